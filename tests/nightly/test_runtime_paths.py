"""Every class of path that the tree has for CPUs, each a bucket of one plan, on 2 nodes x 2 ranks over Gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_pool import pool
from support.workers import job, step

from commlayer.cluster.collectives import Groups
from commlayer.compressors import codec_of
from commlayer.engine.worker import Worker
from commlayer.planner import lower, tree
from commlayer.planner.tree import spell
from commlayer.records import Bucket, Plan, Slice

WORLD, PER_NODE, STEPS = 4, 2, 3
PATHS = [p for kind in ("flat", "two-level", "sum") for p in tree.kind(kind, ("cpu",))]  # type: ignore[arg-type]
SIZES = (1, 3, 41, 130)
"""Fewer elements than ranks, and sizes that no number of ranks divides."""
SHAPES = [(SIZES[i % len(SIZES)],) for i in range(len(PATHS))]


def plan(codec: str) -> Plan:
    """Dense codings in paths whose payloads are added up: there `codec` cannot stand."""
    result = job(SHAPES)
    buckets = tuple(
        Bucket(i, (Slice(i, 0, SHAPES[i][0]),), spell(path), owner=i % PER_NODE,
               codec="identity()" if tree.summing(path) else codec)
        for i, path in enumerate(PATHS)
    )
    return lower(Plan(result.digest(), buckets, ranks_per_node=PER_NODE))


def gradients(rank: int, number: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def run(rank: int, wanted: Plan) -> dict[str, Any]:
    """What was applied in each step, and the residuals of this rank, per tensor."""
    groups = Groups(PER_NODE, 30.0, torch.device("cpu"))
    worker = Worker(job(SHAPES), wanted, {b.id: codec_of(b, rank // PER_NODE) for b in wanted.buckets}, torch.device("cpu"),
                    rank=rank, groups=groups)
    try:
        applied = [step(worker, gradients(rank, number)) for number in range(STEPS)]
        owed = [torch.zeros(shape) for shape in SHAPES]
        for bucket in worker.buckets:
            for debt in bucket.ledger.residuals():
                owed[debt.tensor][debt.start : debt.stop] += torch.as_tensor(debt.values)
        return {"applied": applied, "residuals": owed}
    finally:
        worker.close()
        groups.close()


def test_the_tree_has_what_is_run_here() -> None:
    every = {tuple(op.name for op in p) for p in tree.kind("two-level")}
    assert {tuple(op.name for op in p) for p in tree.kind("two-level", ("cpu",))} == every
    assert len(set(PATHS)) == len(PATHS) == 177


@pytest.mark.parametrize("codec", ["identity()", "qsgd(levels=7)", "topk(ratio=0.3)", "int8(block=32)"])
def test_every_class_sums_and_owes_what_it_did_not_send(codec: str) -> None:
    results = pool(WORLD).call(run, plan(codec))
    for tensor, path in enumerate(PATHS):
        for number in range(STEPS):
            first = results[0]["applied"][number][tensor]
            assert all(torch.equal(r["applied"][number][tensor], first) for r in results), f"ranks differ after {spell(path)}"
        put = sum(g for rank in range(WORLD) for n in range(STEPS) if (g := gradients(rank, n)[tensor]) is not None)
        got = WORLD * sum(results[0]["applied"][n][tensor] for n in range(STEPS)) + sum(r["residuals"][tensor] for r in results)
        if not codec.startswith("qsgd"):  # which keeps no residual: its errors are random
            torch.testing.assert_close(got, put, rtol=1e-4, atol=1e-4, msg=lambda m, p=path: f"{spell(p)}: {m}")
