"""Convergence factors of sync modes and codecs, from curves of trainings: the rows of a learning table.

The factor at step N is N divided by the step at which dense training first had the same loss. A configuration's factor is the
mean over the last half of its run. So all runs have the same length, and large factors are measured like small ones.
`held_out` says how well the rows predict tasks that they do not contain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from bench.virtual_training import STEPS, Variant
from commlayer.errors import InvalidInput
from commlayer.planner.convergence import ALONE, ALONE_AMONG, LearningRow, Recipe, excess

LEAST_TASKS = 3
"""A factor of the shipped table needs measurements on at least this number of tasks."""
MOST = 20.0
"""Factor of a training that has learned almost nothing."""
CAUTIOUS = 0.8

Curve = Sequence[float]


class Cost(NamedTuple):
    """One run relative to its dense run. Noise may push `steps` below 1 and `loss` below 0."""

    steps: float
    loss: float


def smooth(curve: Curve) -> list[float]:
    """Means over five points, fewer at the ends."""
    return [fmean(curve[max(0, i - 2) : i + 3]) for i in range(len(curve))]


def cost(curve: Curve, dense: Curve) -> Cost:
    """`dense` must be finite. The result is relative to dense training against itself, which noise puts slightly above 1."""
    if not all(map(math.isfinite, curve)):
        return Cost(MOST, MOST)
    mine, best = smooth(curve), smooth(dense)
    late = range(len(dense) // 2, len(dense))
    steps = min(MOST, _factor(mine, best, late) / _factor(best, best, late))
    return Cost(steps, min(MOST, mine[-1] / best[-1] - 1))


def _factor(mine: Curve, dense: Curve, looks: range) -> float:
    best, each = np.minimum.accumulate(dense), STEPS / len(dense)
    return fmean(min(MOST, (look + 1) * each / max(_when(best, mine[look]) * each, 1.0)) for look in looks)


def _when(falling: np.ndarray[Any, np.dtype[np.float64]], loss: float) -> float:
    """The time, in points from the start, at which the curve first reached this loss; interpolated between points."""
    below = np.flatnonzero(falling <= loss)
    if not len(below):
        return float(len(falling))
    i = int(below[0])
    if i == 0:
        return 0.5
    return i + float((falling[i - 1] - loss) / (falling[i - 1] - falling[i]))


def costs(curves: Mapping[Variant, Curve]) -> dict[Variant, Cost]:
    """Costs of all runs that have a dense counterpart."""
    results = {}
    for variant, curve in curves.items():
        dense = curves.get(variant.dense)
        if dense is None or variant == variant.dense or variant.rate:
            continue
        if not all(map(math.isfinite, dense)):
            raise InvalidInput("E-USER-CODE",
                               f"task {variant.task}: dense training with {variant.optimizer} ends in a loss of nan: lower its "
                               "rate")
        results[variant] = cost(curve, dense)
    return results


def rows_of(costs: Mapping[Variant, Cost], *, least_tasks: int = 1) -> tuple[LearningRow, ...]:
    """The rows of all measurements, for each number of workers. If there are several numbers, also a row with the worst of
    them.

    Rows of fewer tasks are left out, because they could not be compared with the others.
    """
    table_rows: list[LearningRow] = []
    tasks = {variant.optimizer: {other.task for other in costs if other.optimizer == variant.optimizer} for variant in costs}
    for key, by_workers in sorted(_grouped(costs).items(), key=lambda item: repr(item[0])):
        each = [_row(key, workers, runs) for workers, runs in sorted(by_workers.items())]
        enough = [row for row in each if row.tasks >= max(least_tasks, len(tasks[key[0]]))]
        if not enough:
            continue
        worst = {field: max(getattr(row, field) for row in enough) for field in ("steps", "steps_high", "loss", "loss_high")}
        table_rows.append(structs.replace(enough[0], workers=0, tasks=max(row.tasks for row in enough),
                                          runs=sum(row.runs for row in enough), **worst))
        table_rows += enough if len(enough) > 1 else []
    return tuple(table_rows)


def alone(curves: Mapping[Variant, Curve]) -> Iterator[tuple[Variant, Cost]]:
    """The cost of one worker alone, relative to several."""
    for variant, curve in curves.items():
        together = structs.replace(variant, workers=ALONE_AMONG)
        if variant.workers == ALONE and together in curves:
            yield variant, cost(curve, curves[together])


def alone_rows(curves: Mapping[Variant, Curve], *, least_tasks: int = 1) -> tuple[LearningRow, ...]:
    """The rows of `alone`, one per optimizer."""
    grouped: dict[_Key, dict[str, list[Cost]]] = {}
    for variant, one in alone(curves):
        grouped.setdefault(key_of(variant), {}).setdefault(variant.task, []).append(one)
    return tuple(_row(key, ALONE, runs) for key, runs in sorted(grouped.items()) if len(runs) >= least_tasks)


_Key = tuple[str, str, str, int, str, bool]


def key_of(variant: Variant) -> _Key:
    """The configuration, as a row names it."""
    codes = "updates" if variant.updates else "gradients"
    return variant.optimizer, codes, variant.codec, variant.every, variant.overlap, variant.late


def label(one: Variant | LearningRow) -> str:
    """The sync mode and codec, in words."""
    if one.workers == ALONE:
        return "one worker alone"
    words = [one.codec, "updates" if one.codes == "updates" and one.every == 1 else "",
             f"{one.every} local steps" if one.every > 1 else "", "overlapped" if one.overlap else "",
             "one step late" if one.late else ""]
    return ", ".join(filter(None, words))


def has_row(variant: Variant) -> bool:
    """Whether rows can express the configuration."""
    return variant.ratio_over == "bucket" and variant.fragments == 1 and not variant.outer and variant.batches == 1


def _grouped(costs: Mapping[Variant, Cost]) -> dict[_Key, dict[int, dict[str, list[Cost]]]]:
    """Grouped by configuration, workers and task."""
    groups: dict[_Key, dict[int, dict[str, list[Cost]]]] = {}
    for variant, one in costs.items():
        if has_row(variant):
            groups.setdefault(key_of(variant), {}).setdefault(variant.workers, {}).setdefault(variant.task, []).append(one)
    return groups


def _row(key: _Key, workers: int, runs: Mapping[str, Sequence[Cost]]) -> LearningRow:
    optimizer, codes, codec, every, overlap, late = key
    # A task counts once, however many seeds it was measured with.
    steps = [fmean(one.steps for one in of_task) for of_task in runs.values()]
    losses = [fmean(one.loss for one in of_task) for of_task in runs.values()]
    return LearningRow(optimizer, codes, codec, every, overlap, late, workers, *_spread(steps, 1.0), *_spread(losses, 0.0),
                       len(runs), sum(map(len, runs.values())))


def _spread(values: Sequence[float], least: float) -> tuple[float, float]:
    """Median and cautious quantile. Values below dense are chance and count as dense; clipping earlier would bias them."""
    cautious = float(np.quantile(values, CAUTIOUS))
    return round(max(least, median(values)), 4), round(max(least, cautious), 4)


def shared_rows(costs: Mapping[Variant, Cost]) -> tuple[LearningRow, ...]:
    """Rows for configurations measured on enough tasks."""
    return rows_of(costs, least_tasks=LEAST_TASKS)


class HeldOutPrediction(NamedTuple):
    """Prediction of one task's factors, with one optimizer, from the rows of the other tasks."""

    task: str
    optimizer: str
    rank_correlation: float
    error: float
    """The median of |predicted - measured| / measured over the factors."""
    cautious_rank: float
    """Rank correlation of the cautious factors, which choose plans."""
    covered: float
    """Fraction of the configurations whose measured factor is at most the cautious one."""


