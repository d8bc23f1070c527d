"""Looks up convergence factors of a training recipe in rows of measured trainings.

    excess(rows, "topk(ratio=0.01)", Recipe("adam", every=4)).high     # 0.2: a cautious fifth more steps than dense needs

Measured points are returned as measured, made monotonic: a smaller ratio or more local steps never cost less. Between them,
values are interpolated over log(ratio) and log2(every). An unmeasured combination costs as much as the worst measured one
that is related to it.

Rows are for whole exchanges: waited for, or merged a round late. With F fragments, merged H / F steps late, the cost is
interpolated between the two; measured lags of 3 and 5 of 16 steps confirm it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from commlayer.codec_spec import spec_error
from commlayer.planner.model.learning_curves import Curves, Place, Point, place_of
from commlayer.records import Record

FIELDS = ("steps", "high", "loss", "loss_high")
ALONE, ALONE_AMONG = 1, 4
"""A row with workers=ALONE is for one worker by itself, compared with ALONE_AMONG workers that exchange in every step."""


class LearningRow(Record, frozen=True):
    """One measured combination over several tasks and seeds."""

    optimizer: str
    """"sgd" (with momentum) or "adam" (Adam, AdamW, LANS and similar)."""
    codes: str
    """"gradients" or "updates"."""
    codec: str
    """As plans spell it, without error feedback: "topk(ratio=0.01)"."""
    every: int
    """Steps per exchange."""
    overlap: str
    """"" or "round". ("forward" is exact and uses the row of "".)"""
    late: bool
    """Whether results are used one step late."""
    workers: int
    """0: the worst over all measured numbers of workers. `ALONE`: one worker by itself."""
    steps: float
    """Convergence factor: steps to the same loss relative to dense training with an exchange in every step; the median
    over tasks and seeds."""
    steps_high: float
    """The cautious convergence factor: the 80th percentile."""
    loss: float
    """Relative increase of the loss after equally many steps, the median: 0.01 is 1 %, the unit of loss budgets."""
    loss_high: float
    tasks: int
    runs: int


def row_problem(row: LearningRow) -> str:
    """What is wrong with a row from a user's table; empty if it is valid."""
    if wrong := spec_error(row.codec):
        return wrong
    allowed = {"optimizer": ("sgd", "adam"), "codes": ("gradients", "updates"), "overlap": ("", "round")}
    which = [name for name, values in allowed.items() if getattr(row, name) not in values]
    which += [name for name, least in {"every": 1, "workers": 0, "steps": 1, "steps_high": 1, "loss": 0, "loss_high": 0}.items()
              if not (getattr(row, name) >= least and math.isfinite(getattr(row, name)))]
    problems = "; ".join(f"{name} is {getattr(row, name)!r}" for name in which)
    return problems and (f"row {row.optimizer} {row.codec} every={row.every}: {problems}, "
                         "allowed: sgd or adam, gradients or updates, "
                     "overlap of round or nothing, every and steps of 1 or more, workers and losses of 0 or more, all finite")


class Recipe(NamedTuple):
    """How a plan trains, apart from codecs."""

    optimizer: str = "adam"
    """"sgd" or "adam"; anything else costs the worse of both."""
    codes: str = "gradients"
    every: int = 1
    overlap: str = ""
    late: bool = False
    workers: int = 4
    fragments: int = 1
    """Number of parts in which a round is exchanged, one after the other."""


class Excess(NamedTuple):
    """Cost on top of dense training with an exchange in every step."""

    steps: float = 0.0
    """Convergence factor - 1."""
    high: float = 0.0
    loss: float = 0.0
    loss_high: float = 0.0


NONE = Excess()


def alone(rows: Iterable[LearningRow], optimizer: str, workers: float) -> float:
    """Steps that one worker alone needs, with its own batch, relative to `workers` together; 0: not measured.

    An unmeasured optimizer gets the smallest measured value, since plans must beat it. For other numbers of workers the value
    grows as a power of that number.
    """
    known = {row.optimizer: row.steps for row in rows if row.workers == ALONE}
    steps = known.get(optimizer) or min(known.values(), default=0.0)
    return steps ** (math.log(workers) / math.log(ALONE_AMONG)) if steps else 0.0


