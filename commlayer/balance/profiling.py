"""The profiling phase: which batches fit into a worker's memory, and how long they take.

Batches are powers of two until memory ends (LBB). Bisection then refines the limit, and headroom stays for memory that
training needs beyond a profile run (codec buffers, fragmentation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from commlayer.records import Record

Points = Sequence[tuple[int, float]]
"""(batch, seconds)."""
Run = Callable[[int], float]
"""Runs forward and backward of a batch and returns its seconds. Raises MemoryError if memory ends (the caller converts
torch's error)."""

REPEATS = 9
"""Timed runs per batch, of which the middle three count. One untimed run comes first, in which kernels are selected."""
HEADROOM = 0.1
REFINE = 1 / 16
"""Relative precision of the memory limit."""
LIMIT_S = 30.0
"""Default time limit of profiling, in seconds."""
PART_OF_TIME = 0.25
"""With a time limit, the runs of a batch take at most this part of the remaining time, since larger batches follow."""

Left = Callable[[], float]
"""Returns the seconds until profiling must end."""


def _no_limit() -> float:
    return math.inf


class WorkerProfile(Record, frozen=True):
    """A worker's measurements: points (batch, seconds) and the cap, 0 if not even the smallest batch fitted."""

    points: tuple[tuple[int, float], ...]
    cap: int
    ended: bool
    """Memory ended below the total batch; otherwise the cap is the total."""


def ladder(total: int) -> list[int]:
    """The batches of a profile.

    >>> ladder(20)
    [2, 4, 8, 16, 20]
    """
    return [2**p for p in range(1, total.bit_length()) if 2**p < total] + [total]


def profile(
    run: Run, total: int, *, repeats: int = REPEATS, headroom: float = HEADROOM, left_s: Left = _no_limit
) -> WorkerProfile:
    """Profiles batches 2, 4, 8, ... up to `total`. If time ends before memory does, the memory limit stays unknown."""
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
    """The mean of the middle third, or None if memory ends."""
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
    """The largest batch that runs, between one that does (or 0) and one that does not."""
    while fails - fits > max(1, int(REFINE * fails)) and left_s() > 0:
        middle = (fits + fails) // 2
        try:
            run(middle)
            fits = middle
        except MemoryError:
            fails = middle
    return fits
