"""How well what ways cost in steps is foretold on tasks held out, and what has no row. Trains nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from msgspec import structs

from bench import Unmeasurable
from bench.learning_run import Variant
from commlayer.autotune.measure import convergence
from commlayer.autotune.measure.convergence import EARLY, MOST, Cost, Curve, alone, cost, key_of, told
from commlayer.planner.convergence import LearningRow, Recipe, excess

__all__ = ["LEAST_TASKS", "MOST", "Cost", "alone", "by_phase", "cost", "costs", "held_out", "rows", "with_batches",
           "with_outer"]

WORKERS = 4
"""So many, where nothing else is said."""
LEAST_TASKS = 3
"""On fewer nobody has measured it."""


def costs(curves: Mapping[Variant, Curve]) -> dict[Variant, Cost]:
    """Of all runs whose dense one is there, too."""
    try:
        return convergence.costs(curves)
    except ValueError as error:
        raise Unmeasurable(str(error)) from None


def rows(found: Mapping[Variant, Cost]) -> tuple[LearningRow, ...]:
    """Of all that was measured on all tasks."""
    return convergence.rows_of(found, least_tasks=LEAST_TASKS)


def with_outer(found: Mapping[Variant, Cost], outer: str = "diloco") -> tuple[LearningRow, ...]:
    """As `rows`, of ways with that outer optimizer alone. No plan says such a one, so no planner is to look these up."""
    return rows({structs.replace(way, outer=""): one for way, one in found.items() if way.outer == outer})


def with_batches(found: Mapping[Variant, Cost]) -> dict[int, tuple[LearningRow, ...]]:
    """As `rows`, by how many times as large a worker's batch was; of 4 workers, with the seeds of larger batches."""
    seeds = {way.seed for way in found if way.batches > 1}
    mine = {way: one for way, one in found.items() if way.workers == WORKERS and way.seed in seeds}
    return {times: rows({structs.replace(way, batches=1): one for way, one in mine.items() if way.batches == times})
            for times in sorted({way.batches for way in mine})}


class Phases(NamedTuple):
    """Factors of a way in early steps and, in its row, in the second half of a run; medians over tasks."""

    row: LearningRow
    early: float


def by_phase(curves: Mapping[Variant, Curve]) -> list[Phases]:
    """Of the ways that rows are made of, with 4 workers, where what workers exchange is merged in early steps at all."""
    mine = {way: curve for way, curve in curves.items() if told(way) and way.workers == WORKERS
            and way.every * (2 if way.overlap else 1) <= EARLY[0]}
    cost_by_variant = costs(mine)
    early: dict[tuple[object, ...], dict[str, list[float]]] = {}
    for way in cost_by_variant:
        early.setdefault(key_of(way), {}).setdefault(way.task, []).append(convergence.early(mine[way], mine[way.dense]))
    return [Phases(row, max(1.0, median(fmean(each) for each in early[_key(row)].values()))) for row in rows(cost_by_variant)]


def _key(row: LearningRow) -> tuple[object, ...]:
    return row.optimizer, row.codes, row.codec, row.every, row.overlap, row.late


class Foretold(NamedTuple):
    """On one task with one optimizer, by rows of the other tasks."""

    task: str
    optimizer: str
    ways: int
    rank_correlation: float
    error: float
    """The median of |foretold - measured| / measured, of factors."""
    cautious_rank: float
    """The rank correlation of the cautious figures, by which plans are chosen."""
    covered: float
    """The part of the ways that cost no more than the cautious figures say."""


def held_out(found: Mapping[Variant, Cost]) -> list[Foretold]:
    """Each task by the others."""
    told = []
    for task in sorted({way.task for way in found}):
        table = rows({way: one for way, one in found.items() if way.task != task})
        for optimizer in sorted({row.optimizer for row in table}):
            mine = _of_task(found, task, optimizer)
            known = {*map(_key, table)}
            mine = {way: steps for way, steps in mine.items() if key_of(way) in known}
            if len(mine) < LEAST_TASKS:
                continue
            looked_up = [excess(table, way.codec, _recipe(way)) for way in mine]
            guessed, cautious = [1 + each.steps for each in looked_up], [1 + each.high for each in looked_up]
            measured = list(mine.values())
            errors = [abs(g - m) / m for g, m in zip(guessed, measured, strict=True)]
            covered = fmean(m <= high for m, high in zip(measured, cautious, strict=True))
            told.append(Foretold(task, optimizer, len(mine), _rank(guessed, measured), median(errors),
                                 _rank(cautious, measured), covered))
    return told


def _rank(guessed: Sequence[float], measured: Sequence[float]) -> float:
    from scipy.stats import spearmanr  # which loads much of scipy, and tests of benches do not

    rank = float(spearmanr(guessed, measured).statistic)
    return 0.0 if math.isnan(rank) else rank


def _of_task(found: Mapping[Variant, Cost], task: str, optimizer: str) -> dict[Variant, float]:
    """The mean over seeds, by the way with seed 0."""
    by: dict[Variant, list[float]] = {}
    for way, one in found.items():
        if (way.task, way.optimizer) == (task, optimizer) and told(way) and way.workers > 1:
            by.setdefault(structs.replace(way, seed=0), []).append(one.steps)
    return {way: fmean(each) for way, each in by.items()}


def _recipe(way: Variant) -> Recipe:
    return Recipe(way.optimizer, way.codes, way.every, way.overlap, way.late, way.workers)
