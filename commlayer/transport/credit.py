"""Flow control of a connection: limits bytes in flight to slightly above rate times round trip.

Bytes handed to the kernel cannot be overtaken by more urgent frames. A long queue at the link also delays all other
connections, including heartbeats.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from collections import deque
from typing import NamedTuple, Protocol, cast

from commlayer.transport.byte_channel import ByteChannel

PART_S = 0.004
"""The link sends one part in about this time, which is therefore the longest wait of an urgent frame."""
LEAST_NBYTES, FIRST_NBYTES, MOST_NBYTES = 8 << 10, 64 << 10, 4 << 20
"""Size of a part: minimum, initial, maximum."""
WINDOW_S = 0.05
"""Interval between readings of tcp_info; at least two round trips."""
WINDOWS = 16
"""The rate is the highest of this many readings."""
GROWTH, PATIENCE = 1.25, 3
"""There is no limit while the rate grows. Growth has ended after PATIENCE readings without a factor of GROWTH."""
QUEUE_S, MOST_QUEUE_S = 0.01, 0.1
"""Queue beyond the rate-delay product, in seconds: minimum and maximum. It grows for a sender thread that wakes late."""
QUEUE_SHARE = 1 / 3
"""Minimum queue as a share of the round trip, so that a link that has become faster is noticed."""
LATER, EARLIER = 1.5, 0.995
"""Factors of the queue after the sender came too late, and after it had to wait."""

_INFO = struct.Struct("=148xI8xQ")
"""Fields of tcp_info: shortest round trip in microseconds, delivery rate in bytes per second."""


class Seen(NamedTuple):
    """The kernel's measurements of a connection."""

    rate: float
    """Bytes per second delivered while data was waiting; a sender that pauses does not lower it."""
    round_trip_s: float
    """The shortest round trip."""


class Credit:
    """The credit of one connection. The caller passes the time and the kernel's measurements."""

    def __init__(self) -> None:
        self.part_nbytes = FIRST_NBYTES
        self.due_s = 0.0
        """Earliest time at which a new `see` is useful."""
        self._rates: deque[float] = deque(maxlen=WINDOWS)
        self._best, self._without = 0.0, 0
        self._round_trip_s = 0.0
        self._queue_s, self._full = QUEUE_S, False

    def see(self, now: float, seen: Seen) -> None:
        self._round_trip_s = seen.round_trip_s
        self.due_s = now + max(WINDOW_S, 2 * seen.round_trip_s)
        self._rates.append(seen.rate)
        if seen.rate > GROWTH * self._best:
            self._best, self._without = seen.rate, 0
        else:
            self._without += 1
            self._best = max(self._rates)
        self.part_nbytes = int(min(MOST_NBYTES, max(LEAST_NBYTES, self._best * PART_S)))

    @property
    def settled(self) -> bool:
        return self._without >= PATIENCE

    @property
    def nbytes(self) -> float:
        """Limit of the bytes in flight; 0 means no limit yet."""
        room_s = self._round_trip_s + max(self._queue_s, QUEUE_SHARE * self._round_trip_s)
        return max(2 * self.part_nbytes, self._best * room_s) if self.settled else 0.0

    @property
    def nbytes_s(self) -> float:
        """The rate that this limit allows; 0 means no limit yet."""
        return self.nbytes / self._round_trip_s if self._round_trip_s else 0.0

    def wait_s(self, waiting_nbytes: int) -> float:
        """How long the next part should wait with this many bytes in flight. The part may exceed the limit: otherwise large
        parts would hold the rate below the link's."""
        if not self.settled or not self._best:
            return 0.0
        over = waiting_nbytes - self.nbytes
        if over > 0:
            self._full, self._queue_s = True, max(QUEUE_S, EARLIER * self._queue_s)
        elif self._full and waiting_nbytes < self._best * self._round_trip_s:
            self._full, self._queue_s = False, min(MOST_QUEUE_S, LATER * self._queue_s)  # the link was idle
        return max(0.0, over / self._best)

    def idle(self) -> None:
        """Records that nothing was waiting to be sent: an idle link is then not a late sender."""
        self._full = False


SUPPORTED = sys.platform == "linux"
TCP_NOTSENT_LOWAT = 25
"""A Linux constant without a name in Python before 3.12."""
UNSENT_PARTS = 4
"""Parts that the kernel may hold unsent while there is no limit on bytes in flight."""


def bound_unsent(sock: ByteChannel, part_nbytes: int) -> None:
    if isinstance(sock, socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_PARTS * part_nbytes)


class Telling(Protocol):
    """A channel that measures its own rate."""

    def seen(self) -> Seen: ...


def look(sock: ByteChannel) -> Seen:
    if not isinstance(sock, socket.socket):
        return cast(Telling, sock).seen()
    round_trip_us, rate = _INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return Seen(rate, round_trip_us * 1e-6)


def waiting_nbytes(sock: ByteChannel) -> int:
    """Bytes in the kernel or in flight; 0 for a closed connection, and for channels with their own flow control."""
    if not isinstance(sock, socket.socket):
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):
        return 0
