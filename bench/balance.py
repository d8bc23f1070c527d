"""Benchmark of load balancing: the paper's four GPUs and other clusters, ours against LBB and equal shares.

Emulated workers are linear time models with noise (bench.reference.balance_cluster), so runs are reproducible; only solve times
are measured. All modes see the same noise. The oracle knows the true times of each step. Communication counts only in the rows
that name it. The last rows come from real processes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench import balance_live, balance_unmodelled, relink
from bench.balance_plot import Band, Timeline, write_png
from bench.reference.balance_cluster import Disturbance, Mode, PlayedCluster, PlayedStep, moves, slow_after
from bench.reference.balance_cluster import run as run_mode
from bench.reference.balance_default import Equal, Ours
from bench.report import Result
from commlayer.balance import Communication, LinearTime, shares, solve
from commlayer.balance.lbb import Lbb
from commlayer.balance.profile import profile
from commlayer.balance.time_models import Cubic, fit_cubic

PAPER_MS = ((0.5931, 5.90), (0.5808, 7.15), (0.6023, 8.29), (2.6714, 50.98))
"""(ms per sample, launch overhead in ms) of the paper's M40, GTX 1070, GTX 1070 and GTX 750."""
PAPER = tuple(LinearTime(slope / 1e3, launch / 1e3) for slope, launch in PAPER_MS)
GPUS = ("M40", "GTX 1070 (a)", "GTX 1070 (b)", "GTX 750")
BATCH = 512
NOISE = 0.01
ADDED_S = 0.05
TURN = 40
"""Number of steps for which one worker has the extra 50 ms before the next worker gets it. The first disturbance starts at step
25, as in the paper's figure 7."""
LBB_COMM_S = 0.1
"""Communication time of an iteration in the logs of the paper's authors: blocking, not overlapped."""
BACKWARD = 2 / 3
"""Fraction of the compute time that communication can overlap with: backward takes about twice as long as forward."""


def in_turn(workers: int) -> tuple[Disturbance, ...]:
    return tuple(Disturbance(w, 25 + TURN * w, 25 + TURN * (w + 1), added_s=ADDED_S) for w in range(workers))


def mixed(ratio: float) -> tuple[LinearTime, ...]:
    """Two fast workers and two that are `ratio` times slower."""
    fast, slow = LinearTime(0.5e-3, 5e-3), LinearTime(0.5e-3 * ratio, 5e-3 * ratio)
    return fast, fast, slow, slow


HEAT = (Disturbance(0, 30, 200, factor=2.0, ramp=60), Disturbance(1, 60, 200, factor=1.5, ramp=20))
SCENARIOS: dict[str, tuple[PlayedCluster, int]] = {
    "paper, static": (PlayedCluster(PAPER, BATCH, noise=NOISE), 100),
    "paper, +50 ms in turn": (PlayedCluster(PAPER, BATCH, disturbances=in_turn(4), noise=NOISE), 25 + 4 * TURN + 20),
    "paper, thermal ramps": (PlayedCluster(PAPER, BATCH, disturbances=HEAT, noise=NOISE), 220),
    **{f"{ratio}:1 mix, x2 on one": (
        PlayedCluster(mixed(ratio), BATCH, disturbances=(Disturbance(0, 30, 70, factor=2.0),), noise=NOISE), 100
    ) for ratio in (3, 10, 30)},
}


def cubics(cluster: PlayedCluster) -> list[Cubic]:
    """LBB's profile models, fitted to batch sizes in powers of two up to the total, with the cluster's noise."""
    fitted = []
    for worker in range(len(cluster.lines)):
        draw = random.Random(worker)
        line = cluster.lines[worker]
        points = profile(lambda batch, line=line, draw=draw: line.time_s(batch) * (1 + NOISE * draw.gauss(0, 1)), cluster.total)  # type: ignore[misc]
        fitted.append(fit_cubic(points.points))
    return fitted


MODES: Mapping[str, Callable[[PlayedCluster], Mode]] = {
    "equal (SSGD)": Equal,
    "LBB as published": lambda c: Lbb(cubics(c), c.total),
    "ours": Ours,
}

DRAWN = ("equal (SSGD)", "LBB as published", "ours")

def run(quick: bool) -> Result:
    unmodelled = balance_unmodelled.run(quick)
    parts = emulated(quick), unmodelled, balance_live.run(quick, PAPER, BATCH, ADDED_S), relink.run()
    rows = [row for part in parts for row in part["rows"]]
    return {"rows": rows, "summary": {key: value for part in parts for key, value in part["summary"].items()}}


