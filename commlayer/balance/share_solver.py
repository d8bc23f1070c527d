"""Computes shares from time models so that the slowest worker finishes as early as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from commlayer.balance.time_models import TimeCurves, TimeModel
from commlayer.errors import InvalidInput
from commlayer.records import Record


class Communication(NamedTuple):
    """Communication of one step: seconds, and the fraction of the compute time that hides communication. Overlap 0:
    communication starts after the slowest worker has computed (a blocking all-reduce)."""

    seconds: float = 0.0
    overlap: float = 0.0

    def exposed_s(self, makespan_s: float) -> float:
        return max(0.0, self.seconds - self.overlap * makespan_s)


FREE = Communication()


class Solution(Record, frozen=True):
    """Shares of the workers, in the order of their time models."""

    shares: tuple[int, ...]
    makespan_s: float


def shares(models: Sequence[TimeModel], total: int, caps: Sequence[int | None] = (), *, minimum: int = 1) -> list[int]:
    """Returns how many of `total` samples each worker gets so that the slowest worker finishes first; the sum is exactly
    `total`.

    >>> from commlayer.balance import LinearTime
    >>> shares([LinearTime(0.5931, 5.90), LinearTime(0.5808, 7.15), LinearTime(0.6023, 8.29), LinearTime(2.6714, 50.98)], 512)
    [166, 167, 159, 20]
    """
    return list(solve(models, total, caps, minimum=minimum).shares)


def solve(models: Sequence[TimeModel], total: int, caps: Sequence[int | None] = (), *, minimum: int = 1) -> Solution:
    """Returns the same shares as shares(), with the resulting times."""
    room = [min(cap or total, total) for cap in caps or [None] * len(models)]
    if not models or len(room) != len(models) or minimum < 1 or total < len(models) * minimum or min(room) < minimum:
        raise InvalidInput("E-SHARES-ARGUMENT",
                           f"shares: got total {total} for {len(models)} workers with caps {list(caps)} and minimum {minimum}, "
                           "allowed are one cap of at least the minimum for each worker, and a total of at least the minimum "
                           "for each; raise the total or leave workers out")
    curves = TimeCurves(models, room)

    def within(limit_s: float, low: np.ndarray, high: np.ndarray, *, exactly: bool) -> tuple[np.ndarray, np.ndarray]:
        """Narrows the bounds of how many samples each worker finishes within `limit_s`, by bisection of all workers at once.
        Unless `exactly`, it stops as soon as they say whether that is less or more than `total`."""
        while (low < high).any() and (exactly or low.sum() <= total <= high.sum()):
            middle = (low + high + 1) // 2
            fits = curves.times_s(middle) <= limit_s
            low, high = np.where(fits, middle, low), np.where(fits, high, np.maximum(low, middle - 1))
        return low, high

    # Bisection to the last bit of the makespan. The remaining samples go to any worker with room, because they end at the same
    # time on each of them.
    least, most = np.full(len(models), minimum), np.full(len(models), total)
    low_s, high_s = 0.0, curves.times_s(most).max()
    while least.sum() < total and low_s < (middle_s := low_s + (high_s - low_s) / 2) < high_s:
        low, high = within(middle_s, least, most, exactly=False)
        if low.sum() <= total:
            low_s, least = middle_s, low
        else:
            high_s, most = middle_s, high
    least, _ = within(low_s, least, most, exactly=True)
    _, most = within(high_s, least, most, exactly=True)
    taken = least + np.diff(np.minimum(np.cumsum(most - least), total - least.sum()), prepend=0)
    return Solution(tuple(taken.tolist()), float(curves.times_s(taken).max()))
