"""Balancing where compute time is not linear: GPUs whose time rises in steps, and memory that spills.

Compares the default, which always fits linear models, with Nelder-Mead, which fits none. Runs in virtual time. As in a job,
decisions are announced two steps in advance. The last scenario checks for false alarms: its workers are linear and their speed
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from bench.reference.balance_cluster import Disturbance, Mode, PlayedCluster, Unevenness, moves
from bench.reference.balance_cluster import run as run_mode
from bench.reference.balance_default import Ours
from bench.reference.balance_search import OursThenSearch
from bench.report import Result
from commlayer.balance import LinearTime
from commlayer.balance.balancer import SharePolicy

LINES = (LinearTime(0.59e-3, 6e-3), LinearTime(0.58e-3, 7e-3), LinearTime(0.9e-3, 8e-3), LinearTime(1.2e-3, 9e-3))
BATCH, NOISE = 512, 0.01
EVEN = Unevenness()
STAIRS = (Unevenness(32),) * 4
KINDS = {
    "stairs of 32 samples": STAIRS,
    "one spills over 120 samples": (Unevenness(1, 120, 6.0), EVEN, EVEN, EVEN),
    "stairs and spills": (Unevenness(32), Unevenness(1, 150, 6.0), Unevenness(64), Unevenness(16)),
    "lines, with heat": (),
}
HEAT = (Disturbance(0, 60, 600, factor=1.6, ramp=60), Disturbance(1, 160, 600, factor=1.4, ramp=20))
STEPS, LAST = 600, 50
POLICY = SharePolicy(lead=2)
MODES: dict[str, Callable[[PlayedCluster], Mode]] = {
    "ours": lambda c: Ours(c, POLICY),
    "ours, Nelder-Mead from step 40": lambda c: OursThenSearch(c, POLICY, at_step=40),
    "ours, Nelder-Mead after two missed outcomes": lambda c: OursThenSearch(c, POLICY),
}


def run(quick: bool) -> Result:
    """Means over seeds."""
    seeds = range(1 if quick else 4)

    def played(kind: str) -> list[PlayedCluster]:
        heat = () if KINDS[kind] else HEAT
        return [PlayedCluster(LINES, BATCH, disturbances=heat, noise=NOISE, seed=seed, uneven=KINDS[kind]) for seed in seeds]

    rows = [row(kind, name, build, played(kind)) for kind in KINDS for name, build in MODES.items()]
    return {"rows": rows, "summary": gains(rows)}


def row(kind: str, name: str, mode_of: Callable[[PlayedCluster], Mode], clusters: list[PlayedCluster]) -> dict[str, Any]:
    runs = [run_mode(mode_of(cluster), cluster, STEPS) for cluster in clusters]
    whole_s, oracle_s = (mean(getattr(step, what) for one in runs for step in one) for what in ("iteration_s", "oracle_s"))
    return {
        "scenario": kind, "mode": name, "iteration_ms": whole_s * 1e3, "oracle_gap_pct": 100 * (whole_s / oracle_s - 1),
        "last_50_ms": 1e3 * mean(step.iteration_s for one in runs for step in one[-LAST:]),
        "moves": mean(moves(one) for one in runs), "final": "/".join(map(str, runs[0][-1].shares)),
    }  # fmt: skip


def gains(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Gain of the search over all steps: always started at step 40, and started only by missed predictions."""
    ours = {one["scenario"]: one["iteration_ms"] for one in rows if one["mode"] == "ours"}
    _, always, missed = MODES
    gained = {name: [100 * (1 - one["iteration_ms"] / ours[one["scenario"]]) for one in rows if one["mode"] == name]
              for name in (always, missed)}
    return {
        "search_gain_pct_min": min(gained[always]), "search_gain_pct_max": max(gained[always]),
        "search_if_missed_gain_pct_min": min(gained[missed]), "search_if_missed_gain_pct_max": max(gained[missed]),
    }  # fmt: skip
