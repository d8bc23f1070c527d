"""Deviation of measured from predicted times, per operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

from commlayer.observe.events import NO_BUCKET, Event
from commlayer.records import Record

STEP = "step"


class Seen(NamedTuple):
    """Recorded steps of one rank."""

    node: int
    steps: Sequence[Sequence[Event]]


class OpDeviation(Record, frozen=True):
    """One operation: seconds per step for all its buckets, whether or not they overlap; the mean over nodes."""

    op: str
    buckets: int
    """On the node with the most; 0 for operations without a bucket."""
    measured_s: float
    predicted_s: float | None = None
    worst: int | None = None
    """The bucket with the largest difference."""

    @property
    def error(self) -> float | None:
        """Relative error; positive if it took longer than predicted."""
        return self.measured_s / self.predicted_s - 1.0 if self.predicted_s else None


class Comparison(Record, frozen=True):
    """A trace's comparison of measured and predicted times."""

    plan: str
    """Digest of the active plan."""
    first_step: int
    steps: int
    ranks: int
    nodes: int
    rows: tuple[OpDeviation, ...]
    note: str = ""
    """Why there is no prediction, if so."""


Cell = dict[tuple[str, int], float]
"""Seconds of (op, bucket) on one node."""


def rows_of(seen: Sequence[Seen], predicted: Mapping[int, Sequence[Event]]) -> tuple[OpDeviation, ...]:
    """One row per measured operation; `predicted` by node, empty without a prediction.

    The slowest of a node's ranks counts, since the node waits for it; of the steps the median counts.
    """
    nodes = sorted({s.node for s in seen})
    measured = {node: _slowest([_of_rank(s.steps) for s in seen if s.node == node]) for node in nodes}
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
    """In the order of a step; the step itself comes last."""
    ops = dict.fromkeys(op for cells in (measured, foreseen) for cell in cells.values() for op, _ in cell)
    return sorted(ops, key=lambda op: op == STEP)


def _of_rank(steps: Iterable[Sequence[Event]]) -> Cell:
    totals = [_totals(sorted(events, key=lambda e: e.start_s)) for events in steps]
    return {key: median(total.get(key, 0.0) for total in totals) for key in dict.fromkeys(k for t in totals for k in t)}


def _totals(events: Iterable[Event]) -> Cell:
    """Sums over repetitions: a bucket may repeat an operation in rounds, or in both directions."""
    total: Cell = {}
    for event in events:
        total[event.op, event.bucket] = total.get((event.op, event.bucket), 0.0) + event.seconds
    return total


def _slowest(ranks: Sequence[Cell]) -> Cell:
    return {key: max(rank.get(key, 0.0) for rank in ranks) for key in dict.fromkeys(k for r in ranks for k in r)}
