"""Wrappers around codecs: what each promises, over skipped and abandoned steps, and how they nest."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import codecs_kit as kit
import pytest
import torch

from commlayer.compressors import (
    Codec,
    chain,
    dgc,
    ef21,
    error_feedback,
    fp16,
    identity,
    int8,
    momentum,
    momentum_correction,
    parse,
    partition,
    powersgd,
    restore,
    seed,
    shared_int,
    snapshot,
    topk,
    warmup,
    wrap,
)
from commlayer.compressors.feedback import in_updates
from commlayer.compressors.selection import Placed
from commlayer.compressors.warmup import FIRST
from commlayer.records import Spec

EXACT = topk(ratio=0.05, values="fp32", exact=True)
WRAPPED: list[Codec] = [
    ef21(topk(ratio=0.1)),
    ef21(int8()),
    ef21(fp16()),
    momentum(identity(), 0.9),
    wrap(momentum(topk(ratio=0.1), 0.5)),
    wrap(momentum(powersgd(rank=2), 0.5)),
    momentum_correction(topk(ratio=0.1), 0.9),
    momentum_correction(EXACT, 0.7, nesterov=True, clip=20.0),
    momentum_correction(chain(topk(ratio=0.1, values="fp32"), int8()), 0.5),
    dgc(ratio=0.02, momentum=0.9, clip=30.0, warmup=3),
    error_feedback(warmup(topk(ratio=0.02), steps=3)),
    error_feedback(partition(topk(ratio=0.05), parts=4)),
    error_feedback(partition(powersgd(rank=2), shapes=((30, 50), (500,), (10, 100)))),
    partition(shared_int(bits=4), parts=3),
    error_feedback(chain(topk(ratio=0.1, values="fp32"), fp16())),
    error_feedback(int8(), lr_correction=True),
    error_feedback(shared_int(rounding="nearest")),
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
    kept = ("residual", "estimate", "velocity")
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
    assert all(bool(torch.isfinite(t).all()) for s in [*cluster.states, cluster.server] for t in snapshot(s).values())


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


# ---- ef21


def drift(cluster: kit.Cluster) -> float:
    total = torch.stack([s["estimate"].double() for s in cluster.states]).sum(0)
    return float((total - cluster.server["estimate"].double()).abs().max())


@pytest.mark.parametrize("inner", [topk(ratio=0.1), int8(block=64), fp16()], ids=str)
def test_ef21_keeps_both_sides_together(inner: Codec) -> None:
    """Skips, undone steps, weights and scales that change, a sum that overflows: estimates stay one, held the same bits."""
    cluster = kit.Cluster(ef21(inner), SPEC, 3)
    for step in range(30):
        weights = (1.0, 0.5, 0.0 if step % 7 == 3 else 2.0)
        xs = [w * x for w, x in zip(weights, noises(step), strict=True)]
        if step % 6 == 2:
            xs[step % 3][5] = float("inf")
        if step == 13 and inner != fp16():
            xs = [torch.full_like(x, 3e38) for x in xs]
        sums = cluster.step(xs)
        if not cluster.finite[0] or step % 5 == 4:
            cluster.undo()
            cluster.undo()
        else:
            assert all(torch.equal(s, cluster.server["held"]) for s in sums)
        if step < 13:
            assert drift(cluster) < 1e-4
        assert all(torch.equal(s["held"], cluster.server["held"]) for s in cluster.states)


def test_ef21_follows_a_gradient_that_stays() -> None:
    cluster = kit.Cluster(ef21(topk(ratio=0.1, values="fp32")), SPEC, 2)
    xs = noises(0, 2)
    errors = [float((cluster.step(xs)[0] - xs[0] - xs[1]).norm()) for _ in range(60)]
    assert errors[-1] < 0.02 * errors[0]


def test_ef21_heals_what_an_enormous_step_has_set_apart() -> None:
    cluster = kit.Cluster(ef21(topk(ratio=1.0, values="fp32", exact=True)), Spec((50,)), 2)
    calm = [kit.noise(50, 1), kit.noise(50, 2)]
    cluster.step(calm)
    cluster.step([1e9 * calm[1], calm[0]])
    cluster.step(calm)
    begun = drift(cluster)
    assert begun > 1.0, "the case is none: nothing was set apart"
    for _ in range(2000):
        cluster.step(calm)
    assert drift(cluster) < 0.65 * begun


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


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [None, 20.0])
def test_momentum_correction_is_dgc(nesterov: bool, clip: float | None) -> None:
    """Against the equations of the paper, written out; steps 2 and 4 are abandoned."""
    k, beta = EXACT.wanted(N), 0.9
    cluster = kit.Cluster(momentum_correction(EXACT, beta, nesterov, clip), SPEC, 1)
    u, v = torch.zeros(N), torch.zeros(N)
    for step in range(7):
        g = kit.noise(N, step)
        cluster.step([g])
        before = u, v
        if clip is not None:
            g = g * min(1.0, clip / float(g.norm()))
        u = beta * (u + g) if nesterov else beta * u + g
        v = v + u + g if nesterov else v + u
        top = v.abs().topk(k).indices
        if step in (2, 4):
            cluster.undo()
            cluster.undo()
            u, v = before
        else:
            u[top] = 0.0
            v[top] = 0.0
        torch.testing.assert_close(cluster.states[0]["velocity"], u, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cluster.states[0]["residual"], v, rtol=1e-5, atol=1e-5)


# ---- warmup


def test_warmup_comes_down_from_a_quarter() -> None:
    codec = warmup(topk(ratio=0.01, exact=True), steps=10)
    cluster = kit.Cluster(error_feedback(codec), Spec((10_000,)), 1)
    counts = []
    for step in range(14):
        cluster.step([kit.noise(10_000, step)])
        counts.append(int.from_bytes(cluster.payloads[0][8:12], "little"))
        assert int.from_bytes(cluster.result[8:12], "little") == counts[-1], "the server is in another stage"
    assert counts[0] == FIRST * 10_000
    assert counts[10:] == [100] * 4
    assert counts == sorted(counts, reverse=True)
    assert all(a / b < 2.1 for a, b in pairwise(counts))
    assert kit.Cluster(warmup(topk(ratio=0.5), steps=3), SPEC, 1).codec.bound(SPEC) == topk(ratio=0.5).bound(SPEC)


# ---- partition and chain


def test_partition_codes_each_slice_as_it_would_be_alone() -> None:
    codec = partition(topk(ratio=0.1, exact=True), shapes=((1000,), (7,), (1993,)))
    x = kit.noise(N)
    x[:1000] *= 100.0
    got = kit.decoded(codec, kit.encode(codec, x, codec.init(Spec((N,)))), N)
    alone = topk(ratio=0.1, exact=True)
    sizes = [1000, 7, 1993]
    payloads = [kit.encode(alone, p, alone.init(Spec((p.numel(),)))) for p in x.split(sizes)]
    parts = [kit.decoded(alone, p, n) for p, n in zip(payloads, sizes, strict=True)]
    assert torch.equal(got, torch.cat(parts))


def test_partition_gives_each_slice_a_key_of_its_own() -> None:
    state = partition(shared_int(), parts=3).init(Spec((N,)))
    seed(state, "job", 0, 1)
    assert len({part["own"] for part in state["parts"].values()}) == 3


def test_low_rank_slices_of_a_fused_bucket() -> None:
    codec = partition(powersgd(rank=1), shapes=((30, 50), (100,), (35, 40)))
    first, last = torch.outer(kit.noise(30, 1), kit.noise(50, 2)), torch.outer(kit.noise(35, 3), kit.noise(40, 4))
    x = torch.cat([first.view(-1), kit.noise(100, 5), last.view(-1)])
    torch.testing.assert_close(kit.Cluster(codec, SPEC, 1).step([x])[0], x, rtol=1e-4, atol=1e-4)


def test_chain_picks_then_codes() -> None:
    first, x = topk(ratio=0.1, values="fp32", exact=True), kit.noise(N)
    codec = chain(first, int8(block=32))
    got = kit.decoded(codec, kit.encode(codec, x, codec.init(Spec((N,)))), N)
    picked = kit.decoded(first, kit.encode(first, x, first.init(Spec((N,)))), N)
    assert torch.equal(got != 0, picked != 0)
    assert float((got - picked).abs().max()) <= float(x.abs().max()) / 250
    assert isinstance(codec, Placed)
    assert torch.equal(codec.places(kit.encode(codec, x, codec.init(Spec((N,)))), N).long(), picked.nonzero().view(-1))


def test_chain_with_feedback_cuts_what_the_second_cannot_hold() -> None:
    x = torch.zeros(100)
    x[3], x[4] = 1e6, 2.0
    codec = error_feedback(chain(topk(ratio=0.02, values="fp32"), fp16()))
    cluster = kit.Cluster(codec, Spec((100,)), 1)
    assert cluster.step([x])[0][3] == 65504.0
    torch.testing.assert_close(cluster.states[0]["residual"][3], torch.tensor(1e6 - 65504.0))


# ---- how they nest


def test_feedback_goes_inside_what_accumulates() -> None:
    assert wrap(momentum(topk())) == momentum(error_feedback(topk()))
    assert wrap(momentum(momentum(int8()), 0.5)) == momentum(momentum(error_feedback(int8())), 0.5)
    assert wrap(momentum(shared_int())) == momentum(shared_int())
    assert wrap(partition(topk(), parts=2)) == error_feedback(partition(topk(), parts=2))
    assert wrap(ef21(topk())) == ef21(topk())
    assert dgc(0.01, 0.5) == momentum_correction(topk(0.01), 0.5)
    assert dgc(0.01, warmup=5) == momentum_correction(warmup(topk(0.01), 5), 0.9)


def test_units() -> None:
    on = error_feedback(int8(), lr_correction=True)
    assert in_updates(on)
    assert in_updates(momentum(on))
    assert not in_updates(error_feedback(int8()))
    assert "lr_correction" not in str(error_feedback(int8())), "plans from before there was a choice"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ef21(error_feedback(topk())), "ef21: inner is error_feedback.* codec of one round that keeps nothing"),
        (lambda: ef21(identity()), r"ef21: inner is identity\(\), allowed is a codec that servers decode"),
        (lambda: ef21("topk"), "ef21: inner is 'topk', allowed is a codec"),
        (lambda: error_feedback(ef21(topk())), "keeps back itself what it does not send"),
        (lambda: error_feedback(int8(), lr_correction=1), "lr_correction is 1, allowed is True or False"),
        (lambda: momentum(topk(), 1.0), "momentum: beta is 1.0, allowed is a number from 0 up to, and not, 1"),
        (lambda: momentum_correction(int8()), r"int8\(block=1024\) sends every entry"),
        (lambda: momentum_correction(topk(), clip=0), "clip is 0, allowed is None or a number above 0"),
        (lambda: momentum_correction(powersgd()), "allowed is a codec of one round"),
        (lambda: warmup(int8(), 3), "allowed is a sparse codec with a ratio"),
        (lambda: warmup(topk(), 0), "warmup: steps is 0"),
        (lambda: chain(topk(), int8()), "allowed is a sparse codec with values='fp32'"),
        (lambda: chain(int8(), int8()), "chain: first is int8"),
        (lambda: chain(EXACT, topk()), "chain: second is topk.* sends every entry"),
        (lambda: chain(EXACT, shared_int()), "chain: second is shared_int"),
        (lambda: partition(topk()), "exactly one must be set"),
        (lambda: partition(topk(), parts=2, nbytes=100), "exactly one must be set"),
        (lambda: partition(topk(), parts=0), "partition: parts is 0"),
        (lambda: partition(topk(), nbytes=3), "partition: nbytes is 3, allowed is None or a whole number of at least 4"),
        (lambda: partition(topk(), shapes=(3,)), "partition: shapes is .* allowed is None or a tuple of shapes"),
        (lambda: partition(error_feedback(topk()), parts=2), "allowed is a codec without wrappers"),
        (lambda: dgc(ratio=2.0), "dgc: ratio is 2.0"),
    ],
)
def test_what_does_not_fit_is_named(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
