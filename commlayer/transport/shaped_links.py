"""Timing of shaped links: when bytes leave and arrive, with state shared by a host's processes."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from commlayer.errors import InvalidInput

CHUNK_NBYTES = 16 << 10
"""Reserved of an uplink at once, so that the processes of one host take turns."""

_SLOT = struct.Struct("=d")


class HostLink(NamedTuple):
    """A host's link to all others. math.inf bits per second and 0.0 s mean no limit."""

    up_bps: float
    down_bps: float
    delay_s: float = 0.0
    """One way: a frame is delayed by the sum of the sender's and the receiver's."""


class Clock(Protocol):
    """A clock that tests can replace."""

    def now(self) -> float: ...

    def sleep_until(self, at: float, wake: threading.Event) -> None:
        """Returns early when `wake` is set."""
        ...


class MonotonicClock:
    """time.monotonic, which all processes of a machine share."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, at: float, wake: threading.Event) -> None:
        left_s = at - time.monotonic()
        if left_s > 0:
            wake.wait(left_s)


class ShapedLinks:
    """The links of all hosts of a run. Processes that name the same `path` share the file, which the first one creates.

    The file holds two doubles per host: when its uplink and when its downlink are free.
    """

    def __init__(self, path: Path | str, hosts: Sequence[HostLink]) -> None:
        self.hosts = tuple(hosts)
        for i, link in enumerate(self.hosts):
            if not (link.up_bps > 0 and link.down_bps > 0 and link.delay_s >= 0):
                raise InvalidInput("E-ARGUMENT", f"host {i}: {link}: rates must be above 0 bits/s and the delay at least 0 s")
        nbytes = max(1, 2 * _SLOT.size * len(self.hosts))
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, nbytes)
        self._free = mmap.mmap(self._fd, nbytes)
        self._lock = threading.Lock()  # the file lock works only between processes

    def send(self, host: int, queued: float, nbytes: int) -> float:
        """Reserves the uplink for a chunk of a frame queued at `queued`. Returns when its last bit is sent."""
        return self._reserve(2 * host, queued, nbytes * 8 / self.hosts[host].up_bps)

    def reaches(self, source: int, host: int, out: float, nbytes: int) -> tuple[float, float]:
        """When the first and the last bit reach the host's downlink, if the last one left `source` at `out`."""
        last_bit = out + self.hosts[source].delay_s + self.hosts[host].delay_s
        return last_bit - nbytes * 8 / self.hosts[source].up_bps, last_bit

    def receive(self, host: int, first_bit: float, last_bit: float, nbytes: int) -> float:
        """Reserves the downlink. Returns when the frame is complete.

        Bits are forwarded as they come: an idle downlink as fast as the uplink adds no time. Frames of several senders use
        it one after the other, in the order of the calls.
        """
        return max(last_bit, self._reserve(2 * host + 1, first_bit, nbytes * 8 / self.hosts[host].down_bps))

    def _reserve(self, slot: int, earliest: float, duration_s: float) -> float:
        with self._lock:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                (free,) = _SLOT.unpack_from(self._free, slot * _SLOT.size)
                end: float = max(earliest, free) + duration_s
                _SLOT.pack_into(self._free, slot * _SLOT.size, end)
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
        return end

    def close(self) -> None:
        self._free.close()
        os.close(self._fd)
