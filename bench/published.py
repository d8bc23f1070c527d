"""`python -m bench published`: the law of local steps, fitted to published trainings, and its error on each paper left out.

data/published.jsonl has the papers' losses after equal numbers of tokens, relative to synchronous training ("loss_pct"), or
perplexities beside those of synchronous training. A loss L beside data parallel's D becomes a convergence factor by the
scaling law of 2503.09799: F = (L / D) ** 20.96. One per cent of loss is 23 % of steps, so single trainings scatter much.
Factors below 1 count as 1: the planner does not promise that local steps learn faster.
"""

from __future__ import annotations

import json
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


def cells() -> list[Cell]:
    rows = map(json.loads, (report.DATA / "published.jsonl").read_text().splitlines())
    return [Cell(row["paper"], row["numel"], row["workers"], row["every"], factor_of(row), row["outer"],
                 row.get("inner", "adamw")) for row in rows]


def factor_of(row: dict[str, Any]) -> float:
    if "factor" in row:
        return float(row["factor"])
    loss_pct = row["loss_pct"] if "loss_pct" in row else 100 * (math.log(row["perplexity"]) / math.log(row["synchronous"]) - 1)
    return math.exp(max(0.0, math.log1p(loss_pct / 100)) / LOSS_EXPONENT)


def fit(known: Sequence[Cell], quantile: float = 0.5) -> LocalStepLaw:
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


def leave_one_out(known: Sequence[Cell]) -> Iterable[tuple[str, LocalStepLaw, list[float]]]:
    """For each paper: the law of the other papers, and its errors on this one."""
    for paper in dict.fromkeys(cell.paper for cell in known):
        law = fit([cell for cell in known if cell.paper != paper])
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
        "fit_median": str(tuple(fit(known))), "fit_cautious": str(tuple(fit(known, 0.8))),
        "median_error_pct": 100 * median(errors), "largest_error_pct": 100 * max(errors),
        "below_the_cautious_factor": sum(error(LOCAL_STEPS_HIGH, cell) >= 0 for cell in known) / len(known)}
    absent: list[float] = []
    for paper, _, each in leave_one_out(known):
        sizes = [abs(one) for one in each]
        absent += sizes
        summary |= {f"left_out_{paper}_median_pct": 100 * median(sizes), f"left_out_{paper}_largest_pct": 100 * max(sizes)}
    summary |= {"left_out_median_pct": 100 * median(absent), "left_out_largest_pct": 100 * max(absent)}
    return {"rows": rows, "summary": summary}
