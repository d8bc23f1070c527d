"""Shares with the smallest makespan, in whole samples.

Bisection on the makespan brackets the answer to a few samples. The rest go one by one to the worker that finishes them first.
For monotonic models this greedy end is exact.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Collection, Sequence

import numpy as np

from commlayer.balance.models import Accumulated, Line, TimeModel

LONGEST_S = sys.float_info.max
FEW = 24
"""With fewer workers, plain Python is faster than numpy."""


class Speeds:
    """All workers' models, vectorized where possible. `most`: upper bound of each worker's share."""

    def __init__(self, models: Sequence[TimeModel], most: Sequence[int]) -> None:
        self.models, self.most = models, most
        self._table = _table(models, most) if len(models) >= FEW else None
        self._longest_s = self.times(range(len(models)), most)

    def hand_out(self, places: Sequence[int], total: int, minimum: int, kept: Collection[int] | None = None) -> list[int]:
        """Shares of these workers, in their order, with the smallest makespan. kept=None: all of them take part.

        A worker that is not kept gets 0 or at least `minimum`. With a minimum above 1 the sum may then exceed the total by
        less than the minimum: the shares are what these workers finish in the smallest time that reaches the total.

        The caller has checked that the bounds admit the total.
        """
        most = [self.most[place] for place in places]
        counts = self._counts(places, minimum, [minimum if kept is None or place in kept else 0 for place in places])
        low_s, high_s = 0.0, min(max(self._longest_s[place] for place in places), LONGEST_S)
        taken, given = counts(low_s)
        above = sum(most)
        while above - given > len(places) // 2 + 1:
            middle_s = low_s + (high_s - low_s) / 2
            if not low_s < middle_s < high_s:
                # All remaining samples end at the same time, for example where time does not depend on the share: fill
                # workers in order.
                for i, able in enumerate(counts(high_s)[0]):
                    if given < total and able > taken[i]:
                        more = min(able - taken[i], total - given if taken[i] else max(total - given, minimum))
                        taken[i], given = taken[i] + more, given + more
                break
            middle, middle_sum = counts(middle_s)
            if middle_sum <= total:
                low_s, taken, given = middle_s, middle, middle_sum
            else:
                high_s, above = middle_s, middle_sum
        # The next larger share of each worker: one more sample, or the minimum at once.
        larger = [min(share + 1 if share else minimum, high) for share, high in zip(taken, most, strict=True)]
        nexts = [(time_s, i) for i, time_s in enumerate(self.times(places, larger)) if taken[i] < most[i]]
        heapq.heapify(nexts)
        while given < total:
            i = nexts[0][1]
            given, taken[i] = given + larger[i] - taken[i], larger[i]
            if taken[i] < most[i]:
                larger[i] += 1
                heapq.heapreplace(nexts, (self.models[places[i]].time_s(larger[i]), i))
            else:
                heapq.heappop(nexts)
        return taken

    def times(self, places: Sequence[int], shares: Sequence[int]) -> list[float]:
        """Seconds that each worker needs for its share, which is above 0."""
        if self._table is None or len(places) < FEW:
            return [self.models[place].time_s(share) for place, share in zip(places, shares, strict=True)]
        launch_s, slope_s, _, cap, full_s, _ = self._table[:, list(places)]
        full, rest = np.divmod(np.array(shares, float), cap)
        return (full * full_s + np.where(rest > 0, launch_s + slope_s * rest, 0.0)).tolist()  # type: ignore[no-any-return]

    def able(self, time_s: float) -> list[int]:
        """The most samples that each worker finishes within a time."""
        return self._counts(range(len(self.models)), 1, [0] * len(self.models))(time_s)[0]

    def _counts(self, places: Sequence[int], minimum: int, least: Sequence[int]) -> Callable[[float], tuple[list[int], int]]:
        """A function of time: samples that each worker finishes within its bounds, and their sum."""
        if self._table is not None and len(places) >= FEW:
            return _line_counts(self._table[:, list(places)], minimum, np.array(least))
        bounds = [(self.models[place].within, self.most[place], low) for place, low in zip(places, least, strict=True)]

        def counts(time_s: float) -> tuple[list[int], int]:
            taken = [done if (done := int(min(within(time_s), high))) >= minimum else low for within, high, low in bounds]
            return taken, sum(taken)

        return counts


def makespan_s(models: Sequence[TimeModel], shares: Sequence[int]) -> float:
    """The time of the slowest worker with a share. A worker without one takes no part, so its launch cost does not count."""
    return max((model.time_s(share) for model, share in zip(models, shares, strict=True) if share), default=0.0)


def fewer_pieces(speeds: Speeds, shares: Sequence[int], caps: Sequence[int], makespan: float) -> list[int]:
    """Equally fast shares with fewer micro-batches: samples above one worker's cap move to workers with time to spare."""
    taken = list(shares)
    over = [i for i, (share, cap) in enumerate(zip(taken, caps, strict=True)) if share > cap]
    if not over:
        return taken
    workers = zip(speeds.models, taken, caps, speeds.able(makespan), strict=True)
    spare = [_spare(model, share, cap, able, makespan) if share else 0 for model, share, cap, able in workers]
    left = sum(spare)
    givers = [i for i, more in enumerate(spare) if more]
    last = [((taken[i] - 1) % caps[i] + 1, i) for i in over]
    heapq.heapify(last)
    while last:
        beyond, i = heapq.heappop(last)
        if left - spare[i] < beyond:
            continue
        left, spare[i], taken[i] = left - spare[i] - beyond, 0, taken[i] - beyond
        while beyond:
            j = givers[-1]
            more = min(spare[j], beyond)
            taken[j], spare[j], beyond = taken[j] + more, spare[j] - more, beyond - more
            if not spare[j]:
                givers.pop()
        if taken[i] > caps[i]:
            heapq.heappush(last, (caps[i], i))
    return taken


def _spare(model: TimeModel, share: int, cap: int, able: int, makespan: float) -> int:
    """Samples that a worker could add within that time without another micro-batch."""
    high = min(able, -(-share // cap) * cap)
    return high - share if high > share and model.time_s(high) <= makespan else 0


def _table(models: Sequence[TimeModel], most: Sequence[int]) -> np.ndarray | None:
    """Rows: launch, seconds per sample, samples per second, cap, seconds of a full micro-batch, most samples. None if a
    model is no line."""
    columns = []
    for model, high in zip(models, most, strict=True):
        line, cap = (model.inner, model.cap) if isinstance(model, Accumulated) else (model, high)
        if not isinstance(line, Line):
            return None
        # A flat line finishes all samples as soon as it has started.
        per_s = 1 / line.slope_s if line.slope_s > 1e-300 else LONGEST_S / 1e9
        columns.append((line.intercept_s, line.slope_s, per_s, cap, min(line.time_s(cap), LONGEST_S), high))
    return np.array(columns, float).T


def _line_counts(table: np.ndarray, minimum: int, least: np.ndarray) -> Callable[[float], tuple[list[int], int]]:
    launch_s, _, per_s, cap, full_s, most = table

    def counts(time_s: float) -> tuple[list[int], int]:
        with np.errstate(over="ignore"):
            full = np.floor(time_s / full_s)
            rest = np.clip((time_s - full * full_s - launch_s) * per_s, 0, cap)
            done = np.minimum(full * cap + np.floor(rest), most)
        taken = np.where(done >= minimum, done, least).astype(np.int64)
        return taken.tolist(), int(taken.sum())

    return counts
