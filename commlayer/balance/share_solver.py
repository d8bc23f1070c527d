"""Computes shares from time models: which workers take part, and with how many samples.

It minimizes the iteration time: the makespan of the participating workers plus the communication that is not hidden. A worker
takes part with at least `minimum` samples or not at all.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from commlayer.balance.time_models import Accumulated, Line, ModelLike, Piecewise, TimeModel, accumulated, as_model
from commlayer.errors import InvalidInput
from commlayer.records import Record

Accumulate = Literal["never", "needed", "always"]


class Communication(NamedTuple):
    """Cost of an iteration's communication: seconds for a set of workers, and the part of the compute time that can hide
    it."""

    seconds: Callable[[tuple[int, ...]], float]
    overlap: float = 0.0
    """0: it starts after the slowest worker has computed (a blocking all-reduce). 1: all of the compute can hide it."""

    def exposed_s(self, active: tuple[int, ...], makespan: float) -> float:
        return max(0.0, self.checked_s(active) - self.overlap * makespan)

    def checked_s(self, active: tuple[int, ...]) -> float:
        """The function's result; infinite if these workers cannot communicate."""
        seconds = self.seconds(active)
        if not 0 <= seconds <= math.inf:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               f"communication of workers {', '.join(map(str, active))}: got {seconds} s, allowed are 0 or "
                               "more")
        return seconds


FREE = Communication(lambda _active: 0.0)


class Solution(Record, frozen=True):
    """Shares in the order of the models; 0 means that the worker takes no part."""

    shares: tuple[int, ...]
    micro_batches: tuple[int, ...]
    """Pieces, each within the worker's cap, in which a share is computed; more than 1 is gradient accumulation."""
    makespan_s: float
    exposed_s: float
    """Communication that the compute does not hide."""

    @property
    def iteration_s(self) -> float:
        return self.makespan_s + self.exposed_s

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(i for i, share in enumerate(self.shares) if share)


class SharesProblem:
    """Validated models and bounds, and the price of a set. Workers without room are already excluded; places count the
    others."""

    def __init__(
        self, models: list[TimeModel], workers: list[int], most: list[int], minimum: int, total: int,
        communication: Communication,
    ) -> None:
        self.models, self.workers, self.minimum, self.total = models, workers, minimum, total
        self.speeds, self._most, self._communication = Speeds(models, most), most, communication
        self._seconds: dict[tuple[int, ...], float] = {}

    def best(self, allowed: Sequence[int], kept: frozenset[int]) -> ActiveSet | None:
        if not max(1, len(kept)) * self.minimum <= self.total <= sum(self._most[place] for place in allowed):
            return None
        return self._computed(allowed, self.speeds.assign(allowed, self.total, self.minimum, kept))

    def exactly(self, places: Sequence[int]) -> ActiveSet | None:
        if not len(places) * self.minimum <= self.total <= sum(self._most[place] for place in places):
            return None
        return self._computed(places, self.speeds.assign(places, self.total, self.minimum))

    def cost_s(self, taken_in: tuple[int, ...], makespan_s: float) -> float:
        if not taken_in or self._communication is FREE:
            return makespan_s
        if taken_in not in self._seconds:
            self._seconds[taken_in] = self._communication.checked_s(tuple(self.workers[place] for place in taken_in))
        return makespan_s + max(0.0, self._seconds[taken_in] - self._communication.overlap * makespan_s)

    def shares(self, found: ActiveSet) -> list[int]:
        """Shares for all places."""
        all_shares, taken = [0] * len(self.models), found.shares
        if sum(taken) > self.total:
            taken = tuple(self.speeds.assign(found.active, self.total, self.minimum))
        for place, share in zip(found.active, taken, strict=True):
            all_shares[place] = share
        return all_shares

    def _computed(self, places: Sequence[int], taken: Sequence[int]) -> ActiveSet:
        active, shares = zip(*((place, share) for place, share in zip(places, taken, strict=True) if share), strict=True)
        return ActiveSet(max(self.speeds.times(active, shares)), active, shares)


