"""Peak memory of this process and free memory of the machine, from Linux's /proc and cgroups; elsewhere unknown."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

_STATUS, _RESET, _MACHINE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")
_LIMIT, _TAKEN = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
RESET_PEAK = "5"
"""Resets the peak: see proc(5)."""


def room_nbytes() -> float:
    """Memory that the machine, or the container's limit, leaves to all processes."""
    room = _field(_MACHINE, "MemAvailable")
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        room = min(room, float(_LIMIT.read_text()) - float(_TAKEN.read_text()))
    return room


class Peak:
    """Predicts the memory of a batch from the peaks of smaller ones."""

    def __init__(self) -> None:
        self._peaks: dict[int, float] = {}

    def begin(self) -> None:
        with contextlib.suppress(OSError):
            _RESET.write_text(RESET_PEAK)

    def end(self, samples: int) -> None:
        """Records the peak of a batch that ran since `begin`."""
        peak = _field(_STATUS, "VmHWM")
        if peak < math.inf:
            self._peaks[samples] = max(peak, self._peaks.get(samples, 0.0))

    def more_nbytes(self, samples: int) -> float:
        """Predicted memory of a batch beyond the process's present use; 0 until two smaller batches are known."""
        known = sorted(self._peaks.items())[-2:]
        if len(known) < 2 or samples <= known[-1][0]:
            return 0.0
        (few, low), (many, high) = known
        return high + max(0.0, high - low) / (many - few) * (samples - many) - _field(_STATUS, "VmRSS")


def _field(file: Path, name: str) -> float:
    """Bytes; infinite if the system does not report it."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024.0 * int(line.split()[1])
    return math.inf
