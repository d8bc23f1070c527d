"""Paths of collectives whose codings run on the device, in part or throughout: the bits of the host's, on 2 nodes x 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cuda import DEVICE, running
from support.rank_pool import pool
from support.staged import PER_NODE, SHAPES, WORLD, gradients, plan
from support.workers import job, step

from commlayer.cluster.collectives import Groups
from commlayer.compressors import parse, wrap
from commlayer.engine.worker import Worker

PATHS = [
    "encode@gpu all.allgather decode@gpu",
    "encode@gpu all.allgather decode@cpu",
    "encode@cpu all.alltoall decode@gpu all.allgather",
    "node.reduce_scatter encode@gpu net.alltoall decode@gpu encode@cpu net.allgather decode@gpu node.allgather",
    "node.reduce encode@gpu net.gather decode@cpu encode@gpu net.broadcast decode@gpu node.broadcast",
]
CODECS = ["int8(block=64)", "topk(ratio=0.1, values='int8')"]
STEPS = 3


def run(rank: int, cases: list[tuple[str, str]], present: bool) -> list[Any]:
    """For each path and codec: averages of all steps, residuals, and whether any kernel was launched."""
    if not present:
        return [trained(rank, text, codec, torch.device("cpu")) for text, codec in cases]
    with running(resident=2) as launcher:
        results = []
        for text, codec in cases:
            launcher.launched.clear()
            results.append((*trained(rank, text, codec, DEVICE), bool(launcher.launched)))
        return results


def trained(rank: int, text: str, codec: str, device: torch.device) -> tuple[list[Any], list[torch.Tensor]]:
    groups, wanted = Groups(PER_NODE, 60.0, torch.device("cpu")), plan(text, codec)
    worker = Worker(job(SHAPES), wanted, {b.id: wrap(parse(codec)) for b in wanted.buckets}, device, rank=rank, groups=groups)
    try:
        averages = []
        for number in range(STEPS):
            put = gradients(rank, number)
            if number == 1 and rank == 2:
                assert put[5] is not None
                put[5][7] = float("nan")
            mine = [None if g is None else g.to(device) for g in put]
            averages.append([None if t is None else t.cpu() for t in step(worker, mine, 60.0, device)])
        residuals = [residual for bucket in worker.buckets for residual in bucket.ledger.residuals()]
        return averages, [torch.as_tensor(residual.values).cpu().clone() for residual in residuals]
    finally:
        worker.close()
        groups.close()


@pytest.mark.commit(1)
@pytest.mark.parametrize("codec", CODECS)
def test_where_a_path_codes_does_not_change_what_it_gives(codec: str) -> None:
    with running():
        pass  # compiled once, before the ranks start
    cases = [(text, codec) for text in PATHS]
    hosts, devices = (pool(WORLD).call(run, cases, present) for present in (False, True))
    for host, device in zip(hosts, devices, strict=True):
        for (text, _), (averages, debts), (theirs, owed, launched) in zip(cases, host, device, strict=True):
            assert launched, f"{text}: nothing ran on the device"
            for one, other in zip(averages, theirs, strict=True):
                for a, b in zip(one, other, strict=True):
                    assert (a is None) == (b is None)
                    if a is not None:
                        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True, msg=lambda m, t=text: f"{t}: {m}")
            for a, b in zip(debts, owed, strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=0, msg=lambda m, t=text: f"{t}: owed: {m}")
