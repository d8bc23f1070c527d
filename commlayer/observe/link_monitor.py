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
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from msgspec import structs

from commlayer.errors import InvalidInput
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


# ---- throughput: the rate that a link sustained while busy, from byte counters
#
# Interface counters include all concurrent transfers (pushes, results, collectives). The rate is a lower bound of the link's
# capacity; callers judge from `share` whether the link limited the transfer.

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


# ---- when to probe again a link that may have become faster
# A plan for a slow link sends little, so a recovered link shows only as faster steps. A probe follows soon after that.
# Without a hint links are probed at growing intervals: first those that were faster once, later also others, since their
# measurement may have been disturbed. A probe stops training on all ranks, so it waits until a faster link could have saved
# the time that the probe takes.

FIRST_S, LAST_S = 15.0, 600.0
"""Interval between probes without a hint: first and largest; it doubles after each probe that finds nothing."""
HINTED_S = 1.0
"""First interval after a hint."""
COST_MOST = 0.02
"""Fraction of the time that probes without a hint may take."""
EXPECTED_S = 1.5
"""Assumed duration of a probe before the first one."""


class ReprobeSchedule(Record, frozen=True):
    """An immutable value: each event returns the next schedule."""

    since_s: float = math.inf
    """Time of the last measurement or probe; infinite before the first."""
    gap_s: float = FIRST_S
    hinted_s: float = HINTED_S
    cost_s: float = 0.0
    """Duration of the last probe; 0 before the first."""

    def changed(self, now: float) -> ReprobeSchedule:
        """Links were measured."""
        return ReprobeSchedule(now, cost_s=self.cost_s)

    def probed(self, now: float, cost_s: float, *, found: bool) -> ReprobeSchedule:
        """A probe has ended; `found`: the link is faster."""
        if found:
            return ReprobeSchedule(now, cost_s=cost_s)
        return ReprobeSchedule(now, min(2 * self.gap_s, LAST_S), min(4 * self.hinted_s, LAST_S), cost_s)

    def due(self, now: float, *, hinted: bool, lost: bool, to_win: float) -> bool:
        """`lost`: links were once faster than now known. `to_win`: fraction of the time that infinitely fast links could save.
        """
        for_s, cost_s = now - self.since_s, self.cost_s or EXPECTED_S
        gap_s = max(self.gap_s, (self.cost_s if lost else cost_s) / COST_MOST)
        return for_s * to_win >= cost_s and for_s >= (min(gap_s, self.hinted_s) if hinted else gap_s)


# ---- byte counters of this machine's network interface, from Linux's /proc

PERIOD_S = 0.05
"""About the length of a step's burst on a fast link. A reading takes about 30 us, or 0.1 % of a core."""
KEPT = 1200
"""A minute of readings, longer than the time between two calls of `look`."""
COUNTERS = Path("/proc/net/dev")

Counters = Callable[[], tuple[int, int]]
"""Returns (bytes sent, bytes received) so far."""


class InterfaceCounters:
    """A thread that reads the counters until close()."""

    def __init__(self, counters: Counters, period_s: float = PERIOD_S) -> None:
        self._counters, self._period_s = counters, period_s
        self._readings: deque[Reading] = deque(maxlen=KEPT)
        self._over = threading.Event()
        self._read()
        self._thread = threading.Thread(target=self._loop, name="commlayer-meter", daemon=True)
        self._thread.start()

    @property
    def since_s(self) -> float:
        """Length of the interval that the next `look` covers."""
        return time.monotonic() - self._readings[0].at_s if self._readings else 0.0

    def look(self) -> Throughput:
        """Throughput since the last call."""
        self._read()
        readings = []
        while len(self._readings) > 1:
            readings.append(self._readings.popleft())
        return throughput([*readings, *list(self._readings)[:1]])

    def _read(self) -> None:
        try:
            self._readings.append(Reading(time.monotonic(), *self._counters()))
        except (OSError, ValueError):
            pass  # the interface is gone: a missing reading has no effect

    def _loop(self) -> None:
        while not self._over.wait(self._period_s):
            self._read()

    def close(self) -> None:
        self._over.set()
        self._thread.join(1.0)


def counters_of(interface: str) -> Counters | None:
    """The byte counters of that network interface; None without an interface, or without Linux."""
    return (lambda: _counters(interface)) if interface and COUNTERS.exists() else None


def _counters(name: str) -> tuple[int, int]:
    for line in COUNTERS.read_text().splitlines():
        head, _, rest = line.partition(":")
        if head.strip() == name:
            words = rest.split()
            return int(words[8]), int(words[0])
    raise InvalidInput("E-ARGUMENT", f"{COUNTERS} has no interface {name}")
