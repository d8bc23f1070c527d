"""Convergence factors of sync modes and codecs, from hundreds of small trainings without a network.

`python -m bench learning` runs the campaign and prints the factors. Ctrl-C stops it; the next run resumes.
`python -m bench.learning.table` writes the table that ships with the package, and its page in the docs.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable
from statistics import fmean, median
from typing import Any

import torch
from msgspec import structs

from bench import report
from bench.learning import campaign, factors
from bench.learning.store import Run, Store
from bench.learning.training import train
from bench.virtual_training import Variant

STORE = report.DATA / "learning_runs.jsonl"
MARKED_STEPS = 24


def run(quick: bool) -> report.Result:
    """Runs the missing trainings. A row per configuration, with factors of the median task and cautious ones."""
    torch.set_num_threads(1)
    store = Store(STORE)
    try:
        measure(campaign.quick() if quick else campaign.campaign(), store)
    except KeyboardInterrupt:
        print("bench: stopped; what is measured stays, and the same command goes on from there", file=sys.stderr)
    return result_of(store)


def measure(variants: Iterable[Variant], store: Store) -> None:
    """Runs the trainings that the store lacks."""
    for variant in variants:
        if not store.has(variant, mark(variant)):
            store.add(variant, Run(mark(variant), tuple(train(variant))))


def mark(variant: Variant) -> str:
    """Hash of a few steps of this configuration and of its task. It changes when the code's results change."""
    short = structs.replace(variant, task="mlp", workers=2, seed=0, rate=0.0)
    text = f"{_outcome(short)} {_outcome(Variant(variant.task, variant.optimizer, workers=2, rate=variant.rate))}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@functools.cache
def _outcome(variant: Variant) -> str:
    """Losses after a few steps, rounded to digits that are equal on all processors."""
    return " ".join(f"{loss:.5g}" for loss in train(variant, steps=max(MARKED_STEPS, 2 * variant.every), looks=2))


def valid_curves(store: Store) -> dict[Variant, tuple[float, ...]]:
    """Loss curves whose mark matches the current code."""
    return {variant: one.curve for variant, one in store.runs.items() if one.mark == mark(variant)}


def result_of(store: Store) -> report.Result:
    curves = valid_curves(store)
    cost_by_variant = factors.costs(curves)
    rows = factors.shared_rows(cost_by_variant)
    held_out = factors.held_out(cost_by_variant)
    by_itself = [one.steps for _, one in factors.alone(curves)]
    summary: dict[str, Any] = {
        "tasks": len({variant.task for variant in cost_by_variant}),
        "combinations": len([row for row in rows if row.workers == 0]),
        "runs": len(curves),
        "outdated_runs": len(store.runs) - len(curves),
        "alone_steps_p50": median(by_itself) if by_itself else 0.0,
    }
    if held_out:
        summary |= {"rank_correlation_held_out": fmean(one.rank_correlation for one in held_out),
                    "factor_error_p50": median(one.error for one in held_out),
                    "rank_correlation_cautious": fmean(one.cautious_rank for one in held_out),
                    "covered_by_cautious": fmean(one.covered for one in held_out)}
    return {"rows": [structs.asdict(row) for row in rows], "summary": summary}
