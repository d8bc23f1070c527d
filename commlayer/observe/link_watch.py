"""Whether links are still what a plan was made for: judged from steps and what they carried. Knows numbers of nodes only.

A link that is slower than it was shows in both: steps take longer than they used to, and their bytes as much longer on the
link. Either alone is something else: a slow machine leaves its link idle, and a link that carries little under a plan that
sends little may be as fast as ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from msgspec import structs

from commlayer.observe.link_throughput import Direction, Throughput
from commlayer.records import Record

FACTOR = 1.5
"""By which a rate, and a step, must differ to count."""
EXPLAINED = 0.5
"""Part of what a step took longer that must be what its bytes took longer on the link: where machines are short of processors,
transfers get slower, too."""
PAYLOAD = 0.95
"""Part of an interface's bytes that is not headers."""
CONFIRMED_S = 1.0
"""A step that long has twenty readings of a slow link in it; shorter ones must come twice."""
USUAL = 9
"""Looks that tell what is usual."""
SETTLED = 4
"""Fewer may be the first ones under a plan, which warm up."""


class Rates(NamedTuple):
    """Of one node, bit/s."""

    up_bps: float
    down_bps: float


class LinkWatch(Record, frozen=True):
    """A value, under one plan: `observe` at every row of all ranks gives the watch after it.

    The same input gives the same answer, so all ranks may ask for themselves.
    """

    planned: tuple[Rates, ...]
    """May be replaced; what is usual stays what it is as long as the plan does."""
    faster: bool = False
    """Steps went faster than usual, or more came in than was planned for: it may be worth a probe."""
    seen: tuple[tuple[float, tuple[Throughput, ...]], ...] = ()
    """The latest steps that were not slow: seconds, and what each node's link carried."""
    slow_rows: int = 0
    """In a row, of steps that slower links explain."""
    long_rows: int = 0
    """In a row, of steps that were slow for whatever reason."""

    @property
    def usual_s(self) -> float:
        """Seconds of a step; 0 before there are any."""
        return median(step_s for step_s, _ in self.seen) if self.seen else 0.0

    @property
    def slow_s(self) -> float:
        """A step that takes longer is slow. None is before there are any to compare with."""
        return FACTOR * self.usual_s if self.seen else math.inf

    def observe(self, step_s: float, nodes: Sequence[Throughput]) -> tuple[LinkWatch, tuple[Rates, ...] | None]:
        """With the rates to plan for, once links have become slower; None while there is no reason."""
        if step_s <= self.slow_s:
            return self._quick(step_s, nodes), None
        if self.long_rows == USUAL:  # whatever it is, it is what steps take now
            return LinkWatch(self.planned), None
        found = tuple(
            Rates(self._lower(step_s, node.up, planned.up_bps, [carried[i].up.bps for _, carried in self.seen]),
                  self._lower(step_s, node.down, planned.down_bps, [carried[i].down.bps for _, carried in self.seen]))
            for i, (node, planned) in enumerate(zip(nodes, self.planned, strict=True))
        )
        slow = self.slow_rows + 1 if found != self.planned else 0
        after = structs.replace(self, faster=False, slow_rows=slow, long_rows=self.long_rows + 1)
        return after, found if slow > 1 or (slow and step_s >= CONFIRMED_S) else None

    def _quick(self, step_s: float, nodes: Sequence[Throughput]) -> LinkWatch:
        quick = len(self.seen) >= SETTLED and FACTOR * step_s < self.usual_s
        more = any(PAYLOAD * node.down.bps > FACTOR * rates.down_bps for node, rates in zip(nodes, self.planned, strict=True))
        return LinkWatch(self.planned, quick or more, (*self.seen, (step_s, tuple(nodes)))[-USUAL:])

    def _lower(self, step_s: float, way: Direction, planned_bps: float, usual: Sequence[float]) -> float:
        """`planned_bps`, or the rate that the way has fallen to."""
        bps, usual_bps = PAYLOAD * way.bps, median(usual)
        if not (0 < FACTOR * bps < planned_bps and FACTOR * way.bps < usual_bps):
            return planned_bps
        longer_s = way.share * step_s * (1 - way.bps / usual_bps)
        return bps if longer_s >= EXPLAINED * (step_s - self.usual_s) else planned_bps


def differ(a: Sequence[Rates], b: Sequence[Rates]) -> bool:
    """Whether some rate differs enough to plan anew."""
    return any(max(x, y) > FACTOR * min(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def spelled(rates: Sequence[Rates]) -> str:
    """In Mb/s, one for all nodes where they are alike."""
    each = [f"{r.up_bps / 1e6:.3g}/{r.down_bps / 1e6:.3g}" for r in rates]
    return f"{each[0] if len(set(each)) == 1 else ', '.join(each)} Mb/s up/down"
