"""torch's communication hooks against ours of the same meaning, after the cases that torch's own tests have for hooks.

Each case trains one model twice through DDP, by torch's hook and by ours, and compares the gradients of every step. What they
may differ by is a few roundings of the type on the wire; powersgd, whose random start is its own, is exact for both where
gradients are of its rank. docs/how-to/frameworks.md has the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.attached import coordinators, data, mlp
from support.models import Branches
from support.rank_pool import pool, quick, ranks_first
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commlayer

WORLD, STEPS = 2, 5
_ranks = ranks_first(WORLD)
Gradients = list[torch.Tensor | None]
Wrap = Callable[..., DistributedDataParallel]

HOOKS: dict[str, tuple[str, torch.dtype, float]] = {
    "allreduce_hook": ("identity()", torch.float32, 1e-6),
    "fp16_compress_hook": ("fp16()", torch.float16, 2.0**-11),
    "bf16_compress_hook": ("bf16()", torch.bfloat16, 2.0**-8),
}
"""Ours of the same meaning; the type on the wire, and the relative error of one rounding to it."""
ROUNDINGS = 2
"""Both round the gradients and their sum; torch halves before it adds."""


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Gradients:
    found = [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return found


def train(rank: int, wrap: Wrap, how: str = "", dtype: torch.dtype = torch.float32, **ddp: Any) -> list[Gradients]:
    model = mlp().to(dtype)
    wrapped, optimizer, found = wrap(model, **ddp), torch.optim.SGD(model.parameters(), lr=0.05), []

    def loss(number: int) -> torch.Tensor:
        x, y = data(rank, number)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return nn.functional.mse_loss(wrapped(x.to(dtype)).to(torch.float32 if how == "autocast" else dtype), y.to(dtype))

    for number in range(STEPS):
        if how == "no_sync":
            for micro in range(3):
                with wrapped.no_sync() if micro < 2 else contextlib.nullcontext():
                    loss(3 * number + micro).backward()
        elif how == "several forward passes":
            torch.stack([loss(2 * number), loss(2 * number + 1)]).sum().backward()
        elif how == "several backward passes":  # each of them averages what has gathered in `.grad`
            for micro in range(2):
                loss(2 * number + micro).backward()
        else:
            loss(number).backward()
        found.append(step(model, optimizer))
    return found


def unused_parameters(rank: int, wrap: Wrap) -> list[Gradients]:
    """By one rank, by the other, by both."""
    torch.manual_seed(0)
    model = Branches()
    wrapped, found = wrap(model, find_unused_parameters=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number, branches in enumerate([("l", "l"), ("l", "r"), ("lr", "l"), ("r", "r"), ("r", "lr")]):
        x, y = data(rank, number)
        nn.functional.mse_loss(wrapped(x, branches[rank]), y).backward()
        found.append(step(model, optimizer))
    return found


CASES: dict[str, Callable[..., list[Gradients]]] = {
    "plain": train, "gradient_as_bucket_view": partial(train, gradient_as_bucket_view=True),
    "static_graph": partial(train, static_graph=True), "one bucket": partial(train, bucket_cap_mb=25),
    "unused parameters": unused_parameters, "in bfloat16": partial(train, dtype=torch.bfloat16),
} | {how: partial(train, how=how) for how in ("no_sync", "several forward passes", "several backward passes", "autocast")}


def bf16_compress(group: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """By another name: by that one DDP asks for NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


# DDP looks at the annotations of a hook, which are text in this file.
bf16_compress.__annotations__ = {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]}
TORCHS = {name: bf16_compress if name == "bf16_compress_hook" else getattr(default_hooks, name) for name in HOOKS}


class Hooked:
    """Wraps models in DDP, with torch's hook or with ours."""

    def __init__(self, hook: Callable[..., Any], state: Any = None) -> None:
        self.hook, self.state = hook, state

    def __call__(self, model: nn.Module, **ddp: Any) -> DistributedDataParallel:
        wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": 0.002} | ddp)
        wrapped.register_comm_hook(self.state, self.hook)
        return wrapped


def ours(codec: str, address: str, **fields: Any) -> Hooked:
    state = commlayer.HookState(commlayer.compressors.parse(codec), config=quick(join=address) | fields)
    return Hooked(commlayer.comm_hook, state)


