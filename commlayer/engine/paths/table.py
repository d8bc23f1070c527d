"""Assigns a route to each bucket of a plan, once per worker. The only module that lists all routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from commlayer.cluster.collectives import Groups
from commlayer.compressors.codec import Codec
from commlayer.engine.buckets import WorkerBucket
from commlayer.engine.lanes import Lane, Staging
from commlayer.engine.late_results import LateResult
from commlayer.engine.paths.allreduce import AllReducePath
from commlayer.engine.paths.collectives import CollectivesPath
from commlayer.engine.paths.late import LateNodePath, LatePath
from commlayer.engine.paths.node import NodeReduce
from commlayer.engine.paths.path import BucketPath
from commlayer.engine.paths.server import ServerExchange, ServerPath
from commlayer.engine.step import Step
from commlayer.records import Plan
from commlayer.transport.protocol import Transport


class Paths(NamedTuple):
    """The routes of one worker under one plan."""

    of: Mapping[int, BucketPath]
    turns: tuple[tuple[BucketPath, ...], ...]
    """The routes of each turn's buckets, in the order of waiting. Routes whose server can name missing workers come first."""
    late: LatePath | LateNodePath | None
    exchange: ServerExchange | None
    """Shared by several routes; None if no bucket uses a server."""
    handing: Lane | None
    """Shared likewise, if nodes have several ranks."""

    @property
    def all(self) -> tuple[BucketPath, ...]:
        return tuple(route for turn in self.turns for route in turn)

    def stalled(self, bucket: int, step: int, missing: tuple[int, ...]) -> None:
        """Receives a server's report of a bucket and step for which it waits, and of the missing workers."""
        if self.exchange is not None:
            self.exchange.stalled(bucket, step, missing)

    def awaited(self, bucket: WorkerBucket) -> tuple[str, ...]:
        """The peers without which a bucket that uses a server has no result yet."""
        return () if self.exchange is None else self.exchange.awaited(bucket)

    def drain(self, timeout_s: float) -> bool:
        """Whether all threads finished their work, each within that time."""
        shared = [each.drain(timeout_s) for each in (self.exchange, self.handing) if each is not None]
        return all([route.drain(timeout_s) for route in self.all] + shared)

    def close(self, timeout_s: float) -> None:
        for shared in (self.exchange, self.handing):
            if shared is not None:
                shared.close(timeout_s)
        for route in self.all:
            route.close(timeout_s)


def routes_of(
    turns: Sequence[Sequence[WorkerBucket]], plan: Plan, codecs: Mapping[int, Codec], step: Step, staging: Staging,
    late_results: Mapping[int, LateResult], transport: Transport | None, groups: Groups | None,
    recycle: Callable[[memoryview], None],
) -> Paths:
    """`turns`: the buckets in the order of waiting. A late bucket is in its turn, but all late buckets share one route."""
    flat = [bucket for buckets in turns for bucket in buckets]
    late = [bucket for bucket in flat if bucket.late]
    exchange = ServerExchange(step, transport, recycle, staging) if any(bucket.served for bucket in flat) else None

    several = groups if plan.ranks_per_node > 1 else None
    handing = Lane("handing", step.latch) if several is not None and any(b.served and not b.late for b in flat) else None

    def of_turn(buckets: Sequence[WorkerBucket]) -> list[tuple[BucketPath, list[WorkerBucket]]]:
        served = [bucket for bucket in buckets if bucket.served and not bucket.late]
        staged = [bucket for bucket in buckets if bucket.staged]
        dense = [bucket for bucket in buckets if bucket.dense]
        pairs: list[tuple[BucketPath, list[WorkerBucket]]] = []
        if served and exchange is not None:
            if several is not None and handing is not None:
                pairs.append((NodeReduce(served, step, staging, exchange, several, handing), served))
            else:
                pairs.append((ServerPath([bucket for bucket in served if bucket.coded], step, staging, exchange), served))
        if staged:
            pairs.append((CollectivesPath(staged, step, staging, codecs, plan, groups), staged))
        if dense:
            pairs.append((AllReducePath(dense, step, staging, groups), dense))
        return pairs

    pairs = [of_turn(buckets) for buckets in turns]
    late_route: LatePath | LateNodePath | None = None
    if late and exchange is not None:
        late_route = (LateNodePath(late_results, late, step, staging, exchange, several) if several is not None else
                  LatePath(late_results, late, step, staging, exchange))
        pairs[0].insert(int(any(b.served and not b.late for b in turns[0])), (late_route, late))
    of = {bucket.id: route for turn in pairs for route, its in turn for bucket in its}
    return Paths(of, tuple(tuple(route for route, _ in turn) for turn in pairs), late_route, exchange, handing)
