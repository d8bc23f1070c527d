"""A backward pass that raises: the step is dropped on all ranks, with its reason, and training goes on."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support import cuda, rank_pool
from support.arguments import plan_or_codec
from support.rank_pool import pool
from torch import nn

import commlayer
from commlayer.engine.optimizers import job_of
from commlayer.errors import StepAbandoned
from commlayer.planner import default_plan, lower
from commlayer.records import Plan

WORLD = 2


class Breaks(torch.autograd.Function):
    """Raises in its backward pass if `broken`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, broken: bool) -> torch.Tensor:
        ctx.broken = broken
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.broken:
            raise ArithmeticError("no more memory, say")
        return grad, None


def delayed(model: nn.Module, per_node: int) -> Plan:
    """Half of the buckets are used a step late."""
    plan = default_plan(job_of(model), codec="int8(block=64)", path="service", servers=1, ranks_per_node=per_node,
                        fuse_nbytes=1024, cut_nbytes=4096)
    assert len(plan.buckets) > 2
    return replace(plan, buckets=tuple(replace(b, stale=b.id % 2 == 0) for b in plan.buckets))


def planned(model: nn.Module, how: str, per_node: int) -> Any:
    """What attach() takes for a plan."""
    plan = default_plan(job_of(model), codec="topk(ratio=0.1)", path="service", servers=1, ranks_per_node=per_node,
                        fuse_nbytes=1024, cut_nbytes=4096)
    if how == "delayed":
        return delayed(model, per_node)
    if "staged" in how:
        staged = (replace(b, path="encode@cpu all.allgather decode@cpu", down="") for b in plan.buckets)
        return lower(replace(plan, buckets=tuple(staged), servers=0))
    return "auto" if "allreduce" in how else commlayer.compressors.parse(how)


def train(rank: int, how: str, who: tuple[int, ...], per_node: int, late: bool, address: str) -> dict[str, Any]:
    """Four steps; in the second one the backward pass raises on the ranks `who`: half-way, or after the last gradient."""
    torch.manual_seed(0)
    first, second = nn.Linear(50, 40), nn.Linear(40, 1)
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = "allreduce" in how or "staged" in how
    config = rank_pool.quick(ranks_per_node=per_node, fuse_nbytes=1024, **({} if alone else {"join": address}))
    with cuda.unread() if "unread" in how else contextlib.nullcontext():
        session = commlayer.attach(model, optimizer, **plan_or_codec(planned(model, how, per_node)), config=config,
                                   sync="forward" if "forward" in how else None)
    lines, seen = [], []
    try:
        for step in range(4):
            optimizer.zero_grad()
            x = torch.full((4, 50), 1.0 + rank + step)
            try:
                broken = step == 1 and rank in who
                hidden = first(Breaks.apply(x.requires_grad_(), broken and late))
                second(Breaks.apply(hidden, broken and not late)).sum().backward()
                optimizer.step()
                if "forward" in how:
                    session.flush()
            except (ArithmeticError, StepAbandoned) as error:
                lines.append(f"{type(error).__name__}: {error}")
                continue
            seen.append([p.detach().clone() for p in model.parameters()])
        return {"said": lines, "seen": seen, "steps": session.metrics()["exchanges"]}
    finally:
        session.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("how", "who", "per_node"), [
    ("identity()", (1,), 1), ("topk(ratio=0.1)", (0, 1), 1), ("topk(ratio=0.1)", (1,), 1), ("int8(block=64)", (0,), 2),
    ("allreduce", (1,), 2), ("allreduce", (0, 1), 2), ("powersgd(rank=1)", (1,), 1),
    ("delayed", (1,), 1), ("delayed", (1,), 2), ("staged", (1,), 1), ("staged", (0, 1), 2),
    ("allreduce, unread", (1,), 2), ("allreduce, unread", (0, 1), 2), ("staged, unread", (1,), 1),
    ("allreduce, forward", (1,), 2), ("allreduce, forward, unread", (0,), 2), ("staged, forward, unread", (1,), 1),
])
def test_a_step_that_a_worker_breaks_off_is_none(how: str, who: tuple[int, ...], per_node: int, late: bool) -> None:
    with rank_pool.Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(train, how, who, per_node, late, servers.address)
    for rank, result in enumerate(results):
        (text,) = result["said"]
        assert result["steps"] == 3
        if rank in who:
            assert text == "ArithmeticError: no more memory, say"
        else:
            assert text.endswith("(step 1) [E-STEP-ABANDONED]"), text
    for mine, theirs in zip(*(r["seen"] for r in results), strict=True):
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(mine, theirs, strict=True))
