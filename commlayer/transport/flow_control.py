"""Flow control of a connection: limits the bytes in flight to slightly more than rate times round trip.

More urgent frames cannot overtake bytes that were handed to the kernel. A long queue at the link also delays all other
connections, including heartbeats.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
import threading
import time
import weakref
from collections import deque
from typing import NamedTuple, Protocol, cast

from commlayer.transport.protocol import ByteChannel

PART_S = 0.004
"""Seconds that the link should need for one part of a body. An urgent frame waits for at most about one part."""
MIN_PART_NBYTES, FIRST_PART_NBYTES, MAX_PART_NBYTES = 8 << 10, 64 << 10, 4 << 20
"""Size of a part of a large body, in bytes: minimum, initial, maximum."""
WINDOW_S = 0.05
"""Shortest interval between two readings of tcp_info, in seconds. The interval is at least two round trips."""
WINDOWS = 16
"""The estimated rate is the highest of the last readings without a pause, this many."""
GROWTH, SETTLE_READINGS = 1.25, 3
"""Bytes in flight are not limited while the rate grows: until SETTLE_READINGS readings without a pause are below GROWTH times
the highest rate."""
QUEUE_S, MAX_QUEUE_S = 0.01, 0.1
"""Minimum and maximum of the queue: bytes in flight beyond rate times round trip, in seconds at the estimated rate. The queue
grows if the sender thread wakes too late."""
QUEUE_SHARE = 1 / 3
"""Minimum of the queue as a fraction of the round trip, large enough to detect that the link has become faster."""
LATER, EARLIER = 1.5, 0.995
"""Factors on the queue: after the sender thread woke so late that the link was idle, and after the thread had to wait."""

_INFO = struct.Struct("=148xI8xQ")
"""Fields of tcp_info: shortest round trip in microseconds, delivery rate in bytes per second."""


class LinkSample(NamedTuple):
    """A connection's rate and round trip, measured by the kernel for TCP and by the stream for gRPC."""

    rate: float
    """Bytes per second delivered while data was waiting. Bursts shorter than a round trip give a lower rate than the link's."""
    round_trip_s: float
    """The shortest round trip so far, in seconds; 0 if unknown."""


class Credit:
    """Limits one connection's bytes in flight; the limit is its credit. Pure: the caller passes the time and the
    measurements."""

    def __init__(self) -> None:
        self.part_nbytes = FIRST_PART_NBYTES
        self.due_s = 0.0
        """Earliest time (time.monotonic()) at which a new `update` is useful."""
        self._rates: deque[float] = deque(maxlen=WINDOWS)
        self._best, self._without = 0.0, 0
        self._round_trip_s = 0.0
        self._queue_s, self._full, self._paused = QUEUE_S, False, False

    def update(self, now: float, seen: LinkSample) -> None:
        """Takes a reading. One that includes a pause can only raise the rate: a burst of N bytes that is shorter than a round
        trip is measured as N bytes per round trip, however fast the link."""
        self._round_trip_s = seen.round_trip_s
        self.due_s = now + max(WINDOW_S, 2 * seen.round_trip_s)
        paused, self._paused = self._paused, False
        if seen.rate > GROWTH * self._best:
            self._best, self._without = seen.rate, 0
        elif not paused:
            self._without += 1
        elif seen.rate <= self._best:
            return
        self._rates.append(seen.rate)
        self._best = max(self._rates)
        self.part_nbytes = int(min(MAX_PART_NBYTES, max(MIN_PART_NBYTES, self._best * PART_S)))

    @property
    def measured(self) -> bool:
        return self._best > 0

    @property
    def settled(self) -> bool:
        return self._without >= SETTLE_READINGS

    @property
    def nbytes(self) -> float:
        """Limit of the bytes in flight; 0: no limit, because the rate is still growing."""
        room_s = self._round_trip_s + max(self._queue_s, QUEUE_SHARE * self._round_trip_s)
        return max(2 * self.part_nbytes, self._best * room_s) if self.settled else 0.0

    @property
    def nbytes_s(self) -> float:
        """The rate that the limit allows, in bytes per second; 0: no limit."""
        return self.nbytes / self._round_trip_s if self._round_trip_s else 0.0

    def wait_s(self, waiting_nbytes: int) -> float:
        """Returns the seconds that the next part should wait while this many bytes are in flight. The part itself may exceed
        the limit; otherwise large parts would keep the rate below the link's."""
        if not self.settled or not self._best:
            return 0.0
        over = waiting_nbytes - self.nbytes
        if over > 0:
            self._full, self._queue_s = True, max(QUEUE_S, EARLIER * self._queue_s)
        elif self._full and waiting_nbytes < self._best * self._round_trip_s:
            self._full, self._queue_s = False, min(MAX_QUEUE_S, LATER * self._queue_s)  # the link was idle
        return max(0.0, over / self._best)

    def idle(self) -> None:
        """Records that no frame was waiting to be sent. If the link was idle meanwhile, the sender thread did not wake too
        late."""
        self._full, self._paused = False, True


