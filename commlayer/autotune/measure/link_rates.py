"""Link rate measurement: sends chunks to several servers, or requests chunks from them, in one direction at a time.

The rate is that of the fastest intervals, after connections have opened their windows. Several servers are used at once,
because one server's own link may be slower than the measured one.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from commlayer.errors import DeadlineExceeded
from commlayer.transport.protocol import SERVER_BASE, peer_name

PINGS = 4
ALIKE = 1.1
"""The measurement ends after two round trips that differ by at most this factor. Threads of busy machines answer late, and
rarely with equal delays."""
FIRST_NBYTES = 32 << 10
"""Initial bytes in flight per direction. A link of 1 Mb/s needs a quarter of a second for them."""
CHUNKS = 8
"""Chunks in flight per server. More would cost more CPU time than the transfer on fast links."""
LEAST_NBYTES, MOST_NBYTES = 4 << 10, 1 << 20
"""Smallest and largest size of a chunk. Smaller chunks would cost more CPU time than the transfer over a link of a few Mb/s."""
LEAST_ROUND_TRIP_S = 0.02
"""Lower limit of the round trip that sets how many bytes are in flight: threads of busy machines do not answer sooner."""
RECENT = 3
"""Chunks that arrived within this many round trips set how many bytes are in flight. With full queues a chunk takes that
long."""
STRETCH = 1 / 3
"""The rate is taken over intervals of this fraction of the measurement's time, so some begin when TCP windows are open."""
NEARLY_ALL = 0.9
"""Quantile of the interval rates that counts as the link's rate. In slower intervals TCP windows opened or threads were late;
the fastest may contain data that was queued before a late thread."""


UP, DOWN = 0, 1
"""Directions of a measurement: to servers, and from servers."""


class ChunkArrival(NamedTuple):
    """A chunk that has been transferred, and when."""

    server: int
    nbytes: int
    at_s: float


def round_trip(network: RequestNetwork, server: int, patience_s: float) -> float:
    """Returns the shortest round trip to a server in seconds, without other traffic of the probe."""
    times_s = [_ping(network, server, patience_s)]
    while len(times_s) < PINGS:
        times_s.append(_ping(network, server, patience_s))
        first, second = sorted(times_s)[:2]
        if second <= ALIKE * first:
            break
    return min(times_s)


def rate(
    network: RequestNetwork, direction: int, servers: Sequence[int], round_trip_s: float, budget_s: float, patience_s: float,
    *, expected_bps: float = 0.0,
) -> float:
    """Measures the rate in one direction (UP or DOWN) in bit/s. Takes about `budget_s`, plus the time of chunks in flight."""
    # The first request is as large as the amount that the link is expected to have in flight.
    first_nbytes = max(FIRST_NBYTES, int(expected_bps / 8 * round_trip_s))
    return _DirectionProbe(direction, servers, round_trip_s, first_nbytes).run(network, budget_s, patience_s)


def _ping(network: RequestNetwork, server: int, patience_s: float) -> float:
    begin = network.now()
    network.ask(server, UP, 1)
    network.next(patience_s)
    return network.now() - begin


