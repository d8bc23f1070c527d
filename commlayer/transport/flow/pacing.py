"""Pacing of connections: sets the kernel's pacing rate to a share of the link, and to at most the credit.

TCP connections that start together each send at the rate that they last had alone, and overflow the link's queue. With four
nodes pushing dense gradients to each other, a third of the time went to retransmissions.

BBR starts at 2.89 times the rate it knows, until a round with enough data brings no increase. A credit leaves no round enough
data, so BBR kept that factor. Over 100 Mb/s and 150 ms its bursts lost a quarter of the rate in a third of all runs.
"""

from __future__ import annotations

import math
import socket
import sys
import threading
import weakref

from commlayer.transport.flow.credit import MAX_PART_NBYTES, MIN_PART_NBYTES, PART_S, waiting_nbytes

BUSY_NBYTES = 16 << 10
"""Bytes in the kernel or in flight above which a connection counts as busy and gets a share of the link."""
SLACK = 1.65
"""Factor by which paced connections together exceed the link's measured rate. A short probe may measure too low a rate, which a
limit below the link's rate would confirm. Too high a limit costs a few lost segments."""
SO_MAX_PACING_RATE = 47
"""Linux socket option, which has no name in Python."""
UNLIMITED, MIN_RATE, MAX_RATE = -1, 1 << 12, 2**31 - 1
"""Pacing rates in bytes per second, as the kernel accepts them; 0 would stop a connection."""


class Pacer:
    """Sets the kernel's pacing rate of a transport's connections, which share the link. Until `follow` is called, the rate is
    not shared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bps = 0.0
        self._shares: dict[socket.socket, int] = {}
        self._bounds = weakref.WeakKeyDictionary[socket.socket, int]()
        self._applied = weakref.WeakKeyDictionary[socket.socket, int]()

    @property
    def part_nbytes(self) -> int:
        """Bytes that the link sends in PART_S; MAX_PART_NBYTES if its rate is unknown."""
        return max(MIN_PART_NBYTES, int(self._bps / 8 * PART_S)) if self._bps else MAX_PART_NBYTES

    def follow(self, bps: float) -> None:
        """Sets the measured upload rate of this machine's link in bit/s, which connections share. 0: unknown, so connections
        are not limited to a share."""
        with self._lock:
            self._bps = bps if sys.platform == "linux" else 0.0
            for sock in list(self._shares):
                self._lift(sock)

    def begin_share(self, sock: socket.socket) -> None:
        """Divides the link's rate equally among the busy connections. Call this before a large frame is sent."""
        if not self._bps:
            return
        with self._lock:
            self._shares.setdefault(sock, UNLIMITED)
            busy = [one for one in self._shares if one is sock or waiting_nbytes(one) > BUSY_NBYTES]
            share = _bytes_s(SLACK * self._bps / 8 / len(busy))
            for one in busy:
                self._shares[one] = share
                self._apply(one)

    def share(self, sock: socket.socket) -> float:
        """Returns the connection's share of the link in bytes per second; infinite if it has none."""
        share = self._shares.get(sock, UNLIMITED)
        return math.inf if share == UNLIMITED else share

    def bound(self, sock: socket.socket, nbytes_s: float) -> None:
        """Sets the rate in bytes per second that the connection's credit allows; 0: no limit."""
        if sys.platform == "linux":
            with self._lock:
                self._bounds[sock] = _bytes_s(nbytes_s) if nbytes_s else UNLIMITED
                self._apply(sock)

    def end_share(self, sock: socket.socket) -> None:
        """Ends the connection's share of the link's rate. Call this before a probe that measures the link, and when the
        connection has ended."""
        if sock in self._shares:
            with self._lock:
                self._lift(sock)

    def _lift(self, sock: socket.socket) -> None:
        self._shares.pop(sock, None)
        self._apply(sock)

    def _apply(self, sock: socket.socket) -> None:
        limits = [one for one in (self._shares.get(sock, UNLIMITED), self._bounds.get(sock, UNLIMITED)) if one != UNLIMITED]
        limit = min(limits, default=UNLIMITED)
        if self._applied.get(sock, UNLIMITED) == limit:
            return
        try:
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, limit)
        except OSError:
            pass  # the connection is ending
        self._applied[sock] = limit


def _bytes_s(rate: float) -> int:
    return min(MAX_RATE, max(MIN_RATE, int(rate)))
