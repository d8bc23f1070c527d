"""Counts the bytes of this process on the network, and limits the rate at which it sends.

The limit is a token bucket of this process and not the kernel's pacing rate. So it holds for all transports, and for a tunnel
whose near end is on this machine.
"""

from __future__ import annotations

import threading
import time

WIRE = 1.06
"""Bytes on the link for each byte of a message: headers of TCP and IP, TLS records, and acknowledgements."""
CALL_NBYTES = 1000
"""Bytes of a call to the coordinator without its messages: a heartbeat without TLS took 1,150 bytes on the link."""
BURST_S, PART_S, MIN_PART_NBYTES = 0.05, 0.1, 8 << 10
"""Seconds at the limit that may be sent at once, and size of a part of a large body."""


class Limit:
    """A limit on the rate of sending; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bps = 0.0
        """In bit/s; 0: no limit."""
        self._sent_s = 0.0
        """Value of time.monotonic() at which the bytes so far would have been sent at the limit."""

    def set(self, bps: float) -> None:
        with self._lock:
            now = time.monotonic()
            if self.bps and bps:
                self._sent_s = now + (self._sent_s - now) * self.bps / bps
            elif not self.bps:
                self._sent_s = now
            self.bps = bps

    @property
    def part_nbytes(self) -> float:
        """Size of a part of a large body; infinite without a limit."""
        return max(MIN_PART_NBYTES, self.bps / 8 * PART_S) if self.bps else float("inf")

    def hold_s(self) -> float:
        """Returns the seconds before more bytes may be sent."""
        return max(0.0, self._sent_s - time.monotonic() - BURST_S) if self.bps else 0.0

    def count(self, nbytes: int) -> None:
        if self.bps:
            with self._lock:
                self._sent_s = max(self._sent_s, time.monotonic()) + 8 * nbytes / max(self.bps, 1.0)


class Traffic:
    """Bytes on the link that this process has sent and received so far. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = self._received = 0
        self.gradients, self.states = Limit(), Limit()
        """Limits of data between workers and servers, and of calls to the coordinator that carry states to homes that join."""

    def add(self, sent_nbytes: int = 0, received_nbytes: int = 0) -> None:
        with self._lock:
            self._sent += sent_nbytes
            self._received += received_nbytes

    def call(self, sent_nbytes: int, received_nbytes: int) -> None:
        """Counts a call to the coordinator."""
        self.add(sent_nbytes + CALL_NBYTES // 2, received_nbytes + CALL_NBYTES // 2)

    def hold_state(self, nbytes: int, most_s: float) -> None:
        """Waits before a part of a state is sent. The state's traffic reduces the rate that is left for gradients."""
        if self.states.bps:
            time.sleep(min(self.states.hold_s(), most_s))
            self.states.count(nbytes)
            self.gradients.count(nbytes)

    @property
    def sent_nbytes(self) -> int:
        return int(WIRE * self._sent)

    @property
    def received_nbytes(self) -> int:
        return int(WIRE * self._received)


TRAFFIC = Traffic()
"""Of this process."""