class _DirectionProbe:
    """A measurement in one direction: bytes in flight per server, and transferred chunks."""

    def __init__(self, direction: int, servers: Sequence[int], round_trip_s: float, first_nbytes: int) -> None:
        self._direction, self._first_nbytes = direction, first_nbytes
        self._recent_s = max(RECENT * round_trip_s, LEAST_ROUND_TRIP_S)
        self._to = dict.fromkeys(servers, 0)
        self._seen: list[ChunkArrival] = []
        self._recent = 0
        """Index of the first chunk in `_seen` that arrived within the last RECENT round trips."""
        self._recent_nbytes = dict.fromkeys(servers, 0)

    def run(self, network: RequestNetwork, budget_s: float, patience_s: float) -> float:
        until = network.now() + budget_s
        while True:
            now = network.now()
            if now < until:
                self._fill(network, now)
            if not any(self._to.values()):
                return self._rate_bps(STRETCH * budget_s)
            self._arrived(network.next(patience_s))

    def _fill(self, network: RequestNetwork, now: float) -> None:
        """Requests chunks until twice the bytes that arrived within the last RECENT round trips are in flight. That grows
        faster than TCP windows. Of each server at most four times its own bytes of that time are in flight, and a part of the
        first bytes, so that a slow server does not prolong the measurement."""
        while self._recent < len(self._seen) and (old := self._seen[self._recent]).at_s < now - self._recent_s:
            self._recent_nbytes[old.server] -= old.nbytes
            self._recent += 1
        if self._recent:  # the link's rate is known now and may be lower than expected
            self._first_nbytes = FIRST_NBYTES
        first_nbytes = self._first_nbytes // len(self._to)
        equal = first_nbytes + 2 * sum(self._recent_nbytes.values()) // len(self._to)
        for server in self._to:
            room = min(max(min(equal, first_nbytes + 4 * self._recent_nbytes[server]), LEAST_NBYTES), CHUNKS * MOST_NBYTES)
            nbytes = min(max(room // CHUNKS, LEAST_NBYTES), MOST_NBYTES)
            while self._to[server] + nbytes <= room:
                self._to[server] += nbytes
                network.ask(server, self._direction, nbytes)

    def _arrived(self, arrival: ChunkArrival) -> None:
        self._to[arrival.server] -= arrival.nbytes
        self._seen.append(arrival)
        self._recent_nbytes[arrival.server] += arrival.nbytes

    def _rate_bps(self, stretch_s: float) -> float:
        """Returns the NEARLY_ALL quantile of the rates over intervals of `stretch_s`; the rate of the only interval if the
        transfer was shorter."""
        seen, end, nbytes = self._seen, 0, 0
        rates: list[float] = []
        for first in range(len(seen)):
            while end < len(seen) - 1 and (end <= first or seen[end].at_s - seen[first].at_s < stretch_s):
                end += 1
                nbytes += seen[end].nbytes
            took_s = seen[end].at_s - seen[first].at_s
            if took_s < stretch_s and rates:
                break
            rates.append(8 * nbytes / max(took_s, 1e-9))
            nbytes -= seen[first + 1].nbytes if first + 1 < len(seen) else 0
        return sorted(rates)[int(NEARLY_ALL * (len(rates) - 1))]


class RequestNetwork:
    """Sends chunks to servers and requests chunks from them. `ask(server, up bytes, down bytes, done)` calls done(error or
    None) from any thread."""

    def __init__(self, ask: Callable[[int, int, int, Callable[[Exception | None], None]], None]) -> None:
        self._ask = ask
        self._waiting: list[int] = []
        self._arrived: queue.SimpleQueue[tuple[ChunkArrival, Exception | None]] = queue.SimpleQueue()

    def ask(self, server: int, direction: int, nbytes: int) -> None:
        """Sends this many bytes to the server (UP), or requests this many from it (DOWN)."""

        def done(error: Exception | None) -> None:
            self._arrived.put((ChunkArrival(server, nbytes, time.perf_counter()), error))

        self._waiting.append(server)
        self._ask(server, *((1, nbytes) if direction == DOWN else (nbytes, 1)), done)

    def next(self, patience_s: float) -> ChunkArrival:
        """Waits for the next transferred chunk and returns it, or raises the error of its transfer."""
        try:
            arrival, error = self._arrived.get(timeout=patience_s)
        except queue.Empty:
            raise DeadlineExceeded(f"a probe of the link has had no answer for {patience_s:.0f} s",
                                   peer=peer_name(SERVER_BASE + self._waiting[0])) from None
        self._waiting.remove(arrival.server)
        if error is not None:
            raise error
        return arrival

    def now(self) -> float:
        return time.perf_counter()
