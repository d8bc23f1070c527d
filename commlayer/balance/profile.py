"""The profiling phase: which batches fit into a worker's memory, and how long they take.

Batches are powers of two until memory runs out, as in LBB. Bisection then refines the limit. Headroom is left for memory that
training needs beyond a profile run (codec buffers, fragmentation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from commlayer.balance.assignment import micro_batch_sizes
from commlayer.balance.balancer import Decision, Note, straggler_effect
from commlayer.balance.share_solver import solve
from commlayer.balance.time_models import (
    LinearTime,
    Points,
    TimeModel,
    checked_time,
    fit_line,
    fit_piecewise,
    times_of_shares,
)
from commlayer.errors import InvalidInput
from commlayer.records import Record

Run = Callable[[int], float]
"""Function that runs forward and backward of a batch and returns the seconds. The function raises MemoryError if memory runs
out (the caller converts torch's error)."""

REPEATS = 9
"""Timed runs per batch; the mean of the middle three is the batch's time. An untimed run comes first, because kernels are
selected in it."""
HEADROOM = 0.1
REFINE = 1 / 16
"""Bisection ends when the memory limit is known within this fraction."""
LIMIT_S = 30.0
"""Default time limit of profiling, in seconds."""
PART_OF_TIME = 0.25
"""With a time limit, the runs of a batch take at most this part of the remaining time, since larger batches follow."""

Left = Callable[[], float]
"""Function that returns the seconds until profiling must end."""


def unlimited() -> float:
    return math.inf


class WorkerProfile(Record, frozen=True):
    """One worker's profile: measured points (batch, seconds), and the cap: the largest batch that fits into memory, 0 if none
    did."""

    points: tuple[tuple[int, float], ...]
    cap: int
    ended: bool
    """True: memory ran out below the total batch. False: the cap is the total batch."""


def ladder(total: int) -> list[int]:
    """Returns the batches that a profile measures: powers of two, then the total.

    >>> ladder(20)
    [2, 4, 8, 16, 20]
    """
    return [2**p for p in range(1, total.bit_length()) if 2**p < total] + [total]


def profile(
    run: Run, total: int, *, repeats: int = REPEATS, headroom: float = HEADROOM, left_s: Left = unlimited
) -> WorkerProfile:
    """Measures batches of 2, 4, 8, ... samples, up to `total`. If the time limit is reached before memory runs out, the memory
    limit stays unknown."""
    points: list[tuple[int, float]] = []
    fits = 0
    for batch in ladder(total):
        if points and 2 * points[-1][1] > left_s():
            break
        time_s = _timed(run, batch, repeats, left_s)
        if time_s is None:
            return WorkerProfile(tuple(points), int(_memory_end(run, fits, batch, left_s) * (1 - headroom)), True)
        points.append((batch, time_s))
        fits = batch
    return WorkerProfile(tuple(points), total, False)


def _timed(run: Run, batch: int, repeats: int, left_s: Left) -> float | None:
    """Returns the mean of the middle third of the batch's times; None if memory runs out."""
    until_s = left_s() * (1 - PART_OF_TIME)
    try:
        run(batch)
        times = [run(batch)]
        while len(times) < repeats and left_s() >= until_s:
            times.append(run(batch))
    except MemoryError:
        return None
    times.sort()
    out = len(times) // 3
    middle = times[out : len(times) - out]
    return sum(middle) / len(middle)


def _memory_end(run: Run, fits: int, fails: int, left_s: Left) -> int:
    """Returns the largest batch that runs, by bisection. `fits`: a batch that runs (or 0); `fails`: one that does not."""
    while fails - fits > max(1, int(REFINE * fails)) and left_s() > 0:
        middle = (fits + fails) // 2
        try:
            run(middle)
            fits = middle
        except MemoryError:
            fails = middle
    return fits


class InitialShares(Record, frozen=True):
    """The first decision after profiling. `lines`: linear time models near these shares, with which the balancer continues."""

    decision: Decision
    lines: tuple[LinearTime, ...]
    notes: tuple[Note, ...] = ()
    """A note for each measured time that was invalid and was therefore dropped."""


def initial_shares(
    profiles: Sequence[WorkerProfile], total: int, before: Mapping[int, int], *, step: int, minimum: int = 1,
) -> InitialShares:
    """Computes shares from `step` on, which replace `before`. Raises ValueError if a worker's memory is too small for any
    share."""
    needed = 2 * minimum - 1  # a share above the cap is split into micro-batches of at least the minimum
    for worker, profile in enumerate(profiles):
        if profile.ended and profile.cap < needed:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               f"worker {worker}: its memory holds {profile.cap} samples (with headroom), but needs at least "
                               f"{needed}: free memory, take a smaller model, or start without it")
    invalid: list[Note] = []
    points = [_valid_points(worker, profile.points, step, invalid) for worker, profile in enumerate(profiles)]
    models: list[TimeModel] = [fit_piecewise(one) if len(one) > 1 else _local_line(one, 1) for one in points]
    caps = [profile.cap if profile.ended else None for profile in profiles]
    shares = solve(models, total, caps, minimum=minimum).shares
    room = [cap or total for cap in caps]
    before_s = times_of_shares(models, [before.get(worker, 0) for worker in range(len(profiles))], room)
    decision = Decision(step, step, shares, "the profile", max(before_s, default=math.inf),
                        max(times_of_shares(models, shares, room)), straggler_effect(before_s))
    at = [max(micro_batch_sizes(share, cap), default=1) for share, cap in zip(shares, room, strict=True)]
    lines = tuple(_local_line(measured, batch) for measured, batch in zip(points, at, strict=True))
    return InitialShares(decision, lines, tuple(invalid))


def _valid_points(worker: int, points: Points, step: int, invalid: list[Note]) -> Points:
    sound = []
    for batch, time_s in points:
        try:
            sound.append((batch, checked_time(worker, time_s)))
        except ValueError as error:
            invalid.append(Note(step, f"in the profile, {error}"))
    return sound


def _local_line(points: Points, batch: int) -> LinearTime:
    """Returns the line through the points on both sides of a batch. A worker without points is assumed to be slow, so its
    first share is small."""
    if len(points) < 2:
        size, time_s = points[0] if points else (1, 1.0)
        return LinearTime(time_s / size)
    low, high = next(((a, b) for a, b in pairwise(points) if batch <= b[0]), points[-2:])
    slope_s = (high[1] - low[1]) / (high[0] - low[0])
    now_s = low[1] + slope_s * (batch - low[0])
    if slope_s < 0 or now_s <= 0:
        return fit_line((low, high))
    # The local line of a convex curve may be below zero at small batches. In this case, use the line through zero that is exact
    # at this batch.
    return LinearTime(slope_s, now_s - slope_s * batch) if now_s >= slope_s * batch else LinearTime(now_s / batch)