SUPPORTED = sys.platform == "linux"
TCP_NOTSENT_LOWAT = 25
"""Linux socket option, which has no name in Python before 3.12."""
UNSENT_PARTS = 4
"""Number of parts that the kernel may buffer unsent, also while there is no limit on bytes in flight."""


def bound_unsent(sock: ByteChannel, part_nbytes: int) -> None:
    if isinstance(sock, socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_PARTS * part_nbytes)


class MeasuredChannel(Protocol):
    """A channel that measures its own rate and round trip, because the kernel cannot."""

    def seen(self) -> LinkSample: ...


def sample_link(sock: ByteChannel) -> LinkSample:
    if not isinstance(sock, socket.socket):
        return cast(MeasuredChannel, sock).seen()
    round_trip_us, rate = _INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return LinkSample(rate, round_trip_us * 1e-6)


def waiting_nbytes(sock: ByteChannel) -> int:
    """Returns the bytes in the kernel's send buffer or in flight; 0 for a closed connection, or if the channel has its own flow
    control."""
    if not isinstance(sock, socket.socket):
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):
        return 0


# ---- Pacing of connections: sets the kernel's pacing rate to a share of the link, and to at most the credit.
#
# TCP connections that start together each send at the rate that they last had alone, and overflow the link's queue. With four
# nodes pushing dense gradients to each other, a third of the time went to retransmissions.
#
# BBR starts at 2.89 times the rate it knows, until a round with enough data brings no increase. A credit leaves no round enough
# data, so BBR kept that factor. Over 100 Mb/s and 150 ms its bursts lost a quarter of the rate in a third of all runs.

BUSY_NBYTES = 16 << 10
"""Bytes in the kernel or in flight above which a connection counts as busy and gets a share of the link."""
SLACK = 1.65
"""Factor by which paced connections together exceed the link's measured rate. A short probe may measure too low a rate, which a
limit below the link's rate would confirm. Too high a limit costs a few lost segments."""
SO_MAX_PACING_RATE = 47
"""Linux socket option, which has no name in Python."""
UNLIMITED, MIN_RATE, MAX_RATE = -1, 1 << 12, 2**31 - 1
"""Pacing rates in bytes per second, as the kernel accepts them; 0 would stop a connection."""
SLOW_BPS = 20e6
"""If a process's share of the link is below this rate in bit/s, its connections switch away from BBR. Every ten seconds BBR
probes for the shortest round trip. On a slow link a burst lasts few round trips, so BBR forgets the rate and needs seconds to
recover."""
BBR, INSTEAD_OF_BBR = (b"bbr",), (b"cubic", b"reno")
"""Names of congestion controls in the kernel. The first of INSTEAD_OF_BBR that this process may use replaces BBR."""
NAME_NBYTES = 16


