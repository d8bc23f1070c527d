"""Overhead of commlayer where compression cannot help: step time against DDP on Gloo over loopback, and memory.

The codec is identity, on 4 ranks with 1 thread each. Ratios are medians over interleaved, paired steps of one run:
`python -m bench.overhead WHAT` is one rank, which trains the same model under DDP and under commlayer.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.memory import peak
from bench.ranks import launch_hosts, slowest_s
from bench.report import Result
from bench.worker import DEADLINE, MODELS, build
from commlayer import planner
from commlayer.engine.model.model_tensors import job_of

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
    memory, growth = measure_memory(quick, rows)
    return {"rows": rows, "summary": {
        "step_vs_ddp_allreduce": ratios["allreduce"],
        "step_vs_ddp_service": ratios["service"],
        "step_of_sites_vs_members": statistics.median(
            t / b for t, b in zip(slowest(replies, "sites"), slowest(replies, "service"), strict=True)),
        "us_per_bucket": per_bucket,
        "attach_s": attach_s,
        "memory_x_model_bytes": memory,
        "rss_growth_pct_2000_steps": growth,
    }}


def run_ranks(what: str, steps: int, *more: object, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    replies = launch_hosts(None, RANKS, [sys.executable, "-m", "bench.overhead", what, *map(str, (steps, *more))], env=env)
    worst = max(t.get("disagreement", 0.0) for t in replies)
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
    """Peak resident memory of a worker beyond plain training, in model sizes; then its growth in percent over many steps.

    Servers are separate processes. The figure is the median over the ranks that started no server. MALLOC makes the allocator
    return large freed blocks to the system; otherwise heap fragmentation would vary by more than the model's size.
    """
    megabytes, short = 128, 8 if quick else 12  # with a smaller model, the fixed 25 MB of gRPC and buffers would dominate

    def train(mode: str, megabytes: int, steps: int) -> dict[str, Any]:
        first, *others = run_ranks("memory", steps, mode, megabytes, env=MALLOC)
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


MODEL, WARMUP = "mlp", 5
COMPARED = 20
"""Steps after which parameters are compared. Later, rounding may switch a ReLU in one model only, and the models diverge."""


class Training(NamedTuple):
    """A model whose gradients are averaged by one method: its training step, and how to close it."""

    step: Callable[[torch.Tensor, torch.Tensor], None]
    close: Callable[[], None]
    model: nn.Module
    buckets: int
    servers: tuple[int, ...] = ()
    """Process ids of the servers that this rank started."""
    attach_s: float = 0.0


def with_sgd(
    module: nn.Module, model: nn.Module, close: Callable[[], None], buckets: int, servers: tuple[int, ...] = (),
    attach_s: float = 0.0,
) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of = nn.CrossEntropyLoss()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(module(x), y).backward()
        optimizer.step()

    return Training(step, close, model, buckets, servers, attach_s)


def plain(make: Callable[[], nn.Module]) -> Training:
    model = make()
    return with_sgd(model, model, lambda: None, 0)


def ddp(make: Callable[[], nn.Module]) -> Training:
    model = make()
    return with_sgd(DistributedDataParallel(model), model, lambda: None, 0)


def uncompressed(make: Callable[[], nn.Module], path: str, site: int = 1, **sizes: int) -> Training:
    """attach() with the identity codec, by all-reduce or through one summation server (`path`), which sees `site` ranks as one
    member."""
    model = make()
    world = dist.get_world_size()
    cut: dict[str, Any] = {"fuse_nbytes": 1 << 20, "cut_nbytes": 4 << 20} | sizes
    plan = planner.default_plan(job_of(model), codec="identity()", path=path, servers=1 if path == "service" else 0,
                                ranks_per_node=site, **cut)
    dist.barrier()
    begin = time.perf_counter()
    session = commlayer.attach(model, plan=plan, config={"ranks_per_node": site if path == "service" else world})
    return with_sgd(model, model, session.close, len(plan.buckets), servers_of(session), time.perf_counter() - begin)


def equal_layers(layers: int, width: int) -> Callable[[], nn.Module]:
    """A stack of equal layers: many buckets of equal size, little compute."""
    def make() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    return make


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


def memory(mode: str, megabytes: int, steps: int) -> dict[str, Any]:
    """Peak resident bytes during steps, and resident bytes after some steps; servers are separate processes.

    The peak is the memory that a machine needs. Between steps, resident bytes depend on what the allocator has returned.
    """
    width = int((megabytes * (1 << 20) / 4 / 4) ** 0.5)
    make = equal_layers(4, width)
    training = {"plain": plain, "topk": with_topk}[mode](make) if mode in ("plain", "topk") else uncompressed(make, mode)
    x, y = torch.randn(2, width), torch.zeros(2, dtype=torch.long)
    marks = []
    for number in range(steps):
        if number == steps // 2:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, so the peak is of the second half
        training.step(x, y)
        if number in (min(4, steps - 1), steps // 10, steps - 1):
            marks.append(peak(field="VmRSS"))
    nbytes = sum(p.numel() * 4 for p in training.model.parameters())
    answer = {"nbytes": nbytes, "rss": marks, "peak": peak(),
              "servers": [peak(pid) for pid in training.servers]}
    dist.barrier()
    training.close()
    return answer


def with_topk(make: Callable[[], nn.Module]) -> Training:
    model = make()
    session = commlayer.attach(model, compression=commlayer.compressors.topk(ratio=0.01), config={"ranks_per_node": 1})
    return with_sgd(model, model, session.close, 0, servers_of(session))


def servers_of(session: commlayer.Session) -> tuple[int, ...]:
    return tuple(child.pid for child in session.inspect.context.embedded)


def rank(what: str, steps: int, mode: str = "plain", megabytes: str = "64") -> None:
    """One rank: prints one line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=DEADLINE)
    if what == "memory":
        print(json.dumps(memory(mode, int(megabytes), steps)), flush=True)
    else:
        if what == "step":
            make, width = partial(build, MODEL), MODELS[MODEL][0]
            trainings = {"ddp": ddp(make)} | {path: uncompressed(make, path) for path in ("allreduce", "service")}
            trainings["sites"] = uncompressed(make, "service", site=2)
            times, disagreement = compare_steps(trainings, width, 32, 10, steps)
        else:
            # The same bytes in 64 buckets and in 4: only the number of buckets differs.
            equal = equal_layers(64, 64)
            sizes = {"few": 1 << 18, "many": 0}
            trainings = {name: uncompressed(equal, "service", fuse_nbytes=size) for name, size in sizes.items()}
            times, disagreement = compare_steps(trainings, 64, 2, 64, steps)
        print(json.dumps({"trainings": times, "disagreement": disagreement,
                          "attach_s": {name: training.attach_s for name, training in trainings.items()}}), flush=True)
        dist.barrier()
        for training in trainings.values():
            training.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
