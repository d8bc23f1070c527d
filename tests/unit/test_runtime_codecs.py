"""Every codec through workers, the real service and its servers: sums, skipped steps, states, and small trainings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import workers as kit

from commlayer.compressors import parse, restore, snapshot, wrap
from commlayer.compressors.plan_codecs import FACTORIES
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


def test_every_name_runs_through_the_service() -> None:
    assert {text.partition("(")[0] for text in CODECS} == set(FACTORIES)


@each
def test_sums_of_unequal_workers_over_a_skipped_step(codec: str) -> None:
    with rig(codec) as r:
        results = run(r, range(7), bad=3)
        assert all(not w.roll_back() for w in r.workers), "the last step was whole"
    for step in range(7):
        for ours, theirs in zip(results[0][step], results[2][step], strict=True):
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        assert bool(torch.isnan(results[0][step][4]).any()) is (step == 3)
    kept = wrap(parse(codec)).keeps
    exact = [weighted(step) for step in range(7)]
    if codec == "identity()":
        torch.testing.assert_close(results[1][5][0], exact[5][0])
    agreement = sum(float((results[0][s][t] * exact[s][t]).sum()) for s in range(7) if s != 3 for t in range(5))
    assert agreement > 0.1 * sum(float((exact[s][t] ** 2).sum()) for s in range(7) if s != 3 for t in range(5))
    with rig(codec) as r:
        assert [w.tracked for w in r.workers] == [kept] * WORLD


def weighted(step: int) -> list[torch.Tensor]:
    mean = [torch.zeros(shape) for shape in SHAPES]
    for rank in range(WORLD):
        for total, g in zip(mean, gradients(rank, step), strict=True):
            assert g is not None
            total += g * (rank + 0.5) / (1.5 * WORLD)
    return mean


@each
def test_states_of_workers_and_servers_go_on_bit_for_bit(codec: str) -> None:
    with rig(codec) as first, rig(codec) as second:
        run(first, range(4))
        for old, new in zip(first.workers, second.workers, strict=True):
            new.now.number, new.units.total = old.step, old.units.total
            for a, b in zip(old.buckets, new.buckets, strict=True):
                restore(b.ledger.state, snapshot(a.ledger.state))
        for old_server, new_server in zip(first.servers, second.servers, strict=True):
            for bucket, cell in old_server._core.cells.items():
                new_server._core.cells[bucket].ops.restore(cell.ops.snapshot())
        ours, theirs = run(first, range(4, 8), bad=5), run(second, range(4, 8), bad=5)
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


def test_a_changed_learning_rate_rescales_what_is_owed_on_both_sides() -> None:
    """Residuals are in units of the update: all else equal, they scale with the rate."""
    owed = {}
    for rates in ((1.0, 1.0), (0.25, 0.25)):
        with rig("error_feedback(topk(0.1, 'fp32'), lr_correction=True)") as r:
            results = run(r, range(4), rates=rates)
            cells = [cell for s in r.servers for cell in s._core.cells.values()]
            kept = [torch.from_numpy(state["residual"]) for state in (
                *(f.ledger.state for w in r.workers for f in w.buckets), *(c.ops._state for c in cells))]
            owed[rates[0]] = torch.cat([k.clone() for k in kept]), torch.cat([t.view(-1) for t in results[0][3]])
    torch.testing.assert_close(owed[0.25][0], 0.25 * owed[1.0][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(owed[0.25][1], owed[1.0][1], rtol=1e-5, atol=1e-6)


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
