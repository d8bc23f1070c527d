"""Convergence factors of sync modes and codecs, from hundreds of small trainings without a network.

`python -m bench learning` runs the campaign and prints the factors. Ctrl-C stops it; the next run resumes.
`python -m bench.learning.table` writes the table that ships with the package, and its page in the docs.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from msgspec import structs

from bench import report
from bench.learning import campaign, factors
from bench.learning.training import train
from bench.virtual_training import Variant

STORE = report.DATA / "learning_runs.jsonl"
MARKED_STEPS = 24


def run(quick: bool) -> report.Result:
    """Runs the missing trainings. A row per configuration, with factors of the median task and cautious ones."""
    torch.set_num_threads(1)
    store = trainings(STORE)
    measure(campaign.quick() if quick else campaign.campaign(), store)
    return result_of(store)


def trainings(path: Path) -> report.Store:
    """Finished trainings by configuration: the mark and the validation losses of each, which are null once they are NaN."""
    return report.Store(path, lambda row: Variant(**row["way"]))


def measure(variants: Iterable[Variant], store: report.Store) -> None:
    """Runs the trainings that the store lacks, or that have another mark."""
    for variant in variants:
        if store.rows.get(variant, {}).get("mark") != (current := mark(variant)):
            curve = [float(f"{loss:.5g}") if math.isfinite(loss) else None for loss in train(variant)]
            store.add({"way": structs.asdict(variant), "mark": current, "curve": curve})


def mark(variant: Variant) -> str:
    """Hash of a few steps of this configuration and of its task. It changes when the code's results change."""
    short = structs.replace(variant, task="mlp", workers=2, seed=0, rate=0.0)
    text = f"{_outcome(short)} {_outcome(Variant(variant.task, variant.optimizer, workers=2, rate=variant.rate))}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@functools.cache
def _outcome(variant: Variant) -> str:
    """Losses after a few steps, rounded to digits that are equal on all processors."""
    return " ".join(f"{loss:.5g}" for loss in train(variant, steps=max(MARKED_STEPS, 2 * variant.every), looks=2))


def valid_curves(store: report.Store) -> dict[Variant, tuple[float, ...]]:
    """Loss curves whose mark matches the current code."""
    return {variant: tuple(math.nan if loss is None else loss for loss in row["curve"])
            for variant, row in store.rows.items() if row["mark"] == mark(variant)}


def result_of(store: report.Store) -> report.Result:
    curves = valid_curves(store)
    cost_by_variant = factors.costs(curves)
    rows = factors.shared_rows(cost_by_variant)
    held_out = factors.held_out(cost_by_variant)
    by_itself = [one.steps for _, one in factors.alone(curves)]
    summary: dict[str, Any] = {
        "tasks": len({variant.task for variant in cost_by_variant}),
        "combinations": len([row for row in rows if row.workers == 0]),
        "runs": len(curves),
        "outdated_runs": len(store.rows) - len(curves),
        "alone_steps_p50": median(by_itself) if by_itself else 0.0,
    }
    if held_out:
        summary |= {"rank_correlation_held_out": fmean(one.rank_correlation for one in held_out),
                    "factor_error_p50": median(one.error for one in held_out),
                    "rank_correlation_cautious": fmean(one.cautious_rank for one in held_out),
                    "covered_by_cautious": fmean(one.covered for one in held_out)}
    return {"rows": [structs.asdict(row) for row in rows], "summary": summary}
