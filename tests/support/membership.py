"""States of a job: workers and servers that have joined, are silent or continue without others."""

from __future__ import annotations

from typing import Any

import msgspec

from commlayer.cluster.calls.messages import PROTOCOL, Join, JoinReply, hash_plan_bytes
from commlayer.cluster.membership import membership
from commlayer.cluster.membership.membership import State

PLAN = b'{"a": "plan"}'
DEAD_AFTER_S = 10.0


def worker(rank: int, /, **fields: Any) -> Join:
    """Worker `rank` of 2 on a separate host; its token is w<rank> unless given."""
    base = Join("worker", f"w{rank}", f"host{rank}", 100 + rank, PROTOCOL, "1.0", rank, 2, rank, "jobA",
                PLAN if rank == 0 else b"", hash_plan_bytes(PLAN), gradients=5)
    return msgspec.structs.replace(base, **fields)


def server(number: int, **fields: Any) -> Join:
    base = Join("server", f"s{number}", "host0", 200 + number, PROTOCOL, "1.0", address=f"127.0.0.1:{7000 + number}")
    return msgspec.structs.replace(base, **fields)


def after(state: State, *requests: Join, now: float = 0.0) -> tuple[State, JoinReply]:
    """Registers one after the other; the state and the last reply."""
    reply = JoinReply()
    for request in requests:
        state, reply = membership.join(state, request, now)
    return state, reply


def running(workers: int = 3, servers: int = 1, now: float = 0.0) -> State:
    requests = [server(i) for i in range(servers)] + [worker(i, world=workers) for i in range(workers)]
    state, reply = after(State(0, servers), *requests, now=now)
    assert reply.epoch is not None
    return state


def beat(state: State, *tokens: str, now: float) -> State:
    for token in tokens:
        state, _ = membership.heartbeat(state, token, now)
    return state


def ticked(state: State, start: float, stop: float) -> State:
    """Ticks every second of [start, stop], as the coordinator does every fraction of one."""
    while start <= stop:
        state = membership.tick(state, start, DEAD_AFTER_S)
        start += 1.0
    return state


def elastic(workers: int = 4, least: int = 2, *, unable: int = -1) -> State:
    state = msgspec.structs.replace(running(workers), min_workers=least)
    places = {token: msgspec.structs.replace(p, active_generation=1,
                                             join=msgspec.structs.replace(p.join, elastic=p.rank != unable))
              for token, p in state.registrations.items()}
    return msgspec.structs.replace(state, registrations=places)


def members(state: State) -> tuple[int, list[int]]:
    assert state.epoch is not None
    return state.epoch.generation, [m.rank for m in state.epoch.members]


PATIENCE_S = 60.0


def several(workers: int = 4, least: int = 2, servers: int = 2, *, unable: int = -1) -> State:
    """Of several servers, and workers that may continue without others."""
    state = msgspec.structs.replace(running(workers, servers=servers), min_workers=least)
    places = {token: msgspec.structs.replace(p, known_generation=1, active_generation=1,
                                             join=msgspec.structs.replace(p.join, elastic=p.rank != unable))
              for token, p in state.registrations.items()}
    return msgspec.structs.replace(state, registrations=places)


