"""Limits that several sources share, so that no source can use up what the others need.

A source is an address or the name in a certificate. Limits are derived from the largest job: 64 workers, all behind one address
or with one certificate. It has at most 5 x 64 = 320 connections to one port: of each worker, its heartbeat process, its store
client and its data stream, and of each home's launcher.
"""

from __future__ import annotations

import ipaddress
import math
import threading
import time
from collections import Counter
from collections.abc import Callable

from commlayer.transport.connection import shut_down
from commlayer.transport.protocol import ByteChannel

LIMIT = 1536
"""Default limit of a FairShare, for calls. One source alone may have half of them unanswered: 12 for each of 64 workers, of
which a large collective takes 8 (site_process_group.PARTS_IN_FLIGHT). Clients repeat what is refused."""
MAX_AGE = 700.0
"""Number of time constants after which all is forgotten; exp() of more overflows."""
REBASE = 100.0
"""Growth of the unit of a limit that forgets, after which all amounts are scaled back and small ones are dropped."""


class FairShare:
    """A limited amount of which several sources take units. No source may use more than what is free. One source alone thus
    gets half of the limit, and each of n sources gets 1 / (n + 1) of it. The same amount stays free for a new source.
    Thread-safe.

    `forget_s`: what was taken is forgotten exponentially with this time constant, so rates are limited. At most `limit` sources
    are kept, or a few times as many if they are forgotten.
    """

    def __init__(self, limit: float = LIMIT, forget_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._forget_s, self._clock = limit, forget_s, clock
        self._lock = threading.Lock()
        self._begin_s, self._total = clock(), 0.0
        # The unit grows exponentially with time. An amount keeps the size that it was taken with, so it counts less and less
        # without an update.
        self._used: dict[str, float] = {}

    @property
    def sources(self) -> int:
        """Number of sources that are kept."""
        with self._lock:
            return len(self._used)

    def take(self, source: str) -> bool:
        """Takes a unit for that source. Returns False, and takes nothing, if the source has used its share."""
        with self._lock:
            unit = self._unit()
            used = self._used.get(source, 0.0) + unit
            if used > unit * self._limit - self._total:
                return False
            self._used[source] = used
            self._total += unit
            return True

    def give(self, source: str) -> None:
        """Returns a unit that `take` has taken."""
        with self._lock:
            unit = self._unit()
            used = self._used.pop(source, 0.0)
            if used > unit:
                self._used[source] = used - unit
            self._total -= min(used, unit)

    def _unit(self) -> float:
        now = self._clock()
        age = (now - self._begin_s) / self._forget_s
        unit = math.exp(min(age, MAX_AGE))
        if unit < REBASE:
            return unit
        self._used = {source: used / unit for source, used in self._used.items() if 2 * used > unit}
        self._begin_s, self._total = now, sum(self._used.values())
        return 1.0


class MinuteCounts:
    """Counts the events of each key per minute. A minute begins with a key's first event. Keeps the `most` keys with the newest
    events. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._counts: dict[str, tuple[float, int]] = {}
        """Maps a key to the begin of its last minute and the number of events in that minute."""

    def count(self, key: str, now: float) -> int:
        with self._lock:
            begin, count = self._counts.get(key, (now, 0))
            return count if now - begin < 60 else 0

    def add(self, key: str, now: float) -> tuple[int, int]:
        """Counts an event. Returns the number of the key's earlier events in this minute. If this is the minute's first event,
        also returns the number of events in the last minute that had any; otherwise 0."""
        with self._lock:
            begin, count = self._counts.pop(key, (now, 0))
            over = now - begin >= 60
            self._counts[key] = (now, 1) if over else (begin, count + 1)
            while len(self._counts) > self._most:
                del self._counts[next(iter(self._counts))]
        return (0, count) if over else (count, 0)


class ConnectionTable:
    """Open connections with their sources. Their number is limited: a new connection that finds no space takes the place of the
    oldest connection of the source that has most, which is ended. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self._lock, self._closed = most, threading.Lock(), False
        self._sources: dict[ByteChannel, str] = {}  # oldest first

    def __contains__(self, sock: ByteChannel) -> bool:
        with self._lock:
            return sock in self._sources

    def add(self, sock: ByteChannel, source: str) -> bool:
        """Adds a connection. Returns False after close()."""
        with self._lock:
            if self._closed:
                return False
            if len(self._sources) >= self._most:
                counts = Counter(self._sources.values())
                most = max(counts.values())
                oldest = next(other for other, its in self._sources.items() if counts[its] == most)
                del self._sources[oldest]
                shut_down(oldest)
            self._sources[sock] = source
            return True

    def replace(self, sock: ByteChannel, other: ByteChannel) -> None:
        """Puts another object for the same connection in the place of `sock`, which keeps its age."""
        with self._lock:
            self._sources = {other if one is sock else one: source for one, source in self._sources.items()}

    def remove(self, sock: ByteChannel) -> str:
        """Removes a connection and returns its source; "" if it was removed before."""
        with self._lock:
            return self._sources.pop(sock, "")

    def close(self) -> None:
        """Ends all connections; later ones are not added."""
        with self._lock:
            self._closed = True
            for sock in self._sources:
                shut_down(sock)
            self._sources.clear()


def address_source(host: str) -> str:
    """Returns the source of a connection from this address: an IPv4 address, or the /64 of an IPv6 address, since one machine
    has a whole /64."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))
