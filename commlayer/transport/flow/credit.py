"""The credit of a connection: limits the bytes in flight to slightly more than rate times round trip.

More urgent frames cannot overtake bytes that were handed to the kernel. A long queue at the link also delays all other
connections, including heartbeats.
"""

from __future__ import annotations

import fcntl
import math
import socket
import struct
import sys
import termios
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

FORGOTTEN, BELOW_LIMIT = 1 / 8, 1 / 2
"""The kernel has forgotten a connection's rate if it paces the connection at less than FORGOTTEN of that rate, and at less than
BELOW_LIMIT of the limit that we set."""
BBR, RENO = b"bbr", b"reno"
"""Names of congestion controls, as the kernel spells them. Every process may use RENO."""
MAX_NAME_NBYTES = 16

_INFO = struct.Struct("=104xQQ28xI8xQ")
"""Fields of tcp_info: pacing rate and its limit in bytes per second, shortest round trip in microseconds, delivery rate in
bytes per second."""


class LinkSample(NamedTuple):
    """A connection's rate and round trip, measured by the kernel for TCP and by the stream for gRPC."""

    rate: float
    """Bytes per second delivered while data was waiting. Bursts shorter than a round trip give a lower rate than the link's."""
    round_trip_s: float
    """The shortest round trip so far, in seconds; 0 if unknown."""
    paced: float = math.inf
    """Bytes per second at which the kernel sends now; infinite if unknown, or if a limit of ours may be the reason."""


class Credit:
    """Limits one connection's bytes in flight; the limit is its credit. Pure: the caller passes the time and the
    measurements."""

    def __init__(self) -> None:
        self.part_nbytes = FIRST_PART_NBYTES
        self.share = math.inf
        """Bytes per second that the connection may take of the link; infinite if the link is not shared."""
        self.due_s = 0.0
        """Earliest time (time.monotonic()) at which a new `update` is useful."""
        self._rates: deque[float] = deque(maxlen=WINDOWS)
        self._best, self._without = 0.0, 0
        self._round_trip_s = 0.0
        self._queue_s, self._full, self._paused = QUEUE_S, False, False

    def update(self, now: float, seen: LinkSample) -> None:
        """Updates the credit from a reading. A reading that includes a pause can only raise the rate. The reason: N bytes that
        are sent within less than a round trip are measured as N bytes per round trip, however fast the link is."""
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

    def forgotten(self, seen: LinkSample) -> bool:
        """True: the kernel sends at a small part of the rate that the connection had."""
        return seen.paced < FORGOTTEN * self._best

    @property
    def measured(self) -> bool:
        return self._best > 0

    @property
    def settled(self) -> bool:
        return self._without >= SETTLE_READINGS

    @property
    def _rate(self) -> float:
        return min(self._best, self.share)

    @property
    def nbytes(self) -> float:
        """Limit of the bytes in flight; 0: no limit, because the rate is still growing."""
        room_s = self._round_trip_s + max(self._queue_s, QUEUE_SHARE * self._round_trip_s)
        return max(2 * self.part_nbytes, self._rate * room_s) if self.settled else 0.0

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
        elif self._full and waiting_nbytes < self._rate * self._round_trip_s:
            self._full, self._queue_s = False, min(MAX_QUEUE_S, LATER * self._queue_s)  # the link was idle
        return max(0.0, over / self._rate)

    def idle(self) -> None:
        """Records that no frame was waiting to be sent. An idle link then does not mean that the sender thread woke too
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
    paced, limit, round_trip_us, rate = _INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return LinkSample(rate, round_trip_us * 1e-6, paced if paced < BELOW_LIMIT * limit else math.inf)


def restart_bbr(sock: ByteChannel) -> bool:
    """Lets BBR measure the connection's rate again. Returns whether the connection uses BBR.

    BBR keeps the highest rate of ten round trips. Short bursts bring it no new rates, except when the last segment of one is
    lost. BBR then takes one segment per timeout for the rate, and needs many seconds to find the former one.
    """
    if not isinstance(sock, socket.socket):
        return False
    if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, MAX_NAME_NBYTES).rstrip(b"\0") != BBR:
        return False
    for name in (RENO, BBR):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    return True


def waiting_nbytes(sock: ByteChannel) -> int:
    """Returns the bytes in the kernel's send buffer or in flight; 0 for a closed connection, or if the channel has its own flow
    control."""
    if not isinstance(sock, socket.socket):
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):
        return 0
