"""Reads the byte counters of a network interface, and computes the rate that the link has sustained."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from commlayer.errors import InvalidInput

LEAST_NBYTES = 16 << 10
"""Minimum number of bytes between first and last reading. Fewer are only control traffic."""
DOWN_PART = 0.25
"""Fraction of the received bytes that arrived at the reported rate or faster. Weighting by bytes instead of time excludes idle
intervals. The weighting also excludes bytes that arrived slowly because a peer was slow, if they are the smaller part."""
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
    return Throughput(_direction(_joined(up), UP_PART), _direction(down, DOWN_PART))


def _joined(spans: list[tuple[float, int]]) -> list[tuple[float, int]]:
    joined, seconds, nbytes = list[tuple[float, int]](), 0.0, 0
    for more_s, more_nbytes in spans:
        seconds, nbytes = seconds + more_s, nbytes + more_nbytes
        if seconds >= UP_S:
            joined.append((seconds, nbytes))
            seconds, nbytes = 0.0, 0
    return [*joined, (seconds, nbytes)] if seconds > 0 else joined


def _direction(spans: list[tuple[float, int]], part: float) -> Direction:
    total = sum(nbytes for _, nbytes in spans)
    if total < LEAST_NBYTES:
        return Direction()
    rates = sorted(((8 * nbytes / seconds, nbytes) for seconds, nbytes in spans), reverse=True)
    bps = next(rate for (rate, _), faster in zip(rates, accumulate(nbytes for _, nbytes in rates), strict=True)
               if faster >= part * total)
    return Direction(bps, min(1.0, 8 * total / sum(seconds for seconds, _ in spans) / bps))


PERIOD_S = 0.05
"""Seconds between two readings: about the length of a step's burst on a fast link. A reading takes about 30 us, or 0.1 % of a
core."""
LATE_S = 0.01
"""A reading that took this many seconds is dropped: this thread was interrupted, so the time of the counts is unknown.
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
        self.read()
        self._thread = threading.Thread(target=self._loop, name="commlayer-meter", daemon=True)
        self._thread.start()

    @property
    def since_s(self) -> float:
        """Length in seconds of the interval that the next `look` covers."""
        return time.monotonic() - self._readings[0].at_s if self._readings else 0.0

    def look(self) -> Throughput:
        """Returns the throughput since the last call."""
        self.read()
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

    def read(self) -> None:
        """Reads the counters once, as the thread does every `period_s`."""
        try:
            begin_s, counts = time.monotonic(), self._counters()
            if time.monotonic() - begin_s < LATE_S or not self._readings:
                self._readings.append(Reading(begin_s, *counts))
        except (OSError, ValueError):
            pass  # the interface has disappeared; a missing reading has no effect

    def _loop(self) -> None:
        while not self._over.wait(self._period_s):
            self.read()

    def close(self) -> None:
        self._over.set()
        self._thread.join(1.0)


def counter_reader(interface: str) -> Counters | None:
    """Returns a function that reads the byte counters of that network interface. Returns None if no interface is known, or if
    the system is not Linux."""
    return partial(_counters, interface) if interface and COUNTERS.exists() else None


def _counters(name: str) -> tuple[int, int]:
    for line in COUNTERS.read_text().splitlines():
        head, _, rest = line.partition(":")
        if head.strip() == name:
            words = rest.split()
            return int(words[8]), int(words[0])
    raise InvalidInput("E-ARGUMENT", f"{COUNTERS} has no interface {name}")
