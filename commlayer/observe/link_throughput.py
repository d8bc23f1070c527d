"""Link throughput: the rate that a link sustained while busy, from byte counters over time.

Interface counters include all transfers at once (pushes, results, collectives), so concurrent traffic needs no model. The rate
is a lower bound of the link's capacity. Whether the link limited the transfer is judged elsewhere, from `share`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

LEAST_NBYTES = 16 << 10
"""Less than this between first and last reading is control traffic."""
DOWN_PART = 0.25
"""Fraction of the received bytes that came at the reported rate or faster. Counting bytes instead of time excludes idle
intervals. It also excludes bytes that arrived while waiting for a slower peer, if they are the smaller part."""
UP_PART, UP_S = 0.5, 0.25
"""The same for sent bytes, over intervals of at least UP_S. Sent bytes are counted when they enter the queue before the link,
in bursts faster than the link, and some are dropped there; received bytes have passed the link."""


class Reading(NamedTuple):
    """The interface's counters at one time."""

    at_s: float
    up_nbytes: int
    down_nbytes: int


SOONEST_S = 1e-6
"""Readings closer together than this have no rate between them."""


class Direction(NamedTuple):
    """One direction of a link."""

    bps: float = 0.0
    """The sustained rate. 0 if almost nothing was carried; then the rate is unknown."""
    share: float = 0.0
    """Fraction of the time the link would have been busy at that rate. Near 1 it was busy without a break."""


class Throughput(NamedTuple):
    up: Direction
    down: Direction


def throughput(readings: Sequence[Reading]) -> Throughput:
    """From the first reading to the last; readings are in order of time."""
    spans = [(b.at_s - a.at_s, b.up_nbytes - a.up_nbytes, b.down_nbytes - a.down_nbytes) for a, b in pairwise(readings)]
    # A counter that decreases was reset, because the interface went down.
    valid = [span for span in spans if span[0] >= SOONEST_S and span[1] >= 0 and span[2] >= 0]
    up, down = [(s, up) for s, up, _ in valid], [(s, down) for s, _, down in valid]
    return Throughput(_way(_joined(up), UP_PART), _way(down, DOWN_PART))


def _joined(spans: list[tuple[float, int]]) -> list[tuple[float, int]]:
    joined, seconds, nbytes = list[tuple[float, int]](), 0.0, 0
    for more_s, more_nbytes in spans:
        seconds, nbytes = seconds + more_s, nbytes + more_nbytes
        if seconds >= UP_S:
            joined.append((seconds, nbytes))
            seconds, nbytes = 0.0, 0
    return [*joined, (seconds, nbytes)] if seconds > 0 else joined


def _way(spans: list[tuple[float, int]], part: float) -> Direction:
    total = sum(nbytes for _, nbytes in spans)
    if total < LEAST_NBYTES:
        return Direction()
    rates = sorted(((8 * nbytes / seconds, nbytes) for seconds, nbytes in spans), reverse=True)
    bps = next(rate for (rate, _), faster in zip(rates, accumulate(nbytes for _, nbytes in rates), strict=True)
               if faster >= part * total)
    return Direction(bps, min(1.0, 8 * total / sum(seconds for seconds, _ in spans) / bps))
