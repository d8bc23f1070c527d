"""One rank of the balancing benchmark with real processes. Prints one line of JSON.

`python -m bench.balance_worker --mode lbb`. Compute is replaced by sleeping for the rank's modelled time: a third in forward,
the rest spread over backward, so that gradients become ready as on a GPU. Bytes, shares and times are real.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commlayer
from bench.as_rank import as_rank
from bench.balance import BACKWARD, BATCH, PAPER, cubics
from bench.reference.balance_cluster import PlayedCluster
from bench.worker import DEADLINE, host_config
from commlayer.balance import LinearTime, Sampler
from commlayer.balance.lbb import Lbb

WIDTHS = (64, 352, 352, 352, 10)
"""1.1 MB of float32: LBB's all-reduce per parameter among four ranks takes about 100 ms at 200 Mb/s, as in the paper."""
SAMPLES = 4
"""Number of samples that are really computed per share: enough to get gradients."""


class Nap(torch.autograd.Function):
    """Sleeps in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None


class Slept(nn.Module):
    """An MLP whose forward and backward passes together take `compute_s`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS))
        self.compute_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.compute_s * (1 - BACKWARD))
        for layer in self.layers:
            x = Nap.apply(torch.tanh(layer(x)), self.compute_s * BACKWARD / len(self.layers))  # type: ignore[no-untyped-call]
        return x


class Truth(NamedTuple):
    """This rank's linear time model, and the time added to it from a step on."""

    line: LinearTime
    from_step: int
    added_s: float

    def compute_s(self, step: int, samples: int) -> float:
        return self.line.time_s(samples) + (self.added_s if step >= self.from_step else 0.0)


def published(model: Slept, truth: Truth, steps: int) -> Iterator[list[int]]:
    """LBB as its authors run it: a blocking all-reduce for each parameter after backward. Yields all shares after each step."""
    dist.init_process_group("gloo", timeout=DEADLINE)
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.01)
    mode = Lbb(cubics(PlayedCluster(PAPER, BATCH)), BATCH)
    x = torch.randn(SAMPLES, WIDTHS[0])
    for step in range(steps):
        shares = list(mode.shares(step))
        model.compute_s = truth.compute_s(step, shares[rank])
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        computed_s = time.perf_counter() - begin
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad.mul_(shares[rank] / BATCH))
        optimizer.step()
        yield shares
        times = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(times, torch.tensor([computed_s], dtype=torch.float64))
        mode.observe(step, [float(one) for one in times])


def balanced(model: Slept, truth: Truth, steps: int, codec: str, result: dict[str, Any]) -> Iterator[list[int]]:
    """Our balancer: starts with equal shares, without a profile. Yields this rank's share after each step."""
    dist.init_process_group("gloo", timeout=DEADLINE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = host_config(servers="each", fuse_nbytes=1 << 17, cut_nbytes=1 << 18)  # small: as many buckets as a large model has
    session = commlayer.attach(model, optimizer, compression=None if codec == "auto" else codec, config=config)
    sampler = Sampler(steps * BATCH, BATCH, world=dist.get_world_size(), rank=dist.get_rank())
    x = torch.randn(SAMPLES, WIDTHS[0])
    controller = commlayer.LoadBalancer(session, sampler)
    loader = DataLoader(TensorDataset(torch.arange(sampler.length)), batch_sampler=sampler)
    for (batch,) in controller.follow(loader):
        model.compute_s = truth.compute_s(sampler.step, len(batch))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield [len(batch)]
    result |= {"decisions": session.inspect.decisions(), "stats": session.metrics(),
             "sums": [sum(e.shares) for e in controller.events if hasattr(e, "shares")]}
    session.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.balance_worker")
    parser.add_argument("--mode", required=True, metavar="lbb | CODEC | auto")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slow", type=int, default=-1, help="the rank that slows down")
    parser.add_argument("--from-step", type=int, default=0)
    parser.add_argument("--added-ms", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    truth = Truth(PAPER[rank], args.from_step, args.added_ms / 1e3 if rank == args.slow else 0.0)
    model, info = Slept(), dict[str, Any]()
    running = published(model, truth, args.steps) if args.mode == "lbb" else balanced(model, truth, args.steps, args.mode, info)
    marks, clocks, shares = [], [], []
    for now in running:
        marks.append(time.perf_counter())
        clocks.append(time.time())
        shares.append(now[rank] if len(now) > 1 else now[0])
    step_s = [0.0] + [after - before for before, after in itertools.pairwise(marks)]
    print(json.dumps({"rank": rank, "step_s": step_s, "at_s": clocks, "shares": shares} | info), flush=True)


if __name__ == "__main__":
    as_rank(main)
