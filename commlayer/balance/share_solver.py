"""Computes shares from time models: which workers take part, and with how many samples.

It minimizes the iteration time: the makespan of the participating workers plus the communication that is not hidden. A worker
takes part with at least `minimum` samples or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from commlayer.balance.active import Computed, choose
from commlayer.balance.makespan import Speeds, fewer_pieces, makespan_s
from commlayer.balance.models import Given, Line, Piecewise, TimeModel, accumulated, as_model
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

    def best(self, allowed: Sequence[int], kept: frozenset[int]) -> Computed | None:
        if not max(1, len(kept)) * self.minimum <= self.total <= sum(self._most[place] for place in allowed):
            return None
        return self._computed(allowed, self.speeds.hand_out(allowed, self.total, self.minimum, kept))

    def exactly(self, places: Sequence[int]) -> Computed | None:
        if not len(places) * self.minimum <= self.total <= sum(self._most[place] for place in places):
            return None
        return self._computed(places, self.speeds.hand_out(places, self.total, self.minimum))

    def cost_s(self, taken_in: tuple[int, ...], makespan_s: float) -> float:
        if not taken_in or self._communication is FREE:
            return makespan_s
        if taken_in not in self._seconds:
            self._seconds[taken_in] = self._communication.checked_s(tuple(self.workers[place] for place in taken_in))
        return makespan_s + max(0.0, self._seconds[taken_in] - self._communication.overlap * makespan_s)

    def able(self, time_s: float) -> list[int]:
        return self.speeds.able(time_s)

    def shares(self, found: Computed) -> list[int]:
        """Shares for all places."""
        whole, taken = [0] * len(self.models), found.shares
        if sum(taken) > self.total:
            taken = tuple(self.speeds.hand_out(found.active, self.total, self.minimum))
        for place, share in zip(found.active, taken, strict=True):
            whole[place] = share
        return whole

    def _computed(self, places: Sequence[int], taken: Sequence[int]) -> Computed:
        active, shares = zip(*((place, share) for place, share in zip(places, taken, strict=True) if share), strict=True)
        return Computed(max(self.speeds.times(active, shares)), active, shares)


def shares(models: Sequence[Given], total: int, caps: Sequence[int | None] | None = None, *, minimum: int = 1) -> list[int]:
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
    models: Sequence[Given],
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
    choice = choose(problem, len(problem.workers), kept, free=communication is FREE)
    taken = problem.shares(choice)
    makespan = makespan_s(problem.models, taken)
    if accumulate == "needed":
        taken = fewer_pieces(problem.speeds, taken, [room[worker] for worker in problem.workers], makespan)
    whole = [0] * len(models)
    for worker, share in zip(problem.workers, taken, strict=True):
        whole[worker] = share
    pieces = tuple(-(-share // cap) if share else 0 for share, cap in zip(whole, room, strict=True))
    return Solution(tuple(whole), pieces, makespan, problem.cost_s(choice.active, makespan) - makespan)


def _problem(
    models: Sequence[Given], total: int, caps: Sequence[int | None] | None, minimum: int, accumulate: Accumulate,
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
