"""Pacing of connections: sets the kernel's pacing rate to a share of the link, and to at most the credit.

TCP connections that start together each send at the rate that they last had alone, and overflow the link's queue. With four
nodes pushing dense gradients to each other, a third of the time went to retransmissions.

BBR starts at 2.89 times the rate it knows, until a round with enough data brings no increase. A credit leaves no round enough
data, so BBR kept that factor. Over 100 Mb/s and 150 ms its bursts lost a quarter of the rate in a third of all runs.
"""

from __future__ import annotations

import socket
import sys
import threading
import weakref

from commlayer.transport.credit import waiting_nbytes

MUCH_NBYTES = 16 << 10
"""Bytes in the kernel or in flight above which a connection counts as busy; any queue holds less."""
SLACK = 1.1
"""Rates are measured over about a second: a few losses are better than a link that is never filled."""
SO_MAX_PACING_RATE = 47
"""A Linux constant without a name in Python."""
UNLIMITED, LEAST, MOST = -1, 1 << 12, 2**31 - 1
"""Bytes per second, as the kernel takes them; 0 would stop a connection."""
SLOW_BPS = 20e6
"""On slower links connections switch away from BBR. Every ten seconds BBR probes for the shortest round trip; a burst here
lasts few round trips, over which BBR forgets the rate and takes seconds to recover."""
LEFT, TAKEN = (b"bbr",), (b"cubic", b"reno")
"""Congestion controls, as the kernel spells them; of TAKEN the first that this process may use."""
NAME_NBYTES = 16


class Pacer:
    """Paces the connections of one transport. Does nothing before `follow` sets a rate."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bps = 0.0
        self._calmed = weakref.WeakSet[socket.socket]()
        self._shares: dict[socket.socket, int] = {}
        self._bounds = weakref.WeakKeyDictionary[socket.socket, int]()
        self._told = weakref.WeakKeyDictionary[socket.socket, int]()

    def follow(self, bps: float) -> None:
        """Sets the link's rate; 0 means unknown."""
        with self._lock:
            self._bps = bps if sys.platform == "linux" else 0.0
            for sock in list(self._shares):
                self._lift(sock)

    def sends(self, sock: socket.socket) -> None:
        """Called before a frame is sent."""
        if 0.0 < self._bps < SLOW_BPS and sock not in self._calmed:
            self._calmed.add(sock)
            _calm(sock)

    def begins(self, sock: socket.socket) -> None:
        """Called before a large frame is sent: divides the link among the busy connections."""
        if not self._bps:
            return
        with self._lock:
            self._shares.setdefault(sock, UNLIMITED)
            busy = [one for one in self._shares if one is sock or waiting_nbytes(one) > MUCH_NBYTES]
            share = _bytes_s(SLACK * self._bps / 8 / len(busy))
            for one in busy:
                self._shares[one] = share
                self._tell(one)

    def bound(self, sock: socket.socket, nbytes_s: float) -> None:
        """Sets the rate that the connection's credit allows; 0 means no limit."""
        if sys.platform == "linux":
            with self._lock:
                self._bounds[sock] = _bytes_s(nbytes_s) if nbytes_s else UNLIMITED
                self._tell(sock)

    def lift(self, sock: socket.socket) -> None:
        """Ends the link's share of a connection: it sends a probe that measures the link, or it is over."""
        if sock in self._shares:
            with self._lock:
                self._lift(sock)

    def _lift(self, sock: socket.socket) -> None:
        self._shares.pop(sock, None)
        self._tell(sock)

    def _tell(self, sock: socket.socket) -> None:
        limits = [one for one in (self._shares.get(sock, UNLIMITED), self._bounds.get(sock, UNLIMITED)) if one != UNLIMITED]
        limit = min(limits, default=UNLIMITED)
        if self._told.get(sock, UNLIMITED) == limit:
            return
        try:
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, limit)
        except OSError:
            pass  # the connection is ending
        self._told[sock] = limit


def _bytes_s(rate: float) -> int:
    return min(MOST, max(LEAST, int(rate)))


def _calm(sock: socket.socket) -> None:
    """Switches the connection from BBR permanently."""
    for name in TAKEN:
        try:
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, NAME_NBYTES).rstrip(b"\0") not in LEFT:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except OSError:
            pass  # not allowed for this process, or the connection is ending
