"""What a way of training costs in steps, looked up in rows of measured trainings. Knows rows; no files, links or seconds.

    excess(rows, "topk(ratio=0.01)", Recipe("adam", every=4)).high     # 0.2: a cautious fifth more steps than dense needs

What is measured is given as measured, made monotone: a smaller ratio or more local steps never cost less. Between measured
points it lies on a line over log(ratio) and log2(every). What nobody measured costs what its worst measured relatives do.

Rows are of whole exchanges: waited for, or merged a round late. What is merged H / F steps late, in F fragments, lies so far
between the two: measured lags of 3 and 5 of 16 steps are on that line (docs/decisions/0223-lag-of-a-fragment.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from commlayer.codec_name import misspelled
from commlayer.planner.model.learning_curves import Curves, Place, Point, place_of
from commlayer.records import Record

FIELDS = ("steps", "high", "loss", "loss_high")
ALONE, ALONE_AMONG = 1, 4
"""Workers of a row that is of no way: of one by itself, with its own batch, against so many that exchange in each step."""


class LearningRow(Record, frozen=True):
    """One measured combination over several tasks and seeds."""

    optimizer: str
    """"sgd" (with momentum) or "adam" (Adam, AdamW, LANS and their like)."""
    codes: str
    """"gradients" or "updates"."""
    codec: str
    """As plans spell it, without error feedback: "topk(ratio=0.01)"."""
    every: int
    """Steps to an exchange."""
    overlap: str
    """"" or "round". ("forward" is exact: the row of "" holds.)"""
    late: bool
    """Whether results are used one step late."""
    workers: int
    """0: the worst over all that were measured. `ALONE`: one by itself."""
    steps: float
    """How many times as many steps as dense training in every step, to the same loss: the median over tasks and seeds."""
    steps_high: float
    """The same, cautiously: 80 % were better."""
    loss: float
    """By what part the loss is higher after equally many steps, the median: 0.01 is 1 %, the one unit of budgets."""
    loss_high: float
    tasks: int
    runs: int


def row_problem(row: LearningRow) -> str:
    """What is wrong with a row that somebody wrote; nothing if nothing is."""
    if wrong := misspelled(row.codec):
        return wrong
    allowed = {"optimizer": ("sgd", "adam"), "codes": ("gradients", "updates"), "overlap": ("", "round")}
    which = [name for name, values in allowed.items() if getattr(row, name) not in values]
    which += [name for name, least in {"every": 1, "workers": 0, "steps": 1, "steps_high": 1, "loss": 0, "loss_high": 0}.items()
              if not (getattr(row, name) >= least and math.isfinite(getattr(row, name)))]
    said = "; ".join(f"{name} is {getattr(row, name)!r}" for name in which)
    return said and (f"row {row.optimizer} {row.codec} every={row.every}: {said}, allowed: sgd or adam, gradients or updates, "
                     "overlap of round or nothing, every and steps of 1 or more, workers and losses of 0 or more, all finite")


class Recipe(NamedTuple):
    """How a plan's steps are taken, apart from codecs."""

    optimizer: str = "adam"
    """"sgd", "adam"; anything else costs the worse of both."""
    codes: str = "gradients"
    every: int = 1
    overlap: str = ""
    late: bool = False
    workers: int = 4
    fragments: int = 1
    """In so many parts, one after the other, a round is exchanged."""


class Excess(NamedTuple):
    """What comes on top of dense training in every step."""

    steps: float = 0.0
    """Steps factor - 1."""
    high: float = 0.0
    loss: float = 0.0
    loss_high: float = 0.0


NONE = Excess()


def alone(rows: Iterable[LearningRow], optimizer: str, workers: float) -> float:
    """How many times as many steps one needs by itself as so many workers together, by its own batches; 0: nobody knows.

    Of an optimizer of no measured family the least counts: it is what plans have to beat. By other numbers of workers it grows
    as a power of them does.
    """
    known = {row.optimizer: row.steps for row in rows if row.workers == ALONE}
    steps = known.get(optimizer) or min(known.values(), default=0.0)
    return steps ** (math.log(workers) / math.log(ALONE_AMONG)) if steps else 0.0


def late_measured(rows: Iterable[LearningRow], optimizer: str) -> bool:
    """Whether somebody has trained with late results, in all that count for it. What they cost is no matter of relatives: one
    step late is nothing to some optimizers, and with others it diverges."""
    rows = tuple(rows)
    late = {row.optimizer for row in rows if row.late}
    return bool(rows) and late.issuperset(_families(rows, optimizer))


def measured_local_steps(rows: Iterable[LearningRow]) -> int:
    """The most local steps that a row was measured with: what more of them cost is extrapolated."""
    return max((row.every for row in rows), default=1)


def _families(rows: Iterable[LearningRow], optimizer: str) -> list[str]:
    """That of the optimizer, or else all that there are."""
    known = {row.optimizer for row in rows if row.workers != ALONE}
    return [optimizer] if optimizer in known else sorted(known)


def excess(rows: tuple[LearningRow, ...], codec: str, recipe: Recipe = Recipe()) -> Excess:
    """Of what is sent and answered in `codec`, as plans spell it. Without rows nothing is known, and all steps count alike."""
    return _tables(_Same(rows)).look(codec, recipe) if rows else NONE


class _Same:
    """Rows by which object they are: comparing hundreds of them at each look would take longer than the look."""

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
    """Curves of each field by optimizer and workers, made when first asked for."""

    def __init__(self, rows: tuple[LearningRow, ...]) -> None:
        self._rows = rows
        self._curves: dict[tuple[str, int], tuple[Curves, ...]] = {}
        self._found: dict[tuple[str, Recipe], Excess] = {}

    def look(self, codec: str, recipe: Recipe) -> Excess:
        found = self._found.get((codec, recipe))
        if found is None:
            found = self._found[codec, recipe] = self._look(codec, recipe)
        return found

    def _look(self, codec: str, recipe: Recipe) -> Excess:
        if recipe.overlap == "round" and recipe.fragments > 1:
            return self._sooner(codec, recipe)
        part = place_of(codec, recipe.every)
        place = Place(recipe.codes, recipe.overlap, recipe.late).plain(recipe.every)
        asked = _families(self._rows, recipe.optimizer)
        each = [[curves.at(place, *part) for curves in self._of(name, recipe.workers)] for name in asked]
        steps, high, loss, loss_high = (max(of_field) for of_field in zip(*each, strict=True))
        return Excess(steps, max(steps, high), loss, max(loss, loss_high))

    def _sooner(self, codec: str, recipe: Recipe) -> Excess:
        """With each fragment merged H / fragments steps after it was sent: never more than what is merged a round late."""
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
    """Of each combination the rows of so many workers, else of the worst, else all."""
    by: dict[tuple[Place, str, Point], list[LearningRow]] = {}
    for row in rows:
        by.setdefault(_point(row), []).append(row)
    counts = (workers, 0)
    return {point: next((found for n in counts if (found := [r for r in same if r.workers == n])), same)
            for point, same in by.items()}


def _point(row: LearningRow) -> tuple[Place, str, Point]:
    kind, point = place_of(row.codec, row.every)
    return Place(row.codes, row.overlap, row.late).plain(row.every), kind, point


def _value(row: LearningRow, field: str) -> float:
    return max(0.0, {"steps": row.steps - 1, "high": row.steps_high - 1, "loss": row.loss, "loss_high": row.loss_high}[field])
