"""The smallest makespan for a fixed set of workers, in whole samples. Knows models and bounds, not who is worth having.

Bisection on the makespan brackets the answer to a few samples; these go, one by one, to whoever finishes them first. For
rising models that greedy end is exact: the samples that it hands out are the next ones in order of their finishing time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from commlayer.balance.models import Line, TimeModel

FEW = 24
"""Below this many workers plain Python is faster than numpy's calls."""

Counts = Callable[[float], tuple[list[int], int]]
"""The samples that each worker finishes in a time, within its bounds, and their sum."""


def fill(models: Sequence[TimeModel], total: int, least: Sequence[int], most: Sequence[int]) -> list[int]:
    """Shares that sum to `total` with least <= share <= most and the smallest greatest time.

    The caller has seen to it that sum(least) <= total <= sum(most).
    """
    counts = _counts(models, least, most)
    low_s, high_s = 0.0, max(model.time_s(m) for model, m in zip(models, most, strict=True))
    taken, given = counts(low_s)
    above = sum(most)
    while above - given > len(models) // 2 + 1:
        middle_s = (low_s + high_s) / 2
        if not low_s < middle_s < high_s:
            break
        here, here_sum = counts(middle_s)
        if here_sum <= total:
            low_s, taken, given = middle_s, here, here_sum
        else:
            high_s, above = middle_s, here_sum
    nexts = [(models[i].time_s(taken[i] + 1), i) for i in range(len(models)) if taken[i] < most[i]]
    heapq.heapify(nexts)
    for _ in range(total - given):
        _, i = nexts[0]
        taken[i] += 1
        if taken[i] < most[i]:
            heapq.heapreplace(nexts, (models[i].time_s(taken[i] + 1), i))
        else:
            heapq.heappop(nexts)
    return taken


def reached_s(models: Sequence[TimeModel], total: int, minimum: int, most: Sequence[int]) -> float:
    """About the time in which those workers that can do `minimum` samples in it do `total` together."""
    counts = _counts(models, [0] * len(models), most)
    low_s, high_s = 0.0, max(model.time_s(m) for model, m in zip(models, most, strict=True))
    while high_s - low_s > 1e-4 * high_s:
        middle_s = (low_s + high_s) / 2
        if sum(count for count in counts(middle_s)[0] if count >= minimum) < total:
            low_s = middle_s
        else:
            high_s = middle_s
    return high_s


def makespan_s(models: Sequence[TimeModel], shares: Sequence[int]) -> float:
    """The time of the slowest of those who have a share: one without takes no part, so its launch cost does not count."""
    return max((model.time_s(share) for model, share in zip(models, shares, strict=True) if share), default=0.0)


def _counts(models: Sequence[TimeModel], least: Sequence[int], most: Sequence[int]) -> Counts:
    if len(models) >= FEW and all(isinstance(model, Line) for model in models):
        return _line_counts([model for model in models if isinstance(model, Line)], least, most)
    bounds = list(zip([model.within for model in models], least, most, strict=True))

    def counts(time_s: float) -> tuple[list[int], int]:
        taken = [max(int(min(within(time_s), high)), low) for within, low, high in bounds]
        return taken, sum(taken)

    return counts


def _line_counts(lines: Sequence[Line], least: Sequence[int], most: Sequence[int]) -> Counts:
    intercepts = np.array([line.intercept_s for line in lines])
    slopes = np.array([line.slope_s for line in lines])
    # A flat line finishes everything as soon as it has started.
    per_s = np.divide(1.0, slopes, out=np.full(len(lines), np.finfo(float).max / 1e9), where=slopes > 0)
    low, high = np.array(least, float), np.array(most, float)

    def counts(time_s: float) -> tuple[list[int], int]:
        with np.errstate(over="ignore"):
            taken = np.clip(np.floor((time_s - intercepts) * per_s), low, high).astype(np.int64)
        return taken.tolist(), int(taken.sum())

    return counts
