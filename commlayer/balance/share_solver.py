"""Computes shares from time models so that the slowest worker finishes as early as possible."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from commlayer.balance.time_models import TimeModel, in_pieces_s
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

    def time_s(worker: int, share: int) -> float:
        return in_pieces_s(models[worker], share, room[worker])

    workers, sizes = range(len(models)), range(total + 1)

    def within(limit_s: float) -> list[int]:
        """Returns the most samples that each worker finishes within `limit_s`, but at least the minimum."""
        return [max(minimum, bisect_right(sizes, limit_s, minimum, key=lambda share: time_s(worker, share)) - 1)
                for worker in workers]

    # Bisection to the last bit of the makespan. What is left after it ends at the same time on any worker that has room.
    low_s, high_s = 0.0, max(time_s(worker, total) for worker in workers)
    taken = [minimum] * len(models)
    while sum(taken) < total and low_s < (middle_s := low_s + (high_s - low_s) / 2) < high_s:
        counts = within(middle_s)
        if sum(counts) <= total:
            low_s, taken = middle_s, counts
        else:
            high_s = middle_s
    for worker, most in enumerate(within(high_s)):
        taken[worker] += max(0, min(most - taken[worker], total - sum(taken)))
    return Solution(tuple(taken), max(map(time_s, workers, taken)))
