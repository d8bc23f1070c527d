"""Connections that have proved nothing yet: few at once, and the silent keep nobody out. Knows no frames."""

from __future__ import annotations

import socket
import threading
import time

from commlayer.errors import Unsaid
from commlayer.transport.byte_channel import ByteChannel

MOST = 64
"""At once; more wait in the kernel's backlog."""
HURRY_S = 0.5
"""When it is full, whoever has been here for longer gives way: those who greet need two round trips."""


class Probe(str):
    """Why nobody came in where nothing was asked for: whoever dialled has said nothing, and shown no credential."""


class Hall:
    """Any number of threads may call it."""

    def __init__(self, most: int = MOST, hurry_s: float = HURRY_S) -> None:
        self._most, self._hurry_s = most, hurry_s
        self._work = threading.Condition()
        self._here: dict[ByteChannel, float] = {}  # since when, the first to come first
        self._closed = False

    def room(self) -> bool:
        """Waits until one more may come; for that the one longest here may have to go. False once it is closed."""
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
        """Whether there is room without waiting."""
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
        """It has proved itself, or is gone. Twice is once."""
        with self._work:
            self._here.pop(sock, None)
            self._work.notify_all()

    def why(self, sock: ByteChannel, error: Exception) -> str:
        """Why whoever came by it has not come in. One that was sent away for its silence is no probe: this end closed it."""
        with self._work:
            return Probe(error.what) if isinstance(error, Unsaid) and sock in self._here else str(error)

    def close(self) -> None:
        """Everybody out."""
        with self._work:
            self._closed = True
            for sock in self._here:
                _wake(sock)
            self._here.clear()
            self._work.notify_all()


def _wake(sock: ByteChannel) -> None:
    """Ends what its thread waits for; that thread closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # gone by itself
