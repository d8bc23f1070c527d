"""Measures CPU seconds and memory of a run's processes from /proc, by rank, including child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

EVERY_S = 0.5
TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """Called repeatedly with the ranks' main processes. What a process uses after it was last seen is not counted."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._cpu_s: dict[tuple[int, int], float] = {}
        """CPU seconds by (pid, start time), since pids are reused."""
        self.peak_nbytes: dict[int, int] = {}
        """By rank: total memory of its processes, without files and libraries."""

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu_s.values())

    def __call__(self, ranks: Sequence[subprocess.Popen[Any]]) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + EVERY_S
        parents: dict[int, list[int]] = {}
        stats = {int(path.name): stat for path in Path("/proc").iterdir() if path.name.isdigit() and (stat := _stat(path))}
        for pid, (parent, _, _) in stats.items():
            parents.setdefault(parent, []).append(pid)
        for rank, child in enumerate(ranks):
            own, nbytes = [child.pid], 0
            for pid in own:  # grows while children are added
                own += parents.get(pid, [])
                if pid in stats:
                    _, begun, cpu_s = stats[pid]
                    self._cpu_s[pid, begun] = cpu_s
                    nbytes += _memory(pid)
            self.peak_nbytes[rank] = max(self.peak_nbytes.get(rank, 0), nbytes)

    def end(self) -> None:
        """Kills the processes that the run left behind."""
        for pid, begun in self._cpu_s:
            if (stat := _stat(Path(f"/proc/{pid}"))) and stat[1] == begun:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _stat(path: Path) -> tuple[int, int, float] | None:
    """(parent pid, start time, CPU seconds), or None if the process is gone or a zombie."""
    try:
        fields = (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (int(fields[1]), int(fields[19]), (int(fields[11]) + int(fields[12])) / TICKS)


def _memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
