"""Balancing with real processes: rows against LBB over a shaped link, after a slow-down, and of the accuracy reached.

Knows how ranks are launched and what they say; lines and modes are handed in.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from bench.baselines import ROOT, launch_hosts
from bench.lab import Lab, LabUnavailable, check, sound
from bench.report import Result
from commlayer.balance import Line, solve

LINK_BPS, ONE_WAY_S = 200e6, 0.00025
"""At which an all-reduce of the model takes the 100 ms that it took the paper's authors."""
WARM = 20
"""Steps that are left out: shares settle in them."""
MODES = {
    "LBB as published, blocking all-reduce": "lbb",
    "ours, overlapped, fp16": "fp16()",
    "ours, overlapped, topk 1 % int8": "topk(ratio=0.01,values='int8')",
}


def run(quick: bool, lines: Sequence[Line], total: int, added_s: float) -> Result:
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    try:
        _against_lbb(rows, summary, lines, total, steps=50 if quick else 100)
    except LabUnavailable as reason:
        rows.append({"scenario": "real processes, shaped link", "mode": str(reason), "void": True})
    sums: list[int] = []
    _recovery(rows, summary, sums, lines, total, added_s, [0, 3] if quick else [0, 1, 2, 3])
    summary["share_sum_violations_real"] = sum(one != total for one in sums)
    _accuracy(rows, summary, seeds=range(1, 3 if quick else 4))
    return {"rows": rows, "summary": summary}


def _against_lbb(
    rows: list[dict[str, Any]], summary: dict[str, Any], lines: Sequence[Line], total: int, steps: int
) -> None:
    times: dict[str, float] = {}
    with Lab(hosts=len(lines), up_bps=LINK_BPS, down_bps=LINK_BPS, delay_s=ONE_WAY_S) as lab:
        checked = check(lab)
        for name, mode in MODES.items():
            before = lab.counters()
            told = launch_hosts(lab, len(lines), _worker("--mode", mode, "--steps", steps), deadline_s=200)
            after = lab.counters()
            times[mode] = median(_iterations(told)[WARM:])
            rows.append({
                "scenario": f"real processes, {LINK_BPS / 1e6:.0f} Mb/s", "mode": name, "iteration_ms": times[mode] * 1e3,
                "moves": _moves(told), "final": _final(told), "void": not (checked.passed and sound(before, after)),
            })
    lbb, fp16, topk = times.values()
    exposed_s = lbb - _best_s(lines, total)
    summary |= {"vs_lbb_paper": lbb / topk, "vs_lbb_paper_fp16": lbb / fp16, "lbb_exposed_ms": exposed_s * 1e3}


def _recovery(
    rows: list[dict[str, Any]], summary: dict[str, Any], sums: list[int], lines: Sequence[Line], total: int, added_s: float,
    ranks: Sequence[int],
) -> None:
    """Slow iterations after the added time came. On loopback, so that what is counted is balancing."""
    start, counted = 30, {}
    for rank in ranks:
        told = launch_hosts(None, len(lines), _worker(
            "--mode", "topk(ratio=0.01,values='int8')", "--steps", start + 30, "--slow", rank, "--from-step", start,
            "--added-ms", added_s * 1e3,
        ), deadline_s=200)
        iterations = _iterations(told)
        best_s = _best_s(lines, total)
        over_s = median(iterations[WARM:start]) - best_s
        slowed = [Line(line.slope_s, line.intercept_s + added_s * (i == rank)) for i, line in enumerate(lines)]
        oracle_s = _best_s(slowed, total)
        counted[rank] = sum(one > 1.1 * oracle_s + over_s for one in iterations[start:])
        sums += told[0]["sums"]
        rows.append({
            "scenario": f"real processes, +{added_s * 1e3:.0f} ms on worker {rank + 1}", "mode": "ours, topk 1 % int8",
            "iteration_ms": median(iterations[start + 10 :]) * 1e3, "oracle_ms": (oracle_s + over_s) * 1e3,
            "slow_iterations": counted[rank], "moves": _moves(told), "final": _final(told),
        })
    summary["recover_iterations_additive50_real"] = max(n for rank, n in counted.items() if rank != len(lines) - 1)
    summary["recover_iterations_additive50_small_real"] = counted[len(lines) - 1]


def _accuracy(rows: list[dict[str, Any]], summary: dict[str, Any], seeds: Sequence[int]) -> None:
    """The example, balanced and with equal batches: each step's union of samples is the same, so only rounding differs."""
    found: dict[str, list[float]] = {}
    for name, flags in (("equal batches", ["--modes", "equal"]), ("balanced", ["--modes", "balanced"])):
        told = [_example("--epochs", "6", "--seed", str(seed), *flags) for seed in seeds]
        found[name] = [accuracy for accuracy, _ in told]
        rows.append({
            "scenario": "real processes, example uneven.py", "mode": name, "accuracy": mean(found[name]),
            "accuracy_std": stdev(found[name]), "train_s": mean(seconds for _, seconds in told),
        })
    pairs = zip(found["balanced"], found["equal batches"], strict=True)
    summary["accuracy_minus_equal_pct"] = 100 * mean(mine - theirs for mine, theirs in pairs)


def _example(*flags: str) -> tuple[float, float]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    argv = [*launch, "examples/uneven.py", *flags]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    said = re.search(r"accuracy ([\d.]+) after ([\d.]+) s", done.stdout)
    assert said, done.stdout
    return float(said[1]), float(said[2])


def _worker(*flags: object) -> list[str]:
    return [sys.executable, "-m", "bench.balance_worker", *map(str, flags)]


def _iterations(told: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of each step the slowest rank's."""
    return [max(times) for times in zip(*(one["step_s"] for one in told), strict=True)]


def _best_s(lines: Sequence[Line], total: int) -> float:
    return solve(list(lines), total).makespan_s


def _moves(told: Sequence[Mapping[str, Any]]) -> int:
    shares = list(zip(*(one["shares"] for one in told), strict=True))
    return sum(a != b for a, b in itertools.pairwise(shares))


def _final(told: Sequence[Mapping[str, Any]]) -> str:
    return "/".join(str(one["shares"][-1]) for one in told)
