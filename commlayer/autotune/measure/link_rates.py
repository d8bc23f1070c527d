"""How fast this machine's link is, one way at a time: chunks to several servers or from them. Knows no sockets and no plan.

What tells a rate is how fast chunks come in once connections have opened their windows, so the fastest stretches count.
Several servers at once, because one's own link may be slower than the one that is asked about.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from commlayer.errors import DeadlineExceeded
from commlayer.transport.protocol import SERVER_BASE, peer_name

PINGS = 4
ALIKE = 1.1
"""Two pings that differ by no more than this factor are enough: threads of busy machines answer late, and not twice alike."""
FIRST_NBYTES = 32 << 10
"""Under way at first, each way; of a link of 1 Mb/s a quarter of a second."""
CHUNKS = 8
"""Of what may be under way to a server. More would cost more processor time than bytes on fast links."""
LEAST_NBYTES, MOST_NBYTES = 4 << 10, 1 << 20
"""Of a chunk. Smaller ones would cost more processor time than a link of some Mb/s."""
LEAST_ROUND_TRIP_S = 0.02
"""However near servers are, threads of busy machines answer no sooner; so what went through in it is recent, too."""
RECENT = 3
"""Round trips: what went through in them is recent, for with full queues a chunk takes as long."""
STRETCH = 0.6
"""Of the time: how long a rate is taken over."""
HEADROOM = 1.5
"""Times the measured rate that a node may send at. A short probe may find too little, and a pace below the link's would make
that true; one that is too high costs a few lost segments."""
NEARLY_ALL = 0.9
"""So many stretches are slower than the rate: windows open in them, or a thread comes late. The fastest may hold what had piled
up before such a thread."""


UP, DOWN = 0, 1
"""Ways: to servers, and from them."""


class Arrival(NamedTuple):
    """A chunk went through."""

    server: int
    way: int
    nbytes: int
    at_s: float


class Network(Protocol):
    """Where chunks go."""

    def ask(self, server: int, way: int, nbytes: int) -> None:
        """Sends so many bytes to the server, or has them sent from there."""

    def next(self, patience_s: float) -> Arrival:
        """The next that has gone through, or the error of the one that cannot."""

    def now(self) -> float: ...


def round_trip(network: Network, server: int, patience_s: float) -> float:
    """Seconds, when nothing else is on the way."""
    found = [_ping(network, server, patience_s)]
    while len(found) < PINGS:
        found.append(_ping(network, server, patience_s))
        first, second = sorted(found)[:2]
        if second <= ALIKE * first:
            break
    return min(found)


def rate(
    network: Network, way: int, servers: Sequence[int], round_trip_s: float, budget_s: float, patience_s: float,
    *, expected_bps: float = 0.0,
) -> float:
    """bits per second one way (see Arrival), in about that time and what is still under way then."""
    # What is expected may be on its way from the start.
    first_nbytes = max(FIRST_NBYTES, int(expected_bps / 8 * round_trip_s))
    return _Way(way, servers, round_trip_s, first_nbytes).run(network, budget_s, patience_s)


def _ping(network: Network, server: int, patience_s: float) -> float:
    begin = network.now()
    network.ask(server, UP, 1)
    network.next(patience_s)
    return network.now() - begin


class _Way:
    """One direction: how much is under way to whom, and what has gone through when."""

    def __init__(self, way: int, servers: Sequence[int], round_trip_s: float, first_nbytes: int) -> None:
        self._way, self._first_nbytes = way, first_nbytes
        self._recent_s = max(RECENT * round_trip_s, LEAST_ROUND_TRIP_S)
        self._to = dict.fromkeys(servers, 0)
        self._seen: list[Arrival] = []
        self._recent = 0
        """The first arrival of late."""
        self._recent_nbytes = 0

    def run(self, network: Network, budget_s: float, patience_s: float) -> float:
        """The rate."""
        until = network.now() + budget_s
        while True:
            now = network.now()
            if now < until:
                self._fill(network, now)
            if not any(self._to.values()):
                return self._rate_bps(STRETCH * budget_s)
            self._arrived(network.next(patience_s))

    def _fill(self, network: Network, now: float) -> None:
        """Twice what went through lately: windows open faster than the connections' own."""
        while self._recent < len(self._seen) and self._seen[self._recent].at_s < now - self._recent_s:
            self._recent_nbytes -= self._seen[self._recent].nbytes
            self._recent += 1
        if self._recent:  # by now it is known what the link carries, which may be less than was expected
            self._first_nbytes = FIRST_NBYTES
        room = min(max((self._first_nbytes + 2 * self._recent_nbytes) // len(self._to), LEAST_NBYTES), CHUNKS * MOST_NBYTES)
        nbytes = min(max(room // CHUNKS, LEAST_NBYTES), MOST_NBYTES)
        for server in self._to:
            while self._to[server] + nbytes <= room:
                self._to[server] += nbytes
                network.ask(server, self._way, nbytes)

    def _arrived(self, arrival: Arrival) -> None:
        self._to[arrival.server] -= arrival.nbytes
        self._seen.append(arrival)
        self._recent_nbytes += arrival.nbytes

    def _rate_bps(self, stretch_s: float) -> float:
        """Of stretches that long; all in one if it was all over sooner."""
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


class Asking:
    """A Network over real servers. `ask(server, up bytes, down bytes, done)` calls done(error or None) from any thread."""

    def __init__(self, ask: Callable[[int, int, int, Callable[[Exception | None], None]], None]) -> None:
        self._ask = ask
        self._waiting: list[int] = []
        self._arrived: queue.SimpleQueue[tuple[Arrival, Exception | None]] = queue.SimpleQueue()

    def ask(self, server: int, way: int, nbytes: int) -> None:
        def done(error: Exception | None) -> None:
            self._arrived.put((Arrival(server, way, nbytes, time.perf_counter()), error))

        self._waiting.append(server)
        self._ask(server, *((1, nbytes) if way == DOWN else (nbytes, 1)), done)

    def next(self, patience_s: float) -> Arrival:
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
