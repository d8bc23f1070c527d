"""Link monitoring: detects, from step times and network traffic, that links differ from those for which the plan was made.

A slower link has three effects: steps take longer, all ranks wait longer, and their bytes take correspondingly longer on the
link. Each of these effects can have other causes, too. A rank that evaluates, saves or waits for data makes others wait but
does not wait itself. A slow machine leaves its link idle. A link may carry little because the plan sends little.

Several steps define what is usual. A link counts as slower after several slow steps in a row that have cost as much time as a
plan change does. Before that, waiting would be cheaper. A single step is evidence only if it is many times as long as usual.
In the first steps under a plan, the predicted step time counts as usual, and the difference must be larger.

A faster link is visible in received bytes, since nodes may send faster than planned. If too little is received, it is visible
only in steps with shorter waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from statistics import median
from typing import NamedTuple

from msgspec import structs

from commlayer.observe.interface_counters import Throughput
from commlayer.records import Record

FACTOR = 1.5
"""Factor by which a link's rate must differ from the plan's to count as changed."""
LONGER = 1.25
"""Factor by which a step must be longer than usual to count as slow. It is smaller than FACTOR, since the computing part of a
step does not become longer."""
UNUSUAL = 4.0
"""Factor that replaces FACTOR and LONGER before usual values are known, because predictions may be off by almost as much."""
EXPLAINED = 0.5
"""Fraction of a step's delay that slower links must explain. This much of the delay must be waiting on all ranks, and the link
must have been busy this much longer: a shortage of CPU time slows transfers, too."""
PAYLOAD = 0.95
"""Fraction of an interface's bytes that is payload, not headers."""
MORE = 1.2
"""Factor by which received bytes must exceed the planned rate to show a faster link. A smaller difference may be noise."""
CONFIRMED = 0.8
"""Fraction of the planned rate from which on received bytes confirm the rate."""
USUAL = 9
"""Number of latest steps from which usual values (medians) are computed."""
SETTLED = 4
"""Minimum number of steps for usual values; the first few may be warm-up steps of a plan."""
IN_A_ROW = 3
"""Number of slow steps in a row that indicate a change. Other traffic or a lost segment delays only one or two steps."""
COST_S = 0.5
"""Total delay in seconds of consecutive slow steps that justifies a plan change, which takes about as long."""
DIRECTIONS = UP, DOWN = 0, 1
"""Directions of a link: upload and download, as indices into Rates and Throughput."""

PLENTY = 10
"""The number of slow steps does not matter if their total delay is this many usual steps, and this many times COST_S."""


class Rates(NamedTuple):
    """Upload and download rate of one node's link, in bit/s."""

    up_bps: float
    down_bps: float


class SeenStep(NamedTuple):
    """Reports of all ranks about one step."""

    step_s: float
    waited_s: float
    """The shortest wait for communication of any rank, in seconds."""
    nodes: tuple[Throughput, ...]
    """Traffic of each node's link."""


