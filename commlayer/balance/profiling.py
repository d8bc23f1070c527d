"""The profiling phase: which batches fit into a worker's memory and how long they take. Knows how to ask for a run.

Batches are powers of two until memory ends (LBB); the end is then refined by bisection, and headroom stays for what training
needs beyond a profile run (buffers of codecs, fragmentation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from commlayer.records import Record

Points = Sequence[tuple[int, float]]
"""(batch, seconds)."""
Run = Callable[[int], float]
"""Forward and backward of a batch: its seconds. Raises MemoryError where memory ends (torch's OOM is turned into it)."""

REPEATS = 9
"""Timed runs of a batch, of which the middle three count. One more comes first, untimed: it picks kernels."""
HEADROOM = 0.1
REFINE = 1 / 16
"""Memory's end is looked for to this part of it."""
LIMIT_S = 30.0
"""What profiling takes of a job's time, unless it is told otherwise."""
PART_OF_TIME = 0.25
"""Where time is limited, a batch's runs take this part of what is left: larger ones are to come."""

Left = Callable[[], float]
"""Seconds until profiling is to end."""


def _no_limit() -> float:
    return math.inf


class WorkerProfile(Record, frozen=True):
    """What a worker measured: points (batch, seconds) and the cap, 0 if not even the smallest batch fitted."""

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
    """Profiles batches 2, 4, 8, ... up to `total`; where time ends before memory does, nothing is known of memory's end."""
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
    """The mean of the middle third, or None where memory ends."""
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
