"""The state for a joining worker, which is sent through the coordinator's store. Members are threads with store clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from support.coordinators import WAIT_S, Opened
from support.site_groups import met

from commlayer.cluster.calls.site_client import KvClient
from commlayer.cluster.processes import site_process_group
from commlayer.cluster.processes.relayed_group import PART_NBYTES
from commlayer.engine.epochs import state_relay
from commlayer.engine.epochs.state_relay import NewestEpoch, StateRelay
from commlayer.errors import CommError, DeadlineExceeded
from commlayer.records import Epoch, Member

WORLD, JOINS, MOST_NBYTES = 3, 2, 1 << 30
DATA = bytes(range(256)) * (5 * PART_NBYTES // 512)
"""Two and a half parts."""


def epoch(generation: int, *ranks: int) -> Epoch:
    return Epoch(generation, tuple(Member(rank, rank, "host") for rank in ranks), ())


FIRST = epoch(2, *range(WORLD))


class Desks:
    """Store clients by rank. Each thread uses that of its own rank."""

    def __init__(self, clients: list[KvClient]) -> None:
        self.clients, self._own = clients, threading.local()

    def be(self, rank: int) -> None:
        self._own.rank = rank

    def own(self) -> KvClient:
        return self.clients[self._own.rank]

    def run(self, *acts: Callable[[], Any]) -> list[Any]:
        """The results of acts, which run as the ranks in order."""
        def one(rank: int) -> Any:
            self.be(rank)
            return acts[rank]()

        with ThreadPoolExecutor(len(acts)) as pool:
            return [*pool.map(one, range(len(acts)))]


@pytest.fixture(name="desks")
def store_clients(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> Desks:
    """Windows of the state are short."""
    desks = Desks(met(opened, WORLD)[1])
    monkeypatch.setattr(site_process_group, "kv_client", desks.own)
    monkeypatch.setattr(state_relay, "WINDOW", 2)
    return desks


def relay(newest: NewestEpoch, at: Epoch, own: int, giver: int = 0, limit_s: float = WAIT_S) -> StateRelay:
    return StateRelay(newest, at, JOINS, own, giver, limit_s, 0.0, MOST_NBYTES)


@pytest.mark.parametrize("data", [b"", DATA], ids=["nothing", "two windows"])
def test_state_reaches_the_joining_worker_before_the_others_continue(data: bytes, desks: Desks) -> None:
    entered: list[float] = []

    def enter(state: bytes) -> bytes:
        entered.append(time.monotonic())
        return state

    def watch() -> float:
        relay(NewestEpoch(FIRST, 0.0), FIRST, 1).watch()
        return time.monotonic()

    _, watched, taken = desks.run(
        lambda: relay(NewestEpoch(FIRST, 0.0), FIRST, 0).give(data, [0, 1, JOINS]), watch,
        lambda: relay(NewestEpoch(FIRST, 0.0), FIRST, JOINS).take(enter))
    assert taken == data
    assert entered[0] <= watched
    parts = [(f"joining2/{JOINS}/part{part}", 0) for part in range(3)]
    left = desks.clients[0].request(time.monotonic() + WAIT_S, want=parts, wait=False).values
    assert [*left] == [None] * 3, "what was read is deleted"


def test_next_member_gives_the_state_if_the_giver_leaves(desks: Desks) -> None:
    """The giver has announced the state, and then sends nothing."""
    newest = [NewestEpoch(FIRST, WAIT_S) for _ in range(WORLD)]
    later = epoch(3, 1, JOINS)

    def leave() -> None:
        announced = msgspec.msgpack.encode((len(DATA), [0, 1, JOINS]))
        desks.own().request(time.monotonic() + WAIT_S, put=[((f"joining2/{JOINS}/state", 0), announced)])
        time.sleep(0.5)
        for each in newest[1:]:
            each.epoch = later

    def stay() -> None:
        def act(now: Epoch) -> None:
            if now.members[0].rank == 1:
                relay(newest[1], now, 1, 1).give(DATA, (1, JOINS))
            else:
                relay(newest[1], now, 1).watch()

        newest[1].run(act)

    def join() -> bytes:
        return newest[JOINS].run(lambda now: relay(newest[JOINS], now, JOINS, now.members[0].rank).take(bytes))

    assert desks.run(leave, stay, join)[JOINS] == DATA


def test_missing_giver_ends_the_wait_at_the_deadline_by_name(desks: Desks) -> None:
    desks.be(JOINS)
    with pytest.raises(DeadlineExceeded, match=r"worker 0: .*state for a joining worker.*E-DEADLINE") as caught:
        relay(NewestEpoch(FIRST, 0.0), FIRST, JOINS, limit_s=0.3).take(bytes)
    assert caught.value.peer == "worker 0"


def test_error_of_the_store_is_raised_if_no_newer_epoch_arrives(desks: Desks, opened: Opened) -> None:
    desks.be(JOINS)
    opened[0].close()
    with pytest.raises(CommError):
        relay(NewestEpoch(FIRST, 0.1), FIRST, JOINS, limit_s=1.0).take(bytes)
