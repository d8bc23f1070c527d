"""Contributions that a worker withdraws, because its link has collapsed: nothing is lost, and ranks stay equal."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from msgspec import structs
from support import rank_pool
from support.attached import sync_of
from support.jobs import distributed_job
from support.rank_pool import pool
from torch import nn

import commlayer
from commlayer.engine.epochs.plan_switch import switch
from commlayer.transport.flow.traffic import TRAFFIC

WORLD, NUMEL, TENSORS, STEPS = 2, 1 << 16, 6, 3
SLOW_BPS = 400e3
"""A tensor's payload of 64 KiB then takes 1.3 s."""


class Tensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.zeros(NUMEL)) for _ in range(TENSORS)])


def gradient(rank: int, step: int, tensor: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + 10 * tensor + rank))


def train(
    rank: int, sync: dict[str, Any], codec: str, node: int, optimizer_name: str, address: str, switches: bool = False,
) -> dict[str, Any]:
    """The link of rank 1 collapses in the second exchange, and recovers after rank 1 has withdrawn what waits, or after a
    switch to another plan, which withdraws it."""
    model = Tensors()
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=1.0)
    session = commlayer.attach(
        model, optimizer, compression=codec, sync="forward" if "forward" in sync else sync_of(**sync) if sync else None,
        config=rank_pool.quick(ranks_per_node=node, fuse_nbytes=4096, cut_nbytes=4 * NUMEL, join=address))
    job, withdrawn, after = distributed_job(session), list[int](), sync.get("every", 1)

    def withdraw() -> None:
        while not job.worker.waiting_since:
            time.sleep(0.01)
        time.sleep(0.5)
        withdrawn.append(job.worker.withdraw())
        TRAFFIC.gradients.set(0.0)

    for step in range(STEPS * after + 24):
        if rank == WORLD - 1 and step == after:
            TRAFFIC.gradients.set(SLOW_BPS)
            if not switches:
                threading.Thread(target=withdraw).start()
        optimizer.zero_grad()
        loss = sum((p * gradient(rank, step, number)).sum() if step < STEPS * after else 0.0 * p.sum()
                   for number, p in enumerate(model.tensors))
        loss.backward()
        optimizer.step()
        if switches and step == 2 * after:
            time.sleep(0.3)  # until the payloads are encoded
            waiting = job.worker.unsent_nbytes
            switch(job, structs.replace(job.worker.plan, local_steps=1, fragments=1, overlap="round") if rank == 0 else None,
                   by_itself=True)
            withdrawn.append(waiting)
            TRAFFIC.gradients.set(0.0)
    session.flush()
    weights = [p.detach().clone() for p in model.parameters()]
    session.close()
    return {"weights": weights, "withdrawn": withdrawn}


@pytest.mark.parametrize(("sync", "codec", "node"), [
    ({}, "error_feedback(int8(block=64))", 1), ({}, "error_feedback(int8(block=64))", 2), ({}, "identity()", 1),
    ({}, "fp16()", 1), ({}, "error_feedback(topk(ratio=0.25))", 1), ({"forward": True}, "error_feedback(int8(block=64))", 1),
    ({"every": 2}, "identity()", 1), ({"every": 2, "overlap": "round", "fragments": 2}, "error_feedback(int8(block=64))", 1),
])
def test_withdrawn_contributions_are_sent_with_the_next_ones(sync: dict[str, Any], codec: str, node: int) -> None:
    with rank_pool.Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(train, sync, codec, node, "SGD", servers.address)
    if node == 1:
        (nbytes,) = second["withdrawn"]
        assert nbytes >= NUMEL
    steps = STEPS * sync.get("every", 1)
    for number, (mine, theirs) in enumerate(zip(first["weights"], second["weights"], strict=True)):
        assert torch.equal(mine, theirs)
        total = sum(gradient(rank, step, number) for rank in range(WORLD) for step in range(steps)) / WORLD
        torch.testing.assert_close(mine, -total, rtol=0.0, atol=5e-3)


def test_plan_switches_withdraw_what_waits() -> None:
    sync = {"every": 2, "overlap": "round", "fragments": 2}
    with rank_pool.Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(train, sync, "error_feedback(int8(block=64))", 1, "SGD", servers.address, True)
    assert second["withdrawn"][0] >= NUMEL
    for number, (mine, theirs) in enumerate(zip(first["weights"], second["weights"], strict=True)):
        assert torch.equal(mine, theirs)
        total = sum(gradient(rank, step, number) for rank in range(WORLD) for step in range(2 * STEPS)) / WORLD
        torch.testing.assert_close(mine, -total, rtol=0.0, atol=5e-3)


def test_norms_of_withdrawn_changes_scale_nothing() -> None:
    with rank_pool.Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(train, {"every": 2, "overlap": "round", "fragments": 2, "outer": None},
                                         "error_feedback(int4())", 1, "AdamW", servers.address)
    assert second["withdrawn"][0] >= NUMEL // 2
    for mine, theirs in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(mine, theirs)
        assert mine.abs().max() < 3 * 2 * STEPS
