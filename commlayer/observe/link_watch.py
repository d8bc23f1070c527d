"""Link monitoring: detects, from steps and their traffic, that links differ from those the plan was made for.

A slower link shows in three places: steps take longer, all ranks wait longer, and their bytes take correspondingly longer on
the link. Each alone has other causes: a rank that evaluates, saves or waits for data makes others wait but does not wait
itself; a slow machine leaves its link idle; and a link may carry little because the plan sends little.

A single step is not evidence. Several steps define what is usual. A link counts as slower after several slow steps in a row
that have cost as much as a plan change does; otherwise waiting a little longer would have been better.

A faster link shows in received bytes, since nodes may send faster than planned; if too little is received, only in steps with
shorter waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import median
from typing import NamedTuple

from msgspec import structs

from commlayer.observe.link_throughput import Throughput
from commlayer.records import Record

FACTOR = 1.5
"""Factor by which a rate must differ to count."""
LONGER = 1.25
"""The same for steps, whose computing does not become longer."""
EXPLAINED = 0.5
"""Fraction of a step's delay that all ranks must have waited longer, and that the link must have been busy longer: a shortage
of CPU time slows transfers, too."""
PAYLOAD = 0.95
"""Fraction of an interface's bytes that is not headers."""
MORE = 1.2
"""Factor over the planned rate that received bytes must reach; less may be noise."""
USUAL = 9
"""Steps that define what is usual."""
SETTLED = 4
"""Minimum number of steps; fewer may be warm-up steps under a plan."""
IN_A_ROW = 3
"""Slow steps in a row that indicate a change: a foreign transfer or a lost segment delays one or two."""
COST_S = 0.5
"""Total delay of these steps that justifies a plan change, which takes about as long."""
WAYS = UP, DOWN = 0, 1
"""Directions: indices into a node's values."""


class Rates(NamedTuple):
    """Of one node, in bit/s."""

    up_bps: float
    down_bps: float


class SeenStep(NamedTuple):
    """The reports of all ranks about a step, or the mean of several steps."""

    step_s: float
    waited_s: float
    """The shortest wait for communication of any rank."""
    nodes: tuple[Throughput, ...]
    """Traffic of each node's link."""