def emulated(quick: bool) -> Result:
    """Runs all modes in virtual time."""
    rows: list[dict[str, Any]] = []
    done: dict[tuple[str, str], list[PlayedStep]] = {}
    for scenario, (cluster, steps) in SCENARIOS.items():
        for name, build in MODES.items():
            done[scenario, name] = run_mode(build(cluster), cluster, steps)
            rows.append(_row(scenario, name, done[scenario, name], cluster.total))
    comm_rows, vs_lbb = _with_communication()
    many_row, many = _thousand(10 if quick else 40)
    ours = [steps for (_, name), steps in done.items() if name == "ours"]
    recovery = [_recovery(seed) for seed in range(2 if quick else 8)]
    static = done["paper, static", "ours"]
    return {
        "rows": rows + comm_rows + [many_row],
        "summary": {
            "paper_fixture_makespan_ms": solve(PAPER, BATCH).makespan_s * 1e3,
            "paper_fixture_shares": "/".join(map(str, shares(PAPER, BATCH))),
            "vs_ssgd": _mean_s(done["paper, static", "equal (SSGD)"]) / _mean_s(static),
            "vs_lbb_disturbed": _mean_s(done["paper, +50 ms in turn", "LBB as published"])
            / _mean_s(done["paper, +50 ms in turn", "ours"]),
            **vs_lbb,
            "recover_iterations_additive50": max(max(one[:3]) for one in recovery),
            "recover_iterations_additive50_small": max(one[3] for one in recovery),
            "share_sum_violations": sum(_wrong(steps, BATCH) for steps in ours) + _wrong(many, MANY_TOTAL),
            "oracle_gap_pct": max(_gap_pct(steps) for steps in ours),
            "solve_us_4": _solve_us(lambda: shares(PAPER, BATCH), 200),
            "solve_us_1000": _solve_us(lambda: shares(_many_lines(), MANY_TOTAL), 10),
            "solve_us_1000_caps": _solve_us(lambda: solve(_many_lines(), MANY_TOTAL, MANY_CAPS), 10),
        },
    }


def draw(path: Path) -> str:
    """Plots shares, times and straggler effect while 50 ms are added to one worker after another. Returns a line to print."""
    cluster, steps = SCENARIOS["paper, +50 ms in turn"]
    bands = [Band(d.worker, d.start, d.stop) for d in cluster.disturbances]
    courses = [Timeline(name, tuple(run_mode(MODES[name](cluster), cluster, steps))) for name in DRAWN]
    target = path.with_suffix(".png")
    try:
        write_png(target, "+50 ms on one GPU after another (shaded in its colour)", GPUS, courses, bands)
    except ModuleNotFoundError as missing:
        return f'no plot: {missing}: pip install "commlayer[plot]"'
    return f"drawn: {target}"


def _mean_s(steps: list[PlayedStep]) -> float:
    return sum(step.iteration_s for step in steps) / len(steps)


def _gap_pct(steps: list[PlayedStep]) -> float:
    return 100 * (sum(step.iteration_s for step in steps) / sum(step.oracle_s for step in steps) - 1)


def _wrong(steps: list[PlayedStep], total: int) -> int:
    return sum(sum(step.shares) != total for step in steps)


def _row(scenario: str, name: str, steps: list[PlayedStep], total: int) -> dict[str, Any]:
    return {
        "scenario": scenario, "mode": name, "iteration_ms": _mean_s(steps) * 1e3, "samples_per_s": total / _mean_s(steps),
        "oracle_gap_pct": _gap_pct(steps), "slow_iterations": sum(step.slow for step in steps), "moves": moves(steps),
        "sum_wrong": _wrong(steps, total), "final": "/".join(map(str, steps[-1].shares)) if len(steps[-1].shares) < 9 else "",
    }  # fmt: skip


def _with_communication() -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The authors' 100 ms of blocking all-reduce, the same all-reduce overlapped, and overlapped with a tenth of the bytes."""
    cluster = PlayedCluster(PAPER, BATCH, noise=NOISE)
    ways = {
        "LBB as published, blocking 100 ms": (MODES["LBB as published"], Communication(LBB_COMM_S)),
        "ours, overlapped": (MODES["ours"], Communication(LBB_COMM_S, BACKWARD)),
        "ours, overlapped, a tenth of the bytes": (MODES["ours"], Communication(LBB_COMM_S / 10, BACKWARD)),
    }
    rows, means = [], []
    for name, (build, communication) in ways.items():
        steps = run_mode(build(cluster), cluster, 100, communication)
        rows.append(_row("paper, static, communication emulated", name, steps, BATCH))
        means.append(_mean_s(steps))
    return rows, {"vs_lbb_emulated_overlap": means[0] / means[1], "vs_lbb_emulated_compressed": means[0] / means[2]}


def _recovery(seed: int) -> list[int]:
    """Number of slow iterations after 50 ms were added, for each of the workers."""
    cluster = PlayedCluster(PAPER, BATCH, disturbances=in_turn(4), noise=NOISE, seed=seed)
    steps = run_mode(Ours(cluster), cluster, 25 + 4 * TURN)
    return [slow_after(steps, 25 + TURN * w, 25 + TURN * (w + 1)) for w in range(4)]


MANY_TOTAL = 64_000
MANY_CAPS = [40 if worker % 2 else None for worker in range(1000)]
"""Memory limits in samples for every second worker, below the mean share of 64."""


@lru_cache
def _many_lines() -> list[LinearTime]:
    draw = random.Random(1)
    return [LinearTime(draw.uniform(0.3e-3, 9e-3), draw.uniform(1e-3, 50e-3)) for _ in range(1000)]


def _thousand(steps: int) -> tuple[dict[str, Any], list[PlayedStep]]:
    """A thousand workers, of which fifty slow down in the third step."""
    slower = tuple(Disturbance(worker, 3, 1000, factor=2.0) for worker in range(0, 1000, 20))
    cluster = PlayedCluster(tuple(_many_lines()), MANY_TOTAL, disturbances=slower, noise=NOISE)
    seen = run_mode(Ours(cluster), cluster, steps)
    return _row("1,000 workers, x2 on fifty", "ours", seen, MANY_TOTAL), seen


def _solve_us(call: Callable[[], object], times: int) -> float:
    """Minimum over several runs, because other load on the machine only adds time."""
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best * 1e6
