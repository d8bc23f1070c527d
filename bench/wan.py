"""Step time over shaped links on 4 hosts: DDP fp32, DDP with its fp16 hook, and commlayer with top-k 1 % + int8.

The model is light (an MLP of about 8 MB, batch 32), so communication dominates. A rate's rows are void if the lab's
self-check measured less than 95 % of the configured rate.
"""

from __future__ import annotations

from typing import Any

from bench.baselines import launch_hosts, median_step_s, worker
from bench.lab import Lab, check, sound
from bench.report import Result

HOSTS = 4
ONE_WAY_S = 0.015
TOPK = "commlayer:topk(ratio=0.01,values='int8')"
MODES = {"DDP fp32": "ddp_fp32", "DDP fp16 hook": "ddp_fp16", "commlayer topk 1 % int8": TOPK}
RATES = {"1g": 1e9, "100m": 100e6, "10m": 10e6}
STEPS = {"1g": 20, "100m": 10, "10m": 3}


def run(quick: bool) -> Result:
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for name, bps in RATES.items():
        if quick and name == "1g":
            continue
        with Lab(hosts=HOSTS, up_bps=bps, down_bps=bps, delay_s=ONE_WAY_S) as lab:
            checked = check(lab)
            times = {}
            for label, mode in MODES.items():
                steps = STEPS[name] if mode != TOPK else max(30, STEPS[name])
                before = lab.counters()
                ranks = launch_hosts(lab, HOSTS, worker(mode, warmup=2, steps=steps), deadline_s=500)
                after = lab.counters()
                times[mode] = median_step_s(ranks)
                rows.append({
                    "link": name, "what": label, "step_ms": times[mode] * 1e3,
                    "x_vs_ddp_fp32": times["ddp_fp32"] / times[mode], "sent_mb": most_sent(before, after) / 1e6,
                    "steps": steps + 2, "void": not (checked.passed and sound(before, after)), "congestion": lab.congestion,
                })
            rows.append({"link": name, "what": "bound: ring all-reduce fp32", "step_ms": ring_s(ranks[0]["nbytes"], bps) * 1e3})
            summary[f"step_x_vs_ddp_fp32_{name}"] = times["ddp_fp32"] / times[TOPK]
            summary[f"step_x_vs_ddp_fp16_{name}"] = times["ddp_fp16"] / times[TOPK]
    return {"rows": rows, "summary": summary}


def most_sent(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Bytes sent by the host that sent most, including start-up."""
    return max(int(b["sent_nbytes"] - a["sent_nbytes"]) for a, b in zip(before["hosts"], after["hosts"], strict=True))


def ring_s(nbytes: int, bps: float) -> float:
    """Lower bound for a ring all-reduce: 2 (n - 1) / n of the bytes through each link, and 2 (n - 1) hops."""
    return 2 * (HOSTS - 1) / HOSTS * nbytes * 8 / bps + 2 * (HOSTS - 1) * ONE_WAY_S
