"""Device codecs against host codecs in workers: the averages are equal bit for bit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from msgspec import structs
from support.cuda import DEVICE, running
from support.workers import Rig, job, on_ranks, step

from commlayer.compressors import block_threshold, identity, int8, make_codec, runs_on
from commlayer.engine.buckets.bucket import EncodedBucket
from commlayer.engine.paths.staging import device_buckets
from commlayer.engine.worker.worker import Worker
from commlayer.errors import InvalidInput
from commlayer.gpu import launch
from commlayer.planner import default_plan
from commlayer.records import Plan

SHAPES = [(150, 200), (64,), (4000,), (1,)]
CODECS = [
    "identity()", "bf16()", "int8(block=64)", "topk(ratio=0.05, values='int8', exact=False)",
    "error_feedback(int4())",
]  # fmt: skip


def planned(codec: str, coder: str, **fields: Any) -> Plan:
    sizes = {"fuse_nbytes": 2048, "cut_nbytes": 4096}
    plan = default_plan(job(SHAPES), codec=codec, path="service", servers=1, ranks_per_node=1, **sizes)
    return structs.replace(plan, buckets=tuple(structs.replace(b, coder=coder) for b in plan.buckets), **fields)


class DeviceRig(Rig):
    def __init__(self, codec: str, *, on_device: bool, **fields: Any) -> None:
        self.on_device = on_device
        super().__init__(2, codec, shapes=SHAPES, plan=planned(codec, "gpu" if on_device else "", **fields))

    def worker(self, rank: int, transport: Any) -> Worker:
        device = DEVICE if self.on_device else torch.device("cpu")
        codecs = {b.id: make_codec(b, rank, self.plan) for b in self.plan.buckets}
        return Worker(self.job, self.plan, codecs, device, rank=rank, members=len(self.transports), transport=transport)


def train(codec: str, *, on_device: bool, **fields: Any) -> list[list[list[torch.Tensor]]]:
    with DeviceRig(codec, on_device=on_device, **fields) as rig:
        coders = [bucket.coder for worker in rig.workers for bucket in worker.buckets if isinstance(bucket, EncodedBucket)]
        assert {coder.on_device for coder in coders} == {on_device}

        def body(rank: int) -> list[list[torch.Tensor]]:
            averages = []
            for s in range(4):
                generator = torch.Generator().manual_seed(10 * s + rank)
                gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
                if s == 2 and rank == 1:
                    gradients[2][7] = float("nan")  # the step is aborted, and residuals restore what they sent
                home = DEVICE if on_device else torch.device("cpu")
                averages.append([t.cpu() for t in step(rig.workers[rank], [g.to(home) for g in gradients], device=home)])
            return averages

        results = on_ranks(2, body)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize(("codec", "fields"), [*((codec, {}) for codec in CODECS),
                                               ("topk(ratio=0.05)", {"ratio_over": "plan", "warmup": 2})])
def test_device_codecs_give_the_averages_of_host_codecs(codec: str, fields: dict[str, Any]) -> None:
    expected = train(codec, on_device=False, **fields)
    with running(resident=2) as launcher:
        got = train(codec, on_device=True, **fields)
    assert launcher.launched or codec in ("identity()", "bf16()"), "which are operations of torch"
    for mine, theirs in zip(expected, got, strict=True):
        for host, there in zip(mine, theirs, strict=True):
            for a, b in zip(host, there, strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def test_plan_selects_the_buckets_coded_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    plan, wanted = planned("int8()", ""), planned("int8()", "gpu")
    codecs = {b.id: int8() if b.id else block_threshold() for b in plan.buckets}
    assert device_buckets(wanted, codecs, torch.device("meta")) == set()
    with running():
        assert device_buckets(plan, codecs, DEVICE) == set()
        assert not caplog.records
        assert device_buckets(wanted, codecs, DEVICE) == {b.id for b in plan.buckets if b.id}
    assert "1 buckets" in caplog.records[0].message
    assert "block_threshold" in caplog.records[0].message


def test_missing_cupy_is_logged_once_and_the_host_encodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise InvalidInput("E-GPU-CODE", "device codecs: CuPy cannot be loaded (none here); install commlayer[gpu12]")

    monkeypatch.setattr(launch, "_cupy", missing)
    monkeypatch.setattr(launch, "_launchers", {})
    with caplog.at_level(logging.WARNING, logger="commlayer"):
        assert not runs_on(identity(), torch.device("cuda"))
        assert not runs_on(int8(), torch.device("cuda"))
    assert [record.message for record in caplog.records] == [
        "device codecs: CuPy cannot be loaded (none here); install commlayer[gpu12]; gradients are compressed on the CPU "
        "instead"
    ]
