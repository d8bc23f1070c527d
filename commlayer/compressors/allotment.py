"""Shares the entries of a plan among its buckets (global budget), as if one threshold selected from all of them.

The largest entries of all buckets together are those above one threshold. The last payload of each bucket estimates how many
of its entries lie above a nearby threshold: its count times (its least magnitude / threshold) to the power of its slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = "npt.NDArray[np.float64]"

MOST_CHANGE = 2.0
"""The largest factor by which a bucket's entries change in one step: the estimate holds only near the last threshold."""

HALVINGS = 30
"""Bisection steps over the range of thresholds."""


ROUNDING = 1e-6
"""Rounding error of a count that passes through a logarithm and back."""


class Tail(NamedTuple):
    """Magnitudes in one payload: entries sent, the least magnitude, and the exponent of the tail."""

    sent: float
    least: float
    slope: float


NONE = Tail(1e-9, 1.0, 1.0)
"""The tail of a bucket that sent nothing, since 0 has no logarithm."""


class Ask(NamedTuple):
    """One bucket: its entries now, and the fewest, the unshared and the most entries for its next payload."""

    now: int
    fewest: int
    plain: int
    most: int
    tail: Tail | None
    """None if unknown: the bucket keeps its part. A bucket that sent nothing, since all was zero, gets the fewest."""


def allot(asks: Sequence[Ask]) -> list[int]:
    """Entries for each bucket; their total equals the total of the unshared ones. Deterministic.

    >>> calm, wild = Tail(100, 0.1, 3.0), Tail(100, 10.0, 3.0)
    >>> allot([Ask(100, 12, 100, 800, calm), Ask(100, 12, 100, 800, wild)])
    [50, 150]
    """
    total, now = sum(ask.plain for ask in asks), sum(ask.now for ask in asks)
    if not now:
        return [ask.plain for ask in asks]
    kept = np.array([ask.now * total / now for ask in asks])
    tails = [ask.tail if ask.tail is not None and ask.tail.sent else NONE for ask in asks]
    sent, least, slope = np.array(tails, dtype=float).T
    level, base = np.log(least), np.log(sent)
    change = np.array([1.0 if ask.tail is None else MOST_CHANGE for ask in asks])
    fewest, most = np.array([(ask.fewest, ask.most) for ask in asks], dtype=float).T
    low, high = (np.log(np.minimum(np.maximum(limit, fewest), most)) for limit in (kept / change, kept * change))
    # The lowest and the highest threshold at which some bucket reaches a limit.
    below, above = float((level + (base - high) / slope).min()), float((level + (base - low) / slope).max())
    for _ in range(HALVINGS):
        middle = (below + above) / 2
        reached = np.exp(np.minimum(np.maximum(base + slope * (level - middle), low), high)).sum()
        below, above = (middle, above) if reached > total else (below, middle)
    wanted = np.exp(np.minimum(np.maximum(base + slope * (level - above), low), high))
    return _whole(wanted, asks, total)


def _whole(wanted: Floats, asks: Sequence[Ask], total: int) -> list[int]:
    """Rounds and keeps the total: the rest goes to the largest remainders first, then to buckets below their limit."""
    counts = np.floor(wanted + ROUNDING).astype(int)
    order = np.argsort(counts - wanted, kind="stable")
    fewest, most = np.array([ask.fewest for ask in asks]), np.array([ask.most for ask in asks])
    while rest := total - int(counts.sum()):
        room = most - counts if rest > 0 else counts - fewest
        takers = [i for i in order if room[i] > 0][: abs(rest)]
        if not takers:
            break  # every bucket is at its limit
        each = np.minimum(room[takers], max(1, abs(rest) // len(takers)))
        counts[takers] += each if rest > 0 else -each
    return [int(count) for count in counts]
