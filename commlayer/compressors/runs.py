"""Picks about k runs of neighbours of largest score out of gradient + residual. Knows thresholds and memory; no payloads.

As selection.py does with entries, but what is picked stays in the residual until the codec says what it keeps of it: runs are
few and contiguous, so that looking at them again is cheap and nothing has to be given back.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from commlayer.compressors import kernels, tracked_threshold
from commlayer.compressors.codec import State
from commlayer.compressors.selection import ENOUGH, SPARE

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

EXACT_RUNS = 1024
"""Up to here all scores are looked at."""


class PickedRuns(NamedTuple):
    """Numbers of the runs, increasing, and whether all of x + residual is finite."""

    ids: torch.Tensor
    finite: bool


def room(runs: int, k: int) -> int:
    """Most runs that `pick` hands on."""
    return k if runs <= EXACT_RUNS else min(runs, k + max(1, k // 10))


def scratch(runs: int, k: int) -> State:
    """Memory of a step."""
    few = runs <= EXACT_RUNS
    candidates = k if few else min(runs, k + k // 2 + SPARE)
    sample = runs if few else tracked_threshold.sample_room(runs, k)
    return {
        "ids": torch.empty(candidates, dtype=torch.int32),
        "scores": torch.empty(candidates),
        "sample": torch.empty(sample),
        "words": torch.empty(max(sample, candidates), dtype=torch.int32),
    }


def pick(k: int, run: int, x: torch.Tensor, residual: torch.Tensor | None, state: State) -> PickedRuns:
    """The residual becomes x + residual where that is finite."""
    runs, memory = -(-x.numel() // run), state["_scratch"]
    ids, scores = memory["ids"], memory["scores"]
    start = tracked_threshold.rotation(runs, state)
    draw = partial(kernels.score_runs, x, residual, run)
    if runs <= EXACT_RUNS:
        draw(0, memory["sample"])
        cut = tracked_threshold.exact(k, memory["sample"], None, memory["words"]) if runs else tracked_threshold.TINY
        count, _, finite = kernels.select_runs(x, residual, run, cut, start, ids, scores)
        state["step"] += finite
        return PickedRuns(ids[:count], finite)
    tracked = tracked_threshold.begin(k, runs, draw, state)
    count, overflow, finite = kernels.select_runs(x, residual, run, tracked.threshold, start, ids, scores)
    if not finite:
        return PickedRuns(ids[:0], False)
    if count < ENOUGH * k and tracked.threshold > tracked_threshold.TINY:
        v = x if residual is None else residual
        tracked = tracked_threshold.again(k, runs, partial(kernels.score_runs, v, None, run), state, tracked, count)
        count, overflow, _ = kernels.select_runs(v, None, run, tracked.threshold, start, ids, scores)
    tracked_threshold.end(k, runs, count + overflow, tracked, state)
    if count > room(runs, k):
        count = kernels.trim(None, runs, ids, scores, count, k, start, memory["words"])
    return PickedRuns(ids[:count], True)
