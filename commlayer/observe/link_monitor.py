"""Link monitoring: detects, from step times and network traffic, that links differ from those for which the plan was made.

A slower link has three effects: steps take longer, all ranks wait longer, and their bytes take correspondingly longer on the
link. Each effect has other causes, too. A rank that evaluates, saves or waits for data makes others wait but does not wait
itself. A slow machine leaves its link idle. A link may carry little because the plan sends little.

A single step is not evidence. Several steps define what is usual. A link counts as slower after several slow steps in a row
that have cost as much time as a plan change does. Before that, waiting would be cheaper.

A faster link is visible in received bytes, since nodes may send faster than planned. If too little is received, it is visible
only in steps with shorter waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from statistics import median
from typing import NamedTuple

from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.records import Record

FACTOR = 1.5
"""Factor by which a link's rate must differ from the plan's to count as changed."""
LONGER = 1.25
"""Factor by which a step must be longer than usual to count as slow. It is smaller than FACTOR, since the computing part of a
step does not become longer."""
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
"""Number of slow steps in a row that indicate a change. Other traffic or a lost segment delays one or two steps."""
COST_S = 0.5
"""Total delay in seconds of consecutive slow steps that justifies a plan change, which takes about as long."""
WAYS = UP, DOWN = 0, 1
"""Directions of a link: upload and download, as indices into Rates and Throughput."""


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
        """Usual step time in seconds; 0 before the first step."""
        return _median(row.step_s for row in self.seen)

    @property
    def waited_s(self) -> float:
        """Usual time in seconds for which all ranks wait for communication in a step."""
        return _median(row.waited_s for row in self.seen)

    @property
    def slow_s(self) -> float:
        """Step time in seconds above which a step is slow; infinite before usual values are known."""
        return LONGER * self.usual_s if self.settled else math.inf

    @property
    def decisive_s(self) -> float:
        """Step time in seconds above which the next step may show that links have changed; infinite if no single step can show
        that."""
        return self.slow_s if len(self.slow) >= IN_A_ROW - 1 else math.inf

    @property
    def faster(self) -> bool:
        """True: links may have become faster, because the latest steps are shorter and all ranks wait less."""
        was, now = LinkWatch(self.planned, self.seen[:-SETTLED]), LinkWatch(self.planned, self.seen[-SETTLED:])
        shorter_s = was.usual_s - now.usual_s
        return was.settled and LONGER * now.usual_s < was.usual_s and was.waited_s - now.waited_s >= EXPLAINED * shorter_s

    @property
    def confirmed(self) -> bool:
        """True: in the latest steps each node received at about its planned rate, and none sent faster than planned, so links
        have their planned rates."""
        latest = self.seen[-SETTLED:]
        ratios = [[PAYLOAD * _carried(latest, node, way) / planned[way] for way in WAYS]
                  for node, planned in enumerate(self.planned)]
        return self.settled and all(up <= MORE and CONFIRMED <= down <= MORE for up, down in ratios)

    def observe(self, row: SeenStep) -> tuple[LinkWatch, tuple[Rates, ...] | None]:
        """Adds a step's reports. Returns the next value, and the new rates if links have changed, otherwise None."""
        if row.step_s <= self.slow_s:
            after = LinkWatch(self.planned, (*self.seen, row)[-(USUAL + SETTLED):])
            raised = after._more()
            return after, None if raised == self.planned else raised
        if self.long_rows >= USUAL and self.long_cost_s >= COST_S:  # the longer steps are now usual, whatever the cause
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
        """Returns the planned rates, raised for nodes that received more in the latest steps. Sent bytes are not evidence,
        since they wait in a queue before the link, for example in a modem."""
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
        """Returns the planned rates, lowered where these slow steps show slower links."""
        return tuple(Rates(*(self._lower(rows, node, way) for way in WAYS)) for node in range(len(self.planned)))

    def _lower(self, rows: Sequence[SeenStep], node: int, way: int) -> float:
        planned_bps = self.planned[node][way]
        bps, usual_bps = _carried(rows, node, way), _carried(self.seen, node, way)
        # Results arrive no faster than the slowest node sends, and busy machines send slowly. A download that is not clearly
        # slower than that shows nothing about its link.
        if way == DOWN and FACTOR * bps >= min(_carried(rows, each, UP) for each in range(len(self.planned))):
            return planned_bps
        if not (0 < FACTOR * PAYLOAD * bps < planned_bps and FACTOR * bps < usual_bps):
            return planned_bps
        busy_s = _median(row.nodes[node][way].share * row.step_s for row in rows)
        longer_s = _median(row.step_s for row in rows) - self.usual_s
        return PAYLOAD * bps if busy_s * (1 - bps / usual_bps) >= EXPLAINED * longer_s else planned_bps


