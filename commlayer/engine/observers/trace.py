"""Records a trace of a few steps: predictions and each rank's measurements, in one file that rank 0 writes.

All ranks count steps alike, so they record the same steps. With an automatic plan, only rank 0 knows when the search for a plan
has ended. Until then rank 0 informs the other ranks after agreed steps.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import torch

from commlayer.cluster.calls.messages import unpack
from commlayer.cluster.processes.collectives import gather_bytes
from commlayer.engine.components import Component, ComponentOrder
from commlayer.engine.job.job import DistributedJob, JobContext
from commlayer.engine.observers.predicted_trace import Prediction, origins, predict
from commlayer.engine.worker.worker import Worker
from commlayer.errors import CorruptFrame, InvalidInput
from commlayer.observe.step_trace import NO_BUCKET, RecordedStep, TraceEvent
from commlayer.observe.trace_files import STEP, Comparison, MeasuredRank, by_lane, compare_operations, write_trace
from commlayer.records import Plan, digest

log = logging.getLogger("commlayer")
STEPS = 3
WARM_STEPS = 2
"""Number of first steps that are not traced: these steps find thresholds and allocate buffers, so their times are not
typical."""
LATEST_STEP = 200
"""Number of steps after which a trace starts even if the search for a plan has not ended."""
MOST_GAP = 16
"""Largest number of steps between two checks whether the search for a plan has ended."""
STEP_NBYTES, BUCKET_NBYTES, TENSOR_NBYTES = 64 << 10, 8 << 10, 64
"""Largest size of a recorded step: for itself, for each bucket with some 10 events of 80 bytes in every round, and for each
tensor."""
APART = 1.05
"""Distance between two steps in the drawing, in units of the longest step, predicted or measured."""


def trace_once(context: JobContext, file: str, *, planning: bool) -> None:
    """Starts a trace when the plan is final, if `file` is not empty. `planning`: True while commlayer is still searching for a
    plan."""
    why = "this rank has joined a running job, whose other ranks record no trace" if context.fresh else _untraceable(context)
    if file and why:
        log.warning("no trace in %s: %s", file, why)
    elif file and isinstance(context, DistributedJob):
        Tracer(context, Path(file), STEPS, planning=planning, warm=WARM_STEPS)


def trace(context: JobContext, path: Path, steps: int) -> None:
    if steps < 1:
        raise InvalidInput("E-TRACE", f"steps: got {steps}, but it must be 1 or more")
    why = _untraceable(context)
    if why or not isinstance(context, DistributedJob):
        raise InvalidInput("E-TRACE", f"there is nothing to trace: {why}")
    Tracer(context, path, steps, planning=False, warm=0)


def _untraceable(context: JobContext) -> str:
    """Returns the reason why a trace would record nothing in this job; "" if it would record steps."""
    if not isinstance(context, DistributedJob):
        return "this process trains alone"
    if context.local is not None or context.plan.local_steps > 1:
        return "the plan has local steps, in which no step sends its own gradients"
    return ""


class Tracer(Component):
    """Records one trace, from its construction until the file is written."""

    order = ComponentOrder.TRACE

    def __init__(self, context: DistributedJob, path: Path, steps: int, *, planning: bool, warm: int) -> None:
        self._context, self._path, self._wanted = context, path, steps
        self._before, self._planning, self._ask = context.exchanges, planning, WARM_STEPS
        self._first = warm
        """Number of steps after which recording starts at the earliest."""
        self._steps: list[RecordedStep] = []
        self._latest: RecordedStep | None = None
        """The last recorded step, until it is known whether to keep the record. Only steps in which all ranks have a batch are
        kept (uneven_inputs.py)."""
        self._recording: Worker | None = None
        self._over = False
        self._plan: Plan | None = None
        context.components.add(self)
        context.on_close.append(self._ended)
        self.end_step()

    @property
    def _done(self) -> int:
        return self._context.exchanges - self._before

    def new_members(self) -> None:
        self._stop()
        if self._context.rank == 0:
            log.warning("no trace in %s: members changed before %d steps were recorded", self._path, self._wanted)

    def _stop(self) -> None:
        if self._recording is not None:
            self._recording.recorder.unfollow(self._take)
        self._over = True
        self._context.components.remove(self)

    def _ended(self) -> None:
        if not self._over and self._context.rank == 0:
            log.warning("no trace in %s: the job ended after %d steps, before %d steps were recorded", self._path,
                        self._done, self._wanted)

    def end_step(self) -> None:
        if self._recording is None:
            if self._done >= self._first and self._plan_is_settled():
                self._begin()
        elif self._context.plan is not self._plan:
            self._plan = self._context.plan
            self._steps.clear()
            self._latest = None
        elif self._latest is not None:
            self._steps.append(self._latest)
            self._latest = None
        if len(self._steps) >= self._wanted:
            self._stop()
            self._write(self._steps[: self._wanted])

    def _begin(self) -> None:
        self._recording, self._plan = self._context.worker, self._context.plan
        self._recording.recorder.follow(self._take)

    def _take(self, step: RecordedStep) -> None:
        self._latest = step

    def _plan_is_settled(self) -> bool:
        """Returns True if the current plan is to be traced. Rank 0 decides for all ranks."""
        if not self._planning or not self._context.terms.auto:
            return True
        if self._done < self._ask:
            return False
        self._ask = self._done + min(self._done, MOST_GAP)
        groups = self._context.groups
        word = torch.tensor([self._context.terms.basis is not None], dtype=torch.int64, device=groups.device)
        groups.broadcast_all(word).wait(time.monotonic() + groups.timeout_s)
        return bool(word) or self._done >= LATEST_STEP

    def _write(self, steps: Sequence[RecordedStep]) -> None:
        """Gathers the steps of all ranks, and writes the file on rank 0. A file that cannot be written does not end the
        training."""
        context = self._context
        gathered = gather_steps(context, steps)
        if context.rank != 0:
            return
        try:
            comparison = write(context, self._path, gathered, self._done - len(steps))
        except OSError as error:
            log.warning("the trace could not be written: %s", error)
            return
        log.info("traced %d steps to %s%s", len(steps), self._path, f"; {comparison.note}" if comparison.note else "")


def gather_steps(context: DistributedJob, steps: Sequence[RecordedStep]) -> list[list[RecordedStep]]:
    most_nbytes = len(steps) * (STEP_NBYTES + BUCKET_NBYTES * len(context.plan.buckets)
                                + TENSOR_NBYTES * len(context.worker.job.tensors))
    rows = gather_bytes(context.groups, zlib.compress(msgspec.msgpack.encode(steps)), most_nbytes, "a trace")
    return [_decode_steps(row, most_nbytes, len(steps), len(context.plan.buckets), context.called(rank))
            for rank, row in enumerate(rows)]


def _decode_steps(row: bytes, most_nbytes: int, count: int, buckets: int, peer: str) -> list[RecordedStep]:
    """Returns the steps that a rank recorded. Raises CorruptFrame, which names the rank, if they are malformed."""
    try:
        data = zlib.decompressobj().decompress(row, max(1, most_nbytes))
    except zlib.error as error:
        raise CorruptFrame(f"sends a trace that is malformed: {error}", peer=peer) from None
    steps = unpack(data, list[RecordedStep], peer, "a trace")
    if len(steps) != count or any(not {"backward", "end"} <= step.marks.keys() for step in steps) or not all(
            NO_BUCKET <= event.bucket < buckets for step in steps for event in step.events):
        raise CorruptFrame(f"sends a trace of {len(steps)} steps with other buckets or marks than those of {count} steps here",
                           peer=peer)
    return steps


def write(context: DistributedJob, path: Path, ranks: Sequence[Sequence[RecordedStep]], first_step: int) -> Comparison:
    plan = context.plan
    sites = context.groups.sites
    nodes = len(sites)
    prediction, note = _predicted(context, nodes)
    origin = origins(context.terms.basis.plan, plan) if prediction and context.terms.basis else [b.id for b in plan.buckets]
    seen = [MeasuredRank(node, [[*_events(step, origin)] for step in ranks[rank]]) for node, site in enumerate(sites)
            for rank in site]
    by_node = prediction.by_node if prediction else {}
    comparison = Comparison(_name(context, plan), first_step, len(ranks[0]), len(ranks), nodes,
                            compare_operations(seen, by_node), note)
    write_trace(path, _tracks(seen, prediction, comparison.steps), comparison)
    return comparison


def _name(context: DistributedJob, plan: Plan) -> str:
    """Returns the digest of the plan that users know: that of the file from `plan create`, or the one in the log."""
    basis = context.terms.basis
    return digest(plan if context.terms.auto or basis is None else basis.plan)


def _predicted(context: DistributedJob, nodes: int) -> tuple[Prediction | None, str]:
    if context.terms.basis is None:
        return None, "no prediction: the inputs of the plan are not known"
    try:
        prediction = predict(context.terms.basis)
    except ValueError as error:
        return None, f"no prediction: {error}"
    if len(prediction.by_node) != nodes:
        return None, f"no prediction: the plan was made for {len(prediction.by_node)} nodes, but this job has {nodes}"
    return prediction, ""


def _events(step: RecordedStep, origin: Sequence[int]) -> Iterator[TraceEvent]:
    """Yields the events of a recorded step in the form in which they are compared. Computation and the step itself are events,
    too. Bucket ids are those before lowering, which divides the plan into executable buckets."""
    backward_s = step.marks["backward"]
    first_s = min(step.ready.values(), default=backward_s)
    yield TraceEvent("forward", NO_BUCKET, 0.0, first_s)
    yield TraceEvent("backward", NO_BUCKET, first_s, backward_s)
    yield from (event._replace(bucket=origin[event.bucket]) for event in step.events)
    yield TraceEvent(STEP, NO_BUCKET, 0.0, step.marks["end"])


def _tracks(seen: Sequence[MeasuredRank], prediction: Prediction | None,
            steps: int) -> Mapping[str, Mapping[str, Sequence[TraceEvent]]]:
    """Returns the tracks of the drawing: for each node the prediction, below it the measurements of its ranks; at the end the
    simulated lanes."""
    longest = [max(e.end_s for e in events) for rank in seen for events in rank.steps]
    longest += [max(e.end_s for e in events) for events in prediction.by_node.values()] if prediction else []
    at_s = [APART * max(longest) * number for number in range(steps + 1)]
    begins = [begin for begin, _ in pairwise(at_s)]
    tracks: dict[str, Mapping[str, Sequence[TraceEvent]]] = {}
    for node in sorted({s.node for s in seen}):
        if prediction:
            tracks[f"predicted, node {node}"] = by_lane(_shift_events([prediction.by_node[node]] * steps, begins))
        for rank, each in enumerate(seen):
            if each.node == node:
                tracks[f"measured, rank {rank} on node {node}"] = by_lane(_shift_events(each.steps, begins))
    if prediction:
        lanes: dict[str, list[TraceEvent]] = {}
        for span in prediction.timeline.spans:
            for lane in span.lanes:
                event = TraceEvent(span.op, span.bucket, span.start_s, span.end_s, span.nbytes)
                lanes.setdefault(lane, []).extend(_shift_events([[event]] * steps, begins))
        tracks["predicted, lanes"] = dict(sorted(lanes.items()))
    return tracks


def _shift_events(steps: Sequence[Sequence[TraceEvent]], begins: Sequence[float]) -> Iterator[TraceEvent]:
    for begin_s, events in zip(begins, steps, strict=True):
        for event in events:
            yield event._replace(start_s=begin_s + event.start_s, end_s=begin_s + event.end_s)
