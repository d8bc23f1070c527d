"""Measures the memory and the open files of processes over a long run, and whether they stay constant."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.chaos.processes import Started

SETTLED = 250
"""Number of steps after which a process has reached its size, because buffers of all kinds have been used."""
LEAST = 4
"""Minimum number of measurements of a process."""
MOST_GROWTH_PCT = 5.0
MOST_MORE_FILES = 8
"""Connections of a home that joins or leaves may be open at either end of the measurement."""
UNKNOWN = float("nan")


class Sizes:
    """Counts the second half of `steps` steps, or the part of it in which a process was running and had settled."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seen: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
        """By process name and pid: (step, bytes, open files)."""

    def weigh(self, name: str, one: Started, step: int) -> None:
        try:
            pages = int(Path(f"/proc/{one.process.pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{one.process.pid}/fd"))
        except (OSError, IndexError):
            return
        self._seen[name, one.process.pid or 0].append((step, pages * os.sysconf("SC_PAGE_SIZE"), files))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each process that ran long enough."""
        table = []
        for (name, pid), sizes in self._seen.items():
            settled = [size for size in sizes if size[0] >= max(self._steps // 2, sizes[0][0] + SETTLED)]
            if len(settled) < LEAST:
                continue
            (from_step, first, first_files), (to_step, last, last_files) = settled[0], settled[-1]
            table.append({"process": name, "pid": pid, "from_step": from_step, "to_step": to_step, "first_mib": first / 2**20,
                          "last_mib": last / 2**20, "growth_pct": 100 * (last / first - 1),
                          "first_files": first_files, "last_files": last_files})
        return table


def growth(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Maximum growth in percent: within a process, and between final sizes of processes with one name. nan without rows."""
    lasts: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        lasts[row["process"]].append(row["last_mib"])
    return (max((row["growth_pct"] for row in rows), default=UNKNOWN),
            max((100 * (max(sizes) / min(sizes) - 1) for sizes in lasts.values()), default=UNKNOWN))


def files_flat(rows: list[dict[str, Any]]) -> bool:
    """Whether no process has more open files at the end than at the beginning."""
    return all(row["last_files"] <= row["first_files"] + MOST_MORE_FILES for row in rows)
