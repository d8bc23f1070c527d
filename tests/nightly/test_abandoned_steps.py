"""A backward pass that raises: the step is dropped on all ranks, with its reason, and training continues."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support import cuda, rank_pool
from support.attached import Raises, plan_of, plan_or_codec
from support.rank_pool import pool
from torch import nn
from torch.utils.checkpoint import checkpoint

import commlayer
from commlayer.errors import StepAbandoned
from commlayer.planner import lower

WORLD = 2


def planned(model: nn.Module, how: str, per_node: int) -> Any:
    """What attach() takes for a plan. In "delayed" half of the buckets are used a step late."""
    if "allreduce" in how:
        return "auto"
    if how == "delayed":
        plan = plan_of(model, "int8(block=64)", ranks_per_node=per_node, nbytes=(1024, 4096))
        assert len(plan.buckets) > 2
        return replace(plan, buckets=tuple(replace(b, stale=b.id % 2 == 0) for b in plan.buckets))
    if "staged" in how:
        return lower(plan_of(model, "topk(ratio=0.1)", "encode@cpu all.allgather decode@cpu", ranks_per_node=per_node,
                             nbytes=(1024, 4096)))
    return how.partition(", ")[0]


def train(rank: int, how: str, who: tuple[int, ...], per_node: int, late: bool, address: str) -> dict[str, Any]:
    """Four steps; in the second one the backward pass raises on the ranks `who`: half-way, or after the last gradient."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(50, 40), nn.Linear(40, 1)])
    # A reentrant segment is a backward pass inside the outer one.
    first, second = (partial(checkpoint, part, use_reentrant=True) if "reentrant" in how else part for part in model)
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
                hidden = first(Raises.apply(x.requires_grad_(), broken and late))
                second(Raises.apply(hidden, broken and not late)).sum().backward()
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
    ("identity(), reentrant", (1,), 1), ("identity(), reentrant, forward", (1,), 1),
    ("allreduce", (1,), 2), ("allreduce", (0, 1), 2), ("powersgd(rank=1)", (1,), 1),
    ("delayed", (1,), 1), ("delayed", (1,), 2), ("staged", (1,), 1), ("staged", (0, 1), 2),
    ("allreduce, unread", (1,), 2), ("allreduce, unread", (0, 1), 2), ("staged, unread", (1,), 1),
    ("allreduce, forward", (1,), 2), ("allreduce, forward, unread", (0,), 2), ("staged, forward, unread", (1,), 1),
])
def test_step_aborted_by_a_worker_has_no_effect(how: str, who: tuple[int, ...], per_node: int, late: bool) -> None:
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
