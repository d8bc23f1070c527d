"""The profiling phase: which batches fit into a worker's memory and how long they take. Knows how to ask for a run.

Batches are powers of two until memory ends (LBB); the end is then refined by bisection, and headroom stays for what training
needs beyond a profile run (buffers of codecs, fragmentation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from commlayer.errors import CommError
from commlayer.records import Record

Run = Callable[[int], float]
"""Forward and backward of a batch: its seconds. Raises MemoryError where memory ends (torch's OOM is turned into it)."""

REPEATS = 9
"""Timed runs of a batch, of which the middle three count. One more comes first, untimed: it picks kernels."""
HEADROOM = 0.1
REFINE = 1 / 16
"""Memory's end is looked for to this part of it."""


class Profile(Record, frozen=True):
    """What a worker measured: points (batch, seconds) and the cap, 0 if not even the smallest batch fitted."""

    points: tuple[tuple[int, float], ...]
    cap: int
    ended: bool
    """Memory ended below the total batch; otherwise the cap is the total."""


def profile(run: Run, total: int, *, repeats: int = REPEATS, headroom: float = HEADROOM) -> Profile:
    """Profiles batches 2, 4, 8, ... up to `total`."""
    points: list[tuple[int, float]] = []
    fits, batch = 0, 2
    while batch <= total:
        time_s = _timed(run, batch, repeats)
        if time_s is None:
            return Profile(tuple(points), int(_memory_end(run, fits, batch) * (1 - headroom)), True)
        points.append((batch, time_s))
        fits, batch = batch, batch * 2
    if fits < total:
        time_s = _timed(run, total, repeats)
        if time_s is None:
            return Profile(tuple(points), int(_memory_end(run, fits, total) * (1 - headroom)), True)
        points.append((total, time_s))
    return Profile(tuple(points), total, False)


def profile_all(runs: Mapping[int, Run], total: int) -> tuple[dict[int, Profile], list[str]]:
    """Each worker's profile, and one line for each that did not finish: the others go on without it."""
    found, lost = {}, []
    for worker, run in runs.items():
        try:
            found[worker] = profile(run, total)
        except CommError as error:
            lost.append(f"worker {worker}: vanished while it was profiled ({error}); it takes no part")
    return found, lost


def _timed(run: Run, batch: int, repeats: int) -> float | None:
    """The mean of the middle third, or None where memory ends."""
    try:
        run(batch)
        times = sorted(run(batch) for _ in range(repeats))
    except MemoryError:
        return None
    middle = times[repeats // 3 : repeats - repeats // 3]
    return sum(middle) / len(middle)


def _memory_end(run: Run, fits: int, fails: int) -> int:
    """The largest batch that runs, between one that does (or 0) and one that does not."""
    while fails - fits > max(1, int(REFINE * fails)):
        middle = (fits + fails) // 2
        try:
            run(middle)
            fits = middle
        except MemoryError:
            fails = middle
    return fits
