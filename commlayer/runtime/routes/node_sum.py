"""Buckets that go over servers from nodes of several ranks: summed inside the node, exchanged by their owner, shared again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from commlayer.runtime.bucket import WorkerBucket
from commlayer.runtime.routes.route import Route, fill, take_back
from commlayer.runtime.routes.server_exchange import FOREVER_S, ServerExchange
from commlayer.runtime.staging import Staging
from commlayer.runtime.step import Step
from commlayer.transport.groups import Groups, Pending


class _Reduced(NamedTuple):
    bucket: WorkerBucket
    pending: Pending


class NodeSum(Route):
    """Route. Every rank of a node has all these buckets and codes those that it owns."""

    ordered = True
    alone = False

    def __init__(
        self, buckets: Sequence[WorkerBucket], step: Step, staging: Staging, exchange: ServerExchange, groups: Groups,
    ) -> None:
        self._buckets, self._step, self._staging, self._exchange, self._groups = buckets, step, staging, exchange, groups
        self._mine = [bucket for bucket in buckets if bucket.coded]
        self._arrivals = step.arrivals()
        self._of_others: list[_Reduced] = []

    def begin(self, bucket: WorkerBucket) -> None:
        take_back(self, bucket, self._staging)
        fill(bucket, self._step, self._staging)
        pending = self._groups.reduce(bucket.all, bucket.owner)
        if bucket.coded:
            bucket.step = self._step.number
            self._exchange.put(bucket, self._sum(pending, time.perf_counter()), self._arrived)
        else:
            self._of_others.append(_Reduced(bucket, pending))
            bucket.undone = 0  # its owner says it with this step's frame

    def _sum(self, pending: Pending, issued: float) -> Callable[[WorkerBucket], float]:
        def summed(bucket: WorkerBucket) -> float:
            """Encode lane."""
            pending.wait(time.monotonic() + FOREVER_S, self._step.failed)
            self._step.recorder.add("node.reduce", bucket.id, issued)
            begin = time.perf_counter()
            bucket.weight = float(bucket.tail[-1])
            bucket.used = sum(1 << i for i, flag in enumerate(bucket.tail[:-1].tolist()) if flag > 0)
            return begin

        return summed

    def _arrived(self, _bucket: WorkerBucket) -> None:
        """Decode lane."""
        self._arrivals.arrived()

    def finish(self, deadline: float) -> None:
        """Then shares the results inside the node, in plan order on every rank."""
        if not self._arrivals.wait(deadline):
            raise self._exchange.overdue(next((b for b in self._mine if not b.done), self._mine[0]))
        if self._step.error is not None:
            return
        for bucket, pending in self._of_others:
            pending.wait(deadline, self._step.failed)
            bucket.read_used()
        self._staging.join()
        shares = []
        for bucket in self._buckets:
            if bucket.coded:
                bucket.write_tail(bucket.tail_y)
            shares.append((bucket, time.perf_counter(), self._groups.broadcast(bucket.all_y, bucket.owner)))
        for bucket, issued, share in shares:
            share.wait(deadline, self._step.failed)
            self._step.recorder.add("node.broadcast", bucket.id, issued)
            bucket.weight = float(bucket.tail_y[-1])
            bucket.read_used()

    def reset(self) -> None:
        self._of_others.clear()
        self._arrivals.expect(len(self._mine))
        for bucket in self._buckets:
            bucket.rewind()