def _carried(rows: Sequence[SeenStep], node: int, way: int) -> float:
    return _median(row.nodes[node][way].bps for row in rows)


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


def spelled(rates: Sequence[Rates], names: Sequence[str] = ()) -> str:
    """Formats the rates of the nodes in Mb/s; one pair if all are equal.

    >>> spelled([Rates(1.734e9, 20e6)])
    '1734/20 Mb/s up/down'
    >>> spelled([Rates(20e6, 100e6), Rates(10e6, 50e6)], ["ann", "ben"])
    'ann 20/100, ben 10/50 Mb/s up/down'
    """
    each = [f"{megabits(r.up_bps)}/{megabits(r.down_bps)}" for r in rates]
    if len(set(each)) == 1:
        return f"{each[0]} Mb/s up/down"
    return ", ".join(" ".join(filter(None, pair)) for pair in zip_longest(names, each, fillvalue="")) + " Mb/s up/down"


def megabits(bps: float) -> str:
    """Formats a rate in Mb/s."""
    return f"{bps / 1e6:.0f}" if bps >= 1e9 else f"{bps / 1e6:.3g}"


LEAST_NBYTES = 16 << 10
"""Minimum number of bytes between first and last reading. Fewer are only control traffic."""
DOWN_PART = 0.25
"""Fraction of the received bytes that arrived at the reported rate or faster. Weighting by bytes instead of time excludes idle
intervals. It also excludes bytes that arrived slowly because a peer was slow, if they are the smaller part."""
UP_PART, UP_S = 0.5, 0.25
"""Fraction of the sent bytes that were sent at the reported rate or faster, over intervals of at least UP_S seconds. Sent bytes
are counted when they enter the queue before the link, in bursts faster than the link, and some are dropped there. Received
bytes have passed the link."""


class Reading(NamedTuple):
    """The byte counters of an interface at one time."""

    at_s: float
    up_nbytes: int
    down_nbytes: int


SOONEST_S = 1e-6
"""Minimum seconds between two readings for which a rate is computed."""


class Direction(NamedTuple):
    """Throughput of one direction of a link."""

    bps: float = 0.0
    """The sustained rate in bit/s. 0: unknown, because almost nothing was carried."""
    share: float = 0.0
    """Fraction of the time for which the link would have been busy at that rate. Near 1: the link was always busy."""


class Throughput(NamedTuple):
    up: Direction
    down: Direction


def throughput(readings: Sequence[Reading]) -> Throughput:
    """Computes the throughput from the first reading to the last: the rate that a link sustained while busy. Readings must be
    in order of time.

    Interface counters include all concurrent transfers (pushes, results, collectives). The rate is a lower bound of the link's
    capacity; callers judge from `share` whether the link limited the transfer.
    """
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


FIRST_S, LAST_S = 15.0, 600.0
"""Seconds between probes without a hint: first and largest interval. The interval doubles after each probe that finds no faster
link."""
HINTED_S = 1.0
"""First interval in seconds between probes after a hint that links are faster."""
COST_MOST = 0.02
"""Largest fraction of the time that probes without a hint may take."""
EXPECTED_S, EXPECTED_TRIPS = 1.5, 28
"""Assumed duration of a probe before the first one is measured: the longer of these seconds and this many round trips."""


