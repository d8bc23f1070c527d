"""Memory is returned to the system while nothing reads it, and weights survive an exchange that fails."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from support.workers import Rig, job, step
from torch import nn

from commlayer.compressors import parse
from commlayer.compressors.feedback import wrap
from commlayer.engine import worker as worker_module
from commlayer.engine.buckets import BucketExchange, EncodedBucket
from commlayer.engine.local_steps import OuterSteps, StepWeights
from commlayer.engine.step import Units
from commlayer.engine.worker import Worker
from commlayer.errors import CommError
from commlayer.optim import OuterSGD
from commlayer.planner import default_plan
from commlayer.records import Bucket, Slice

NUMEL = 1 << 20
PAGE = 4096


def coded() -> EncodedBucket:
    bucket = EncodedBucket(Bucket(0, (Slice(0, 0, NUMEL),), "service", codec="int4()"), job([(NUMEL,)]), wrap(parse("int4()")),
                        torch.device("cpu"), 0)
    bucket.keep_encoded(lambda _: None)
    return bucket


@pytest.mark.parametrize("unapplied", [0, 1])
def test_a_bucket_keeps_what_can_be_taken_back(unapplied: int) -> None:
    bucket, x = coded(), torch.randn(NUMEL)
    bucket.x.copy_(x)
    bucket.encode()
    bucket.exchange = BucketExchange()
    bucket.ledger.discard(unapplied)
    owed = bucket.ledger.state["residual"].copy()
    bucket.let_go()
    assert torch.equal(bucket.x, x) == bool(unapplied) or sys.platform != "linux"
    assert np.array_equal(bucket.ledger.state["residual"], owed)
    bucket.ledger.roll_back()
    assert np.array_equal(bucket.ledger.state["residual"], owed) != bool(unapplied)


class Failing:
    """A worker whose servers do not answer."""

    fragments = ((EncodedBucket(Bucket(0, (Slice(0, 0, 12),), "service", codec="int4()"), job([(12,)]), wrap(parse("int4()")),
                           torch.device("cpu"), 0),),)
    units = Units(1, shared=False)

    def send(self, *_: object) -> None: ...

    def complete(self, _: object) -> None: ...

    def wait(self, *_: object) -> None:
        raise CommError("gone")


def test_weights_survive_an_exchange_that_fails() -> None:
    p = nn.Parameter(torch.randn(12))
    steps = OuterSteps([p], 2, OuterSGD(), StepWeights(1.0, None))
    steps.count()
    with torch.no_grad():
        p.add_(0.25)
    now = p.detach().clone()
    with pytest.raises(CommError):
        steps.exchange(Failing(), [], 1.0)  # type: ignore[arg-type]
    torch.testing.assert_close(p.detach(), now)
    assert not torch.equal(p, steps.starts[0])


def large_rig(codec: str) -> Rig:
    of = job([(NUMEL,)])
    return Rig(1, codec, of=of, plan=default_plan(of, codec=codec, path="service", servers=1, ranks_per_node=1,
                                                  fuse_nbytes=NUMEL, cut_nbytes=NUMEL))


def held(worker: Worker) -> bool:
    """Whether something of the last step lies in the worker's buckets."""
    return any(bool(bucket.x[PAGE:-PAGE].any()) for bucket in worker.buckets)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
@pytest.mark.parametrize(("codec", "recording", "stays"), [("identity()", False, False), ("identity()", True, True),
                                                           ("int4()", False, True)])
def test_behind_a_step_buckets_hold_what_can_be_taken_back_or_is_measured(
    codec: str, recording: bool, stays: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "LARGE_NBYTES", NUMEL)
    with large_rig(codec) as rig:
        worker, gradient = rig.workers[0], torch.randn(NUMEL)
        worker.recorder.switch(on=recording)
        averages = [step(worker, [gradient])[0] for _ in range(3)]
        assert held(worker) == stays
        if codec == "identity()":
            assert all(torch.equal(average, gradient) for average in averages if average is not None)
