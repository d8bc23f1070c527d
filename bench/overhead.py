"""Overhead of commlayer where compression cannot help: step time against DDP on Gloo over loopback, and memory.

The codec is identity, on 4 ranks with 1 thread each. Ratios are medians over interleaved, paired steps of one run:
`python -m bench.overhead WHAT` is one rank, which trains the same model under DDP and under commlayer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench import memory
from bench.ranks import DEADLINE, as_rank, launch_hosts, program, slowest_s
from bench.report import Result
from bench.tasks_models import mlp
from commlayer import planner
from commlayer.engine.model.model_tensors import describe_model

RANKS = 4
AGREE = 1e-5
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def run(quick: bool) -> Result:
    steps = 20 if quick else 60
    rows: list[dict[str, Any]] = []
    replies = run_ranks("step", steps)
    ratios: dict[str, float] = {}
    base = slowest(replies, "ddp")
    for training in ("ddp", "allreduce", "service", "sites"):
        times = slowest(replies, training)
        ratio = statistics.median(t / b for t, b in zip(times, base, strict=True))
        ratios[training] = ratio
        rows.append({"what": f"step, {training}", "ms": statistics.median(times) * 1e3, "x_ddp": ratio,
                     "buckets": replies[0]["trainings"][training]["buckets"], "steps": steps})
    few_and_many = run_ranks("bucket", steps)
    per_bucket = bucket_us(few_and_many)
    # The second session of a process finds all modules imported. Its server is a new process, which loads its own.
    attach_s = max(t["attach_s"]["many"] for t in few_and_many)
    rows.append({"what": "attach() with a server of its own, beyond imports", "s": attach_s})
    rows.append({"what": "own CPU time of a worker per bucket", "us": per_bucket})
    memory_x, growth = measure_memory(quick, rows)
    return {"rows": rows, "summary": {
        "step_vs_ddp_allreduce": ratios["allreduce"],
        "step_vs_ddp_service": ratios["service"],
        "step_of_sites_vs_members": statistics.median(
            t / b for t, b in zip(slowest(replies, "sites"), slowest(replies, "service"), strict=True)),
        "us_per_bucket": per_bucket,
        "attach_s": attach_s,
        "memory_x_model_bytes": memory_x,
        "rss_growth_pct_2000_steps": growth,
    }}


def run_ranks(what: str, steps: int) -> list[dict[str, Any]]:
    replies = launch_hosts(None, RANKS, program("bench.overhead", what, steps))
    worst = max(t["disagreement"] for t in replies)
    if worst > AGREE:
        raise RuntimeError(f"the compared trainings did not end with the same model: parameters differ by {worst:.2g}")
    return replies


def slowest(replies: list[dict[str, Any]], training: str) -> list[float]:
    """Per step, the time of the slowest rank."""
    return slowest_s([reply["trainings"][training] for reply in replies])


def bucket_us(replies: list[dict[str, Any]]) -> float:
    """CPU time of a worker per additional bucket, for the same total bytes. Counts all threads and kernel time."""
    few_s, many_s = (statistics.median(c for t in replies for c in t["trainings"][name]["cpu_s"]) for name in ("few", "many"))
    trainings = replies[0]["trainings"]
    spread: int = trainings["many"]["buckets"] - trainings["few"]["buckets"]
    return float((many_s - few_s) / spread * 1e6)


def measure_memory(quick: bool, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Peak resident memory of a rank beyond plain training, in model sizes; then its growth in percent over many steps. MALLOC
    makes the allocator return large freed blocks to the system; otherwise fragmentation would vary by more than the model's
    size."""
    plain, topk = (memory.measured(mode, "small", env=MALLOC) for mode in ("plain", "topk"))
    extra, steps = (topk["peak"] - plain["peak"]) / topk["nbytes"], 200 if quick else 2000
    early, last = memory.measured("topk", "tiny", steps, env=MALLOC)["resident"]
    growth = (last / early - 1) * 100
    rows += [{"what": "peak memory beside plain training, topk", "x_model": extra, "model_mb": topk["nbytes"] / 2**20},
             {"what": f"growth from step {steps // 10} to {steps}, topk", "pct": growth, "steps": steps}]
    return extra, growth


