"""Compares measured with predicted times per operation, and writes trace files for Perfetto and Chrome."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import msgspec

from commlayer.errors import RecordError
from commlayer.files import write_whole
from commlayer.observe.step_trace import NO_BUCKET, TraceEvent
from commlayer.records import Record, complete

STEP = "step"


class MeasuredRank(NamedTuple):
    """The recorded steps of one rank."""

    node: int
    steps: Sequence[Sequence[TraceEvent]]


class OpDeviation(Record, frozen=True):
    """Measured and predicted time of one operation: seconds per step, summed over its buckets (even if they overlap), averaged
    over nodes."""

    op: str
    buckets: int
    """Number of buckets with this operation, on the node with the most; 0 for operations without a bucket."""
    measured_s: float
    predicted_s: float | None = None
    worst: int | None = None
    """Number of the bucket with the largest difference between measured and predicted time. None: there is no prediction or no
    bucket."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction, positive if the operation took longer than predicted. The value is None without a
        prediction."""
        return self.measured_s / self.predicted_s - 1.0 if self.predicted_s else None


class Comparison(Record, frozen=True):
    """Comparison of measured and predicted times, stored in a trace file."""

    plan: str
    """Digest of the active plan."""
    first_step: int
    steps: int
    ranks: int
    nodes: int
    rows: tuple[OpDeviation, ...]
    note: str = ""
    """The reason for a missing prediction; "" if there is a prediction."""


Cell = dict[tuple[str, int], float]
"""Maps (operation, bucket) to seconds on one node."""


def compare_operations(seen: Sequence[MeasuredRank], predicted: Mapping[int, Sequence[TraceEvent]]) -> tuple[OpDeviation, ...]:
    """Returns one row per measured operation. `predicted`: events by node, empty without a prediction.

    A node's time is that of its slowest rank, for which the node waits. The time of several steps is their median.
    """
    nodes = sorted({s.node for s in seen})
    measured = {node: _slowest([_rank_totals(s.steps) for s in seen if s.node == node]) for node in nodes}
    foreseen = {node: _totals(predicted.get(node, ())) for node in nodes}
    return tuple(_row(op, measured, foreseen, known=bool(predicted)) for op in _ops(measured, foreseen))


def _row(op: str, measured: Mapping[int, Cell], foreseen: Mapping[int, Cell], *, known: bool) -> OpDeviation:
    measured_by_node = [{b: s for (o, b), s in cell.items() if o == op} for cell in measured.values()]
    predicted_by_node = [{b: s for (o, b), s in cell.items() if o == op} for cell in foreseen.values()]
    differences: dict[int, float] = {}
    for mine, its in zip(measured_by_node, predicted_by_node, strict=True):
        for bucket in {*mine, *its} - {NO_BUCKET}:
            differences[bucket] = max(differences.get(bucket, 0.0), abs(mine.get(bucket, 0.0) - its.get(bucket, 0.0)))
    predicted_s = mean(sum(each.values()) for each in predicted_by_node)
    return OpDeviation(
        op, max(len({*each} - {NO_BUCKET}) for each in measured_by_node), mean(sum(each.values()) for each in measured_by_node),
        predicted_s if known else None, max(differences, key=lambda b: (differences[b], -b)) if differences and known else None,
    )


def _ops(measured: Mapping[int, Cell], foreseen: Mapping[int, Cell]) -> list[str]:
    """Returns the names of operations in the order of a step; the step itself is last."""
    ops = dict.fromkeys(op for cells in (measured, foreseen) for cell in cells.values() for op, _ in cell)
    return sorted(ops, key=lambda op: op == STEP)


def _rank_totals(steps: Iterable[Sequence[TraceEvent]]) -> Cell:
    totals = [_totals(sorted(events, key=attrgetter("start_s"))) for events in steps]
    return {key: median(total.get(key, 0.0) for total in totals) for key in dict.fromkeys(k for t in totals for k in t)}


def _totals(events: Iterable[TraceEvent]) -> Cell:
    """Sums the seconds of each operation and bucket: an operation may run several times for a bucket."""
    total: Cell = {}
    for event in events:
        total[event.op, event.bucket] = total.get((event.op, event.bucket), 0.0) + event.seconds
    return total


def _slowest(ranks: Sequence[Cell]) -> Cell:
    return {key: max(rank.get(key, 0.0) for rank in ranks) for key in dict.fromkeys(k for r in ranks for k in r)}


Lanes = Mapping[str, Sequence[TraceEvent]]
KEY = "commlayer"
"""Key of the comparison in a trace's `otherData`, which viewers ignore."""


def by_lane(events: Iterable[TraceEvent]) -> dict[str, list[TraceEvent]]:
    """Groups events by lane, in the order in which lanes are first used."""
    lanes: dict[str, list[TraceEvent]] = {}
    for event in sorted(events, key=attrgetter("start_s")):
        lanes.setdefault(event.lane, []).append(event)
    return lanes


def write_trace(path: Path, tracks: Mapping[str, Lanes], comparison: Comparison | None = None) -> None:
    """Writes a file in the trace event format, with one process per track and one thread per lane. The write is atomic.

    Viewers nest overlapping events of a thread, so a lane with concurrent events gets several threads.
    """
    entries: list[dict[str, Any]] = []
    for process, (track, lanes) in enumerate(tracks.items()):
        entries += [_name("process_name", process, 0, name=track), _name("process_sort_index", process, 0, sort_index=process)]
        thread = 0
        for lane, events in lanes.items():
            for number, row in enumerate(_rows(events)):
                thread += 1
                entries.append(_name("thread_name", process, thread, name=f"{lane} {number + 1}" if number else lane))
                entries.append(_name("thread_sort_index", process, thread, sort_index=thread))
                entries += [_span(event, process, thread) for event in row]
    document: dict[str, Any] = {"traceEvents": entries, "displayTimeUnit": "ms"}
    if comparison is not None:
        document["otherData"] = {KEY: msgspec.to_builtins(comparison)}
    write_whole({path: json.dumps(document).encode()})


def read_comparison(path: Path) -> Comparison:
    """Reads the comparison that `write_trace` has stored."""
    try:
        document = json.loads(path.read_text("utf-8"))
        return msgspec.convert(document["otherData"][KEY], complete(Comparison))
    except OSError as error:
        raise RecordError("E-TRACE", f"trace {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        detail = f": {error}" if isinstance(error, msgspec.ValidationError) else ""
        raise RecordError("E-TRACE",
                          f"trace {path}: not a trace that commlayer wrote{detail}; the setting `trace` creates such "
                          "a file") from None


def _rows(events: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """Distributes events over as few rows as possible; events in a row do not overlap."""
    rows: list[list[TraceEvent]] = []
    for event in sorted(events, key=attrgetter("start_s", "end_s")):
        free = next((row for row in rows if row[-1].end_s <= event.start_s), None)
        if free is None:
            rows.append([event])
        else:
            free.append(event)
    return rows


def _span(event: TraceEvent, process: int, thread: int) -> dict[str, Any]:
    whose = {} if event.bucket == NO_BUCKET else {"bucket": event.bucket, "nbytes": event.nbytes}
    name = event.op if event.bucket == NO_BUCKET else f"{event.op} {event.bucket}"
    return {"name": name, "cat": event.op, "ph": "X", "pid": process, "tid": thread,
            "ts": round(event.start_s * 1e6, 3), "dur": round(event.seconds * 1e6, 3), "args": whose}


def _name(kind: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args}
