"""Predicted against measured step times, and plan "auto" against DDP, in real runs over the lab's links.

Predicted: rank 0 prices the current plan from measurements of all ranks in the first steps, as "auto" does. Measured: the
median of the later steps. A row is void if the lab fell below 95 % of its rates during the run.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from bench import Unmeasurable
from bench.baselines import launch_hosts, median_step_s, worker
from bench.lab import Lab, check, sound

HOSTS = 4
ONE_WAY_S = 0.015
PRICED_STEPS = 10
"""First steps, from which the plan is priced. Step times are of later steps."""
SETTLE_STEPS = 60
"""Warm-up of "auto": it measures, plans, switches to a plan, perhaps rolls back, and tries a plan without compression."""


class Net(NamedTuple):
    """Link rates of every host, in bit/s."""

    name: str
    up_bps: float
    down_bps: float


NETS = (Net("1g", 1e9, 1e9), Net("100m", 1e8, 1e8), Net("100/20m", 2e7, 1e8), Net("10m", 1e7, 1e7))
MODELS = ("mlp", "mlp_small")
CODECS = ("topk(ratio=0.01)", "int8()", "fp16()")
STEPS = {"loopback": 20, "1g": 20, "100m": 12, "100/20m": 8, "10m": 6}


def rows(quick: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of the table and figures for the summary."""
    result: list[dict[str, Any]] = []
    errors: list[float] = []
    slower: list[float] = []
    for net in NETS[1:2] if quick else NETS:
        with Lab(hosts=HOSTS, up_bps=net.up_bps, down_bps=net.down_bps, delay_s=ONE_WAY_S) as lab:
            check(lab)
            for model in MODELS[:1] if quick else MODELS:
                for codec in CODECS[:2] if quick else CODECS:
                    row = _priced(lab, net, model, codec)
                    result.append(row)
                    errors += [] if row["void"] else [abs(row["error_pct"])]
                row = _auto(lab, net, model)
                result.append(row)
                slower += [] if row["void"] else [row["x_best_ddp"]]
    if not errors or not slower:
        raise Unmeasurable("planner: the lab did not hold its rates in any run")
    return result, {
        "predicted_vs_measured_pct_p50": statistics.median(errors), "predicted_vs_measured_pct_worst": max(errors),
        "never_slower": max(slower), "never_slower_loopback": _loopback(result),
    }


def _priced(lab: Lab, net: Net, model: str, codec: str) -> dict[str, Any]:
    before = lab.counters()
    command = worker(f"priced:{codec}", model, warmup=PRICED_STEPS, steps=STEPS[net.name])
    replies = launch_hosts(lab, HOSTS, command, deadline_s=400)
    measured_s = median_step_s(replies)
    verdict = replies[0]["verdicts"][0]
    return {
        "link": net.name, "model": model, "what": codec, "step_ms": measured_s * 1e3,
        "predicted_ms": verdict["priced_s"] * 1e3, "error_pct": 100 * (verdict["priced_s"] / measured_s - 1),
        "found_ms": verdict["found_s"] * 1e3, "void": not sound(before, lab.counters()),
    }


def _auto(lab: Lab | None, net: Net, model: str) -> dict[str, Any]:
    before = lab.counters() if lab else None
    steps = STEPS[net.name]
    times = {}
    for mode in ("ddp_fp32", "ddp_fp16", "commlayer:auto"):
        warmup = SETTLE_STEPS if mode == "commlayer:auto" else 2
        replies = launch_hosts(lab, HOSTS, worker(mode, model, warmup=warmup, steps=steps), deadline_s=500)
        times[mode] = median_step_s(replies)
    best = min(times["ddp_fp32"], times["ddp_fp16"])
    return {
        "link": net.name, "model": model, "what": 'plan "auto"', "step_ms": times["commlayer:auto"] * 1e3,
        "ddp_fp32_ms": times["ddp_fp32"] * 1e3, "ddp_fp16_ms": times["ddp_fp16"] * 1e3,
        "x_best_ddp": times["commlayer:auto"] / best,
        "void": bool(lab and before and not sound(before, lab.counters())),
    }


def _loopback(rows: list[dict[str, Any]]) -> float:
    """Plan "auto" against DDP on four nodes that share one machine, where only CPUs are scarce. Appends the row to `rows`."""
    row = _auto(None, Net("loopback", 0.0, 0.0), MODELS[0])
    rows.append(row)
    return float(row["x_best_ddp"])
