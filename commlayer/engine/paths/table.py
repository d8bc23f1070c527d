"""Assigns a path to each bucket of a plan, when a worker is created."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from commlayer.cluster.processes.collectives import Groups
from commlayer.compressors.codec import Codec
from commlayer.engine.buckets.bucket import CollectiveBucket, EncodedBucket, ServedBucket, WorkerBucket
from commlayer.engine.buckets.current_step import Step
from commlayer.engine.paths.allreduce import AllReducePath
from commlayer.engine.paths.collectives import CollectivesPath
from commlayer.engine.paths.lanes import Lane
from commlayer.engine.paths.node import NodeReduce
from commlayer.engine.paths.path import Path
from commlayer.engine.paths.server import ServerPath
from commlayer.engine.paths.server_exchange import ServerExchange
from commlayer.engine.paths.staging import Staging
from commlayer.records import Plan
from commlayer.transport.reconnect import ReconnectingTransport

AnyPath = Path[Any]


class PathTable(NamedTuple):
    """The paths of one worker under one plan, and the threads that these paths share. `of` maps a bucket id to its path."""

    of: Mapping[int, AnyPath]
    groups: tuple[tuple[AnyPath, ...], ...]
    """Paths for each group of buckets, in the order in which the worker waits for them. Paths over servers come first, because
    a server can name missing workers."""
    exchange: ServerExchange | None
    """Exchanges with servers, shared by several paths. The value is None if no bucket uses a server."""
    lanes: Sequence[Lane]
    """Threads that distribute results inside the node, shared by several paths; empty if nodes have one rank."""

    @property
    def all(self) -> list[AnyPath]:
        return [path for paths in self.groups for path in paths]

    def awaited(self, bucket: WorkerBucket) -> tuple[str, ...]:
        """Returns the names of the peers for which the result of a bucket waits; none for a bucket that uses no server."""
        return () if self.exchange is None else self.exchange.awaited(bucket)

    def drain(self, timeout_s: float) -> bool:
        """Returns True if all threads finished their work, each within `timeout_s` seconds."""
        drained = [each.drain(timeout_s) for each in (self.exchange, *self.lanes, *self.all) if each is not None]
        return all(drained)

    def close(self, timeout_s: float) -> None:
        for each in (self.exchange, *self.lanes, *self.all):
            if each is not None:
                each.close(timeout_s)


def make_paths(
    bucket_groups: Sequence[Sequence[WorkerBucket]], plan: Plan, codecs: Mapping[int, Codec], step: Step, staging: Staging,
    transport: ReconnectingTransport | None, groups: Groups | None, recycle: Callable[[memoryview], None],
) -> PathTable:
    """Creates the paths. `bucket_groups`: lists of buckets that are exchanged together and have the same delay."""
    of: dict[int, AnyPath] = {}
    exchange: ServerExchange | None = None
    lanes: dict[bool, Lane] = {}

    def over_server(buckets: Sequence[ServedBucket], *, shared: bool) -> AnyPath | None:
        """`shared`: True if all ranks of a node have the buckets."""
        nonlocal exchange
        if not buckets or transport is None:
            return None
        exchange = exchange or ServerExchange(step, transport, recycle, staging)
        if groups is None or len(groups.site) == 1 or not shared:
            encoded = [bucket for bucket in buckets if isinstance(bucket, EncodedBucket)]
            return ServerPath(encoded, step, staging, exchange)
        groups.allow_inside(plan.local_steps)
        late = buckets[0].late
        if late not in lanes:
            lanes[late] = Lane("late" if late else "distribution", step.latch)
        return NodeReduce(buckets, step, staging, exchange, groups, lanes[late])

    def build_paths(buckets: Sequence[WorkerBucket]) -> tuple[AnyPath, ...]:
        served, sharded = ([bucket for bucket in buckets if isinstance(bucket, ServedBucket) and (bucket.ranks > 1) == shards]
                           for shards in (False, True))
        collective = [bucket for bucket in buckets if isinstance(bucket, CollectiveBucket)]
        others, dense = ([bucket for bucket in collective if bucket.dense == is_dense] for is_dense in (False, True))
        pairs: list[tuple[AnyPath | None, Sequence[WorkerBucket]]] = [
            (over_server(sharded, shared=False), sharded),
            (over_server(served, shared=True), served),
            (CollectivesPath(others, step, staging, codecs, plan, groups) if groups and others else None, others),
            (AllReducePath(dense, step, staging, groups) if groups and dense else None, dense),
        ]
        of.update((bucket.id, path) for path, its in pairs if path is not None for bucket in its)
        return tuple(path for path, _ in pairs if path is not None)

    made = tuple(build_paths(buckets) for buckets in bucket_groups)
    return PathTable(of, made, exchange, [*lanes.values()])