def shares(models: Sequence[ModelLike], total: int, caps: Sequence[int | None] | None = None, *, minimum: int = 1) -> list[int]:
    """How many of `total` samples each worker gets so that the slowest finishes first; the sum is `total` exactly.

    A model is a Line, Piecewise, Cubic, a pair (slope, intercept) or a function of the batch. A cap bounds the samples that a
    worker computes at once (None: no bound). If the caps do not reach the total, shares above a cap mean micro-batches;
    solve() also uses micro-batches where they are faster.

    `minimum` is 2 for a model with BatchNorm. A worker that would only slow the others down gets 0.

    >>> shares([(0.5931, 5.90), (0.5808, 7.15), (0.6023, 8.29), (2.6714, 50.98)], 512)
    [166, 167, 159, 20]
    """
    within = sum(total if cap is None else min(cap, total) for cap in caps or [None] if cap is None or cap >= minimum)
    return list(solve(models, total, caps, minimum=minimum, accumulate="never" if within >= total else "needed").shares)


def solve(
    models: Sequence[ModelLike],
    total: int,
    caps: Sequence[int | None] | None = None,
    *,
    minimum: int = 1,
    exclude: bool = True,
    keep: Sequence[int] = (),
    accumulate: Accumulate = "needed",
    communication: Communication = FREE,
    most: Mapping[int, int] | None = None,
) -> Solution:
    """Like shares(), with the resulting times. `keep`: workers that must take part; with exclude=False, all with room.

    `accumulate`: whether a share may exceed its worker's cap, in micro-batches that each pay the launch cost. "needed": if
    that is faster or the only solution; among equally fast shares, those with fewer micro-batches. "always": fastest, with
    any number of micro-batches. `most`: upper bounds of single workers' shares.
    """
    problem, room = _problem(models, total, caps, minimum, accumulate, communication, most or {}, keep)
    kept = frozenset(p for p, worker in enumerate(problem.workers) if not exclude or worker in keep)
    choice = _cheapest_set(problem, len(problem.workers), kept, free=communication is FREE)
    taken = problem.shares(choice)
    makespan = makespan_s(problem.models, taken)
    if accumulate == "needed":
        taken = fewer_pieces(problem.speeds, taken, [room[worker] for worker in problem.workers], makespan)
    all_shares = [0] * len(models)
    for worker, share in zip(problem.workers, taken, strict=True):
        all_shares[worker] = share
    pieces = tuple(-(-share // cap) if share else 0 for share, cap in zip(all_shares, room, strict=True))
    return Solution(tuple(all_shares), pieces, makespan, problem.cost_s(choice.active, makespan) - makespan)


def _problem(
    models: Sequence[ModelLike], total: int, caps: Sequence[int | None] | None, minimum: int, accumulate: Accumulate,
    communication: Communication, bounds: Mapping[int, int], keep: Sequence[int],
) -> tuple[SharesProblem, list[int]]:
    """The problem, and each worker's room for one micro-batch."""
    if not models:
        raise InvalidInput("E-SHARES-ARGUMENT", "shares: got no model, allowed is one for each worker, at least one")
    if not total >= 1 or not minimum >= 1 or total % 1 or minimum % 1:
        raise InvalidInput("E-SHARES-ARGUMENT",
                           f"shares: got total {total} and minimum {minimum}, allowed are whole numbers from 1")
    if accumulate not in get_args(Accumulate):
        raise InvalidInput("E-SHARES-ARGUMENT",
                           f"shares: accumulate: got {accumulate!r}, allowed: {', '.join(get_args(Accumulate))}")
    if caps is not None and len(caps) != len(models):
        raise InvalidInput("E-SHARES-ARGUMENT",
                           f"shares: got {len(caps)} caps for {len(models)} models; give one for each worker, None for no "
                           "bound")
    room = [total if cap is None else min(cap, total) for cap in (caps or [None] * len(models))]
    for worker, cap in enumerate(room):
        if not cap >= 0 or cap % 1:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               f"shares: cap of worker {worker}: got {cap}, allowed is a whole number from 0 (no part), or "
                               "None")
    total, minimum, room = int(total), int(minimum), [int(cap) for cap in room]
    if not 0 <= communication.overlap <= 1:
        raise InvalidInput("E-SHARES-ARGUMENT",
                           f"shares: communication with overlap {communication.overlap}, allowed is 0 to 1, a part of "
                           "computing")
    for worker in keep:
        if not 0 <= worker < len(models):
            raise InvalidInput("E-SHARES-ARGUMENT", f"shares: keep: got worker {worker}, allowed are 0 to {len(models) - 1}")
        if room[worker] < minimum:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               f"shares: keep: worker {worker} has no room: cap {room[worker]}, minimum batch {minimum}")
    workers = [i for i, cap in enumerate(room) if cap >= minimum]
    if not workers:
        raise InvalidInput("E-SHARES-ARGUMENT",
            f"shares: no worker has room: the greatest cap is {max(room)}, the minimum batch {minimum}; "
            "free memory or lower the minimum"
        )
    if total < len(workers) * minimum:
        raise InvalidInput("E-SHARES-ARGUMENT",
            f"shares: total {total} is less than {len(workers)} workers x minimum batch {minimum}; "
            "raise the total batch, lower the minimum or leave workers out"
        )
    most = [min(bounds.get(i, total), room[i] if accumulate == "never" else total) for i in workers]
    if min(most) < minimum:
        raise InvalidInput("E-SHARES-ARGUMENT",
                           f"shares: got at most {min(most)} for worker {workers[most.index(min(most))]}, less than the "
                           f"minimum batch {minimum}; raise it, or give a cap of 0 to leave the worker out")
    if sum(most) < total:
        raise InvalidInput("E-SHARES-ARGUMENT",
            f"shares: the caps add up to {sum(most)}, less than the total {total}; "
            "lower the total or allow accumulation (micro-batches)"
        )
    time_models: list[TimeModel] = []
    for i, high in zip(workers, most, strict=True):
        model: Line | Piecewise = as_model(models[i], room[i], f"model of worker {i}")
        time_models.append(accumulated(model, room[i]) if room[i] < high else model)
    return SharesProblem(time_models, workers, most, minimum, total, communication), room