def held_out(costs: Mapping[Variant, Cost]) -> list[HeldOutPrediction]:
    """Predicts each task from the other tasks."""
    predictions = []
    for task in sorted({variant.task for variant in costs}):
        table = shared_rows({variant: one for variant, one in costs.items() if variant.task != task})
        for optimizer in sorted({row.optimizer for row in table}):
            mine = _of_task(costs, task, optimizer)
            known = {(row.optimizer, row.codes, row.codec, row.every, row.overlap, row.late) for row in table}
            mine = {variant: steps for variant, steps in mine.items() if key_of(variant) in known}
            if len(mine) < LEAST_TASKS:
                continue
            predicted = [excess(table, variant.codec, _recipe(variant)) for variant in mine]
            guessed, cautious = [1 + each.steps for each in predicted], [1 + each.high for each in predicted]
            measured = list(mine.values())
            errors = [abs(g - m) / m for g, m in zip(guessed, measured, strict=True)]
            covered = fmean(m <= high for m, high in zip(measured, cautious, strict=True))
            predictions.append(HeldOutPrediction(task, optimizer, _rank(guessed, measured), median(errors),
                                                 _rank(cautious, measured), covered))
    return predictions


def _rank(guessed: Sequence[float], measured: Sequence[float]) -> float:
    from scipy.stats import spearmanr  # slow to import, so only where it is needed

    rank = float(spearmanr(guessed, measured).statistic)
    return 0.0 if math.isnan(rank) else rank


def _of_task(costs: Mapping[Variant, Cost], task: str, optimizer: str) -> dict[Variant, float]:
    """Factors of one task, averaged over seeds; keys have seed 0."""
    by: dict[Variant, list[float]] = {}
    for variant, one in costs.items():
        if (variant.task, variant.optimizer) == (task, optimizer) and has_row(variant) and variant.workers > 1:
            by.setdefault(structs.replace(variant, seed=0), []).append(one.steps)
    return {variant: fmean(each) for variant, each in by.items()}


def _recipe(variant: Variant) -> Recipe:
    return Recipe(variant.optimizer, variant.codes, variant.every, variant.overlap, variant.late, variant.workers)
