"""In which order the buckets of an overlapped round go out and come back, over links that carry a frame in a turn. No clock."""

from __future__ import annotations

import heapq
from typing import Any

import torch
from support.loopback import Hub
from support.workers import Rig
from torch import nn

from commlayer.engine.local_steps import OuterSteps, StepWeights
from commlayer.optim import OuterSGD
from commlayer.transport import mailbox
from commlayer.transport.protocol import SERVER_BASE, Header, Kind

WORLD, BUCKETS = 3, 8


class TurnedHub(Hub):
    """Pushes and results wait for `turn()`: then each worker's link carries one out, and one in from each server."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[tuple[int, int], list[Any]] = {}
        self.carried: list[tuple[int, int, str, int]] = []
        """Turn, worker, "up" or "down", bucket."""
        self.turns = self._seq = 0

    def transport(self, rank: int) -> Any:
        return Turned(self, super().transport(rank))

    def queue(self, end: Any, peer: int, header: Header, body: bytes) -> Any:
        operation = mailbox.sending(peer, header)
        line = (end.rank, peer if end.rank >= SERVER_BASE else -1)  # of a worker one, of a server one to each worker
        self._seq += 1
        item = (header.step, header.order, self._seq, operation, end, peer, header, body)
        heapq.heappush(self.waiting.setdefault(line, []), item)
        return operation

    def turn(self) -> None:
        gone = [heapq.heappop(line) for _, line in sorted(self.waiting.items()) if line]
        self.turns += 1
        for *_, operation, end, peer, header, body in gone:
            up = header.kind == Kind.PUSH
            self.carried.append((self.turns, end.rank if up else peer, "up" if up else "down", header.bucket))
            operation.follow(end.send(peer, header, body))


class Turned:
    """One end."""

    def __init__(self, hub: TurnedHub, end: Any) -> None:
        self._hub, self._end = hub, end

    def send(self, peer: int, header: Header, body: Any = b"") -> Any:
        if header.kind in (Kind.PUSH, Kind.RESULT):
            return self._hub.queue(self._end, peer, header, bytes(body))
        return self._end.send(peer, header, body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)


def test_results_come_down_while_a_rounds_other_buckets_still_go_up() -> None:
    hub = TurnedHub()
    with Rig(WORLD, "int4()", shapes=[(1000,)] * BUCKETS, hub=hub) as rig:
        assert len(rig.plan.buckets) == BUCKETS
        rounds = []
        for worker in rig.workers:
            parameters = [nn.Parameter(torch.ones(1000)) for _ in range(BUCKETS)]
            local = OuterSteps(parameters, 4, OuterSGD(), StepWeights(1.0, None), overlap=True)
            for step in range(4):
                local.count()
                torch._foreach_mul_([p.data for p in parameters], 0.9 - 0.1 * step)
            local.exchange(worker, [], 20.0)
            assert worker._paths.drain(20.0), "all of it is coded, and waits at the link"
            rounds.append(local)
        while any(hub.waiting.values()):
            hub.turn()
        for worker, local in zip(rig.workers, rounds, strict=True):
            local.settle(worker, [], 20.0)
    for rank in range(WORLD):
        up, down = ([(turn, bucket) for turn, *of, bucket in hub.carried if of == [rank, way]] for way in ("up", "down"))
        assert [bucket for _, bucket in up] == [bucket for _, bucket in down], "both in the order of the next forward pass"
        assert [bucket for _, bucket in up] == [*reversed(range(BUCKETS))]
        for (sent, _), (came, _) in zip(up[2:], down, strict=False):
            assert came < sent, "a result is here before the next but one goes out"
    assert hub.turns == BUCKETS + 1, "a round takes what one way takes, and one bucket's time"
