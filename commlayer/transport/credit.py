"""How much may be on its way on one connection: about what the link holds. Knows numbers of the kernel; no frames, no order.

What this end has handed to the kernel cannot be overtaken by anything more urgent, and what stands in the link's queue holds up
every other connection, heartbeats among them. So bytes under way have a limit, a little above rate times round trip.
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
"""A part is what the link takes in about that time: so long an urgent frame waits for it."""
LEAST_NBYTES, FIRST_NBYTES, MOST_NBYTES = 8 << 10, 64 << 10, 4 << 20
"""Of a part."""
WINDOW_S = 0.05
"""The kernel is asked that often, or every two round trips."""
WINDOWS = 16
"""The highest of so many answers counts."""
GROWTH, PATIENCE = 1.25, 3
"""There is no limit while the rate grows; it has stopped growing when so many answers brought no such growth."""
QUEUE_S, MOST_QUEUE_S = 0.01, 0.1
"""What may wait behind what the link holds, in seconds of it: room for a sender that wakes late, as much as that needs."""
QUEUE_SHARE = 1 / 3
"""As much at least, as a part of the round trip: a link that has become faster is seen by that."""
LATER, EARLIER = 1.5, 0.995
"""Factors for each time that the sender came too late, or had to wait."""

_INFO = struct.Struct("=148xI8xQ")
"""Of tcp_info: smallest round trip in microseconds, delivery rate in bytes a second."""


class Seen(NamedTuple):
    """What the kernel says of a connection."""

    rate: float
    """Bytes a second that arrived while there was something to send; that a sender fell asleep does not lower it."""
    round_trip_s: float
    """The shortest."""


class Credit:
    """Of one connection that has much to send. Time and the kernel's numbers are arguments."""

    def __init__(self) -> None:
        self.part_nbytes = FIRST_NBYTES
        self.due_s = 0.0
        """From when on `see` has something to learn."""
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
        """That may be under way; 0: no limit yet."""
        room_s = self._round_trip_s + max(self._queue_s, QUEUE_SHARE * self._round_trip_s)
        return max(2 * self.part_nbytes, self._best * room_s) if self.settled else 0.0

    @property
    def nbytes_s(self) -> float:
        """What that lets through in a second; 0: no limit yet."""
        return self.nbytes / self._round_trip_s if self._round_trip_s else 0.0

    def wait_s(self, waiting_nbytes: int) -> float:
        """How long the next part had better wait, with so much under way.

        It may go beyond the limit: a part that is much of it would else keep the rate, and so the limit, below the link's.
        """
        if not self.settled or not self._best:
            return 0.0
        over = waiting_nbytes - self.nbytes
        if over > 0:
            self._full, self._queue_s = True, max(QUEUE_S, EARLIER * self._queue_s)
        elif self._full and waiting_nbytes < self._best * self._round_trip_s:
            self._full, self._queue_s = False, min(MOST_QUEUE_S, LATER * self._queue_s)  # the link has stood idle
        return max(0.0, over / self._best)

    def idle(self) -> None:
        """There was nothing to send: that little is under way is not this sender's doing."""
        self._full = False


SUPPORTED = sys.platform == "linux"
TCP_NOTSENT_LOWAT = 25
"""Linux; Python has no name for it before 3.12."""
UNSENT_PARTS = 4
"""That the kernel may hold and not send yet, while there is no limit on what is under way."""


def bound_unsent(sock: ByteChannel, part_nbytes: int) -> None:
    if isinstance(sock, socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_PARTS * part_nbytes)


class Telling(Protocol):
    """What knows by itself how fast it is."""

    def seen(self) -> Seen: ...


def look(sock: ByteChannel) -> Seen:
    if not isinstance(sock, socket.socket):
        return cast(Telling, sock).seen()
    round_trip_us, rate = _INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return Seen(rate, round_trip_us * 1e-6)


def waiting_nbytes(sock: ByteChannel) -> int:
    """In the kernel or on its way; 0 of a connection that is over, and where another protocol limits it."""
    if not isinstance(sock, socket.socket):
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):
        return 0
