"""`python -m bench longrun-law`: the law of small models, fitted to the trainings of `bench longrun`.

Each task is also predicted by a law whose fit omits it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.stats import spearmanr

from bench import longrun, report
from bench.longrun import Case, Trainings
from bench.virtual_training import Variant
from commlayer.planner.convergence import LONG_RUNS, LONG_RUNS_HIGH, LongRunLaw, steps_alone


class Training(NamedTuple):
    """A measured convergence factor of local steps, or of one worker alone."""

    task: str
    workers: int
    numel: int
    noise: float
    """In batches of one worker."""
    training: str
    every: int
    """Local steps; 0: one worker alone."""
    fragments: int
    """Of an overlapped exchange; 0: the exchange blocks."""
    factor: float


def log_factor(law: LongRunLaw, one: Training) -> float:
    """ln of the law's factor."""
    saved = law.realised_part(one.numel) * math.log(steps_alone(one.noise, one.workers))
    return saved * law.lost_part(law.as_blocking(one.every, one.fragments)) if one.every else saved


def trainings(store: Trainings) -> list[Training]:
    """With AdamW and a decayed learning rate, the rule's outer optimizer, and a measured noise scale."""
    result = []
    for case in map(Case.read, store.rows):
        variant = case.variant
        usual = Variant(variant.task, "adam", workers=variant.workers, seed=variant.seed, batches=variant.batches)
        if case != Case(usual):
            continue
        for each in (longrun.alone_of(case), *map(Case, longrun.local_variants(variant))):
            factor, noise = longrun.factor_of(each, store, variant.workers), longrun.find_noise(case, store)
            if factor and noise and variant.workers > 1:
                result.append(Training(variant.task, variant.workers, longrun.numel_of(variant.task), noise,
                                       longrun.label(each), each.variant.every if each.variant.updates else 0,
                                       each.variant.fragments if each.variant.overlap else 0, factor))
    return result


def fit(known: Sequence[Training]) -> LongRunLaw:
    """The median law."""
    law = _fit_lost(known, 0.5)
    return law._replace(late=_fit_late(law, known))


def fit_cautious(known: Sequence[Training]) -> LongRunLaw:
    """The cautious law: the 80th percentile of what blocking trainings lost, and the smallest `late` with which 80 % of the
    overlapped trainings need at most the law's factor."""
    law, overlapped = _fit_lost(known, 0.8), [one for one in known if one.fragments]
    for late in (hundredths / 100 for hundredths in range(1000)):
        if sum(covers(law._replace(late=late), one) for one in overlapped) >= 0.8 * len(overlapped):
            return law._replace(late=late)
    return law._replace(late=math.inf)


def covers(law: LongRunLaw, one: Training) -> bool:
    return log_factor(law, one) >= math.log(one.factor)


def _fit_late(law: LongRunLaw, known: Sequence[Training]) -> float:
    """The median of the values of `late` by which the law meets the overlapped trainings, relative to blocking ones with as
    many local steps. A training weighs as much as `late` changes the logarithm of its local steps."""
    blocking = {one._replace(training="", factor=0.0): one.factor for one in known if not one.fragments}
    lates = []
    for one in known:
        other = 1.0 if one.every == 1 else blocking.get(one._replace(training="", fragments=0, factor=0.0))
        if one.fragments and other:
            thirty = log_factor(law, one._replace(every=30, fragments=0))
            own, late = (one.every + 1) / 2, one.every / one.fragments
            longer = math.expm1(math.log(one.factor / other) * math.log(15.5) / thirty)
            lates.append((longer * own / late, late / own))
    lates.sort()
    sums = list(accumulate(weight for _, weight in lates))
    return round(next((late for (late, _), so_far in zip(lates, sums, strict=True) if so_far >= sums[-1] / 2), 0.0), 2)


def _fit_lost(known: Sequence[Training], quantile: float) -> LongRunLaw:
    """Fits to the trainings that do not overlap: realised and growth to the least absolute error, with a free lost part. Then
    takes as lost part the quantile of what the trainings with local steps lost. A training of one worker alone counts as much
    as three with local steps."""
    known = [one for one in known if not one.fragments]
    weights = np.array([1 if one.every else 3 for one in known])

    def off(parameters: np.ndarray) -> float:
        if min(parameters) <= 0:
            return math.inf
        law = LongRunLaw(float(parameters[0]), float(parameters[1]), float(parameters[2]), late=0.0)
        return float(np.abs(weights * [math.log(one.factor) - log_factor(law, one) for one in known]).sum())

    options = {"maxiter": 20000, "xatol": 1e-6, "fatol": 1e-9}
    starts = [np.array((realised, growth, 0.4)) for realised in (0.6, 0.8, 1.0) for growth in (0.05, 0.15, 0.3)]
    best = min((minimize(off, start, method="Nelder-Mead", options=options) for start in starts), key=lambda found: found.fun)
    realised, growth = (float(f"{value:.2g}") for value in best.x[:2])
    small = LongRunLaw(realised, growth, 0.1, 0.0)  # at 0.1, log_factor is proportional to `lost`: lost_part does not reach 1
    lost = [small.lost * math.log(one.factor) / log_factor(small, one) for one in known if one.every]
    return small._replace(lost=math.ceil(100 * np.quantile(lost, quantile, method="higher")) / 100)


def run(_quick: bool) -> report.Result:
    """A row for each training: the measured factor, the law's, and that of a law whose fit omits this task."""
    known = trainings(Trainings(longrun.STORE))
    omitting = {task: fit([one for one in known if one.task != task]) for task in dict.fromkeys(one.task for one in known)}
    absent = [math.exp(log_factor(omitting[one.task], one)) for one in known]
    rows: list[dict[str, Any]] = [
        {"task": one.task, "workers": one.workers, "noise": round(one.noise / one.workers, 1),
         "training": one.training, "factor": round(one.factor, 2),
         "law": round(math.exp(log_factor(LONG_RUNS, one)), 2), "left_out": round(out, 2)}
        for one, out in zip(known, absent, strict=True)]
    summary: dict[str, Any] = {
        "fit_median": str(tuple(fit(known))), "fit_cautious": str(tuple(fit_cautious(known))),
        "below_the_cautious_factor": statistics.mean(covers(LONG_RUNS_HIGH, one) for one in known if one.every)}
    kinds = ["alone" if not one.every else "overlapped" if one.fragments else "local_steps" for one in known]
    for name in dict.fromkeys(kinds):
        chosen = [row for kind, row in zip(kinds, rows, strict=True) if kind == name]
        for key in ("law", "left_out"):
            errors = [abs(row[key] / row["factor"] - 1) for row in chosen]
            summary |= {f"{name}_{key}_median_pct": 100 * statistics.median(errors),
                        f"{name}_{key}_largest_pct": 100 * max(errors),
                        f"{name}_{key}_rank": float(spearmanr([(row["factor"], row[key]) for row in chosen]).statistic)}
    return {"rows": rows, "summary": summary}