class ReprobeSchedule(Record, frozen=True):
    """Schedule of link probes, as an immutable value: each event returns the next schedule.

    A plan for a slow link sends little, so a recovered link is visible only in faster steps. A probe follows soon after such a
    hint. Without a hint, links are probed at growing intervals: first links that were faster before, later also others, since
    their measurement may have been disturbed, unless traffic confirms their rates. A probe stops training on all ranks, so it
    waits until a faster link could have saved as much time as the probe takes.
    """

    since_s: float = math.inf
    """Time of the last measurement or probe; infinite before the first."""
    gap_s: float = FIRST_S
    hinted_s: float = HINTED_S
    cost_s: float = 0.0
    """Duration of the last probe in seconds; 0 before the first."""

    def changed(self, now: float) -> ReprobeSchedule:
        """Returns the schedule after links were measured."""
        return ReprobeSchedule(now, cost_s=self.cost_s)

    def probed(self, now: float, cost_s: float, *, found: bool) -> ReprobeSchedule:
        """Returns the schedule after a probe of `cost_s` seconds. `found`: True if the link has become faster."""
        if found:
            return ReprobeSchedule(now, cost_s=cost_s)
        return ReprobeSchedule(now, min(2 * self.gap_s, LAST_S), min(4 * self.hinted_s, LAST_S), cost_s)

    def due(self, now: float, *, hinted: bool, lost: bool, to_win: float, round_trip_s: float = 0.0) -> bool:
        """True: a probe is due. `hinted`: steps have become faster. `lost`: links were once faster than the presently known
        rates. `to_win`: fraction of the time that infinitely fast links could save."""
        for_s, cost_s = now - self.since_s, self.cost_s or max(EXPECTED_S, EXPECTED_TRIPS * round_trip_s)
        gap_s = max(self.gap_s, (self.cost_s if lost else cost_s) / COST_MOST)
        return for_s * to_win >= cost_s and for_s >= (min(gap_s, self.hinted_s) if hinted else gap_s)


PERIOD_S = 0.05
"""Seconds between two readings: about the length of a step's burst on a fast link. A reading takes about 30 us, or 0.1 % of a
core."""
LATE_S = 0.01
"""A reading that took this many seconds is dropped: this thread was interrupted, so it is not known when the counts were valid.
"""
FASTEST_S = 0.15
"""Seconds over which the highest rate is computed, so that packets which the network has held back and then delivers together
do not count as the link's rate."""
KEPT = 1200
"""Number of readings kept: a minute of readings, longer than the time between two calls of `look`."""
COUNTERS = Path("/proc/net/dev")

Counters = Callable[[], tuple[int, int]]
"""A function that returns (bytes sent, bytes received) so far."""


class InterfaceCounters:
    """A thread that reads the byte counters of a network interface, from Linux's /proc, until close()."""

    def __init__(self, counters: Counters, period_s: float = PERIOD_S) -> None:
        self._counters, self._period_s = counters, period_s
        self._readings: deque[Reading] = deque(maxlen=KEPT)
        self._over = threading.Event()
        self._read()
        self._thread = threading.Thread(target=self._loop, name="commlayer-meter", daemon=True)
        self._thread.start()

    @property
    def since_s(self) -> float:
        """Length in seconds of the interval that the next `look` covers."""
        return time.monotonic() - self._readings[0].at_s if self._readings else 0.0

    def look(self) -> Throughput:
        """Returns the throughput since the last call."""
        self._read()
        readings = []
        while len(self._readings) > 1:
            readings.append(self._readings.popleft())
        return throughput([*readings, *list(self._readings)[:1]])

    def fastest_down_bps(self) -> float:
        """Returns the highest rate at which the interface has received for at least FASTEST_S since the last `look`. The link
        carries that, however long this machine's threads or the sender took. Sent bytes may only have entered a queue."""
        readings, fastest_bps, first = list(self._readings), 0.0, 0
        for last in readings:
            while last.at_s - readings[first].at_s >= FASTEST_S:
                begin = readings[first]
                fastest_bps = max(fastest_bps, 8 * (last.down_nbytes - begin.down_nbytes) / (last.at_s - begin.at_s))
                first += 1
        return fastest_bps

    def _read(self) -> None:
        try:
            begin_s, counts = time.monotonic(), self._counters()
            if time.monotonic() - begin_s < LATE_S or not self._readings:
                self._readings.append(Reading(begin_s, *counts))
        except (OSError, ValueError):
            pass  # the interface has disappeared; a missing reading has no effect

    def _loop(self) -> None:
        while not self._over.wait(self._period_s):
            self._read()

    def close(self) -> None:
        self._over.set()
        self._thread.join(1.0)


def counters_of(interface: str) -> Counters | None:
    """Returns a function that reads the byte counters of that network interface. None without an interface, or if the system is
    not Linux."""
    return partial(_counters, interface) if interface and COUNTERS.exists() else None


def _counters(name: str) -> tuple[int, int]:
    for line in COUNTERS.read_text().splitlines():
        head, _, rest = line.partition(":")
        if head.strip() == name:
            words = rest.split()
            return int(words[8]), int(words[0])
    raise InvalidInput("E-ARGUMENT", f"{COUNTERS} has no interface {name}")
