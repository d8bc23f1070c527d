"""How much memory processes have over a long run, and whether that stays as it is. Knows nothing of what they do."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.chaos.processes import Started

SETTLED = 250
"""Steps that a process takes to reach its size: buffers of all kinds have been needed once."""
LEAST = 4
"""With fewer figures than these of a process nothing is known of it."""
MOST_GROWTH_PCT = 5.0
UNKNOWN = float("nan")


class Sizes:
    """Of `steps` steps the second half counts, or what of it a process was there for once it had settled."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seen: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        """Of a process, by name and id: at which step it had how many bytes."""

    def weigh(self, name: str, one: Started, step: int) -> None:
        try:
            pages = int(Path(f"/proc/{one.process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return
        self._seen[name, one.process.pid or 0].append((step, pages * os.sysconf("SC_PAGE_SIZE")))

    def rows(self) -> list[dict[str, Any]]:
        """One of each process that was there for long enough."""
        made = []
        for (name, pid), sizes in self._seen.items():
            settled = [(step, size) for step, size in sizes if step >= max(self._steps // 2, sizes[0][0] + SETTLED)]
            if len(settled) < LEAST:
                continue
            (from_step, first), (to_step, last) = settled[0], settled[-1]
            made.append({"process": name, "pid": pid, "from_step": from_step, "to_step": to_step, "first_mib": first / 2**20,
                         "last_mib": last / 2**20, "growth_pct": 100 * (last / first - 1)})
        return made


def growth(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """In percent, the most: of a process, and of the ends of processes of one name against each other. Of none: nan."""
    lasts: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        lasts[row["process"]].append(row["last_mib"])
    return (max((row["growth_pct"] for row in rows), default=UNKNOWN),
            max((100 * (max(sizes) / min(sizes) - 1) for sizes in lasts.values()), default=UNKNOWN))
