"""Balancing with real processes: comparison with LBB over a shaped link, recovery after a slow-down, accuracy reached.

The time models of the workers are parameters.
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
from commlayer.balance import LinearTime, solve

LINK_BPS, ONE_WAY_S = 200e6, 0.00025
"""With this link an all-reduce of the model takes the 100 ms that the paper's authors measured."""
WARM = 20
"""Warm-up steps that are not counted, because shares settle in them."""
MODES = {
    "LBB as published, blocking all-reduce": "lbb",
    "ours, overlapped, fp16": "fp16()",
    "ours, overlapped, topk 1 % int8": "topk(ratio=0.01,values='int8')",
}


def run(quick: bool, lines: Sequence[LinearTime], total: int, added_s: float) -> Result:
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
    rows: list[dict[str, Any]], summary: dict[str, Any], lines: Sequence[LinearTime], total: int, steps: int
) -> None:
    times: dict[str, float] = {}
    with Lab(hosts=len(lines), up_bps=LINK_BPS, down_bps=LINK_BPS, delay_s=ONE_WAY_S) as lab:
        checked = check(lab)
        for name, mode in MODES.items():
            before = lab.counters()
            results = launch_hosts(lab, len(lines), _worker("--mode", mode, "--steps", steps), deadline_s=200)
            after = lab.counters()
            times[mode] = median(_iterations(results)[WARM:])
            rows.append({
                "scenario": f"real processes, {LINK_BPS / 1e6:.0f} Mb/s", "mode": name, "iteration_ms": times[mode] * 1e3,
                "moves": _moves(results), "final": _final(results), "void": not (checked.passed and sound(before, after)),
            })
    lbb, fp16, topk = times.values()
    exposed_s = lbb - _best_s(lines, total)
    summary |= {"vs_lbb_paper": lbb / topk, "vs_lbb_paper_fp16": lbb / fp16, "lbb_exposed_ms": exposed_s * 1e3}


def _recovery(
    rows: list[dict[str, Any]], summary: dict[str, Any], sums: list[int], lines: Sequence[LinearTime], total: int,
    added_s: float, ranks: Sequence[int],
) -> None:
    """Counts slow iterations after a worker was slowed down. Runs on loopback, so that only balancing is measured."""
    start, counted = 30, {}
    for rank in ranks:
        results = launch_hosts(None, len(lines), _worker(
            "--mode", "topk(ratio=0.01,values='int8')", "--steps", start + 30, "--slow", rank, "--from-step", start,
            "--added-ms", added_s * 1e3,
        ), deadline_s=200)
        iterations = _iterations(results)
        best_s = _best_s(lines, total)
        over_s = median(iterations[WARM:start]) - best_s
        slowed = [LinearTime(line.slope_s, line.intercept_s + added_s * (i == rank)) for i, line in enumerate(lines)]
        oracle_s = _best_s(slowed, total)
        counted[rank] = sum(one > 1.1 * oracle_s + over_s for one in iterations[start:])
        sums += results[0]["sums"]
        rows.append({
            "scenario": f"real processes, +{added_s * 1e3:.0f} ms on worker {rank + 1}", "mode": "ours, topk 1 % int8",
            "iteration_ms": median(iterations[start + 10 :]) * 1e3, "oracle_ms": (oracle_s + over_s) * 1e3,
            "slow_iterations": counted[rank], "moves": _moves(results), "final": _final(results),
        })
    summary["recover_iterations_additive50_real"] = max(n for rank, n in counted.items() if rank != len(lines) - 1)
    summary["recover_iterations_additive50_small_real"] = counted[len(lines) - 1]


def _accuracy(rows: list[dict[str, Any]], summary: dict[str, Any], seeds: Sequence[int]) -> None:
    """Accuracy of the example, balanced and with equal batches. Each step uses the same samples, so only rounding differs."""
    accuracies: dict[str, list[float]] = {}
    for name, flags in (("equal batches", ["--modes", "equal"]), ("balanced", ["--modes", "balanced"])):
        runs = [_example("--epochs", "6", "--seed", str(seed), *flags) for seed in seeds]
        accuracies[name] = [accuracy for accuracy, _ in runs]
        rows.append({
            "scenario": "real processes, example uneven.py", "mode": name, "accuracy": mean(accuracies[name]),
            "accuracy_std": stdev(accuracies[name]), "train_s": mean(seconds for _, seconds in runs),
        })
    pairs = zip(accuracies["balanced"], accuracies["equal batches"], strict=True)
    summary["accuracy_minus_equal_pct"] = 100 * mean(mine - theirs for mine, theirs in pairs)


def _example(*flags: str) -> tuple[float, float]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    argv = [*launch, "examples/uneven.py", *flags]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    match = re.search(r"accuracy ([\d.]+) after ([\d.]+) s", done.stdout)
    assert match, done.stdout
    return float(match[1]), float(match[2])


def _worker(*flags: object) -> list[str]:
    return [sys.executable, "-m", "bench.balance_worker", *map(str, flags)]


def _iterations(replies: Sequence[Mapping[str, Any]]) -> list[float]:
    """For each step the time of the slowest rank."""
    return [max(times) for times in zip(*(one["step_s"] for one in replies), strict=True)]


def _best_s(lines: Sequence[LinearTime], total: int) -> float:
    return solve(list(lines), total).makespan_s


def _moves(replies: Sequence[Mapping[str, Any]]) -> int:
    shares = list(zip(*(one["shares"] for one in replies), strict=True))
    return sum(a != b for a, b in itertools.pairwise(shares))


def _final(replies: Sequence[Mapping[str, Any]]) -> str:
    return "/".join(str(one["shares"][-1]) for one in replies)
