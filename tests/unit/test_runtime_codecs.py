"""Every codec through workers, the real service and its servers: sums, skipped steps, states, and small trainings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import workers as kit

from commlayer.engine.optimizers import learning_rate
from commlayer.planner import default_plan

WORLD = 3
SHAPES = [(40, 30), (40,), (5, 3, 3, 3), (1,), (700,)]
CODECS = [
    "identity()",
    "powersgd(2)",
    "momentum(topk(0.2), 0.5)",
    "error_feedback(int8(), lr_correction=True)",
    "fp16()",
    "bf16()",
    "int8(64)",
    "int4()",
    "qsgd()",
    "onebit(64)",
    "topk(0.1)",
    "block_threshold(0.2)",
    "randomk(0.2)",
]
each = pytest.mark.parametrize("codec", CODECS)


def rig(codec: str) -> kit.Rig:
    """Two servers; the matrix and the convolution keep their shapes."""
    plan = default_plan(kit.job(SHAPES), codec=codec, path="service", servers=2, ranks_per_node=1, fuse_nbytes=600,
                        cut_nbytes=1 << 20)
    assert any(len(b.shape) > 1 for b in plan.buckets)
    return kit.Rig(WORLD, codec, servers=2, shapes=SHAPES, plan=plan)


def gradients(rank: int, step: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def run(r: kit.Rig, steps: range, bad: int = -1, rates: tuple[float, float] = (1.0, 1.0)) -> list[list[list[torch.Tensor]]]:
    """Per rank, the averages of each step. In step `bad` rank 1 has a NaN; from the middle on the second rate holds."""

    def body(rank: int) -> list[list[Any]]:
        worker, results = r.workers[rank], []
        worker.units.weight = rank + 0.5
        for step in steps:
            worker.units.rate = rates[step >= (steps.start + steps.stop) // 2]
            mine = gradients(rank, step)
            if step == bad and rank == 1:
                tensor = mine[4]
                assert tensor is not None
                tensor[3] = float("nan")
            results.append(kit.step(worker, mine))
        return results

    results = kit.on_ranks(WORLD, body)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def weighted(step: int) -> list[torch.Tensor]:
    mean = [torch.zeros(shape) for shape in SHAPES]
    for rank in range(WORLD):
        for total, g in zip(mean, gradients(rank, step), strict=True):
            assert g is not None
            total += g * (rank + 0.5) / (1.5 * WORLD)
    return mean


def test_applied_updates_and_what_is_owed_make_all_that_went_in() -> None:
    """Sum over the steps of rate * average, and residuals as they are: exact where the rate changes, too."""
    with rig("error_feedback(topk(0.1), lr_correction=True)") as r:
        rates = (0.5, 0.05)
        results = run(r, range(8), rates=rates)
        put, got = torch.zeros(40, 30), torch.zeros(40, 30)
        for step in range(8):
            rate = rates[step >= 4]
            got += rate * results[0][step][0] * WORLD
            put += rate * weighted(step)[0] * WORLD
        bucket = next(b for b in r.plan.buckets if b.shape == (40, 30))
        residuals = [b.ledger.state["residual"] for w in r.workers for b in w.buckets if b.id == bucket.id]
        server = r.servers[bucket.server]._core.cells[bucket.id].ops._state["residual"]
        kept = torch.from_numpy(np.stack([*residuals, server])).sum(0).view(40, 30)
    torch.testing.assert_close(got + kept, put, rtol=1e-4, atol=1e-4)


def test_learning_rate_is_that_of_the_first_group_unless_it_is_zero() -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25)
    assert learning_rate(optimizer, 1.0) == 0.25
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    assert learning_rate(optimizer, 1.0) == 0.125
    optimizer.param_groups[0]["lr"] = 0.0
    assert learning_rate(optimizer, 0.5) == 0.5
    assert learning_rate(None, 1.0) == 1.0
