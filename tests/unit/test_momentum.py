"""Wrappers around codecs: what each promises, over skipped and abandoned steps, and how they nest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import codecs as kit

from commlayer.compressors import (
    Codec,
    error_feedback,
    identity,
    int8,
    momentum,
    parse,
    powersgd,
    qsgd,
    restore,
    seed,
    snapshot,
    topk,
    wrap,
)
from commlayer.compressors.feedback import in_updates
from commlayer.records import Spec

WRAPPED: list[Codec] = [
    momentum(identity(), 0.9),
    wrap(momentum(topk(ratio=0.1), 0.5)),
    wrap(momentum(powersgd(rank=2), 0.5)),
    error_feedback(powersgd(rank=2, shapes=((30, 50), (500,), (10, 100)))),
    error_feedback(int8(), lr_correction=True),
]
each = pytest.mark.parametrize("codec", WRAPPED, ids=str)
SPEC = Spec((60, 50))
N = SPEC.numel


def noises(step: int, workers: int = 3) -> list[torch.Tensor]:
    return [kit.noise(N, 100 * step + i) for i in range(workers)]


def seeded(codec: Codec, workers: int = 3) -> kit.Cluster:
    cluster = kit.Cluster(codec, SPEC, workers)
    for rank, state in enumerate([*cluster.states, cluster.server]):
        seed(state, "job", 4, rank)
    return cluster


@each
def test_spelling_and_contract(codec: Codec) -> None:
    assert isinstance(codec, Codec)
    assert parse(str(codec)) == codec
    assert wrap(codec) == codec, "what a plan runs is not wrapped again"
    assert hash(parse(str(codec))) == hash(codec)
    kept = ("residual", "velocity")
    assert codec.keeps is any(name in path for path in snapshot(codec.init(SPEC)) for name in kept)


@each
def test_steps_with_skips_go_on_for_all_alike(codec: Codec) -> None:
    cluster = seeded(codec)
    for step in range(7):
        xs = noises(step)
        if step == 3:
            xs[1][17] = float("nan")
        copies = [x.clone() for x in xs]
        sums = cluster.step(xs)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(xs, copies, strict=True))
        assert cluster.finite == [step != 3] * 3
        assert all(p.nbytes <= codec.bound(SPEC) for p in cluster.payloads)
        if step in (3, 5):
            cluster.undo()
            cluster.undo()
        assert step == 3 or all(torch.equal(s, sums[0]) for s in sums)
    assert all(np.isfinite(t).all() for s in [*cluster.states, cluster.server] for t in snapshot(s).values())


@each
def test_a_restored_cluster_goes_on_bit_for_bit(codec: Codec) -> None:
    cluster, fresh = seeded(codec), seeded(codec)
    for step in range(5):
        cluster.step(noises(step))
    fresh.step(noises(77))
    for old, new in zip([*cluster.states, cluster.server], [*fresh.states, fresh.server], strict=True):
        restore(new, snapshot(old))
    fresh.undo()
    for step in range(5, 9):
        first, second = cluster.step(noises(step)), fresh.step(noises(step))
        assert torch.equal(first[0], second[0])
        assert [bytes(p) for p in cluster.payloads] == [bytes(p) for p in fresh.payloads]


# ---- momentum


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


def test_low_rank_slices_of_a_fused_bucket() -> None:
    codec = powersgd(rank=1, shapes=((30, 50), (100,), (35, 40)))
    first, last = torch.outer(kit.noise(30, 1), kit.noise(50, 2)), torch.outer(kit.noise(35, 3), kit.noise(40, 4))
    x = torch.cat([first.view(-1), kit.noise(100, 5), last.view(-1)])
    torch.testing.assert_close(kit.Cluster(codec, SPEC, 1).step([x])[0], x, rtol=1e-4, atol=1e-4)


# ---- how they nest


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
