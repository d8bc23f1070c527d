"""Overhead of commlayer where compression cannot help: step time against DDP on Gloo over loopback, and memory.

The codec is identity, on 4 ranks with 1 thread each. Ratios are medians over interleaved, paired steps of one run.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from bench.baselines import launch_hosts
from bench.report import Result

RANKS = 4
AGREE = 1e-5
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def run(quick: bool) -> Result:
    steps = 20 if quick else 60
    rows: list[dict[str, Any]] = []
    replies = answers("step", "--steps", str(steps))
    ratios: dict[str, float] = {}
    base = slowest(replies, "ddp")
    for way in ("ddp", "allreduce", "service"):
        times = slowest(replies, way)
        ratio = statistics.median(t / b for t, b in zip(times, base, strict=True))
        ratios[way] = ratio
        rows.append({"what": f"step, {way}", "ms": statistics.median(times) * 1e3, "x_ddp": ratio,
                     "buckets": replies[0]["ways"][way]["buckets"], "steps": steps})
    few_and_many = answers("bucket", "--steps", str(steps))
    per_bucket = bucket_us(few_and_many)
    # The second session of a process finds all modules imported. Its server is a new process, which loads its own.
    attach_s = max(t["attach_s"]["many"] for t in few_and_many)
    rows.append({"what": "attach() with a server of its own, beyond imports", "s": attach_s})
    rows.append({"what": "own CPU time of a worker per bucket", "us": per_bucket})
    memory, growth = measured_memory(quick, rows)
    return {"rows": rows, "summary": {
        "step_vs_ddp_allreduce": ratios["allreduce"],
        "step_vs_ddp_service": ratios["service"],
        "us_per_bucket": per_bucket,
        "attach_s": attach_s,
        "memory_x_model_bytes": memory,
        "rss_growth_pct_2000_steps": growth,
    }}


def answers(what: str, *arguments: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    replies = launch_hosts(None, RANKS, [sys.executable, "-m", "bench.overhead_worker", what, *arguments], env=env)
    worst = max(t.get("disagreement", 0.0) for t in replies)
    if worst > AGREE:
        raise RuntimeError(f"the ways compared did not train the same model: parameters differ by {worst:.2g}")
    return replies


def slowest(replies: list[dict[str, Any]], way: str) -> list[float]:
    """Per step, the time of the slowest rank."""
    return [max(times) for times in zip(*(t["ways"][way]["step_s"] for t in replies), strict=True)]


def bucket_us(replies: list[dict[str, Any]]) -> float:
    """CPU time of a worker per additional bucket, for the same total bytes. Counts all threads and kernel time."""
    few, many = (statistics.median(c for t in replies for c in t["ways"][way]["cpu_s"]) for way in ("few", "many"))
    ways = replies[0]["ways"]
    spread: int = ways["many"]["buckets"] - ways["few"]["buckets"]
    return float((many - few) / spread * 1e6)


def measured_memory(quick: bool, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Peak resident memory of a worker beyond plain training, in model sizes; then its growth in percent over many steps.

    Servers are separate processes. The figure is the median over the ranks that started no server. MALLOC makes the allocator
    return large freed blocks to the system; otherwise heap fragmentation would vary by more than the model's size.
    """
    megabytes, short = 128, 8 if quick else 12  # with a smaller model, the fixed 25 MB of gRPC and buffers would dominate

    def train(mode: str, megabytes: int, steps: int) -> dict[str, Any]:
        arguments = ["--mode", mode, "--megabytes", str(megabytes), "--steps", str(steps)]
        first, *others = answers("memory", *arguments, env=MALLOC)
        return sorted(others, key=lambda t: int(t["peak"]))[len(others) // 2] | {"servers": first["servers"]}

    base = train("plain", megabytes, short)
    worst = 0.0
    for mode in ("allreduce", "service", "topk"):
        peaks = train(mode, megabytes, short)
        extra = (peaks["peak"] - base["peak"]) / peaks["nbytes"]
        worst = max(worst, extra)
        mb = peaks["nbytes"] / 2**20
        rows.append({"what": f"peak memory beside plain training, {mode}", "x_model": extra, "model_mb": mb})
        if mode != "allreduce":
            rows.append({"what": f"the one server's own peak memory, {mode}", "mb": peaks["servers"][0] / 2**20,
                         "model_mb": mb})
    steps = 200 if quick else 2000
    peaks = train("topk", 4, steps)
    growth = (peaks["rss"][-1] / peaks["rss"][1] - 1) * 100
    rows.append({"what": f"growth from step {steps // 10} to {steps}, topk", "pct": growth, "steps": steps})
    return worst, growth