class Pacer:
    """Sets the kernel's pacing rate of a transport's connections, which share the link. Until `follow` is called, the rate is
    not shared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bps = 0.0
        self._connections = weakref.WeakSet[socket.socket]()
        self._shares: dict[socket.socket, int] = {}
        self._bounds = weakref.WeakKeyDictionary[socket.socket, int]()
        self._applied = weakref.WeakKeyDictionary[socket.socket, int]()

    @property
    def part_nbytes(self) -> int:
        """Bytes that the link sends in PART_S; MAX_PART_NBYTES if its rate is unknown."""
        return max(MIN_PART_NBYTES, int(self._bps / 8 * PART_S)) if self._bps else MAX_PART_NBYTES

    def add(self, sock: socket.socket) -> None:
        """Adds a connection that uses the link."""
        with self._lock:
            self._connections.add(sock)
            if 0.0 < self._bps < SLOW_BPS:
                _leave_bbr(sock)

    def follow(self, bps: float) -> None:
        """Sets the measured upload rate of this machine's link in bit/s, which connections share. If it is slow, connections
        switch away from BBR. 0: unknown, so connections are not limited to a share."""
        with self._lock:
            self._bps = bps if sys.platform == "linux" else 0.0
            for sock in list(self._shares):
                self._lift(sock)
            if 0.0 < self._bps < SLOW_BPS:
                for sock in self._connections:
                    _leave_bbr(sock)

    def begins(self, sock: socket.socket) -> None:
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

    def bound(self, sock: socket.socket, nbytes_s: float) -> None:
        """Sets the rate in bytes per second that the connection's credit allows; 0: no limit."""
        if sys.platform == "linux":
            with self._lock:
                self._bounds[sock] = _bytes_s(nbytes_s) if nbytes_s else UNLIMITED
                self._apply(sock)

    def lift(self, sock: socket.socket) -> None:
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


def _leave_bbr(sock: socket.socket) -> None:
    """Switches the connection from BBR to another congestion control, permanently."""
    for name in INSTEAD_OF_BBR:
        try:
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, NAME_NBYTES).rstrip(b"\0") not in BBR:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except OSError:
            pass  # not allowed for this process, or the connection is ending


# ---- What one connection's sender thread asks before each part.

INLINE_NBYTES = 64 << 10
"""Largest body that the caller's thread writes itself on an idle connection (see `SendControl.inline_nbytes`). The rest is left
to the sender thread when writing would block."""


class SendControl:
    """Flow control of one connection: its credit, and its share of the machine's link."""

    def __init__(self, sock: ByteChannel, pacer: Pacer | None) -> None:
        """`pacer`: paces the machine's link; None if both ends are on one machine, so the connection uses no link."""
        self._sock = sock
        self._credit = Credit() if pacer is not None and SUPPORTED else None
        self._paced = (pacer, sock) if pacer is not None and isinstance(sock, socket.socket) else None
        if pacer is not None and isinstance(sock, socket.socket):
            pacer.add(sock)

    @property
    def part_nbytes(self) -> int | None:
        """Size of a part of a body; None if bodies are sent whole."""
        return None if self._credit is None else self._credit.part_nbytes

    @property
    def inline_nbytes(self) -> int:
        """Size of the largest frame that the caller's thread writes itself on an idle connection."""
        limits = [INLINE_NBYTES]
        if self._credit is not None:
            limits.append(self._credit.part_nbytes if self._credit.measured else MIN_PART_NBYTES)
        if self._paced is not None:
            limits.append(self._paced[0].part_nbytes)
        return min(limits)

    def hold_s(self, nbytes: int) -> float:
        """Returns the seconds that the most urgent frame, of this size, should wait until earlier bytes have left the kernel's
        buffer."""
        if self._credit is None or nbytes <= MIN_PART_NBYTES:
            return 0.0
        if (now := time.monotonic()) >= self._credit.due_s:
            try:
                self._credit.update(now, sample_link(self._sock))
                bound_unsent(self._sock, self._credit.part_nbytes)
                if self._paced is not None:
                    pacer, sock = self._paced
                    pacer.bound(sock, self._credit.nbytes_s)
            except (OSError, struct.error):  # the kernel does not report these numbers, so frames are no longer delayed
                self._credit = None
                return 0.0
        return self._credit.wait_s(waiting_nbytes(self._sock))

    def begin(self, nbytes: int, *, probe: bool) -> None:
        """Prepares the connection for a part of a frame of this size. Call this before the part is sent. `probe`: True: the
        frame measures the link."""
        if self._paced is None:
            return
        pacer, sock = self._paced
        if probe:
            pacer.lift(sock)
            return
        if nbytes > self.inline_nbytes:
            pacer.begins(sock)

    def idle(self) -> None:
        """Records that no frame is waiting to be sent."""
        if self._credit is not None:
            self._credit.idle()

    def end(self) -> None:
        """Ends pacing. Call this before the connection's socket is closed."""
        if self._paced is not None:
            pacer, sock = self._paced
            pacer.lift(sock)
