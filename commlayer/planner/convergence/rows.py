"""Measured convergence costs: rows of trainings, and the cost of any recipe by these rows and the laws."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from commlayer.codec_spec import SPARSE, parse_spec, spec_error
from commlayer.planner.convergence.curves import (
    DENSE_CODEC,
    FREE_KINDS,
    ConvergenceCurves,
    ExchangeMode,
    Point,
    kind_and_point,
)
from commlayer.planner.convergence.laws import (
    FREE_NUMEL,
    NONE,
    SHORT_NUMEL,
    Excess,
    Recipe,
    fraction_between,
    local_step_excess,
    steps_alone,
)
from commlayer.records import Record

FIELDS = ("steps", "high", "loss", "loss_high")
ALONE, ALONE_AMONG = 1, 4
"""A row with workers=ALONE is for one worker alone, compared with ALONE_AMONG workers that exchange in every step."""


FAMILIES = ("sgd", "adam", "muon", "lion")
LIKE: Mapping[str, str] = {"lion": "adam"}
"""Families without measurements, and the family whose rows they use: Lion's and Adam's steps have the same size for any noise
in the gradients."""


class LearningRow(Record, frozen=True):
    """The measured convergence cost of one combination of settings, over several tasks and seeds."""

    optimizer: str
    """"sgd" (with momentum), "adam" (Adam, AdamW, LANS and similar), "muon" or "lion"."""
    codes: str
    """The compressed values: "gradients" or "updates" (parameter deltas)."""
    codec: str
    """The codec as in plans, without error feedback, for example "topk(ratio=0.01)"."""
    every: int
    """Steps per exchange."""
    overlap: str
    """"" (blocking) or "round" (merged one outer step later). "forward" is exact and uses the row of ""."""
    late: bool
    """True: averaged gradients are applied one step late."""
    workers: int
    """Number of workers. 0: the row is the worst over all measured numbers. `ALONE`: one worker alone."""
    steps: float
    """Median convergence factor: steps to the same loss, relative to dense training with an exchange in every step."""
    steps_high: float
    """Cautious convergence factor: the 80th percentile."""
    loss: float
    """Median relative increase of the loss after the same number of steps: 0.01 is 1 %, the unit of loss budgets."""
    loss_high: float
    tasks: int
    runs: int
    numel: int = 0
    """Number of parameters of the largest measured model. 0: the row was measured on the user's own model."""


def row_problem(row: LearningRow) -> str:
    """Describes what is wrong with a row of a user's table; empty if the row is valid."""
    if wrong := spec_error(row.codec):
        return wrong
    allowed = {"optimizer": FAMILIES, "codes": ("gradients", "updates"), "overlap": ("", "round")}
    which = [name for name, values in allowed.items() if getattr(row, name) not in values]
    which += [name for name, least in {"every": 1, "workers": 0, "steps": 1, "steps_high": 1, "loss": 0, "loss_high": 0}.items()
              if not (getattr(row, name) >= least and math.isfinite(getattr(row, name)))]
    problems = "; ".join(f"{name} is {getattr(row, name)!r}" for name in which)
    return problems and (f"row {row.optimizer} {row.codec} every={row.every}: {problems}, "
                         f"allowed: an optimizer of {', '.join(FAMILIES)}, gradients or updates, overlap of round or nothing, "
                         "every and steps of 1 or more, workers and losses of 0 or more, all finite")


def one_worker_factor(rows: Iterable[LearningRow], optimizer: str, workers: float, noise: float = 0.0, numel: int = 0) -> float:
    """Steps that one worker alone needs with its own batch, relative to `workers` workers together; 0: unknown.

    `noise`: the gradient noise scale in batches of one worker; 0: unknown, so the measured trainings' scale is used. An
    unmeasured optimizer gets the smallest measured scale, which favors one worker alone. `numel`: as of `steps_alone`.
    """
    if noise:
        return steps_alone(noise, workers, numel)
    noise = measured_noise(rows, optimizer)
    return steps_alone(noise, workers) if noise else 0.0


def measured_noise(rows: Iterable[LearningRow], optimizer: str) -> float:
    """The gradient noise scale, in batches of one worker, that explains how many steps `ALONE_AMONG` workers saved in
    measurements."""
    known = {row.optimizer: row.steps for row in rows if row.workers == ALONE}
    steps = min(known.get(_measured_family(optimizer, known)) or min(known.values(), default=1.0), 0.99 * ALONE_AMONG)
    return (steps - 1) / (1 - steps / ALONE_AMONG)


