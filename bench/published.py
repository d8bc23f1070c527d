"""`python -m bench published`: the law of local steps, fitted to published trainings, and its error on each paper left out.

Papers give losses or perplexities after equal numbers of tokens. A loss L beside data parallel's D becomes a convergence factor
by the scaling law of 2503.09799: F = (L / D) ** 20.96. One per cent of loss is 23 % of steps, so single trainings scatter much.
Factors below 1 count as 1: the planner does not promise that local steps learn faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from bench import report
from commlayer.planner.convergence import LOCAL_STEPS, LOCAL_STEPS_HIGH, LOSS_EXPONENT, MUON, LocalStepLaw


class Cell(NamedTuple):
    """One published training with local steps."""

    paper: str
    numel: float
    workers: int
    every: int
    factor: float
    outer: str
    inner: str = "adamw"


SCALING, OUTER, MULOCO, STREAMING, UNTUNED = "2503.09799", "2509.10439", "2505.23725", "2501.18512", "ft-diloco"
PERPLEXITY = {150e6: 16.89, 400e6: 13.21, 1e9: 11.34}
"""Of data parallel in `OUTER`."""


def cells() -> list[Cell]:
    result = [Cell(SCALING, numel, workers, 30, factor, "Nesterov") for numel, factors in (
        (35e6, (1.15, 1.51, 2.2)), (180e6, (1.05, 1.25, 1.62)), (550e6, (1.03, 1.17, 1.42)), (2.4e9, (0.97, 1.06, 1.25)),
    ) for workers, factor in zip((2, 4, 8), factors, strict=True)]
    result += [Cell(SCALING, numel, workers, 30, by_loss(percent), "Nesterov") for numel, workers, percent in (
        (4e9, 2, -0.2), (4e9, 4, 0.2), (10e9, 2, -0.2), (10e9, 4, 0.3))]
    for outer, perplexities in (("Nesterov 0.7", (17.25, 17.90, 18.09, 17.95, 18.16, 18.40)),
                                ("schedule-free 2.0", (16.88, 16.96, 16.97, 17.18, 17.29, 17.59))):
        result += [Cell(OUTER, 150e6, 4, every, by_perplexity(perplexity, 150e6), outer)
                   for every, perplexity in zip((50, 150, 250, 500, 1000, 2000), perplexities, strict=True)]
    result += [Cell(OUTER, numel, 4, 50, by_perplexity(perplexity, numel), outer) for numel, perplexity, outer in (
        (400e6, 13.71, "Nesterov 0.7"), (400e6, 13.95, "schedule-free 2.0"),
        (1e9, 12.51, "Nesterov 0.7"), (1e9, 12.40, "schedule-free 2.0"))]
    for inner, percents in (("adamw", (5.3, 4.7, 3.4, 3.6, 3.3, 1.0)), ("muon", (2.0, 1.2, 0.3, 1.1, 0.9, 1.6))):
        result += [Cell(MULOCO, numel, 16, 30, by_loss(percent), "Nesterov", inner) for numel, percent in zip(
            (150e6, 416e6, 914e6, 1.76e9, 3.1e9, 15e9), percents, strict=True)]
    result += [Cell(STREAMING, 1e9, 2, 100, by_loss(100 * (loss / data_parallel - 1)), "Nesterov, 4 bits, overlapped")
               for loss, data_parallel in ((2.66, 2.67), (2.51, 2.52), (2.45, 2.45))]
    return result + [Cell(UNTUNED, 51e6, 2, every, by_loss(percent), "Nesterov 0.7, untuned") for every, percent in (
        (25, 2.8), (500, 9.4))]


def by_loss(percent: float) -> float:
    """The factor for this increase of the loss."""
    return math.exp(max(0.0, math.log1p(percent / 100)) / LOSS_EXPONENT)


def by_perplexity(perplexity: float, numel: float) -> float:
    loss, data_parallel = math.log(perplexity), math.log(PERPLEXITY[numel])
    return by_loss(100 * (loss / data_parallel - 1))


def fitted(known: Sequence[Cell], quantile: float = 0.5) -> LocalStepLaw:
    """The law with the least quantile loss of ln F."""
    def off(parameters: np.ndarray) -> float:
        scale, power, sizes = parameters
        if not (scale > 0 and power > 0 and sizes > 1):
            return math.inf
        law = LocalStepLaw(scale, power, sizes)
        errors = [math.log(max(1.0, cell.factor) / law(cell.workers, cell.numel, cell.every)) for cell in known]
        return sum(max(quantile * error, (quantile - 1) * error) for error in errors)

    start = LOCAL_STEPS if quantile == 0.5 else LOCAL_STEPS_HIGH
    best = minimize(off, np.array(start), method="Nelder-Mead", options={"maxiter": 20000, "xatol": 1e-6, "fatol": 1e-9})
    return LocalStepLaw(*(float(f"{value:.3g}") for value in best.x))


def error(law: LocalStepLaw, cell: Cell) -> float:
    """Relative error of the law's factor."""
    factor = law(cell.workers, cell.numel, cell.every)
    if cell.inner == "muon":
        factor = factor**MUON
    return factor / max(1.0, cell.factor) - 1


def left_out(known: Sequence[Cell]) -> Iterable[tuple[str, LocalStepLaw, list[float]]]:
    """For each paper: the law of the other papers, and its errors on this one."""
    for paper in dict.fromkeys(cell.paper for cell in known):
        law = fitted([cell for cell in known if cell.paper != paper])
        yield paper, law, [error(law, cell) for cell in known if cell.paper == paper]


def run(_quick: bool) -> report.Result:
    every = cells()
    known = [cell for cell in every if cell.inner == "adamw" and "untuned" not in cell.outer]
    rows: list[dict[str, Any]] = []
    for cell in every:
        inner = MUON if cell.inner == "muon" else 1
        law, high = (each(cell.workers, cell.numel, cell.every) ** inner for each in (LOCAL_STEPS, LOCAL_STEPS_HIGH))
        rows.append({"paper": cell.paper, "parameters_M": round(cell.numel / 1e6), "workers": cell.workers, "H": cell.every,
                     "outer": cell.outer, "inner": cell.inner, "published": round(cell.factor, 2), "law": round(law, 2),
                     "cautious": round(high, 2), "error_pct": round(100 * error(LOCAL_STEPS, cell))})
    errors = [abs(error(LOCAL_STEPS, cell)) for cell in known]
    summary: dict[str, Any] = {
        "fit_median": str(tuple(fitted(known))), "fit_cautious": str(tuple(fitted(known, 0.8))),
        "median_error_pct": 100 * median(errors), "largest_error_pct": 100 * max(errors),
        "below_the_cautious_factor": sum(error(LOCAL_STEPS_HIGH, cell) >= 0 for cell in known) / len(known)}
    absent: list[float] = []
    for paper, _, each in left_out(known):
        sizes = [abs(one) for one in each]
        absent += sizes
        summary |= {f"left_out_{paper}_median_pct": 100 * median(sizes), f"left_out_{paper}_largest_pct": 100 * max(sizes)}
    summary |= {"left_out_median_pct": 100 * median(absent), "left_out_largest_pct": 100 * max(absent)}
    return {"rows": rows, "summary": summary}
