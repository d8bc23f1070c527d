"""Flow control of one connection's sends: what the sender thread asks before each part."""

from __future__ import annotations

import socket
import struct
import time

from commlayer.transport.flow.credit import (
    MIN_PART_NBYTES,
    SUPPORTED,
    Credit,
    bound_unsent,
    restart_bbr,
    sample_link,
    waiting_nbytes,
)
from commlayer.transport.flow.pacing import Pacer
from commlayer.transport.protocol import ByteChannel

INLINE_NBYTES = 64 << 10
"""Largest body that the caller's thread writes itself on an idle connection (see `SendControl.inline_nbytes`). The rest is left
to the sender thread when writing would block."""


class SendControl:
    """Flow control of one connection: its credit, and its share of the machine's link."""

    def __init__(self, sock: ByteChannel, pacer: Pacer | None) -> None:
        """`pacer`: paces the machine's link. None: both ends are on one machine, so the connection uses no link."""
        self._sock = sock
        self._credit = Credit() if pacer is not None and SUPPORTED else None
        self._paced = (pacer, sock) if pacer is not None and isinstance(sock, socket.socket) else None

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
                seen = sample_link(self._sock)
                if self._credit.forgotten(seen) and restart_bbr(self._sock):
                    self._credit = Credit()
                self._credit.update(now, seen)
                bound_unsent(self._sock, self._credit.part_nbytes)
                if self._paced is not None:
                    pacer, sock = self._paced
                    pacer.bound(sock, self._credit.nbytes_s)
            except (OSError, struct.error):  # the kernel does not report these numbers, so frames are no longer delayed
                self._credit = None
                return 0.0
        if self._paced is not None:
            pacer, sock = self._paced
            self._credit.share = pacer.share(sock)
        return self._credit.wait_s(waiting_nbytes(self._sock))

    def begin(self, nbytes: int, *, probe: bool) -> None:
        """Prepares the connection for a part of a frame of this size. Call this before the part is sent. `probe`: True: the
        frame measures the link."""
        if self._paced is None:
            return
        pacer, sock = self._paced
        if probe:
            pacer.end_share(sock)
            return
        if nbytes > self.inline_nbytes:
            pacer.begin_share(sock)

    def idle(self) -> None:
        """Records that no frame is waiting to be sent."""
        if self._credit is not None:
            self._credit.idle()

    def end(self) -> None:
        """Ends pacing. Call this before the connection's socket is closed."""
        if self._paced is not None:
            pacer, sock = self._paced
            pacer.end_share(sock)
