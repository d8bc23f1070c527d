"""Whether links are still what a plan was made for: judged from steps and what they carried. Knows numbers of nodes only.

A link that is slower than it was shows in both: steps take longer than they used to, and their bytes as much longer on the
link. Either alone is something else: a slow machine leaves its link idle, and a link that carries little under a plan that
sends little may be as fast as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from commlayer.observe.link_throughput import Direction, Throughput

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


class LinkWatch:
    """Under one plan. `observe` at every look; the same input gives the same answer, so all ranks may ask for themselves."""

    def __init__(self, planned: Sequence[Rates]) -> None:
        self.planned = tuple(planned)
        """May be changed; what is usual stays what it is as long as the plan does."""
        self._forget()
        self.faster = False
        """Steps went faster than usual, or more came in than was planned for: it may be worth a probe."""

    def _forget(self) -> None:
        self._steps: deque[float] = deque(maxlen=USUAL)
        self._usual: list[tuple[deque[float], deque[float]]] = [
            (deque(maxlen=USUAL), deque(maxlen=USUAL)) for _ in self.planned
        ]
        self._slow = self._long = 0

    @property
    def usual_s(self) -> float:
        """Seconds of a step; 0 before there are any."""
        return median(self._steps) if self._steps else 0.0

    def slow(self, step_s: float) -> bool:
        return bool(self._steps) and step_s > FACTOR * self.usual_s

    def observe(self, step_s: float, nodes: Sequence[Throughput]) -> tuple[Rates, ...] | None:
        """The rates to plan for, once links have become slower; None while there is no reason."""
        if not self.slow(step_s):
            self._slow = self._long = 0
            quick = len(self._steps) >= SETTLED and FACTOR * step_s < self.usual_s
            self.faster = quick or any(
                PAYLOAD * node.down.bps > FACTOR * rates.down_bps for node, rates in zip(nodes, self.planned, strict=True))
            self._keep(step_s, nodes)
            return None
        self.faster = False
        if (long := self._long + 1) > USUAL:  # whatever it is, it is what steps take now
            self._forget()
            return None
        self._long = long
        found = tuple(
            Rates(self._lower(step_s, node.up, planned.up_bps, up), self._lower(step_s, node.down, planned.down_bps, down))
            for node, planned, (up, down) in zip(nodes, self.planned, self._usual, strict=True)
        )
        if found == self.planned:
            self._slow = 0
            return None
        self._slow += 1
        return found if self._slow > 1 or step_s >= CONFIRMED_S else None

    def _lower(self, step_s: float, way: Direction, planned_bps: float, usual: Sequence[float]) -> float:
        """`planned_bps`, or the rate that the way has fallen to."""
        bps, usual_bps = PAYLOAD * way.bps, median(usual)
        if not (0 < FACTOR * bps < planned_bps and FACTOR * way.bps < usual_bps):
            return planned_bps
        longer_s = way.share * step_s * (1 - way.bps / usual_bps)
        return bps if longer_s >= EXPLAINED * (step_s - self.usual_s) else planned_bps

    def _keep(self, step_s: float, nodes: Sequence[Throughput]) -> None:
        self._steps.append(step_s)
        for node, (up, down) in zip(nodes, self._usual, strict=True):
            up.append(node.up.bps)
            down.append(node.down.bps)


def differ(a: Sequence[Rates], b: Sequence[Rates]) -> bool:
    """Whether some rate differs enough to plan anew."""
    return any(max(x, y) > FACTOR * min(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def spelled(rates: Sequence[Rates]) -> str:
    """In Mb/s, one for all nodes where they are alike."""
    each = [f"{r.up_bps / 1e6:.3g}/{r.down_bps / 1e6:.3g}" for r in rates]
    return f"{each[0] if len(set(each)) == 1 else ', '.join(each)} Mb/s up/down"