class LinkWatch(Record, frozen=True):
    """Observations under one plan, as an immutable value: `observe` returns the next value for each row of all ranks.

    Deterministic, so every rank can evaluate it separately.
    """

    planned: tuple[Rates, ...]
    """Planned rates; may be replaced without a new plan, and what is usual is kept."""
    seen: tuple[SeenStep, ...] = ()
    """The latest steps that were not slow."""
    slow: tuple[SeenStep, ...] = ()
    """The latest consecutive slow steps that slower links explain."""
    slow_cost_s: float = 0.0
    """Total delay of all those consecutive steps."""
    long_rows: int = 0
    """Number of consecutive slow steps, for any reason."""
    long_cost_s: float = 0.0
    """Total delay of those."""

    def resumed(self) -> LinkWatch:
        """The watch after a return to the same plan: usual values stay known, even from few rows, since none is a warm-up row.
        """
        return LinkWatch(self.planned, tuple(islice(cycle(self.seen), max(SETTLED, len(self.seen)))))

    @property
    def settled(self) -> bool:
        """Whether usual values are known."""
        return len(self.seen) >= SETTLED

    @property
    def usual_s(self) -> float:
        """Usual step time; 0 before the first step."""
        return _median(self.seen, lambda row: row.step_s)

    @property
    def waited_s(self) -> float:
        """The part of the step that all ranks wait for communication."""
        return _median(self.seen, lambda row: row.waited_s)

    @property
    def slow_s(self) -> float:
        """Steps above this time are slow; infinite before usual values are known."""
        return LONGER * self.usual_s if self.settled else math.inf

    @property
    def faster(self) -> bool:
        """Whether the latest steps hint at faster links: they are shorter than before because all ranks wait less."""
        was, now = LinkWatch(self.planned, self.seen[:-SETTLED]), LinkWatch(self.planned, self.seen[-SETTLED:])
        shorter_s = was.usual_s - now.usual_s
        return was.settled and LONGER * now.usual_s < was.usual_s and was.waited_s - now.waited_s >= EXPLAINED * shorter_s

    def observe(self, row: SeenStep) -> tuple[LinkWatch, tuple[Rates, ...] | None]:
        """Returns the next value, and the new rates if links have changed; otherwise None."""
        if row.step_s <= self.slow_s:
            after = LinkWatch(self.planned, (*self.seen, row)[-(USUAL + SETTLED):])
            raised = after._more()
            return after, None if raised == self.planned else raised
        if self.long_rows >= USUAL and self.long_cost_s >= COST_S:  # whatever the cause, steps now take this long
            return LinkWatch(self.planned), None
        longer_s = row.step_s - self.usual_s
        after = structs.replace(self, long_rows=self.long_rows + 1, long_cost_s=self.long_cost_s + longer_s)
        if self._fallen((row,)) == self.planned or row.waited_s - self.waited_s < EXPLAINED * longer_s:
            return structs.replace(after, slow=(), slow_cost_s=0.0), None
        after = structs.replace(after, slow=(*self.slow, row)[-IN_A_ROW:], slow_cost_s=self.slow_cost_s + longer_s)
        if len(after.slow) < IN_A_ROW or after.slow_cost_s < COST_S or (lowered := self._fallen(after.slow)) == self.planned:
            return after, None
        return structs.replace(after, slow=(), slow_cost_s=0.0), lowered

    def _more(self) -> tuple[Rates, ...]:
        """The planned rates, raised where the latest steps have received more. Sent bytes wait before the link, for example in
        a modem, so their rate shows nothing."""
        latest = self.seen[-SETTLED:]
        sent, received = (sum(row.step_s * node[way].share * node[way].bps for row in latest for node in row.nodes)
                          for way in WAYS)
        # Nodes receive what nodes send; a difference shows foreign traffic, for example of a disk at the same site.
        if not self.settled or max(sent, received) > MORE * min(sent, received):
            return self.planned
        received_bps = [PAYLOAD * _carried(latest, node, DOWN) for node in range(len(self.planned))]
        return tuple(planned._replace(down_bps=bps) if bps > MORE * planned.down_bps else planned
                     for planned, bps in zip(self.planned, received_bps, strict=True))

    def _fallen(self, rows: Sequence[SeenStep]) -> tuple[Rates, ...]:
        """The planned rates, lowered where these slow steps show slower links."""
        return tuple(Rates(*(self._lower(rows, node, way) for way in WAYS)) for node in range(len(self.planned)))

    def _lower(self, rows: Sequence[SeenStep], node: int, way: int) -> float:
        planned_bps = self.planned[node][way]
        bps, usual_bps = _carried(rows, node, way), _carried(self.seen, node, way)
        if not (0 < FACTOR * PAYLOAD * bps < planned_bps and FACTOR * bps < usual_bps):
            return planned_bps
        busy_s = _median(rows, lambda row: row.nodes[node][way].share * row.step_s)
        longer_s = _median(rows, lambda row: row.step_s) - self.usual_s
        return PAYLOAD * bps if busy_s * (1 - bps / usual_bps) >= EXPLAINED * longer_s else planned_bps


def _carried(rows: Sequence[SeenStep], node: int, way: int) -> float:
    return _median(rows, lambda row: row.nodes[node][way].bps)


def _median(rows: Sequence[SeenStep], of: Callable[[SeenStep], float]) -> float:
    """0 without rows."""
    return median(map(of, rows)) if rows else 0.0


def differ(a: Sequence[Rates], b: Sequence[Rates]) -> bool:
    """Whether some rate differs enough for a new plan."""
    return any(max(x, y) > FACTOR * min(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def slower(a: Sequence[Rates], b: Sequence[Rates]) -> bool:
    """Whether some rate of `a` is lower than in `b`."""
    return any(x < y for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def spelled(rates: Sequence[Rates]) -> str:
    """In Mb/s; one value if all nodes are equal."""
    each = [f"{r.up_bps / 1e6:.3g}/{r.down_bps / 1e6:.3g}" for r in rates]
    return f"{each[0] if len(set(each)) == 1 else ', '.join(each)} Mb/s up/down"
