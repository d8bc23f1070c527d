"""What a link carried: byte counters over time -> the rate it sustained while it was busy. Knows times and bytes; not whose.

Counters of the machine's network interface see every transfer at once, pushes beside servers' results beside collectives, so
nothing has to be known of what went on at the same time. A rate is what was carried, so no more than a lower bound of what the
link can do; whether the link was what held the transfer up is for `links` to judge, from `share`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

LEAST_NBYTES = 16 << 10
"""Less than this between two looks is control traffic."""
DOWN_PART = 0.25
"""Part of the bytes that came in at the rate told or faster. Bytes count, not time, so that idle stretches do not; nor what
came while a slower peer was waited for does, as long as it is less than the rest."""
UP_PART, UP_S = 0.5, 0.25
"""The same of bytes that went out, over stretches of at least that time. They are counted when they go into the queue in front
of the link, in bursts faster than the link and some of them to be dropped there; only what came in has been through it."""


class Reading(NamedTuple):
    """The interface's counters at one time."""

    at_s: float
    up_nbytes: int
    down_nbytes: int


SOONEST_S = 1e-6
"""Two readings closer together are of one moment: no rate is between them."""


class Direction(NamedTuple):
    """One direction of a link."""

    bps: float = 0.0
    """What it sustained. 0: next to nothing was carried, which says nothing."""
    share: float = 0.0
    """Part of the time that it would have been busy, had it carried everything at that rate. Near 1 it went on and on."""


class Throughput(NamedTuple):
    up: Direction
    down: Direction


def throughput(readings: Sequence[Reading]) -> Throughput:
    """From the first reading to the last, which are in order of time."""
    spans = [(b.at_s - a.at_s, b.up_nbytes - a.up_nbytes, b.down_nbytes - a.down_nbytes) for a, b in pairwise(readings)]
    # A counter that falls was set back: an interface that went and came.
    whole = [span for span in spans if span[0] >= SOONEST_S and span[1] >= 0 and span[2] >= 0]
    up, down = [(s, up) for s, up, _ in whole], [(s, down) for s, _, down in whole]
    return Throughput(_way(_joined(up), UP_PART), _way(down, DOWN_PART))


def _joined(spans: list[tuple[float, int]]) -> list[tuple[float, int]]:
    made, seconds, nbytes = list[tuple[float, int]](), 0.0, 0
    for more_s, more_nbytes in spans:
        seconds, nbytes = seconds + more_s, nbytes + more_nbytes
        if seconds >= UP_S:
            made.append((seconds, nbytes))
            seconds, nbytes = 0.0, 0
    return [*made, (seconds, nbytes)] if seconds > 0 else made


def _way(spans: list[tuple[float, int]], part: float) -> Direction:
    total = sum(nbytes for _, nbytes in spans)
    if total < LEAST_NBYTES:
        return Direction()
    rates = sorted(((8 * nbytes / seconds, nbytes) for seconds, nbytes in spans), reverse=True)
    bps = next(rate for (rate, _), faster in zip(rates, accumulate(nbytes for _, nbytes in rates), strict=True)
               if faster >= part * total)
    return Direction(bps, min(1.0, 8 * total / sum(seconds for seconds, _ in spans) / bps))
