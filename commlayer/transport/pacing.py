"""Says how fast a connection may send: its part of the link, and no more than its credit. Knows sockets; no frames, no peers.

TCP connections that start together each send at the rate that they last had alone. What the link's queue cannot hold is lost,
and sending again took a third of the time where four nodes pushed dense gradients to each other.

BBR begins at 2.89 times the rate that it knows, until a round with enough to send brings no more. Behind a credit no round has
enough: there it stayed, and over 100 Mb/s and 150 ms a quarter of the rate was lost to its bursts in every third run.
"""

from __future__ import annotations

import socket
import sys
import threading
import weakref

from commlayer.transport.credit import waiting_nbytes

MUCH_NBYTES = 16 << 10
"""Waiting in the kernel or on its way. Less fits any queue."""
SLACK = 1.1
"""Rates are measured in a second or so: rather a little lost than a link that is never filled."""
SO_MAX_PACING_RATE = 47
"""Linux; Python has no name for it."""
UNLIMITED, LEAST, MOST = -1, 1 << 12, 2**31 - 1
"""Bytes a second, as the kernel takes them; 0 would stop a connection."""
SLOW_BPS = 20e6
"""On slower links connections leave BBR. A burst there is few round trips long. Whenever BBR has looked for the shortest round
trip, every ten seconds, it has forgotten the link's rate over such bursts, and takes seconds to find it."""
LEFT, TAKEN = (b"bbr",), (b"cubic", b"reno")
"""Congestion controls, as the kernel spells them; of the latter the first that this process may use."""
NAME_NBYTES = 16


class Pacer:
    """Of the connections of one transport. Does nothing until it is told a rate."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bps = 0.0
        self._calmed = weakref.WeakSet[socket.socket]()
        self._shares: dict[socket.socket, int] = {}
        self._bounds = weakref.WeakKeyDictionary[socket.socket, int]()
        self._told = weakref.WeakKeyDictionary[socket.socket, int]()

    def follow(self, bps: float) -> None:
        """From now on the link carries that; 0: nobody knows."""
        with self._lock:
            self._bps = bps if sys.platform == "linux" else 0.0
            for sock in list(self._shares):
                self._lift(sock)

    def sends(self, sock: socket.socket) -> None:
        """Something goes out there now."""
        if 0.0 < self._bps < SLOW_BPS and sock not in self._calmed:
            self._calmed.add(sock)
            _calm(sock)

    def begins(self, sock: socket.socket) -> None:
        """Much goes out there now."""
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
        """Its credit lets that through in a second; 0: it has no limit."""
        if sys.platform == "linux":
            with self._lock:
                self._bounds[sock] = _bytes_s(nbytes_s) if nbytes_s else UNLIMITED
                self._tell(sock)

    def lift(self, sock: socket.socket) -> None:
        """What goes out there now finds out how fast the link is; or the connection is over."""
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
    """For good."""
    for name in TAKEN:
        try:
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, NAME_NBYTES).rstrip(b"\0") not in LEFT:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except OSError:
            pass  # it may not be used here, or the connection is ending
