"""Which bucket of a plan goes by which route. Runs once, when a worker is made for a plan; the only place that lists routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from commlayer.compressors.codec import Codec
from commlayer.records import Plan
from commlayer.runtime.bucket import WorkerBucket
from commlayer.runtime.late_results import LateResult
from commlayer.runtime.routes.allreduce import AllReduce
from commlayer.runtime.routes.late import Late
from commlayer.runtime.routes.node_sum import NodeSum
from commlayer.runtime.routes.route import Route
from commlayer.runtime.routes.server_exchange import ServerExchange
from commlayer.runtime.routes.service import Service
from commlayer.runtime.routes.staged import Staged
from commlayer.runtime.staging import Staging
from commlayer.runtime.step import Step
from commlayer.transport.groups import Groups
from commlayer.transport.protocol import Transport


class Routes(NamedTuple):
    """Of one worker under one plan."""

    of: Mapping[int, Route]
    """By bucket number."""
    all: tuple[Route, ...]
    """In the order in which a step waits for them: where a server can name who is missing, it is asked first."""
    late: Late | None
    stalled: Callable[[int, int, tuple[int, ...]], None]
    """Hears of a bucket and step for which a server waits, and for whom."""


def routes_of(
    buckets: Sequence[WorkerBucket], plan: Plan, codecs: Mapping[int, Codec], step: Step, staging: Staging,
    late_results: Mapping[int, LateResult], transport: Transport | None, groups: Groups | None,
    recycle: Callable[[memoryview], None],
) -> Routes:
    late = [bucket for bucket in buckets if bucket.late]
    served = [bucket for bucket in buckets if bucket.served and not bucket.late]
    staged = [bucket for bucket in buckets if bucket.staged]
    dense = [bucket for bucket in buckets if bucket.dense]
    pairs: list[tuple[Route, list[WorkerBucket]]] = []
    behind: Late | None = None
    stalled: Callable[[int, int, tuple[int, ...]], None] = _nobody
    if served or late:
        exchange = ServerExchange(step, transport, recycle, staging)
        stalled = exchange.stalled
        if plan.ranks_per_node > 1 and groups is not None:
            pairs.append((NodeSum(served, step, staging, exchange, groups), served))
        else:
            pairs.append((Service([bucket for bucket in served if bucket.coded], step, staging, exchange), served))
        if late:
            behind = Late(late_results, late, step, staging, exchange)
            pairs.append((behind, late))
    if staged:
        pairs.append((Staged(staged, step, staging, codecs, plan, groups), staged))
    if dense:
        pairs.append((AllReduce(dense, step, staging, groups), dense))
    of = {bucket.id: route for route, its in pairs for bucket in its}
    return Routes(of, tuple(route for route, _ in pairs), behind, stalled)


def _nobody(_bucket: int, _step: int, _missing: tuple[int, ...]) -> None:
    """No bucket goes over a server."""
