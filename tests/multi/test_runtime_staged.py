"""Paths of several collectives on 2 nodes x 2 ranks, real processes over Gloo: each class gives the plain mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_pool import pool
from support.staged import PER_NODE, SHAPES, WORLD, gradients, plan
from support.workers import job, step

from commlayer.cluster.collectives import Groups
from commlayer.compressors import parse, wrap
from commlayer.engine.worker import Worker

DENSE = [
    "all.allreduce",
    "all.reduce_scatter all.allgather",
    "all.reduce all.broadcast",
    "node.reduce_scatter net.allreduce node.allgather",
    "node.reduce net.reduce net.broadcast node.broadcast",
    "node.reduce_scatter net.reduce_scatter net.allgather node.allgather",
]
CODED = [
    "encode@cpu all.allgather decode@cpu",
    "encode@cpu all.alltoall decode@cpu all.allgather",
    "encode@cpu all.alltoall all.allgather decode@cpu",
    "encode@cpu all.alltoall decode@cpu encode@cpu all.allgather decode@cpu",
    "encode@cpu all.gather decode@cpu encode@cpu all.broadcast decode@cpu",
    "encode@cpu all.gather all.broadcast decode@cpu",
    "all.reduce_scatter encode@cpu all.allgather decode@cpu",
    "node.reduce_scatter encode@cpu net.allgather decode@cpu node.allgather",
    "node.reduce encode@cpu net.gather decode@cpu encode@cpu net.broadcast decode@cpu node.broadcast",
    "node.reduce_scatter encode@cpu net.alltoall net.allgather node.allgather decode@cpu",
    "encode@cpu node.alltoall net.alltoall net.allgather node.allgather decode@cpu",
    "encode@cpu node.gather decode@cpu encode@cpu net.allgather node.broadcast decode@cpu",
    "encode@cpu node.alltoall decode@cpu net.reduce_scatter encode@cpu net.allgather node.allgather decode@cpu",
]


def run(rank: int, text: str, codec: str, steps: int) -> list[list[torch.Tensor | None]]:
    groups = Groups(PER_NODE, 30.0, torch.device("cpu"))
    wanted = plan(text, codec)
    worker = Worker(job(SHAPES), wanted, {b.id: wrap(parse(codec)) for b in wanted.buckets}, torch.device("cpu"),
                    rank=rank, groups=groups)
    try:
        return [step(worker, gradients(rank, number)) for number in range(steps)]
    finally:
        worker.close()
        groups.close()


def means(number: int) -> list[torch.Tensor | None]:
    per_rank = [gradients(rank, number) for rank in range(WORLD)]
    results: list[torch.Tensor | None] = []
    for tensors in zip(*per_rank, strict=True):
        present = [t.double() for t in tensors if t is not None]
        results.append(sum(present[1:], present[0]).div(WORLD).float() if present else None)
    return results


@pytest.mark.commit(8)
@pytest.mark.parametrize("text", DENSE + CODED)
def test_a_path_gives_the_plain_mean(text: str) -> None:
    results = pool(WORLD).call(run, text, "identity()", 3)
    for number in range(3):
        wanted = means(number)
        for rank in range(WORLD):
            for got, mean in zip(results[rank][number], wanted, strict=True):
                assert (got is None) == (mean is None)
                if got is not None and mean is not None:
                    torch.testing.assert_close(got, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.commit(10)
@pytest.mark.parametrize("text", CODED)
@pytest.mark.parametrize("codec", ["topk(ratio=0.1, values='int8')", "int8(block=64)"])
def test_lossy_codecs_keep_ranks_alike_and_owe_what_they_did_not_send(text: str, codec: str) -> None:
    steps = 6
    results: list[Any] = pool(WORLD).call(run, text, codec, steps)
    for rank in range(1, WORLD):
        for number in range(steps):
            for mine, first in zip(results[rank][number], results[0][number], strict=True):
                assert mine is first is None or torch.equal(mine, first), "all ranks must apply the same bits"
    # What was sent in all steps, and what a residual holds at most, make up what was put in.
    sent = [sum(t) for t in zip(*(r[5:6] + r[0:1] for r in results[0]), strict=True)]
    put = [sum(t) for t in zip(*([means(n)[5], means(n)[0]] for n in range(steps)), strict=True)]
    for got, wanted in zip(sent, put, strict=True):
        cosine = torch.nn.functional.cosine_similarity(got.view(-1), wanted.view(-1), dim=0)
        assert cosine > (0.6 if "topk" in codec else 0.999)


def skip(rank: int, text: str, codec: str) -> tuple[list[bool], torch.Tensor]:
    """Three steps, the second with an infinity on rank 2. Whether each came out finite; what is still owed or was applied."""
    groups = Groups(PER_NODE, 30.0, torch.device("cpu"))
    wanted = plan(text, codec)
    worker = Worker(job(SHAPES), wanted, {b.id: wrap(parse(codec)) for b in wanted.buckets}, torch.device("cpu"),
                    rank=rank, groups=groups)
    finite, total = [], torch.zeros(4001, dtype=torch.float64)
    try:
        for number in range(3):
            put = gradients(rank, number)
            if number == 1 and rank == 2:
                assert put[5] is not None
                put[5][:4001] = float("inf")
            got = step(worker, put)[5]
            assert got is not None
            finite.append(bool(got.isfinite().all()))
            total += got.double() * WORLD if finite[-1] and rank == 0 else 0
        worker.roll_back()
        for bucket in worker.buckets[1:3]:
            start, stop = bucket.slices[0].start, bucket.slices[0].stop
            for coder in bucket.ledger.state.values():
                total[start:stop] += torch.from_numpy(coder["residual"][: stop - start]).double()
        return finite, total
    finally:
        worker.close()
        groups.close()


@pytest.mark.parametrize("codec", ["topk(ratio=0.1, values='int8')", "int8(block=64)"])
def test_a_skipped_step_leaves_what_was_owed(codec: str) -> None:
    results = pool(WORLD).call(skip, "encode@cpu all.allgather decode@cpu", codec)
    assert [r[0] for r in results] == [[True, False, True]] * WORLD
    owed = sum((r[1] for r in results[1:]), results[0][1])
    parts = [gradients(rank, n)[5] for rank in range(WORLD) for n in (0, 2)]
    put = sum((p.double() for p in parts if p is not None), torch.zeros(4001, dtype=torch.float64))
    torch.testing.assert_close(owed, put, rtol=1e-4, atol=1e-4)
