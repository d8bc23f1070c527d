"""One result of `bench tta`."""

from __future__ import annotations

from typing import Any

from bench.tta.systems import SYSTEMS

STEP_S = 0.3


def row(
    system: str, link: str, goal_s: float, *, task: str = "chars", seed: int = 0, end_s: float = 60.0, **others: Any
) -> dict[str, Any]:
    """A line from 4.0 down that reaches the middle target, 2.0, at goal_s; the easy one, 3.0, in half that time."""
    looks = [0.0, end_s / 2, end_s]
    curve = [(round(s / STEP_S), s, 4.0 - 2.0 * s / goal_s) for s in looks]
    return {
        "task": task, "link": link, "system": system, "seed": seed, "seconds": end_s, "data": "d",
        "group": SYSTEMS[system].group, "targets": (3.0, 2.0, 1.0), "curve": curve, "late_pct": 0.0, "void": "",
        "s_per_step": STEP_S, "up_kb": 1.0, "down_kb": 1.0, "cpu_s": 1.0, "peak_mb": 1.0, "commit": "c", "day": "2026-01-01",
    } | others