WIDTHS, WARMUP = (1024, 1024, 1024, 10), 5
COMPARED = 20
"""Steps after which parameters are compared. Later, rounding may switch a ReLU in one model only, and the models diverge."""


class Training(NamedTuple):
    """A model whose gradients are averaged by one method: its training step, and how to close it."""

    step: Callable[[torch.Tensor, torch.Tensor], None]
    model: nn.Module
    close: Callable[[], None] = dist.barrier
    buckets: int = 0
    attach_s: float = 0.0


def with_sgd(module: nn.Module, model: nn.Module) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()

    return Training(step, model)


def uncompressed(model: nn.Module, path: str, site: int = 1, **sizes: int) -> Training:
    """attach() with the identity codec, by all-reduce or through one summation server (`path`), which sees `site` ranks as one
    member."""
    cut: dict[str, Any] = {"fuse_nbytes": 1 << 20, "cut_nbytes": 4 << 20} | sizes
    plan = planner.default_plan(describe_model(model), codec="identity()", path=path, servers=1 if path == "service" else 0,
                                ranks_per_node=site, **cut)
    dist.barrier()
    begin = time.perf_counter()
    session = commlayer.attach(model, plan=plan, config={"ranks_per_node": site if path == "service" else RANKS})
    return with_sgd(model, model)._replace(close=session.close, buckets=len(plan.buckets),
                                           attach_s=time.perf_counter() - begin)


def equal_layers(layers: int, width: int) -> nn.Sequential:
    """A stack of equal layers: many buckets of equal size, little compute."""
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


Paired = tuple[dict[str, dict[str, Any]], float]
"""Times by method, and the largest difference between their parameters after COMPARED steps."""


def compare_steps(trainings: dict[str, Training], width: int, batch: int, classes: int, steps: int) -> Paired:
    """Times each method one step at a time. A barrier before each step keeps stragglers of one method out of the next time."""
    disagreement = 0.0
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    times: dict[str, dict[str, Any]] = {name: {"step_s": [], "cpu_s": [], "buckets": training.buckets}
                                        for name, training in trainings.items()}
    for number in range(WARMUP + steps):
        x = torch.randn(batch, width, generator=generator)
        y = torch.randint(0, classes, (batch,), generator=generator)
        for name, training in trainings.items():
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            training.step(x, y)
            if number >= WARMUP:
                times[name]["step_s"].append(time.perf_counter() - begin)
                times[name]["cpu_s"].append(time.process_time() - cpu)
        if number + 1 == min(COMPARED, WARMUP + steps):
            disagreement = largest_difference(trainings)
    return times, disagreement


def largest_difference(trainings: dict[str, Training]) -> float:
    """Largest difference between any method's parameters and the first method's, relative to the largest parameter."""
    flat = [torch.cat([p.detach().view(-1) for p in training.model.parameters()]) for training in trainings.values()]
    return max(float((f - flat[0]).abs().max() / flat[0].abs().max()) for f in flat)


def rank(what: str, steps: str) -> dict[str, Any]:
    """One rank. `what`: "step", with each method, or "bucket"."""
    dist.init_process_group("gloo", timeout=DEADLINE)
    if what == "step":
        model, width, batch, classes = mlp(*WIDTHS), WIDTHS[0], 32, WIDTHS[-1]
        trainings = {"ddp": with_sgd(DistributedDataParallel(model), model)}
        trainings |= {path: uncompressed(mlp(*WIDTHS), path) for path in ("allreduce", "service")}
        trainings["sites"] = uncompressed(mlp(*WIDTHS), "service", site=2)
    else:
        # The same bytes in 64 buckets and in 4: only the number of buckets differs.
        width, batch, classes = 64, 2, 64
        sizes = {"few": 1 << 18, "many": 0}
        trainings = {name: uncompressed(equal_layers(64, width), "service", fuse_nbytes=size) for name, size in sizes.items()}
    times, disagreement = compare_steps(trainings, width, batch, classes, int(steps))
    dist.barrier()
    for training in trainings.values():
        training.close()
    return {"trainings": times, "disagreement": disagreement,
            "attach_s": {name: training.attach_s for name, training in trainings.items()}}


if __name__ == "__main__":
    as_rank(rank)
