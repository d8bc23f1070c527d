"""Coded collectives compared with summation servers and DDP's fp16 hook over shaped links.

An all-gather of payloads takes one network trip instead of two, but every host receives the payloads of all others. It should
therefore win only on links with high latency, with few hosts and small payloads. A link's rows are void if the lab's self-check
failed.
"""

from __future__ import annotations

from typing import Any

from bench.baselines import launch_hosts, median_step_s, worker
from bench.lab import Lab, check, sound
from bench.report import Result

LINKS = {"100 Mb/s, 30 ms": (100e6, 0.015), "10 Mb/s, 80 ms": (10e6, 0.040)}
HOSTS = (2, 4)
CODECS = ("topk(ratio=0.01,values='int8')", "int8()")
WAYS = {
    "servers": "commlayer:{}",
    "all-gather": "staged:encode@cpu all.allgather decode@cpu|{}",
    "all-to-all, all-gather": "staged:encode@cpu all.alltoall decode@cpu encode@cpu all.allgather decode@cpu|{}",
}
MODEL = "mlp_small"
"""0.3 MB. Bandwidth dominates for large models, latency for small ones."""
STEPS = 30


def run(quick: bool) -> Result:
    rows: list[dict[str, Any]] = []
    best: dict[str, float] = {}
    for link, (bps, delay_s) in LINKS.items():
        for hosts in HOSTS[:1] if quick else HOSTS:
            with Lab(hosts=hosts, up_bps=bps, down_bps=bps, delay_s=delay_s) as lab:
                passed = check(lab).passed
                for model in (MODEL, "mlp")[: 1 if quick else 2]:
                    fp16_s = _row(rows, lab, passed, hosts, link, model, "DDP fp16 hook", "", "ddp_fp16")
                    for codec in CODECS:
                        times = {way: _row(rows, lab, passed, hosts, link, model, way, codec, mode.format(codec), fp16_s)
                                 for way, mode in WAYS.items()}
                        staged = min(times[way] for way in WAYS if way != "servers")
                        best[f"{link}, {hosts} hosts, {model}, {codec}"] = times["servers"] / staged
    return {"rows": rows, "summary": {
        "rows_won_by_coded_collectives": sum(ratio > 1 for ratio in best.values()),
        "rows": len(best),
        "most_x_vs_servers": max(best.values()),
        "least_x_vs_servers": min(best.values()),
    }}


def _row(
    rows: list[dict[str, Any]], lab: Lab, passed: bool, hosts: int, link: str, model: str, way: str, codec: str, mode: str,
    fp16_s: float = 0.0,
) -> float:
    before = lab.counters()
    results = launch_hosts(lab, hosts, worker(mode, warmup=3, steps=STEPS, model=model), deadline_s=300)
    step_s = median_step_s(results)
    rows.append({"link": link, "hosts": hosts, "model": model, "way": way, "codec": codec, "step_ms": step_s * 1e3,
                 "x_vs_ddp_fp16": fp16_s / step_s if fp16_s else 1.0, "void": not (passed and sound(before, lab.counters()))})
    return step_s
