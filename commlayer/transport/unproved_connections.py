"""Limit on connections in their handshake: silent or slow dialers cannot keep others out."""

from __future__ import annotations

import socket
import threading
import time

from commlayer.errors import Unsaid
from commlayer.transport.byte_channel import ByteChannel

MOST = 64
"""Concurrent handshakes; more wait in the kernel's backlog."""
HURRY_S = 0.5
"""When the limit is reached, handshakes older than this are evicted: a normal one needs two round trips."""


class Probe(str):
    """The reason for a dropped connection that sent nothing and showed no credential, as a port scan or health check does."""


class Hall:
    """The pending handshakes. Thread-safe."""

    def __init__(self, most: int = MOST, hurry_s: float = HURRY_S) -> None:
        self._most, self._hurry_s = most, hurry_s
        self._work = threading.Condition()
        self._here: dict[ByteChannel, float] = {}  # start times, oldest first
        self._closed = False

    def room(self) -> bool:
        """Waits until another connection may enter, evicting the oldest if it has exceeded its time. False once closed."""
        with self._work:
            while len(self._here) >= self._most and not self._closed:
                first, since = next(iter(self._here.items()))
                left_s = since + self._hurry_s - time.monotonic()
                if left_s <= 0:
                    del self._here[first]
                    _wake(first)
                else:
                    self._work.wait(left_s)
            return not self._closed

    def enter_now(self, sock: ByteChannel) -> bool:
        """Like `room` and `enter` without waiting; False if there is no room."""
        with self._work:
            if len(self._here) >= self._most:
                first, since = next(iter(self._here.items()))
                if time.monotonic() < since + self._hurry_s:
                    return False
                del self._here[first]
                _wake(first)
            if not self._closed:
                self._here[sock] = time.monotonic()
            return not self._closed

    def enter(self, sock: ByteChannel) -> None:
        with self._work:
            self._here[sock] = time.monotonic()

    def leave(self, sock: ByteChannel) -> None:
        """Removes a connection that has authenticated or failed. Idempotent."""
        with self._work:
            self._here.pop(sock, None)
            self._work.notify_all()

    def why(self, sock: ByteChannel, error: Exception) -> str:
        """The reason for a failed handshake. A connection evicted for its silence is no Probe, because this end closed it."""
        with self._work:
            return Probe(error.what) if isinstance(error, Unsaid) and sock in self._here else str(error)

    def close(self) -> None:
        """Ends all pending handshakes."""
        with self._work:
            self._closed = True
            for sock in self._here:
                _wake(sock)
            self._here.clear()
            self._work.notify_all()


def _wake(sock: ByteChannel) -> None:
    """Ends the blocking call of its thread, which then closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # already closed by the peer
