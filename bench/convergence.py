"""Convergence factors of sync modes and codecs, from curves of trainings: the rows of a learning table.

The factor at step N is N divided by the step at which dense training first had the same loss. A configuration's factor is the
mean over the last half of its run. So all runs have the same length, and large factors are measured like small ones.

`measured` trains a user's own task by the method of the built-in table (`python -m bench learning`), with the user's model,
data, optimizer and rate:

    table = measured("task.py", make, [*ways_of(("int4()",), (4, 16))], tell)
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs

from bench.virtual_training import LOOKS, STEPS, Make, Variant, train
from commlayer.codec_spec import SPARSE, parse_spec
from commlayer.errors import InvalidInput, cause_of
from commlayer.optim.outer import family_of
from commlayer.planner.convergence import ALONE, ALONE_AMONG, LearningRow
from commlayer.planner.tables import LearningTable, Provenance

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
    return Cost(_over(mine, best, late), min(MOST, mine[-1] / best[-1] - 1))


def _over(mine: Curve, dense: Curve, looks: range) -> float:
    """The factor at these points, relative to that of dense training against itself."""
    return min(MOST, _factor(mine, dense, looks) / _factor(dense, dense, looks))


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
    for way, curve in curves.items():
        dense = curves.get(way.dense)
        if dense is None or way == way.dense or way.rate:
            continue
        if not all(map(math.isfinite, dense)):
            raise InvalidInput("E-USER-CODE",
                               f"task {way.task}: dense training with {way.optimizer} ends in a loss of nan: lower its rate")
        results[way] = cost(curve, dense)
    return results


def rows_of(found: Mapping[Variant, Cost], *, least_tasks: int = 1) -> tuple[LearningRow, ...]:
    """The rows of all measurements, for each number of workers. If there are several numbers, also a row with the worst of
    them.

    Rows of fewer tasks are left out, because they could not be compared with the others.
    """
    table_rows: list[LearningRow] = []
    tasks = {way.optimizer: {other.task for other in found if other.optimizer == way.optimizer} for way in found}
    for key, by_workers in sorted(_grouped(found).items(), key=lambda item: repr(item[0])):
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
    for way, curve in curves.items():
        together = structs.replace(way, workers=ALONE_AMONG)
        if way.workers == ALONE and together in curves:
            yield way, cost(curve, curves[together])


def alone_rows(curves: Mapping[Variant, Curve], *, least_tasks: int = 1) -> tuple[LearningRow, ...]:
    """The rows of `alone`, one per optimizer."""
    grouped: dict[_Key, dict[str, list[Cost]]] = {}
    for way, one in alone(curves):
        grouped.setdefault(key_of(way), {}).setdefault(way.task, []).append(one)
    return tuple(_row(key, ALONE, runs) for key, runs in sorted(grouped.items()) if len(runs) >= least_tasks)


_Key = tuple[str, str, str, int, str, bool]


def key_of(way: Variant) -> _Key:
    """The configuration, as a row names it."""
    return way.optimizer, "updates" if way.updates else "gradients", way.codec, way.every, way.overlap, way.late


def told(way: Variant) -> bool:
    """Whether rows can express the configuration."""
    return way.ratio_over == "bucket" and way.fragments == 1 and not way.outer and way.batches == 1


def _grouped(found: Mapping[Variant, Cost]) -> dict[_Key, dict[int, dict[str, list[Cost]]]]:
    """Grouped by configuration, workers and task."""
    groups: dict[_Key, dict[int, dict[str, list[Cost]]]] = {}
    for way, one in found.items():
        if told(way):
            groups.setdefault(key_of(way), {}).setdefault(way.workers, {}).setdefault(way.task, []).append(one)
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


OWN = "your proxy"
"""Source that distinguishes these rows from the built-in ones."""
Tell = Callable[[Variant, float, LearningTable | None], None]
"""Called after each training with its last loss and the table so far."""


def ways_of(codecs: Sequence[str], local_steps: Sequence[int], *, late: bool = False) -> Iterator[Variant]:
    """The most useful configurations: each codec for gradients and for updates; local steps, with and without overlap, with
    the finest codec that is not sparse; and, if local steps are requested, overlapped updates of each step."""
    dense = Variant("", "")
    yield dense
    yield structs.replace(dense, workers=ALONE)
    codecs = [codec for codec in dict.fromkeys(codecs) if codec != dense.codec]
    yield from (structs.replace(dense, codec=codec) for codec in codecs)
    fine = next((codec for codec in codecs if parse_spec(codec).core.family not in SPARSE), dense.codec)
    for every in sorted({n for n in local_steps if n > 1}):
        yield from (structs.replace(dense, codec=fine, every=every, overlap=overlap) for overlap in ("", "round"))
    yield from (structs.replace(dense, codec=codec, codes="updates") for codec in codecs)
    if max(local_steps, default=1) > 1:
        yield structs.replace(dense, codec=fine, codes="updates", overlap="round")
    if late:
        yield structs.replace(dense, codec=fine, late=True)


def measured(
    name: str, make: Make, ways: Sequence[Variant], tell: Tell, *, steps: int = STEPS, seeds: int = 1,
) -> LearningTable:
    """Trains all configurations. Raises InvalidInput with one line for a task that cannot be trained."""
    family = family_of(_optimizer(name, make))
    if family == "other":
        raise InvalidInput("E-USER-CODE",
                           f"{name}: its optimizer is of no family that tables have; allowed: SGD, Adam and their like")
    curves: dict[Variant, Sequence[float]] = {}
    table: LearningTable | None = None
    for seed in range(seeds):
        for way in ways:
            mine = structs.replace(way, task=name, optimizer=family, seed=seed)
            curves[mine] = _trained(mine, make, steps)
            table = _table(name, curves)
            tell(mine, curves[mine][-1], table)
    if table is None:
        raise InvalidInput("E-USER-CODE", f"{name}: nothing to compare with dense training; name a codec or local steps")
    return table


def _trained(way: Variant, make: Make, steps: int) -> Sequence[float]:
    """Trains one configuration; an error in the user's code becomes one line."""
    try:
        curve = train(way, make, steps=steps, looks=min(LOOKS, steps))
    except ValueError:
        raise
    except Exception as error:
        raise InvalidInput("E-USER-CODE", f"task {way.task}: {cause_of(error)}; a step of it by itself shows where") from None
    if (least := min(curve)) <= 0:  # a diverged training gives NaN, which is valid
        raise InvalidInput("E-USER-CODE",
                           f"task {way.task}: validation returned {least:g}, needed is a loss above 0, since others are told "
                           "as parts of it: return one that stays above 0, or train for fewer steps")
    return curve


def _optimizer(name: str, make: Make) -> torch.optim.Optimizer:
    task = make(0)
    return task.optimizer(task.model)


def _table(name: str, curves: dict[Variant, Sequence[float]]) -> LearningTable | None:
    rows = rows_of(costs(curves))
    rows += alone_rows(curves) if rows else ()
    source = Provenance(datetime.date.today().isoformat(), f"python -m bench.own_learning {name}", len(curves),
                        (f"{OWN}: {name}",), str(torch.__version__), OWN)
    return LearningTable(source, rows) if rows else None