def late_measured(rows: Iterable[LearningRow], optimizer: str) -> bool:
    """Whether stale results were measured for every optimizer family that counts. Their cost is not inferred from related
    rows: one stale step costs some optimizers nothing and makes others diverge."""
    rows = tuple(rows)
    late = {row.optimizer for row in rows if row.late}
    return bool(rows) and late.issuperset(_families(rows, optimizer))


def measured_local_steps(rows: Iterable[LearningRow]) -> int:
    """The most local steps in any row; costs beyond that are extrapolated."""
    return max((row.every for row in rows), default=1)


def _families(rows: Iterable[LearningRow], optimizer: str) -> list[str]:
    """The optimizer's family if it was measured, else all measured families."""
    known = {row.optimizer for row in rows if row.workers != ALONE}
    return [optimizer] if optimizer in known else sorted(known)


def excess(rows: tuple[LearningRow, ...], codec: str, recipe: Recipe = Recipe()) -> Excess:
    """Excess of exchanging with `codec`, as plans spell it. Without rows all steps count equally."""
    return _tables(_Same(rows)).look(codec, recipe) if rows else NONE


class _Same:
    """Rows compared by identity: comparing hundreds of rows would take longer than the lookup."""

    def __init__(self, rows: tuple[LearningRow, ...]) -> None:
        self.rows = rows

    def __hash__(self) -> int:
        return id(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.rows is self.rows


@functools.lru_cache(8)
def _tables(same: _Same) -> _Tables:
    return _Tables(same.rows)


class _Tables:
    """Curves of each field by optimizer and number of workers, built on first use."""

    def __init__(self, rows: tuple[LearningRow, ...]) -> None:
        self._rows = rows
        self._curves: dict[tuple[str, int], tuple[Curves, ...]] = {}
        self._found: dict[tuple[str, Recipe], Excess] = {}

    def look(self, codec: str, recipe: Recipe) -> Excess:
        value = self._found.get((codec, recipe))
        if value is None:
            value = self._found[codec, recipe] = self._look(codec, recipe)
        return value

    def _look(self, codec: str, recipe: Recipe) -> Excess:
        if recipe.overlap == "round" and recipe.fragments > 1:
            return self._sooner(codec, recipe)
        part = place_of(codec, recipe.every)
        place = Place(recipe.codes, recipe.overlap, recipe.late).plain(recipe.every)
        families = _families(self._rows, recipe.optimizer)
        each = [[curves.at(place, *part) for curves in self._of(name, recipe.workers)] for name in families]
        steps, high, loss, loss_high = (max(of_field) for of_field in zip(*each, strict=True))
        return Excess(steps, max(steps, high), loss, max(loss, loss_high))

    def _sooner(self, codec: str, recipe: Recipe) -> Excess:
        """With fragments, each is merged H / fragments steps after it was sent: never worse than a whole round late."""
        whole = self.look(codec, recipe._replace(fragments=1))
        waited = self.look(codec, recipe._replace(fragments=1, overlap=""))
        return Excess(*(late - max(0.0, late - soon) * (1 - 1 / recipe.fragments)
                        for late, soon in zip(whole, waited, strict=True)))

    def _of(self, optimizer: str, workers: int) -> tuple[Curves, ...]:
        key = optimizer, workers
        if key not in self._curves:
            rows = _nearest((r for r in self._rows if r.optimizer == optimizer and r.workers != ALONE), workers)
            self._curves[key] = tuple(
                Curves({point: max(_value(r, field) for r in same) for point, same in rows.items()}) for field in FIELDS)
        return self._curves[key]


def _nearest(rows: Iterable[LearningRow], workers: int) -> dict[tuple[Place, str, Point], list[LearningRow]]:
    """For each combination, the rows for this number of workers, else the worst-case rows, else all."""
    by: dict[tuple[Place, str, Point], list[LearningRow]] = {}
    for row in rows:
        by.setdefault(_point(row), []).append(row)
    counts = (workers, 0)
    return {point: next((matching for n in counts if (matching := [r for r in same if r.workers == n])), same)
            for point, same in by.items()}


def _point(row: LearningRow) -> tuple[Place, str, Point]:
    kind, point = place_of(row.codec, row.every)
    return Place(row.codes, row.overlap, row.late).plain(row.every), kind, point


def _value(row: LearningRow, field: str) -> float:
    return max(0.0, {"steps": row.steps - 1, "high": row.steps_high - 1, "loss": row.loss, "loss_high": row.loss_high}[field])