def both(rank: int, case: str, hook: str, codec: str, address: str) -> tuple[list[Gradients], list[Gradients]]:
    theirs, mine = Hooked(TORCHS[hook]), ours(codec, address)
    try:
        return CASES[case](rank, theirs), CASES[case](rank, mine)
    finally:
        mine.state.connection.close()


@pytest.mark.commit(10)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("hook", HOOKS)
def test_ours_gives_what_torchs_hook_gives(hook: str, case: str) -> None:
    codec, wire, rounding = HOOKS[hook]
    if case in ("autocast", "in bfloat16"):
        rounding = max(rounding, 2.0**-8)  # of the computation, or of the gradients themselves
    with coordinators(1, WORLD, 1) as made:
        results = pool(WORLD).call(both, case, hook, codec, made[0].address)
    for number in range(STEPS):
        theirs, mine = results[0][0][number], results[0][1][number]
        assert [g is None for g in mine] == [g is None for g in theirs], f"step {number}: who has a gradient"
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a is not None:
                largest, apart = float(b.abs().max()), float((a.float() - b.float()).abs().max())
                assert apart <= ROUNDINGS * rounding * largest, f"step {number}, tensor {i}"
                assert largest > 0 or case == "unused parameters"
                assert case != "plain" or torch.equal(a, (WORLD * a).to(wire).float() / WORLD), "it was coded"
                assert torch.equal(a, results[1][1][number][i]), "ranks differ"


class Given(nn.Module):
    """A matrix and a vector, whose gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.zeros(48, 40)), nn.Parameter(torch.zeros(40))

    def forward(self, matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        return (self.matrix * matrix).sum() + (self.vector * vector).sum()


def gradient(rank: int, number: int, of_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * number + rank)
    matrix = torch.randn(48, of_rank, generator=draw) @ torch.randn(of_rank, 40, generator=draw)
    return matrix, torch.randn(40, generator=draw)


def factored(rank: int, of_rank: int, steps: int, change: bool, address: str) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Gradients of each step, by powersgd of torch and by ours."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    ways = [Hooked(powerSGD_hook.powerSGD_hook, state),
            ours("powersgd(rank=2)", address, fuse_nbytes=256, cut_nbytes=1 << 20)]
    found = []
    for way in ways:
        model, rows = Given(), []
        wrapped = way(model, bucket_cap_mb=25)
        for number in range(steps):
            model.zero_grad()
            wrapped(*gradient(rank, number if change else 0, of_rank)).backward()
            rows.append((model.matrix.grad.clone(), model.vector.grad.clone()))
        found.append(rows)
    ways[1].state.connection.close()
    return found


def mean_of(of_rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [gradient(rank, number, of_rank) for rank in range(WORLD)]
    return sum(p[0] for p in parts) / WORLD, sum(p[1] for p in parts) / WORLD


def test_powersgd_is_exact_as_torchs_is_where_gradients_are_of_its_rank() -> None:
    """In the first steps that are coded, torch's third; then rounding errors in what is kept back grow, in both."""
    with coordinators(1, WORLD, 1) as made:
        theirs, mine = pool(WORLD).call(factored, 1, 5, True, made[0].address)[0]
    for rows, coded in ((theirs, range(2, 5)), (mine, range(3))):
        for number in coded:
            for got, mean in zip(rows[number], mean_of(1, number), strict=True):
                assert float((got - mean).norm() / mean.norm()) < 1e-3


def test_powersgd_pays_what_it_owes_as_torchs_does_where_they_are_not() -> None:
    """The mean of what was applied of one gradient over many steps: its distance from that gradient falls as steps grow."""
    steps = 40
    with coordinators(1, WORLD, 1) as made:
        theirs, mine = pool(WORLD).call(factored, 12, steps, False, made[0].address)[0]
    wanted = mean_of(12, 0)[0]
    first, *errors = (float((torch.stack([row[0] for row in rows]).mean(0) - wanted).norm() / wanted.norm())
                      for rows in (mine[:1], theirs, mine))
    assert first > 0.5, "one step sends a part"
    assert errors[0] < 0.2
    assert errors[1] < 1.2 * errors[0]
