"""Codecs whose payloads add up, all-reduced without being decoded: several rounds, integers, values alone, wrappers, skips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attached import assert_refused, outcome
from support.rank_pool import pool
from support.workers import job, step

from commlayer.cluster.collectives import Groups
from commlayer.compressors import codec_of, parse
from commlayer.compressors.plan_codecs import ReducedAccumulator, is_separable, is_summable
from commlayer.engine.worker import Worker
from commlayer.planner import tree
from commlayer.planner.tree import spell
from commlayer.records import Bucket, Plan, Slice, Spec

WORLD, PER_NODE, STEPS = 4, 2, 4
PATHS = [spell(p) for p in tree.kind("sum", ("cpu",))]
SHAPES: list[tuple[int, ...]] = [shape for _ in PATHS for shape in ((24, 33), (500,), (3,))]
BROKEN = 1, 2
"""The step in which that rank's gradients are infinite."""


def plan(codec: str) -> Plan:
    description = job(SHAPES)
    buckets = tuple(Bucket(i, (Slice(i, 0, t.numel),), PATHS[i // 3], codec, owner=i % PER_NODE, shape=t.shape)
                    for i, t in enumerate(description.tensors))
    return Plan(description.digest(), buckets, ranks_per_node=PER_NODE)


def gradients(rank: int, number: int, broken: bool) -> list[torch.Tensor | None]:
    draw = torch.Generator().manual_seed(100 * number + rank)
    results = [torch.randn(shape, generator=draw) for shape in SHAPES]
    return [g.fill_(float("inf")) if broken and (number, rank) == BROKEN else g for g in results]


def run(rank: int, codec: str, broken: bool) -> dict[str, Any]:
    """What each step gave, and this rank's residuals at the end, per tensor."""
    groups = Groups(PER_NODE, 30.0, torch.device("cpu"))
    wanted = plan(codec)
    worker = Worker(job(SHAPES), wanted, {b.id: codec_of(b) for b in wanted.buckets}, torch.device("cpu"), rank=rank,
                    groups=groups)
    try:
        results = [step(worker, gradients(rank, number, broken)) for number in range(STEPS)]
        owed = [torch.zeros(shape).view(-1) for shape in SHAPES]
        for bucket in worker.buckets:
            for debt in bucket.ledger.residuals():
                owed[debt.tensor][debt.start : debt.stop] += torch.as_tensor(debt.values)
        return {"results": results, "residual": owed}
    finally:
        worker.close()
        groups.close()


@pytest.mark.parametrize("codec", [
    "identity()", "powersgd(rank=2)", "randomk(ratio=0.3)",
    "randomk(ratio=0.3, values='bf16')",
])
@pytest.mark.parametrize("broken", [False, True])
def test_what_is_applied_and_owed_is_what_was_put_in(codec: str, broken: bool) -> None:
    results = pool(WORLD).call(run, codec, broken)
    for tensor in range(len(SHAPES)):
        per_step = [[r["results"][n][tensor].view(-1) for r in results] for n in range(STEPS)]
        for number, same in enumerate(per_step):
            finite = not broken or number != BROKEN[0]
            assert all(bool(t.isfinite().all()) == finite for t in same)
            assert not finite or all(torch.equal(t, same[0]) for t in same)
        applied = sum(same[0] for same in per_step if bool(same[0].isfinite().all()))
        got = WORLD * applied + sum(r["residual"][tensor] for r in results)
        put = [g.view(-1) for rank in range(WORLD) for n in range(STEPS) if (g := gradients(rank, n, False)[tensor]) is not None
               and not (broken and n == BROKEN[0])]  # a step that is skipped is dropped, as torch alone drops it
        torch.testing.assert_close(got, sum(put), rtol=1e-4, atol=1e-4)


def test_draws_that_differ_are_told_on_all() -> None:
    codec, spec = parse("randomk(ratio=0.5)"), Spec((8,))
    accs = []
    for shared in (3, 4):
        state, out = codec.init(spec), memoryview(bytearray(codec.bound(spec)))
        state["shared"] = shared
        accs.append(dict(codec.zeros(spec, 0)))
        codec.add(0, out[: codec.start(torch.ones(8), state, out)], accs[-1], first=True)
    both = [ReducedAccumulator(acc) for acc in accs]
    largest = torch.maximum(both[0].facts, both[1].facts)
    for reduced in both:
        reduced.facts.copy_(largest)
        assert_refused(outcome(reduced.merge), "E-PAYLOAD", "seeds")


@pytest.mark.parametrize(("codec", "adds", "alone"), [
    ("identity()", True, True), ("topk(ratio=0.1)", False, True), ("error_feedback(topk(ratio=0.1))", False, True),
    ("bf16()", False, True), ("randomk()", True, False),
    ("error_feedback(powersgd())", True, False),
    ("momentum(error_feedback(onebit()))", False, True),
])
def test_which_codecs_may_go_where(codec: str, adds: bool, alone: bool) -> None:
    assert (is_summable(parse(codec)), is_separable(parse(codec))) == (adds, alone)