def late_measured(rows: Iterable[LearningRow], optimizer: str) -> bool:
    """True if one-step-late averages were measured for the optimizer's family, or for all families if the optimizer is unknown.
    Their cost is not inferred from related rows: one stale step costs some optimizers nothing and makes others diverge."""
    rows = tuple(rows)
    late = {row.optimizer for row in rows if row.late}
    return bool(rows) and late.issuperset(_families(rows, optimizer))


LATE_RATIO = 0.01
"""Ratio up to which one-step-late averages of a sparse codec must be measured with that codec: by DeCo-SGD's analysis
(2507.17346), staleness amplifies the error of compression exponentially."""


def late_allowed(rows: Iterable[LearningRow], codec: str, optimizer: str) -> bool:
    """Returns whether averages under `codec` may be applied one step late. A codec that sends at most `LATE_RATIO` of the
    entries must have been measured with late averages, at this ratio or a smaller one, for the optimizer's family."""
    core, rows = parse_spec(codec).core, tuple(rows)
    if core.family not in SPARSE or (core.ratio or 1.0) > LATE_RATIO:
        return True
    late = ((row.optimizer, parse_spec(row.codec).core) for row in rows if row.late)
    measured = {family for family, each in late if each.family == core.family and (each.ratio or 1.0) <= (core.ratio or 1.0)}
    return bool(measured) and measured.issuperset(_families(rows, optimizer))


def measured_local_steps(rows: Iterable[LearningRow]) -> int:
    """The largest number of local steps in any row; costs beyond this number are extrapolated."""
    return max((row.every for row in rows), default=1)


def _families(rows: Iterable[LearningRow], optimizer: str) -> list[str]:
    """The optimizer's family if it was measured, else all measured families."""
    known = {row.optimizer for row in rows if row.workers != ALONE}
    family = _measured_family(optimizer, known)
    return [family] if family in known else sorted(known)


def _measured_family(optimizer: str, known: Collection[str]) -> str:
    return optimizer if optimizer in known else LIKE.get(optimizer, optimizer)


def excess(rows: tuple[LearningRow, ...], codec: str, recipe: Recipe = Recipe()) -> Excess:
    """Convergence cost of exchanging with `codec`, spelled as in plans. Zero if there are no rows."""
    if not rows:
        return NONE
    if (costs := _KNOWN.get(id(rows))) is None:
        if len(_KNOWN) == MOST_KNOWN:
            _KNOWN.clear()
        costs = _KNOWN[id(rows)] = _Costs(rows)
    return costs.look(codec, recipe)