EVERY_SET = 10
"""Up to this many optional workers, all sets are priced."""
PREFIXES = 256
"""With more optional workers, this many lengths of each order in which workers are left out."""


class ActiveSet(NamedTuple):
    """Participating workers with their best shares. The shares may exceed the total by less than a minimum share."""

    makespan_s: float
    active: tuple[int, ...]
    shares: tuple[int, ...]


def _cheapest_set(problem: SharesProblem, workers: int, kept: frozenset[int], *, free: bool) -> ActiveSet:
    """The set with the shortest iteration that contains `kept`. With more than EVERY_SET optional workers a heuristic: leave
    out workers in the order of their communication cost with the fastest worker, or the slowest workers first."""
    everyone = range(workers)
    result = problem.best(everyone, kept)
    assert result is not None  # the caller has checked that all workers together can process the total
    result_s = problem.cost_s(result.active, result.makespan_s)
    if free or result_s <= result.makespan_s:  # communication is free, or hidden behind computation
        return result
    optional = [worker for worker in everyone if worker not in kept]
    candidates: Iterator[ActiveSet | None]
    if len(optional) <= EVERY_SET:
        some = itertools.chain.from_iterable(itertools.combinations(optional, size) for size in range(len(optional) + 1))
        candidates = (problem.exactly(sorted(kept.union(added))) for added in some if kept or added)
    else:
        able = problem.speeds.able(result_s)
        fastest = max(kept or optional, key=lambda worker: able[worker])
        price = [problem.cost_s(tuple(sorted({fastest, worker})), 0.0) for worker in everyone]
        by_price = sorted(optional, key=lambda worker: (-price[worker], able[worker]))
        by_speed = sorted(optional, key=lambda worker: able[worker])
        step = -(-len(optional) // PREFIXES)
        allowed = (set(everyone).difference(order[:length]) for order in (by_price, by_speed)
                   for length in range(step, len(optional), step))
        candidates = (problem.best(sorted(some), kept) for some in allowed)
    for candidate in candidates:
        if candidate is not None:
            candidate_s = problem.cost_s(candidate.active, candidate.makespan_s)
            if candidate_s < result_s * (1 - 1e-12):  # ignore gains within rounding error
                result, result_s = candidate, candidate_s
    return result


LONGEST_S = sys.float_info.max
FEW = 24
"""With fewer workers, plain Python is faster than numpy."""


class Speeds:
    """All workers' models, vectorized where possible. `most`: upper bound of each worker's share."""

    def __init__(self, models: Sequence[TimeModel], most: Sequence[int]) -> None:
        self.models, self.most = models, most
        self._table = _table(models, most) if len(models) >= FEW else None
        self._longest_s = self.times(range(len(models)), most)

    def assign(self, places: Sequence[int], total: int, minimum: int, kept: Collection[int] | None = None) -> list[int]:
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
