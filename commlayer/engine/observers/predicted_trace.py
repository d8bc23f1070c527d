"""Converts a simulated step into the events that a worker of each node would record."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from commlayer.observe.step_trace import EXCHANGE, NO_BUCKET, TraceEvent
from commlayer.observe.trace_files import STEP
from commlayer.planner.model import Basis, Group, equal_node_groups
from commlayer.planner.simulation import Span, Timeline, server_hosts, simulate
from commlayer.records import Plan

SERVED = {"net.push", "server.add", "server.emit", "net.pull", "net.forward"}


class Prediction(NamedTuple):
    timeline: Timeline
    by_node: dict[int, list[TraceEvent]]
    """Maps a node's index to the events that a worker on this node would record. Only nodes with ranks have an index."""


def predict(basis: Basis) -> Prediction:
    plan, cluster = basis.plan, basis.inputs.cluster
    timeline = simulate(plan, *basis.inputs)
    groups = equal_node_groups(cluster, server_hosts(plan, cluster))
    trained = [place for place, node in enumerate(cluster.nodes) if node.ranks]
    by_bucket: list[list[Span]] = [[] for _ in plan.buckets]
    for span in timeline.spans:
        by_bucket[span.bucket].append(span)
    by_node: dict[int, list[TraceEvent]] = {}
    for group in groups:
        if group.workers:
            events = [*_compute(basis, group, timeline)]
            for bucket, spans in zip(plan.buckets, by_bucket, strict=True):
                events += _over_server(spans, group.name) if bucket.served else _own(spans, group.name)
            by_node.update((trained.index(place), events) for place in group.members)
    return Prediction(timeline, by_node)


def origins(plan: Plan, running: Plan) -> list[int]:
    """Returns, for each bucket of the running plan, the id of the bucket of `plan` from which lowering, or cutting where shards
    end, made it."""
    slices = sorted((s.tensor, s.start, bucket.id) for bucket in plan.buckets for s in bucket.slices)
    firsts = [bucket.slices[0] for bucket in running.buckets]
    return [slices[bisect(slices, (s.tensor, s.start, len(plan.buckets))) - 1][2] for s in firsts]


def _compute(basis: Basis, group: Group, timeline: Timeline) -> Iterator[TraceEvent]:
    timing = basis.inputs.timing
    forward_s, backward_s = timing.forward_s / group.node.speed, timing.backward_s / group.node.speed
    yield TraceEvent("forward", NO_BUCKET, 0.0, forward_s)
    yield TraceEvent("backward", NO_BUCKET, forward_s, forward_s + backward_s)
    yield TraceEvent(STEP, NO_BUCKET, 0.0, timeline.step_s / basis.plan.local_steps)


def _own(spans: Sequence[Span], name: str) -> Iterator[TraceEvent]:
    """Yields events for the spans in which lanes of the node `name` are busy."""
    return (_event(s) for s in spans if any(_is_lane_of_node(lane, name) for lane in s.lanes))


def _over_server(spans: Sequence[Span], name: str) -> Iterator[TraceEvent]:
    """Yields the events of a bucket over a server, as a worker on node `name` records them: everything between sending its
    payload and receiving the result is one exchange."""
    own = [s for s in spans if s.op not in SERVED and any(_is_lane_of_node(lane, name) for lane in s.lanes)]
    coded = next((i for i, s in enumerate(own) if s.op.startswith("encode")), None)
    decoded = next((i for i, s in enumerate(own) if s.op.startswith("decode")), None)
    if coded is None or decoded is None:
        return
    # As in the runtime, each rank is the root of its own part of a bucket.
    yield from (_event(s)._replace(op="node.reduce") for s in own[:coded])
    yield _event(own[coded])
    away = [s for s in spans if s.op in SERVED]
    back = [s.end_s for s in away if f"down:{name}" in s.lanes and s.op in ("net.pull", "net.forward")]
    end_s = max(back or [s.end_s for s in away if s.op.startswith("server")], default=own[coded].end_s)
    nbytes = sum(s.nbytes for s in away if f"up:{name}" in s.lanes and s.op == "net.push")
    yield TraceEvent(EXCHANGE, own[coded].bucket, own[coded].end_s, end_s, nbytes)
    yield _event(own[decoded])
    yield from (_event(s)._replace(op="node.broadcast") for s in own[decoded + 1 :])


def _event(span: Span) -> TraceEvent:
    return TraceEvent(span.op, span.bucket, span.start_s, span.end_s, span.nbytes)


def _is_lane_of_node(lane: str, name: str) -> bool:
    """Returns True if a simulated lane belongs to the node `name`. For example "cpu:home.1" is a lane of node "home"."""
    where = lane.partition(":")[2]
    return where == name or (where.startswith(f"{name}.") and where[len(name) + 1 :].isdigit())