class _Costs:
    """Interpolated convergence costs by optimizer and number of workers, built on first use."""

    def __init__(self, rows: tuple[LearningRow, ...]) -> None:
        self._rows = rows
        self._numel = max((row.numel for row in rows), default=0)
        """Number of parameters up to which the rows apply unchanged; 0: the rows were measured on the user's own model."""
        self._curves: dict[tuple[str, int], tuple[ConvergenceCurves, ...]] = {}
        self._found: dict[tuple[str, Recipe], Excess] = {}

    def look(self, codec: str, recipe: Recipe) -> Excess:
        value = self._found.get((codec, recipe))
        if value is None:
            value = self._found[codec, recipe] = self._look(codec, recipe)
        return value

    def _look(self, codec: str, recipe: Recipe) -> Excess:
        if recipe.numel > self._numel > 0:
            by_family = [self._large_model_cost(codec, recipe, name) for name in _families(self._rows, recipe.optimizer)]
            return Excess(*(max(of_field) for of_field in zip(*by_family, strict=True)))
        if recipe.overlap == "round" and recipe.fragments > 1:
            return self._fragment_cost(codec, recipe)
        part = kind_and_point(codec, recipe.every)
        mode = ExchangeMode(recipe.codes, recipe.overlap, recipe.late).plain(recipe.every)
        families = _families(self._rows, recipe.optimizer)
        each = [[curves.at(mode, *part) for curves in self._curves_for(name, recipe.workers)] for name in families]
        steps, high, loss, loss_high = (max(of_field) for of_field in zip(*each, strict=True))
        return Excess(steps, max(steps, high), loss, max(loss, loss_high))

    def _large_model_cost(self, codec: str, recipe: Recipe, family: str) -> Excess:
        """Convergence cost for a model larger than the measured ones, with the rows of one optimizer family."""
        small = recipe._replace(numel=0, optimizer=family)
        local = self.look(DENSE_CODEC, small._replace(late=False))
        by_law, weight = local_step_excess(recipe), fraction_between(recipe.numel, self._numel, SHORT_NUMEL)
        if recipe.every == 1:  # small models were measured: more is not expected of larger ones
            by_law = Excess(*map(min, local, by_law))
        # More local steps never lower the cost of a codec.
        extra = [max(of_field) for of_field in zip(*(
            self._codec_cost_logs(codec, small._replace(every=every), recipe.numel)
            for every in sorted({2**i for i in range(recipe.every.bit_length())} | {recipe.every})), strict=True)]
        steps, high, loss, loss_high = (
            math.expm1((1 - weight) * math.log1p(own) + weight * math.log1p(others) + more)
            for own, others, more in zip(local, by_law, extra, strict=True))
        return Excess(steps, max(steps, high), loss, max(loss, loss_high))

    def _codec_cost_logs(self, codec: str, recipe: Recipe, numel: int) -> tuple[float, ...]:
        """For each field of `Excess`, ln of the factor that late averages and a codec add to dense exchanges."""
        if recipe.every > 1:  # dense exchanges of local steps were measured with this number of workers only
            recipe = recipe._replace(workers=ALONE_AMONG)
        paid = 1 - fraction_between(numel, self._numel, FREE_NUMEL) * (kind_and_point(codec, 1)[0] in FREE_KINDS)
        prompt, dense, coded = (self.look(DENSE_CODEC, recipe._replace(late=False)), self.look(DENSE_CODEC, recipe),
                                self.look(codec, recipe))
        return tuple(
            max(0.0, math.log1p(late) - math.log1p(own)) + paid * max(0.0, math.log1p(both) - math.log1p(late))
            for own, late, both in zip(prompt, dense, coded, strict=True))

    def _fragment_cost(self, codec: str, recipe: Recipe) -> Excess:
        """Cost of overlapped fragments. A fragment is merged H / fragments steps after it was sent, so the cost is at most that
        of a whole outer step of delay."""
        overlapped_excess = self.look(codec, recipe._replace(fragments=1))
        blocking_excess = self.look(codec, recipe._replace(fragments=1, overlap=""))
        return Excess(*(late - max(0.0, late - soon) * (1 - 1 / recipe.fragments)
                        for late, soon in zip(overlapped_excess, blocking_excess, strict=True)))

    def _curves_for(self, optimizer: str, workers: int) -> tuple[ConvergenceCurves, ...]:
        key = optimizer, workers
        if key not in self._curves:
            rows = _rows_by_setting((r for r in self._rows if r.optimizer == optimizer and r.workers != ALONE), workers)
            self._curves[key] = tuple(
                ConvergenceCurves({point: max(_value(r, field) for r in same) for point, same in rows.items()})
                for field in FIELDS)
        return self._curves[key]


def _rows_by_setting(rows: Iterable[LearningRow], workers: int) -> dict[tuple[ExchangeMode, str, Point], list[LearningRow]]:
    """Groups rows by combination of settings. From each group, keeps the rows for this number of workers. If there are none,
    keeps the worst case."""
    by: dict[tuple[ExchangeMode, str, Point], list[LearningRow]] = {}
    for row in rows:
        by.setdefault(_point(row), []).append(row)
    counts = (workers, 0)
    return {point: next((matching for n in counts if (matching := [r for r in same if r.workers == n])), same)
            for point, same in by.items()}


def _point(row: LearningRow) -> tuple[ExchangeMode, str, Point]:
    kind, point = kind_and_point(row.codec, row.every)
    return ExchangeMode(row.codes, row.overlap, row.late).plain(row.every), kind, point


def _value(row: LearningRow, field: str) -> float:
    return max(0.0, {"steps": row.steps - 1, "high": row.steps_high - 1, "loss": row.loss, "loss_high": row.loss_high}[field])


MOST_KNOWN = 8
_KNOWN: dict[int, _Costs] = {}
"""Costs by the id of their rows, which they keep alive: to hash hundreds of rows would take longer than the lookup."""
