"""Fits the convergence model's parts for small models to the trainings of `bench longrun`: `python -m bench longrun --fit`."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.stats import spearmanr

from bench import longrun, report
from bench.longrun import Case, Store
from bench.virtual_training import Variant
from commlayer.planner.convergence import LOST, LOST_HIGH, REALISED, REALISED_GROWTH, steps_alone


class Training(NamedTuple):
    """A measured convergence factor: of one worker alone (`every` is 0), or of local steps."""

    task: str
    workers: int
    numel: int
    noise: float
    """In batches of one worker."""
    every: int
    factor: float


class Law(NamedTuple):
    realised: float = REALISED
    growth: float = REALISED_GROWTH
    lost: float = LOST

    def __call__(self, one: Training) -> float:
        """ln of the factor."""
        part = min(1.0, self.realised * (one.numel / 1e6) ** self.growth)
        saved: float = part * math.log(steps_alone(one.noise, one.workers))
        return saved * (min(1.0, self.lost * math.log(one.every) / math.log(30)) if one.every else 1.0)


@functools.cache
def numel_of(task: str) -> int:
    return sum(p.numel() for p in longrun.TASKS[task](0).model.parameters())


def trainings(store: Store) -> list[Training]:
    """With AdamW and a decayed learning rate, the rule's outer optimizer, and a measured noise scale."""
    result = []
    for case in map(Case.read, store.curves):
        way = case.way
        usual = Variant(way.task, "adam", workers=way.workers, seed=way.seed, batches=way.batches)
        if way != usual or case != Case(usual):
            continue
        local = {way.every: Case(way) for way in longrun.local_ways(way)}
        for every, each in {0: longrun.alone_of(case), **local}.items():
            factor, noise = longrun.factor_of(each, store, way.workers), longrun.noise_of(case, store)
            if factor and noise and way.workers > 1:
                result.append(Training(way.task, way.workers, numel_of(way.task), noise, every, factor))
    return result


def fitted(known: Sequence[Training], quantile: float = 0.5) -> Law:
    """The law with the least quantile loss of ln F."""
    def off(parameters: np.ndarray) -> float:
        if min(parameters) <= 0:
            return math.inf
        errors = [math.log(one.factor) - Law(*parameters)(one) for one in known]
        return sum(max(quantile * error, (quantile - 1) * error) for error in errors)

    options = {"maxiter": 20000, "xatol": 1e-6, "fatol": 1e-9}
    starts = [np.array(Law()) * (1 + 0.3 * np.random.default_rng(seed).standard_normal(3)) for seed in range(8)]
    best = min((minimize(off, start, method="Nelder-Mead", options=options) for start in starts), key=lambda found: found.fun)
    return Law(*(float(f"{value:.2g}") for value in best.x))


def run() -> report.Result:
    """A row for each training: the measured factor, the law's, and that of a law whose fit omits this task with this number of
    workers."""
    known = trainings(Store(longrun.STORE))
    omitting = {group: fitted([one for one in known if (one.task, one.workers) != group])
                for group in dict.fromkeys((one.task, one.workers) for one in known)}
    absent = [math.exp(omitting[one.task, one.workers](one)) for one in known]
    rows: list[dict[str, Any]] = [
        {"task": one.task, "workers": one.workers, "noise": round(one.noise / one.workers, 1),
         "training": f"{one.every} local steps" if one.every else "alone", "factor": round(one.factor, 2),
         "law": round(math.exp(Law()(one)), 2), "left_out": round(out, 2)} for one, out in zip(known, absent, strict=True)]
    summary: dict[str, Any] = {"fit_median": str(tuple(fitted(known))), "fit_cautious": str(tuple(fitted(known, 0.8))),
                               "cautious": LOST_HIGH}
    for name, local in (("local_steps", True), ("alone", False)):
        chosen = [row for one, row in zip(known, rows, strict=True) if bool(one.every) == local]
        for key in ("law", "left_out"):
            errors = [abs(row[key] / row["factor"] - 1) for row in chosen]
            summary |= {f"{name}_{key}_median_pct": 100 * statistics.median(errors),
                        f"{name}_{key}_largest_pct": 100 * max(errors),
                        f"{name}_{key}_rank": float(spearmanr([(row["factor"], row[key]) for row in chosen]).statistic)}
    return {"rows": rows, "summary": summary}
