"""Debts of an earlier plan and buffers through steps that are skipped because something is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_pool import pool
from support.workers import Rig, job, step

from commlayer.cluster.collectives import Groups
from commlayer.compressors import codec_of
from commlayer.engine.plan_handover import hand_over
from commlayer.engine.worker import Worker
from commlayer.planner import default_plan
from commlayer.records import Plan

SHAPES: list[tuple[int, ...]] = [(400,), (30,), (5,)]


def dense(buffers: int = 0) -> Plan:
    return default_plan(job(SHAPES, buffers), codec="identity()", path="allreduce", servers=0, ranks_per_node=1,
                        fuse_nbytes=64, cut_nbytes=4096)


def alone(plan: Plan) -> Worker:
    return Worker(job(SHAPES), plan, {b.id: codec_of(b) for b in plan.buckets}, torch.device("cpu"))


@pytest.mark.parametrize("skipped", [False, True])
def test_a_skipped_step_still_owes_what_it_carried(skipped: bool) -> None:
    with Rig(1, "topk(ratio=0.1)", shapes=SHAPES) as rig:
        made = torch.Generator().manual_seed(3)
        put = [torch.randn(shape, generator=made) for shape in SHAPES]
        got = [g for g in step(rig.workers[0], list(put)) if g is not None]
        before = rig.workers[0]
        after = alone(dense())
        hand_over(before, after)
    zeros = [torch.zeros(shape) for shape in SHAPES]
    if skipped:
        broken: list[torch.Tensor | None] = [zeros[0].clone(), zeros[1].clone(), torch.full((5,), float("inf"))]
        step(after, broken)
    paid = [g for g in step(after, list(zeros)) if g is not None]
    for wanted, first, rest in zip(put, got, paid, strict=True):
        torch.testing.assert_close(first + rest, wanted, rtol=1e-5, atol=1e-5)
    assert all(g is not None and not g.any() for g in step(after, list(zeros))), "paid once"
    after.close()


def train(rank: int) -> list[list[Any]]:
    """The last tensor is a buffer, and on rank 1 not finite in the first step."""
    groups = Groups(1, 30.0, torch.device("cpu"))
    plan = dense(buffers=1)
    worker = Worker(job(SHAPES, 1), plan, {b.id: codec_of(b) for b in plan.buckets}, torch.device("cpu"), rank=rank,
                    groups=groups)
    try:
        found = []
        for number in range(2):
            values = [torch.full(shape, rank + 1.0) for shape in SHAPES]
            if (rank, number) == (1, 0):
                values[2][1] = float("nan")
            worker.finish(list(values), 20.0)
            worker.commit(list(values))
            found.append(values)
        return found
    finally:
        worker.close()
        groups.close()


def test_a_buffer_that_is_not_finite_somewhere_stays_what_it_is_on_each() -> None:
    first, second = pool(2).call(train)
    assert torch.equal(first[0][2], torch.full((5,), 1.0))
    assert second[0][2].isnan().sum() == 1
    assert second[0][2][0] == 2.0
    assert torch.equal(first[1][2], torch.full((5,), 1.5))
    assert torch.equal(second[1][2], torch.full((5,), 1.5))
    assert torch.equal(first[0][0], torch.full((400,), 1.5))
