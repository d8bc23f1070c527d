"""One rank of `bench overhead`: trains the same model under DDP and under commlayer, in interleaved steps.

Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.worker import MODELS, build
from commlayer import planner
from commlayer.engine.model.model_tensors import job_of

DEADLINE = timedelta(seconds=120)
COMPARED = 20
"""Steps after which parameters are compared. Later, rounding may switch a ReLU in one model only, and the models diverge."""


class Way(NamedTuple):
    """A model whose gradients are averaged by one method: its training step, and how to close it."""

    step: Callable[[torch.Tensor, torch.Tensor], None]
    close: Callable[[], None]
    model: nn.Module
    buckets: int
    servers: tuple[int, ...] = ()
    """Process ids of the servers that this rank started."""
    attach_s: float = 0.0


def trained(
    module: nn.Module, model: nn.Module, close: Callable[[], None], buckets: int, servers: tuple[int, ...] = (),
    attach_s: float = 0.0,
) -> Way:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of = nn.CrossEntropyLoss()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(module(x), y).backward()
        optimizer.step()

    return Way(step, close, model, buckets, servers, attach_s)


def plain(make: Callable[[], nn.Module]) -> Way:
    model = make()
    return trained(model, model, lambda: None, 0)


def ddp(make: Callable[[], nn.Module]) -> Way:
    model = make()
    return trained(DistributedDataParallel(model), model, lambda: None, 0)


def attached(make: Callable[[], nn.Module], path: str, **sizes: int) -> Way:
    """attach() with the identity codec, by all-reduce or through one summation server (`path`)."""
    model = make()
    world = dist.get_world_size()
    cut: dict[str, Any] = {"fuse_nbytes": 1 << 20, "cut_nbytes": 4 << 20} | sizes
    plan = planner.default_plan(job_of(model), codec="identity()", path=path, servers=1 if path == "service" else 0,
                                ranks_per_node=1, **cut)
    dist.barrier()
    begin = time.perf_counter()
    session = commlayer.attach(model, plan=plan, config={"ranks_per_node": 1 if path == "service" else world})
    return trained(model, model, session.close, len(plan.buckets), servers_of(session), time.perf_counter() - begin)


def many(layers: int, width: int) -> Callable[[], nn.Module]:
    """A stack of equal layers: many buckets of equal size, little compute."""
    def make() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    return make


Told = tuple[dict[str, dict[str, Any]], float]
"""Times by method, and the largest difference between their parameters after COMPARED steps."""


def paired(ways: dict[str, Way], width: int, batch: int, classes: int, steps: int, warmup: int) -> Told:
    """Times each method one step at a time. A barrier before each step keeps stragglers of one method out of the next time."""
    disagreement = 0.0
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    times: dict[str, dict[str, Any]] = {name: {"step_s": [], "cpu_s": [], "buckets": way.buckets} for name, way in ways.items()}
    for number in range(warmup + steps):
        x = torch.randn(batch, width, generator=generator)
        y = torch.randint(0, classes, (batch,), generator=generator)
        for name, way in ways.items():
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            way.step(x, y)
            if number >= warmup:
                times[name]["step_s"].append(time.perf_counter() - begin)
                times[name]["cpu_s"].append(time.process_time() - cpu)
        if number + 1 == min(COMPARED, warmup + steps):
            disagreement = agree(ways)
    return times, disagreement


def agree(ways: dict[str, Way]) -> float:
    """Largest difference between any method's parameters and the first method's, relative to the largest parameter."""
    flat = [torch.cat([p.detach().view(-1) for p in way.model.parameters()]) for way in ways.values()]
    return max(float((f - flat[0]).abs().max() / flat[0].abs().max()) for f in flat)


def memory(mode: str, megabytes: int, steps: int) -> dict[str, Any]:
    """Peak resident bytes during steps, and resident bytes after some steps; servers are separate processes.

    The peak is the memory that a machine needs. Between steps, resident bytes depend on what the allocator has returned.
    """
    width = int((megabytes * (1 << 20) / 4 / 4) ** 0.5)
    make = many(4, width)
    way = {"plain": plain, "topk": compressed}[mode](make) if mode in ("plain", "topk") else attached(make, mode)
    x, y = torch.randn(2, width), torch.zeros(2, dtype=torch.long)
    marks = []
    for number in range(steps):
        if number == steps // 2:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, so the peak is of the second half
        way.step(x, y)
        if number in (min(4, steps - 1), steps // 10, steps - 1):
            marks.append(resident())
    nbytes = sum(p.numel() * 4 for p in way.model.parameters())
    answer = {"rank": dist.get_rank(), "mode": mode, "nbytes": nbytes, "rss": marks, "peak": peak(),
              "servers": [peak(pid) for pid in way.servers]}
    dist.barrier()
    way.close()
    return answer


def compressed(make: Callable[[], nn.Module]) -> Way:
    model = make()
    session = commlayer.attach(model, compression=commlayer.compressors.topk(ratio=0.01), config={"ranks_per_node": 1})
    return trained(model, model, session.close, 0, servers_of(session))


def servers_of(session: commlayer.Session) -> tuple[int, ...]:
    return tuple(child.pid for child in session.inspect.context.embedded)


def peak(pid: int | str = "self") -> int:
    line = next(text for text in Path(f"/proc/{pid}/status").read_text().splitlines() if text.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead_worker")
    parser.add_argument("what", choices=["step", "bucket", "memory"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--mode", default="plain")
    parser.add_argument("--megabytes", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=DEADLINE)
    if args.what == "memory":
        print(json.dumps(memory(args.mode, args.megabytes, args.steps)), flush=True)
        dist.destroy_process_group()
        return 0
    if args.what == "step":
        make = partial(build, args.model)
        ways = {"ddp": ddp(make), "allreduce": attached(make, "allreduce"), "service": attached(make, "service")}
        width = MODELS[args.model][0]
        times, disagreement = paired(ways, width, 32, 10, args.steps, args.warmup)
    else:
        # The same bytes in 64 buckets and in 4: only the number of buckets differs.
        equal = many(64, 64)
        ways = {"few": attached(equal, "service", fuse_nbytes=1 << 18), "many": attached(equal, "service", fuse_nbytes=0)}
        times, disagreement = paired(ways, 64, 2, 64, args.steps, args.warmup)
    answer = {"rank": dist.get_rank(), "ways": times, "disagreement": disagreement,
              "attach_s": {name: way.attach_s for name, way in ways.items()},
              "nbytes": sum(p.numel() * 4 for p in next(iter(ways.values())).model.parameters())}
    print(json.dumps(answer), flush=True)
    dist.barrier()
    for way in ways.values():
        way.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
