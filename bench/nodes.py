"""Step time of two nodes with two ranks each over loopback, by which rank of a node encodes a bucket.

    owner    one rank encodes each bucket; the buckets alternate between ranks
    halves   each bucket is split into two, one per rank: two reduces and two broadcasts
    shards   the same two halves, by one reduce-scatter and one all-gather

Steps of one run are interleaved; each rank has one thread.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch.distributed as dist
from msgspec.structs import replace

import commlayer
from bench.baselines import launch_hosts
from bench.overhead_worker import DEADLINE, Way, many, paired, trained
from bench.report import Result
from commlayer.engine.model.model_tensors import job_of
from commlayer.planner import default_plan, lower
from commlayer.planner.plan_rules import together
from commlayer.records import Plan

RANKS, PER_NODE = 4, 2
LAYERS, WIDTH, BATCH = 6, 1024, 16
"""One bucket of 4 MB per layer."""
CODECS = ("identity()", "int8()", "topk(ratio=0.01)")
WAYS = ("owner", "halves", "shards")
STEPS, STEPS_QUICK, WARMUP = 30, 10, 3
SHARDED = "node.reduce_scatter encode@cpu net.push net.pull decode@cpu node.allgather"
EXACT = "identity()"
AGREE = 1e-4


def run(quick: bool) -> Result:
    rows: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    for codec in CODECS[:2] if quick else CODECS:
        replies = launch_hosts(None, RANKS, [sys.executable, "-m", "bench.nodes", codec, str(STEPS_QUICK if quick else STEPS)])
        worst = max(t["disagreement"] for t in replies)
        if codec == EXACT and worst > AGREE:
            raise RuntimeError(f"the ways compared did not train the same model: parameters differ by {worst:.2g}")
        times = {way: [max(s) for s in zip(*(t["ways"][way]["step_s"] for t in replies), strict=True)] for way in WAYS}
        for way in WAYS:
            cpu_s = sum(statistics.median(t["ways"][way]["cpu_s"]) for t in replies)
            ratio = statistics.median(t / b for t, b in zip(times[way], times["owner"], strict=True))
            rows.append({"codec": codec, "way": way, "ms": statistics.median(times[way]) * 1e3,
                         "least_ms": min(times[way]) * 1e3, "x_owner": ratio, "cpu_ms": cpu_s * 1e3,
                         "buckets": replies[0]["ways"][way]["buckets"]})
            if way != "owner":
                summary[f"{way}_vs_owner_{codec.partition('(')[0]}"] = ratio
    return {"rows": rows, "summary": summary}


def plan_of(job: Any, codec: str, way: str) -> Plan:
    plan = default_plan(job, codec=codec, path="service", servers=1, ranks_per_node=PER_NODE, fuse_nbytes=1 << 20,
                        cut_nbytes=8 << 20)
    if way != "owner":
        plan = lower(replace(plan, buckets=tuple(replace(b, path=SHARDED, owner=0) for b in plan.buckets)))
    if way == "halves":
        plan = replace(plan, buckets=tuple(replace(b, owner=1 - b.owner) for b in plan.buckets))
    assert any(len(one) > 1 for one in together(plan.buckets, PER_NODE)) == (way == "shards")
    return plan


def rank(codec: str, steps: int) -> None:
    """One rank. Prints one line of JSON."""
    dist.init_process_group("gloo", timeout=DEADLINE)
    ways: dict[str, Way] = {}
    for way in WAYS:
        model = many(LAYERS, WIDTH)()
        plan = plan_of(job_of(model), codec, way)
        session = commlayer.attach(model, plan=plan, config={"ranks_per_node": PER_NODE})
        ways[way] = trained(model, model, session.close, len(plan.buckets))
    times, disagreement = paired(ways, WIDTH, BATCH, WIDTH, steps, WARMUP)
    for each in ways.values():
        each.close()
    print(json.dumps({"ways": times, "disagreement": disagreement}), flush=True)


if __name__ == "__main__":
    rank(sys.argv[1], int(sys.argv[2]))
