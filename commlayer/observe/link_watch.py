"""Whether links are still what a plan was made for: judged from steps and what they carried. Knows numbers of nodes only.

A link that is slower than it was shows in three places: steps take longer than they used to, all ranks wait longer in them, and
their bytes take as much longer on the link. Any one alone is something else: a rank that evaluates, saves or waits for its data
makes the others wait and does not wait itself; a slow machine leaves its link idle; and a link that carries little under a plan
that sends little may be as fast as ever.

No step says anything alone. What is usual are several, and a link is slower once several in a row were slow and have cost as
much as the answer to it does: with less, whoever waits a little longer would have done better.

A link that is faster than planned for shows in what comes in, for nodes may send faster than is planned with; and where that is
too little to tell, at best in steps that wait less.
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
"""By which a rate must differ to count."""
LONGER = 1.25
"""The same for steps: computing does not become longer with them."""
EXPLAINED = 0.5
"""Part of what a step took longer that all ranks must have waited longer, and its bytes have taken longer on the link: where
machines are short of processors, transfers get slower, too."""
PAYLOAD = 0.95
"""Part of an interface's bytes that is not headers."""
MORE = 1.2
"""So many times what is planned for must come in to count: less may be noise."""
USUAL = 9
"""Steps that tell what is usual."""
SETTLED = 4
"""Fewer may be the first ones under a plan, which warm up."""
IN_A_ROW = 3
"""Slow steps that tell of a change: a transfer of somebody else's, or a lost segment, stretches one or two."""
COST_S = 0.5
"""What so many must have cost: a change of plans takes about as long."""
WAYS = UP, DOWN = 0, 1
"""Up and down: places in what is known of a node."""


class Rates(NamedTuple):
    """Of one node, bit/s."""

    up_bps: float
    down_bps: float


class SeenStep(NamedTuple):
    """What all ranks have told of a step, or of the mean of several."""

    step_s: float
    waited_s: float
    """How long the rank that waited least waited for communication in it."""
    nodes: tuple[Throughput, ...]
    """What each node's link carried."""


class LinkWatch(Record, frozen=True):
    """A value, under one plan: `observe` at every row of all ranks gives the watch after it.

    The same input gives the same answer, so all ranks may ask for themselves.
    """

    planned: tuple[Rates, ...]
    """May be replaced; what is usual stays what it is as long as the plan does."""
    seen: tuple[SeenStep, ...] = ()
    """The latest that were not slow."""
    slow: tuple[SeenStep, ...] = ()
    """In a row, that slower links explain; the latest of them."""
    slow_cost_s: float = 0.0
    """What all those in a row took longer than usual."""
    long_rows: int = 0
    """In a row, that were slow for whatever reason."""
    long_cost_s: float = 0.0
    """What those took longer than usual."""

    def resumed(self) -> LinkWatch:
        """Under the same plan once more: what is usual is known, by however few rows, for none of them warms up."""
        return LinkWatch(self.planned, tuple(islice(cycle(self.seen), max(SETTLED, len(self.seen)))))

    @property
    def settled(self) -> bool:
        """Whether it is known what is usual."""
        return len(self.seen) >= SETTLED

    @property
    def usual_s(self) -> float:
        """Seconds of a step; 0 before there are any."""
        return _median(self.seen, lambda row: row.step_s)

    @property
    def waited_s(self) -> float:
        """How much of it all ranks wait for communication."""
        return _median(self.seen, lambda row: row.waited_s)

    @property
    def slow_s(self) -> float:
        """A step that takes longer is slow. None is before it is known what is usual."""
        return LONGER * self.usual_s if self.settled else math.inf

    @property
    def faster(self) -> bool:
        """Whether the latest steps hint at faster links: they are quicker than those before, since all ranks wait less."""
        was, now = LinkWatch(self.planned, self.seen[:-SETTLED]), LinkWatch(self.planned, self.seen[-SETTLED:])
        shorter_s = was.usual_s - now.usual_s
        return was.settled and LONGER * now.usual_s < was.usual_s and was.waited_s - now.waited_s >= EXPLAINED * shorter_s

    def observe(self, row: SeenStep) -> tuple[LinkWatch, tuple[Rates, ...] | None]:
        """With the rates that links have turned out to carry; None while there is no reason to take others than before."""
        if row.step_s <= self.slow_s:
            after = LinkWatch(self.planned, (*self.seen, row)[-(USUAL + SETTLED):])
            more = after._more()
            return after, None if more == self.planned else more
        if self.long_rows >= USUAL and self.long_cost_s >= COST_S:  # whatever it is, it is what steps take now
            return LinkWatch(self.planned), None
        longer_s = row.step_s - self.usual_s
        after = structs.replace(self, long_rows=self.long_rows + 1, long_cost_s=self.long_cost_s + longer_s)
        if self._fallen((row,)) == self.planned or row.waited_s - self.waited_s < EXPLAINED * longer_s:
            return structs.replace(after, slow=(), slow_cost_s=0.0), None
        after = structs.replace(after, slow=(*self.slow, row)[-IN_A_ROW:], slow_cost_s=self.slow_cost_s + longer_s)
        if len(after.slow) < IN_A_ROW or after.slow_cost_s < COST_S or (found := self._fallen(after.slow)) == self.planned:
            return after, None
        return structs.replace(after, slow=(), slow_cost_s=0.0), found

    def _more(self) -> tuple[Rates, ...]:
        """What is planned for, but where the latest steps have brought more in, that. What goes out waits in front of the link,
        in a modem maybe: how fast it went there tells nothing."""
        latest = self.seen[-SETTLED:]
        sent, received = (sum(row.step_s * node[way].share * node[way].bps for row in latest for node in row.nodes)
                          for way in WAYS)
        # What nodes send is what nodes receive. Else others' bytes are among it, of a disk in the same house perhaps.
        if not self.settled or max(sent, received) > MORE * min(sent, received):
            return self.planned
        came = [PAYLOAD * _carried(latest, node, DOWN) for node in range(len(self.planned))]
        return tuple(planned._replace(down_bps=bps) if bps > MORE * planned.down_bps else planned
                     for planned, bps in zip(self.planned, came, strict=True))

    def _fallen(self, rows: Sequence[SeenStep]) -> tuple[Rates, ...]:
        """What is planned for, but where these slow steps tell of slower links, that."""
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
    """0 without any."""
    return median(map(of, rows)) if rows else 0.0


def differ(a: Sequence[Rates], b: Sequence[Rates]) -> bool:
    """Whether some rate differs enough to plan anew."""
    return any(max(x, y) > FACTOR * min(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def slower(a: Sequence[Rates], b: Sequence[Rates]) -> bool:
    """Whether some rate of `a` is less than in `b`."""
    return any(x < y for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def spelled(rates: Sequence[Rates]) -> str:
    """In Mb/s, one for all nodes where they are alike."""
    each = [f"{r.up_bps / 1e6:.3g}/{r.down_bps / 1e6:.3g}" for r in rates]
    return f"{each[0] if len(set(each)) == 1 else ', '.join(each)} Mb/s up/down"
