"""A backward pass that raises: the step is dropped on all ranks, with its reason, and training goes on."""

from __future__ import annotations

from typing import Any

import pool_kit
import pytest
import torch
from pool_kit import pool
from torch import nn

import commlayer
from commlayer.errors import StepAbandoned

WORLD = 2


class Breaks(torch.autograd.Function):
    """Raises in its backward pass if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, broken: bool) -> torch.Tensor:
        ctx.broken = broken
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.broken:
            raise ArithmeticError("no more memory, say")
        return grad, None


def train(rank: int, how: str, who: tuple[int, ...], per_node: int, address: str) -> dict[str, Any]:
    """Three steps; in the middle one backward breaks off half-way on the ranks `who`."""
    torch.manual_seed(0)
    first, second = nn.Linear(50, 40), nn.Linear(40, 1)
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan: Any = "auto" if how == "allreduce" else commlayer.compressors.parse(how)
    config = pool_kit.quick(ranks_per_node=per_node, fuse_nbytes=1024, **({} if how == "allreduce" else {"join": address}))
    session = commlayer.attach(model, optimizer, plan=plan, config=config)
    said, seen = [], []
    try:
        for step in range(4):
            optimizer.zero_grad()
            x = torch.full((4, 50), 1.0 + rank + step)
            try:
                broken = step == 1 and rank in who
                second(Breaks.apply(first(x), broken)).sum().backward()
            except (ArithmeticError, StepAbandoned) as error:
                said.append(f"{type(error).__name__}: {error}")
                continue
            optimizer.step()
            seen.append([p.detach().clone() for p in model.parameters()])
        return {"said": said, "seen": seen, "steps": session.stats()["steps"]}
    finally:
        session.close()


@pytest.mark.parametrize(("how", "who", "per_node"), [
    ("identity()", (1,), 1), ("topk(ratio=0.1)", (0, 1), 1), ("topk(ratio=0.1)", (1,), 1), ("int8(block=64)", (0,), 2),
    ("allreduce", (1,), 2), ("allreduce", (0, 1), 2), ("powersgd(rank=1)", (1,), 1),
])
def test_a_step_that_a_worker_breaks_off_is_none(how: str, who: tuple[int, ...], per_node: int) -> None:
    with pool_kit.Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(train, how, who, per_node, servers.address)
    for rank, result in enumerate(results):
        (said,) = result["said"]
        assert result["steps"] == 3
        if rank in who:
            assert said == "ArithmeticError: no more memory, say"
        else:
            assert "its backward pass broke off; the step is dropped on all workers (step 1)" in said
    for mine, theirs in zip(*(r["seen"] for r in results), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
