"""Shares from time models: who takes part, and how many samples each. Pure; knows no measurements and no steps.

Minimised is the time of an iteration: the makespan of the workers that take part, plus what of their communication does not
hide behind it. A worker takes part with at least `minimum` samples or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from commlayer.balance.active import choose
from commlayer.balance.makespan import fill, makespan_s, reached_s
from commlayer.balance.models import Accumulated, Given, Line, Piecewise, TimeModel, as_model
from commlayer.records import Record

Accumulate = Literal["never", "needed", "always"]


class Communication(NamedTuple):
    """What an iteration's communication costs: its seconds for a set of workers, and the part of the compute that hides it."""

    seconds: Callable[[tuple[int, ...]], float]
    overlap: float = 0.0
    """0: it starts when the slowest worker has computed (a blocking all-reduce). 1: all of the compute can hide it."""

    def exposed_s(self, active: tuple[int, ...], makespan: float) -> float:
        return max(0.0, self.seconds(active) - self.overlap * makespan)


FREE = Communication(lambda _active: 0.0)


class Solution(Record, frozen=True):
    """Shares in the order of the models; 0 means that the worker takes no part."""

    shares: tuple[int, ...]
    micro_batches: tuple[int, ...]
    """In how many pieces, each within the worker's cap, a share is computed: more than 1 is gradient accumulation."""
    makespan_s: float
    exposed_s: float
    """Communication that the compute does not hide."""

    @property
    def iteration_s(self) -> float:
        return self.makespan_s + self.exposed_s

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(i for i, share in enumerate(self.shares) if share)


class Problem(NamedTuple):
    """Checked models and bounds. Workers with no room (cap below the minimum) have left already."""

    models: list[TimeModel]
    workers: list[int]
    most: list[int]
    minimum: int
    total: int

    def fixed(self, places: Sequence[int]) -> list[int] | None:
        """The best shares when exactly these places take part, or None where their bounds do not admit the total."""
        models, most = [self.models[p] for p in places], [self.most[p] for p in places]
        if not len(places) * self.minimum <= self.total <= sum(most):
            return None
        taken = fill(models, self.total, [self.minimum] * len(places), most)
        whole = [0] * len(self.models)
        for place, share in zip(places, taken, strict=True):
            whole[place] = share
        return whole


def shares(models: Sequence[Given], total: int, caps: Sequence[int | None] | None = None, *, minimum: int = 1) -> list[int]:
    """How many of `total` samples each worker takes so that the slowest finishes first; the sum is `total` exactly.

    A model is a Line, Piecewise, Cubic, a pair (slope, intercept) or a function of the batch. A cap bounds what a worker
    computes at once (None: no bound); where the caps do not reach the total, shares above them stand for micro-batches.
    `minimum` is 2 for a model with BatchNorm. A worker that would only hold the others up gets 0.

    >>> shares([(0.5931, 5.90), (0.5808, 7.15), (0.6023, 8.29), (2.6714, 50.98)], 512)
    [166, 167, 159, 20]
    """
    return list(solve(models, total, caps, minimum=minimum).shares)


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
) -> Solution:
    """As shares(), with what comes of them. `keep`: workers that must take part; with exclude=False all with room."""
    problem, room = _problem(models, total, caps, minimum, accumulate)
    kept = range(len(problem.workers)) if not exclude else [p for p, worker in enumerate(problem.workers) if worker in keep]

    def price(places: Sequence[int], makespan: float) -> float:
        return makespan + communication.exposed_s(tuple(problem.workers[p] for p in places), makespan)

    if len(kept) == len(problem.workers):
        taken = problem.fixed(kept)
    else:

        def reached() -> float:
            return reached_s(problem.models, total, minimum, problem.most)

        taken = choose(problem.models, minimum, kept, problem.fixed, price, reached, free=communication is FREE)
    assert taken is not None, "bounds were checked"
    whole = [0] * len(models)
    for worker, share in zip(problem.workers, taken, strict=True):
        whole[worker] = share
    makespan = makespan_s(problem.models, taken)
    active = tuple(i for i, share in enumerate(whole) if share)
    pieces = tuple(-(-share // cap) if share else 0 for share, cap in zip(whole, room, strict=True))
    return Solution(tuple(whole), pieces, makespan, communication.exposed_s(active, makespan))


def _problem(
    models: Sequence[Given], total: int, caps: Sequence[int | None] | None, minimum: int, accumulate: Accumulate
) -> tuple[Problem, list[int]]:
    """The problem, and each worker's room for one micro-batch."""
    if not models:
        raise ValueError("shares: got no model, allowed is one for each worker, at least one")
    if total < 1 or minimum < 1:
        raise ValueError(f"shares: got total {total} and minimum {minimum}, allowed are whole numbers from 1")
    if caps is not None and len(caps) != len(models):
        raise ValueError(f"shares: got {len(caps)} caps for {len(models)} models; give one for each worker, None for no bound")
    room = [total if cap is None else min(cap, total) for cap in (caps or [None] * len(models))]
    if min(room) < 0:
        raise ValueError(f"shares: cap of worker {room.index(min(room))}: got {min(room)}, allowed is 0 (no part) or more")
    workers = [i for i, cap in enumerate(room) if cap >= minimum]
    if not workers:
        raise ValueError(
            f"shares: no worker has room: the greatest cap is {max(room)}, the minimum batch {minimum}; "
            "free memory or lower the minimum"
        )
    if total < len(workers) * minimum:
        raise ValueError(
            f"shares: total {total} is less than {len(workers)} workers x minimum batch {minimum}; "
            "raise the total batch, lower the minimum or leave workers out"
        )
    within = sum(room[i] for i in workers)
    if within < total and accumulate == "never":
        raise ValueError(
            f"shares: the caps add up to {within}, less than the total {total}; "
            "lower the total or allow accumulation (micro-batches)"
        )
    split = accumulate == "always" or within < total
    made: list[TimeModel] = []
    for i in workers:
        model: Line | Piecewise = as_model(models[i], room[i], f"model of worker {i}")
        made.append(Accumulated(model, room[i]) if split and room[i] < total else model)
    most = [total if split else room[i] for i in workers]
    return Problem(made, workers, most, minimum, total), room
