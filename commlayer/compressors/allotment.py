"""How many entries each bucket of a plan gets, so that one threshold would cut them all. Pure: numbers in, numbers out.

The largest entries of all buckets together are those above one threshold. What each bucket sent last says how many of it lie
above any threshold near its own: as many as it sent, times (its least magnitude / threshold) to the power of its slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = "npt.NDArray[np.float64]"

MOST_CHANGE = 2.0
"""By what factor a bucket's entries change from one step to the next: its tail is known near its threshold alone."""

HALVINGS = 30
"""Of the range of thresholds."""


ROUNDING = 1e-6
"""Of entries, through a logarithm and back."""


class Tail(NamedTuple):
    """Of the magnitudes in one payload."""

    sent: float
    least: float
    slope: float


NONE = Tail(1e-9, 1.0, 1.0)
"""Of a bucket that sent nothing: 0 has no logarithm."""


class Ask(NamedTuple):
    """One bucket: what it sends now, and the fewest, the plain and the most entries that it may be asked for next."""

    now: int
    fewest: int
    plain: int
    most: int
    tail: Tail | None
    """None: nothing is known, so it keeps its part. One that sent none, since all was zero, is left the fewest."""


def allot(asks: Sequence[Ask]) -> list[int]:
    """Entries for each bucket, together as many as the plain ones are. Equal input gives equal output.

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
    # Between the lowest and the highest threshold at which some bucket comes to a limit.
    below, above = float((level + (base - high) / slope).min()), float((level + (base - low) / slope).max())
    for _ in range(HALVINGS):
        middle = (below + above) / 2
        reached = np.exp(np.minimum(np.maximum(base + slope * (level - middle), low), high)).sum()
        below, above = (middle, above) if reached > total else (below, middle)
    wanted = np.exp(np.minimum(np.maximum(base + slope * (level - above), low), high))
    return _whole(wanted, asks, total)


def _whole(wanted: Floats, asks: Sequence[Ask], total: int) -> list[int]:
    """Rounded, with the total kept: what is left over goes to the largest remainders, and beyond those to whoever has room."""
    counts = np.floor(wanted + ROUNDING).astype(int)
    order = np.argsort(counts - wanted, kind="stable")
    fewest, most = np.array([ask.fewest for ask in asks]), np.array([ask.most for ask in asks])
    while rest := total - int(counts.sum()):
        room = most - counts if rest > 0 else counts - fewest
        takers = [i for i in order if room[i] > 0][: abs(rest)]
        if not takers:
            break  # all have what they can take
        each = np.minimum(room[takers], max(1, abs(rest) // len(takers)))
        counts[takers] += each if rest > 0 else -each
    return [int(count) for count in counts]