class LinkWatch(Record, frozen=True):
    """Observations of links under one plan, as an immutable value: `observe` adds a step's reports of all ranks and returns the
    next value.

    Evaluation is deterministic, so every rank can do it separately.
    """

    planned: tuple[Rates, ...]
    """Planned rates of each node. New rates may be set without a new plan; usual values are then kept."""
    expected_s: float = 0.0
    """Predicted step time in seconds; 0 if it is unknown."""
    steps: int = 1
    """Number of steps between two exchanges. A row's times are their means."""
    seen: tuple[SeenStep, ...] = ()
    """The latest steps that were not slow."""
    slow: tuple[SeenStep, ...] = ()
    """The latest consecutive slow steps whose delay slower links explain."""
    slow_cost_s: float = 0.0
    """Total delay in seconds of all consecutive slow steps that slower links explain; `slow` has only the last of these
    steps."""
    long_rows: int = 0
    """Number of consecutive slow steps, for any reason."""
    long_cost_s: float = 0.0
    """Total delay in seconds of the consecutive slow steps, for any reason."""

    @property
    def settled(self) -> bool:
        """True: enough steps were observed to compute usual values."""
        return len(self.seen) >= SETTLED

    @property
    def usual_s(self) -> float:
        """Usual step time in seconds, or the predicted one before that is known; 0 if neither is."""
        return _median(row.step_s for row in self.seen) if self.settled or not self.expected_s else self.expected_s

    @property
    def waited_s(self) -> float:
        """Usual time in seconds for which all ranks wait for communication in a step; 0 before it is known."""
        return _median(row.waited_s for row in self.seen) if self.settled else 0.0

    @property
    def slow_s(self) -> float:
        """Step time in seconds above which a step is slow; infinite if no usual value is known."""
        return LONGER * self.usual_s if self.settled else UNUSUAL * self.expected_s or math.inf

    @property
    def decisive_s(self) -> float:
        """Step time in seconds above which the next step may show that links have changed; infinite if no usual value is
        known."""
        if len(self.slow) >= IN_A_ROW - 1:
            return self.slow_s
        return max(self.slow_s, self.usual_s + (self._plenty_s - self.slow_cost_s) / self.steps)

    @property
    def _plenty_s(self) -> float:
        return PLENTY * max(COST_S, self.usual_s)

    @property
    def faster(self) -> bool:
        """True: links may have become faster, because the latest steps are shorter and all ranks wait less."""
        was, now = (structs.replace(self, expected_s=0.0, seen=seen) for seen in (self.seen[:-SETTLED], self.seen[-SETTLED:]))
        shorter_s = was.usual_s - now.usual_s
        return was.settled and LONGER * now.usual_s < was.usual_s and was.waited_s - now.waited_s >= EXPLAINED * shorter_s

    @property
    def confirmed(self) -> bool:
        """True: in the latest steps each node received at about its planned rate, and none sent faster than planned, so links
        have their planned rates."""
        latest = self.seen[-SETTLED:]
        ratios = [[PAYLOAD * _median_rate(latest, node, direction) / planned[direction] for direction in DIRECTIONS]
                  for node, planned in enumerate(self.planned)]
        return self.settled and all(up <= MORE and CONFIRMED <= down <= MORE for up, down in ratios)

    def observe(self, row: SeenStep) -> tuple[LinkWatch, tuple[Rates, ...] | None]:
        """Adds a step's reports. Returns the next value, and the new rates if links have changed, otherwise None."""
        if row.step_s <= self.slow_s:
            after = LinkWatch(self.planned, self.expected_s, self.steps, (*self.seen, row)[-(USUAL + SETTLED):])
            raised = after._more()
            return after, None if raised == self.planned else raised
        if self.long_rows >= USUAL and self.long_cost_s >= COST_S:  # the longer steps are now usual, whatever the cause
            return LinkWatch(self.planned, steps=self.steps), None
        longer_s = row.step_s - self.usual_s
        cost_s = self.steps * longer_s
        after = structs.replace(self, long_rows=self.long_rows + 1, long_cost_s=self.long_cost_s + cost_s)
        if self._lowered_rates((row,)) == self.planned or row.waited_s - self.waited_s < EXPLAINED * longer_s:
            return structs.replace(after, slow=(), slow_cost_s=0.0), None
        after = structs.replace(after, slow=(*self.slow, row)[-IN_A_ROW:], slow_cost_s=self.slow_cost_s + cost_s)
        least_s = COST_S if len(after.slow) == IN_A_ROW else self._plenty_s
        if after.slow_cost_s < least_s or (lowered := self._lowered_rates(after.slow)) == self.planned:
            return after, None
        return structs.replace(after, slow=(), slow_cost_s=0.0), lowered

    def _more(self) -> tuple[Rates, ...]:
        """Returns the planned rates, raised for nodes that received more in the latest steps. Sent bytes are not evidence,
        since they wait in a queue before the link, for example in a modem."""
        latest = self.seen[-SETTLED:]
        sent, received = (sum(row.step_s * node[direction].share * node[direction].bps for row in latest for node in row.nodes)
                          for direction in DIRECTIONS)
        # Nodes receive what nodes send. A difference shows traffic of others, for example to a file server at the same site.
        if not self.settled or max(sent, received) > MORE * min(sent, received):
            return self.planned
        received_bps = [PAYLOAD * _median_rate(latest, node, DOWN) for node in range(len(self.planned))]
        return tuple(planned._replace(down_bps=bps) if bps > MORE * planned.down_bps else planned
                     for planned, bps in zip(self.planned, received_bps, strict=True))

    def _lowered_rates(self, rows: Sequence[SeenStep]) -> tuple[Rates, ...]:
        """Returns the planned rates, lowered where these slow steps show slower links."""
        return tuple(Rates(*(self._lower(rows, node, direction) for direction in DIRECTIONS))
                     for node in range(len(self.planned)))

    def _lower(self, rows: Sequence[SeenStep], node: int, direction: int) -> float:
        planned_bps = self.planned[node][direction]
        bps, factor = _median_rate(rows, node, direction), FACTOR if self.settled else UNUSUAL
        usual_bps = _median_rate(self.seen, node, direction) if self.settled else planned_bps
        # Results arrive at most as fast as the slowest node uploads, and a busy machine uploads slowly. Only a download that is
        # clearly slower than that upload shows a slow link.
        if direction == DOWN and factor * bps >= min(_median_rate(rows, each, UP) for each in range(len(self.planned))):
            return planned_bps
        if not (0 < factor * PAYLOAD * bps < planned_bps and factor * bps < usual_bps):
            return planned_bps
        busy_s = _median(row.nodes[node][direction].share * row.step_s for row in rows)
        longer_s = _median(row.step_s for row in rows) - self.usual_s
        return PAYLOAD * bps if busy_s * (1 - bps / usual_bps) >= EXPLAINED * longer_s else planned_bps


def _median_rate(rows: Sequence[SeenStep], node: int, direction: int) -> float:
    return _median(row.nodes[node][direction].bps for row in rows)


def _median(values: Iterable[float]) -> float:
    """Returns the median; 0 without values."""
    known = list(values)
    return median(known) if known else 0.0


def differ(a: Sequence[Rates], b: Sequence[Rates]) -> bool:
    """True: some rate differs by more than FACTOR, so a new plan is needed."""
    return any(max(x, y) > FACTOR * min(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def slower(a: Sequence[Rates], b: Sequence[Rates]) -> bool:
    """True: some rate of `a` is lower than in `b`."""
    return any(x < y for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def format_rates(rates: Sequence[Rates], names: Sequence[str] = ()) -> str:
    """Formats the rates of the nodes in Mb/s; one pair if all are equal.

    >>> format_rates([Rates(1.734e9, 20e6)])
    '1734/20 Mb/s up/down'
    >>> format_rates([Rates(20e6, 100e6), Rates(10e6, 50e6)], ["ann", "ben"])
    'ann 20/100, ben 10/50 Mb/s up/down'
    """
    each = [f"{megabits(r.up_bps)}/{megabits(r.down_bps)}" for r in rates]
    if len(set(each)) == 1:
        return f"{each[0]} Mb/s up/down"
    return ", ".join(" ".join(filter(None, pair)) for pair in zip_longest(names, each, fillvalue="")) + " Mb/s up/down"


def megabits(bps: float) -> str:
    """Formats a rate in Mb/s."""
    return f"{bps / 1e6:.0f}" if bps >= 1e9 else f"{bps / 1e6:.3g}"
