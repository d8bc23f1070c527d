"""Momentum, low rank in a fused bucket, and how wrappers nest; the laws of every codec are in test_codec_laws.py."""

from __future__ import annotations

import torch
from support import codecs as kit

from commlayer.compressors import (
    error_feedback,
    identity,
    int8,
    momentum,
    qsgd,
    topk,
    wrap,
)
from commlayer.compressors.feedback import in_updates
from commlayer.records import Spec

SPEC = Spec((60, 50))
N = SPEC.numel


def test_momentum_is_that_of_sgd() -> None:
    cluster = kit.Cluster(momentum(identity(), 0.9), SPEC, 1)
    weight = torch.zeros(N, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    applied = torch.zeros(N)
    for step in range(5):
        x = kit.noise(N, step)
        weight.grad = x.clone()
        optimizer.step()
        applied -= cluster.step([x])[0]
    torch.testing.assert_close(applied, weight.detach())


def test_feedback_goes_inside_what_accumulates() -> None:
    assert wrap(momentum(topk())) == momentum(error_feedback(topk()))
    assert wrap(momentum(momentum(int8()), 0.5)) == momentum(momentum(error_feedback(int8())), 0.5)
    assert wrap(momentum(qsgd())) == momentum(qsgd())


def test_units() -> None:
    on = error_feedback(int8(), lr_correction=True)
    assert in_updates(on)
    assert in_updates(momentum(on))
    assert not in_updates(error_feedback(int8()))
    assert "lr_correction" not in str(error_feedback(int8())), "plans from before there was a choice"
