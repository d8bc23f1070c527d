"""Assigns a path to each bucket of a plan, when a worker is created. The only module that lists all kinds of paths."""

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
    """The paths of one worker under one plan, and the threads that they share. `of` maps a bucket id to its path."""

    of: Mapping[int, BucketPath]
    turns: tuple[tuple[BucketPath, ...], ...]
    """Paths for each group of buckets that is exchanged together, in the order of waiting. Paths over servers come first,
    because a server can name missing workers."""
    late: LatePath | LateNodePath | None
    exchange: ServerExchange | None
    """Exchanges with servers, shared by several paths; None if no bucket uses a server."""
    handing: Lane | None
    """Thread that distributes results inside the node, shared by several paths; None if nodes have one rank."""

    @property
    def all(self) -> tuple[BucketPath, ...]:
        return tuple(route for turn in self.turns for route in turn)

    def stalled(self, bucket: int, step: int, missing: tuple[int, ...]) -> None:
        """Stores a server's report that it waits for the workers `missing` in one bucket and step."""
        if self.exchange is not None:
            self.exchange.stalled(bucket, step, missing)

    def awaited(self, bucket: WorkerBucket) -> tuple[str, ...]:
        """Names of the peers because of which a bucket that uses a server has no result yet."""
        return () if self.exchange is None else self.exchange.awaited(bucket)

    def drain(self, timeout_s: float) -> bool:
        """Whether all threads finished their work, each within `timeout_s` seconds."""
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
    """Creates the paths. `turns`: lists of buckets that are exchanged together, in the order of waiting. Buckets with late
    results are in these lists, but all of them share one path."""
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
