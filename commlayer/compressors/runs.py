"""Selects about k runs of neighbours with the largest scores from gradient + residual.

Works as selection.py does for entries, but selected elements stay in the residual until the codec writes its rounding errors.
Runs are few and contiguous, so a second read is cheap and nothing has to be returned.
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
"""With at most this many runs, `pick` scores all of them."""


class PickedRuns(NamedTuple):
    """Numbers of the runs, increasing, and whether all of x + residual is finite."""

    ids: torch.Tensor
    finite: bool


def room(runs: int, k: int) -> int:
    """The most runs that `pick` returns."""
    return k if runs <= EXACT_RUNS else min(runs, k + max(1, k // 10))


def scratch(runs: int, k: int) -> State:
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
    """Selects runs. The residual becomes x + residual where that is finite."""
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
