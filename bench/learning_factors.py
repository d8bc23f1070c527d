"""From curves of trainings to what each way costs in steps, and how well that is foretold on tasks held out. Trains nothing.

A way's factor at step N' is N' over the step at which dense training had the loss that the way has at N'. Its mean over the
last half of a run is the way's: so no run is longer than another, and large factors are seen as small ones are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from scipy.stats import spearmanr

from bench import Unmeasurable
from bench.learning_run import LOOKS, STEPS, Way
from commlayer.planner.model.learning import LearningRow, Recipe, excess

MOST = 20.0
"""What has learnt as good as nothing costs so much."""
CAUTIOUS = 0.8
LEAST_TASKS = 3
"""On fewer nobody has measured it."""

Curve = Sequence[float]


class Cost(NamedTuple):
    """Of one run against the dense one of the same task, optimizer, workers and seed. Noise may put it below 1, and below 0."""

    steps: float
    loss: float


def smooth(curve: Curve) -> list[float]:
    """Means over five looks, of what there is at the ends."""
    return [fmean(curve[max(0, i - 2) : i + 3]) for i in range(len(curve))]


def cost(curve: Curve, dense: Curve) -> Cost:
    """`dense` was shown to be finite. Over what dense training costs against itself, which noise puts a little above 1."""
    if not all(map(math.isfinite, curve)):
        return Cost(MOST, MOST)
    mine, own = _against(curve, dense), _against(dense, dense)
    return Cost(min(MOST, mine.steps / own.steps), min(MOST, mine.loss / own.loss - 1))


def _against(curve: Curve, dense: Curve) -> Cost:
    """As it stands, with the loss as a part of dense training's."""
    best, mine, each = np.minimum.accumulate(smooth(dense)), smooth(curve), STEPS / LOOKS
    factors = []
    for look in range(LOOKS // 2, LOOKS):
        place = _when(best, mine[look])
        factors.append(min(MOST, (look + 1) * each / max(place * each, 1.0)))
    return Cost(fmean(factors), mine[-1] / float(best[-1]))


def _when(falling: np.ndarray[Any, np.dtype[np.float64]], loss: float) -> float:
    """In looks, from the beginning of the training: where that curve first was as low, on lines between looks."""
    below = np.flatnonzero(falling <= loss)
    if not len(below):
        return float(len(falling))
    i = int(below[0])
    if i == 0:
        return 0.5
    return i + float((falling[i - 1] - loss) / (falling[i - 1] - falling[i]))


def costs(curves: Mapping[Way, Curve]) -> dict[Way, Cost]:
    """Of all runs whose dense one is there, too."""
    made = {}
    for way, curve in curves.items():
        dense = curves.get(way.dense)
        if dense is None or way == way.dense or way.rate:
            continue
        if not all(map(math.isfinite, dense)):
            raise Unmeasurable(f"task {way.task}: dense training with {way.optimizer} ends in a loss of nan: lower its rate")
        made[way] = cost(curve, dense)
    return made


def rows(found: Mapping[Way, Cost]) -> tuple[LearningRow, ...]:
    """Of all that was measured on all tasks: for each number of workers, and where there are several, the worst of them.

    Figures of fewer tasks would stand beside those of all as if they were of the same.
    """
    made: list[LearningRow] = []
    tasks = {way.optimizer: {other.task for other in found if other.optimizer == way.optimizer} for way in found}
    for key, by_workers in sorted(_grouped(found).items(), key=lambda item: repr(item[0])):
        each = [_row(key, workers, runs) for workers, runs in sorted(by_workers.items())]
        enough = [row for row in each if row.tasks >= max(LEAST_TASKS, len(tasks[key[0]]))]
        if not enough:
            continue
        worst = {field: max(getattr(row, field) for row in enough) for field in ("steps", "steps_high", "loss", "loss_high")}
        made.append(structs.replace(enough[0], workers=0, tasks=max(row.tasks for row in enough),
                                    runs=sum(row.runs for row in enough), **worst))
        made += enough if len(enough) > 1 else []
    return tuple(made)


_Key = tuple[str, str, str, int, str, bool]


def _key(way: Way) -> _Key:
    """The combination, as a row names it."""
    return way.optimizer, "updates" if way.updates else "gradients", way.codec, way.every, way.overlap, way.late


def _told(way: Way) -> bool:
    """Whether rows have words for it."""
    return way.ratio_over == "bucket" and way.fragments == 1 and not way.outer


def with_outer(found: Mapping[Way, Cost]) -> tuple[LearningRow, ...]:
    """As `rows`, of ways with DiLoCo's outer optimizer alone. No plan says such a one, so no planner is to look these up."""
    return rows({structs.replace(way, outer=""): one for way, one in found.items() if way.outer == "diloco"})


def _grouped(found: Mapping[Way, Cost]) -> dict[_Key, dict[int, dict[str, list[Cost]]]]:
    """By combination, workers and task."""
    groups: dict[_Key, dict[int, dict[str, list[Cost]]]] = {}
    for way, one in found.items():
        if _told(way):
            groups.setdefault(_key(way), {}).setdefault(way.workers, {}).setdefault(way.task, []).append(one)
    return groups


def _row(key: _Key, workers: int, runs: Mapping[str, Sequence[Cost]]) -> LearningRow:
    optimizer, codes, codec, every, overlap, late = key
    # A task counts once, however many seeds it was measured with.
    steps = [fmean(one.steps for one in of_task) for of_task in runs.values()]
    losses = [fmean(one.loss for one in of_task) for of_task in runs.values()]
    return LearningRow(optimizer, codes, codec, every, overlap, late, workers, *_spread(steps, 1.0), *_spread(losses, 0.0),
                       len(runs), sum(map(len, runs.values())))


def _spread(values: Sequence[float], least: float) -> tuple[float, float]:
    """What is better than dense is chance, and counts as dense; but only here, or chance would count on one side alone."""
    cautious = float(np.quantile(values, CAUTIOUS))
    return round(max(least, median(values)), 4), round(max(least, cautious), 4)


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


def held_out(found: Mapping[Way, Cost]) -> list[Foretold]:
    """Each task by the others."""
    told = []
    for task in sorted({way.task for way in found}):
        table = rows({way: one for way, one in found.items() if way.task != task})
        for optimizer in sorted({row.optimizer for row in table}):
            mine = _of_task(found, task, optimizer)
            known = {(row.optimizer, row.codes, row.codec, row.every, row.overlap, row.late) for row in table}
            mine = {way: steps for way, steps in mine.items() if _key(way) in known}
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
    rank = float(spearmanr(guessed, measured).statistic)
    return 0.0 if math.isnan(rank) else rank


def _of_task(found: Mapping[Way, Cost], task: str, optimizer: str) -> dict[Way, float]:
    """The mean over seeds, by the way with seed 0."""
    by: dict[Way, list[float]] = {}
    for way, one in found.items():
        if (way.task, way.optimizer) == (task, optimizer) and _told(way) and way.workers > 1:
            by.setdefault(structs.replace(way, seed=0), []).append(one.steps)
    return {way: fmean(each) for way, each in by.items()}


def _recipe(way: Way) -> Recipe:
    return Recipe(way.optimizer, way.codes, way.every, way.overlap, way.late, way.workers)


def alone(curves: Mapping[Way, Curve]) -> Iterable[tuple[Way, Cost]]:
    """What one worker costs by itself, against four."""
    for way, curve in curves.items():
        together = structs.replace(way, workers=4)
        if way.workers == 1 and together in curves:
            yield way, cost(curve, curves[together])
