"""The tuner's best of 30 trials against a grid search over the same space, on both proxy tasks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench import report
from commlayer.balance import tuner
from commlayer.balance.tuner import Engine, Search, SearchSpace, Settings, Store, TuningTrial, default_space
from commlayer.demo import tuning_tasks

TASKS = {"digits": tuning_tasks.digits, "chars": tuning_tasks.chars}
TRIALS, SEEDS = 30, 3
BUDGET = 0.02
RATIOS, RATIOS_QUICK = 16, 6
"""Ratios in the grid, evenly spaced in logarithm."""


def run(quick: bool) -> report.Result:
    """One row per task and seed."""
    torch.set_num_threads(1)
    rows = [row for name in TASKS for row in tune_vs_grid(name, RATIOS_QUICK if quick else RATIOS, 1 if quick else SEEDS)]
    worst = max(row["behind_pct"] for row in rows)
    return {"rows": rows, "summary": {"trials": TRIALS, "tuner_behind_grid_pct_max": worst, "tuner_within_5_pct": worst <= 5.0}}


def tune_vs_grid(task: str, ratios: int, seeds: int) -> list[dict[str, Any]]:
    """`behind_pct`: by how much the tuner's best costs more than the grid's; negative if the tuner's is better."""
    space, proxy = default_space(), TASKS[task]
    known: dict[str, TuningTrial] = {}

    def look_up(settings: Settings) -> TuningTrial:
        """Runs a trial once: proxies are deterministic, so the grid and all seeds share results."""
        key = repr(sorted(settings.items()))
        if key not in known:
            known[key] = tuner.run(proxy, settings)
        return known[key]

    points = grid(space, ratios)
    dense = look_up(tuner.first(space))
    floor = min(tuner.price(look_up(p), dense, BUDGET) for p in points)
    rows = []
    for seed in range(seeds):
        with TemporaryDirectory() as folder:
            search = Search(task, space, BUDGET, seed)
            store = Store(Path(folder) / "trials.jsonl", search)
            list(tuner.tune(proxy, store, search, Engine(space, seed), TRIALS))
            best = min(store.trials, key=lambda t: tuner.price(t, dense, BUDGET))
        price = tuner.price(best, dense, BUDGET)
        rows.append({"task": task, "seed": seed, "grid_points": len(points), "grid_s": floor,
                     "tuner_s": price, "behind_pct": 100 * (price / floor - 1), "found": str(best.settings)})
    return rows


def grid(space: SearchSpace, ratios: int) -> list[Settings]:
    """The Cartesian product of all dimensions, with `ratios` values for continuous ones. Without duplicates."""
    points: list[list[float]] = [[]]
    for d in space.dimensions:
        n = len(d.choices) or ratios
        units = [(i + 0.5) / n if d.choices else i / (n - 1) for i in range(n)]
        points = [[*p, u] for p in points for u in units]
    unique = {repr(s): s for s in map(space.at, points)}
    return list(unique.values())
