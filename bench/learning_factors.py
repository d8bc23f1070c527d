"""Convergence factors from measured trainings, and how well they predict tasks that were held out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from msgspec import structs

from bench import Unmeasurable, convergence
from bench.convergence import MOST, Cost, Curve, alone, cost, key_of, told
from bench.learning_run import Variant
from commlayer.planner.convergence import LearningRow, Recipe, excess

__all__ = ["LEAST_TASKS", "MOST", "Cost", "alone", "cost", "costs", "held_out", "rows", "with_batches",
           "with_outer"]

WORKERS = 4
"""Default number of workers of a training."""
LEAST_TASKS = 3
"""A factor needs measurements on at least this number of tasks."""


def costs(curves: Mapping[Variant, Curve]) -> dict[Variant, Cost]:
    """Costs of all runs whose dense reference was also measured."""
    try:
        return convergence.costs(curves)
    except ValueError as error:
        raise Unmeasurable(str(error)) from None


def rows(costs: Mapping[Variant, Cost]) -> tuple[LearningRow, ...]:
    """Rows of the table, for configurations measured on enough tasks."""
    return convergence.rows_of(costs, least_tasks=LEAST_TASKS)


def with_outer(costs: Mapping[Variant, Cost], outer: str = "diloco") -> tuple[LearningRow, ...]:
    """As `rows`, for runs with that outer optimizer only. The planner's table cannot express these rows."""
    return rows({structs.replace(way, outer=""): one for way, one in costs.items() if way.outer == outer})


def with_batches(costs: Mapping[Variant, Cost]) -> dict[int, tuple[LearningRow, ...]]:
    """As `rows`, by the multiple of a worker's batch. Only runs with 4 workers and the seeds of the larger batches."""
    seeds = {way.seed for way in costs if way.batches > 1}
    mine = {way: one for way, one in costs.items() if way.workers == WORKERS and way.seed in seeds}
    return {times: rows({structs.replace(way, batches=1): one for way, one in mine.items() if way.batches == times})
            for times in sorted({way.batches for way in mine})}


def _key(row: LearningRow) -> tuple[object, ...]:
    return row.optimizer, row.codes, row.codec, row.every, row.overlap, row.late


class Foretold(NamedTuple):
    """Prediction of one task's factors, with one optimizer, from the rows of the other tasks."""

    task: str
    optimizer: str
    ways: int
    rank_correlation: float
    error: float
    """The median of |predicted - measured| / measured over the factors."""
    cautious_rank: float
    """Rank correlation of the cautious factors, which choose plans."""
    covered: float
    """Fraction of the configurations whose measured factor is at most the cautious one."""


def held_out(costs: Mapping[Variant, Cost]) -> list[Foretold]:
    """Predicts each task from the other tasks."""
    predictions = []
    for task in sorted({way.task for way in costs}):
        table = rows({way: one for way, one in costs.items() if way.task != task})
        for optimizer in sorted({row.optimizer for row in table}):
            mine = _of_task(costs, task, optimizer)
            known = {*map(_key, table)}
            mine = {way: steps for way, steps in mine.items() if key_of(way) in known}
            if len(mine) < LEAST_TASKS:
                continue
            looked_up = [excess(table, way.codec, _recipe(way)) for way in mine]
            guessed, cautious = [1 + each.steps for each in looked_up], [1 + each.high for each in looked_up]
            measured = list(mine.values())
            errors = [abs(g - m) / m for g, m in zip(guessed, measured, strict=True)]
            covered = fmean(m <= high for m, high in zip(measured, cautious, strict=True))
            predictions.append(Foretold(task, optimizer, len(mine), _rank(guessed, measured), median(errors),
                                 _rank(cautious, measured), covered))
    return predictions


def _rank(guessed: Sequence[float], measured: Sequence[float]) -> float:
    from scipy.stats import spearmanr  # slow to import, so only where it is needed

    rank = float(spearmanr(guessed, measured).statistic)
    return 0.0 if math.isnan(rank) else rank


def _of_task(costs: Mapping[Variant, Cost], task: str, optimizer: str) -> dict[Variant, float]:
    """Factors of one task, averaged over seeds; keys have seed 0."""
    by: dict[Variant, list[float]] = {}
    for way, one in costs.items():
        if (way.task, way.optimizer) == (task, optimizer) and told(way) and way.workers > 1:
            by.setdefault(structs.replace(way, seed=0), []).append(one.steps)
    return {way: fmean(each) for way, each in by.items()}


def _recipe(way: Variant) -> Recipe:
    return Recipe(way.optimizer, way.codes, way.every, way.overlap, way.late, way.workers)
