"""Laws that every codec of the table obeys, with and without error feedback, alone and through workers and a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import codecs as kit

from commlayer.compressors import Codec, error_feedback, parse, restore, seed, snapshot
from commlayer.compressors.plan_codecs import FACTORIES
from commlayer.records import Spec

each = pytest.mark.parametrize("codec", kit.EACH.values(), ids=kit.EACH)
each_named = pytest.mark.parametrize("name", kit.NAMED)
each_codec = pytest.mark.parametrize("codec", kit.CODECS, ids=str)
each_plain = pytest.mark.parametrize("codec", kit.PLAIN, ids=str)
ordinary = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=200)
anything = st.lists(st.floats(width=32), max_size=100)
SHAPES = [(0,), (1,), (33,), (0, 7), (5, 1), (41, 29), (4096,), (7, 3, 5, 11), (20_011,)]
SPECS = [Spec(shape) for shape in SHAPES]
MATRIX = Spec((64, 47))
WORKERS = 3


def seeded(codec: Codec, spec: Spec = MATRIX, workers: int = WORKERS) -> kit.Cluster:
    cluster = kit.Cluster(codec, spec, workers)
    for rank, state in enumerate([*cluster.states, cluster.server]):
        seed(state, "laws", 2, rank)
    return cluster


def noises(step: int, n: int, workers: int = WORKERS) -> list[torch.Tensor]:
    return [kit.noise(n, 50 * step + i) * 3.0 ** (step % 3) for i in range(workers)]


def held(acc: Any) -> list[torch.Tensor]:
    """The numbers in an accumulator."""
    return [torch.as_tensor(acc["sum"]).double()]


def test_no_name_is_missing() -> None:
    assert set(kit.NAMED) == set(FACTORIES)
    for name, text in kit.NAMED.items():
        assert text.startswith(f"{name}(")
    assert kit.EVERY["momentum"] == parse(str(kit.EVERY["momentum"]))


@each
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "x".join(map(str, spec.shape)))
def test_any_shape_is_summed_within_the_bound_alike_for_all(codec: Codec, spec: Spec) -> None:
    runs = []
    for _ in range(2):
        cluster, seen = seeded(codec, spec), []
        for step in range(3):
            xs = noises(step, spec.numel)
            copies = [x.clone() for x in xs]
            sums = cluster.step(xs)
            assert cluster.finite == [True] * WORKERS
            assert all(torch.equal(s, sums[0]) and bool(torch.isfinite(s).all()) for s in sums)
            assert all(torch.equal(x, c) for x, c in zip(xs, copies, strict=True)), "the input was modified"
            assert all(payload.nbytes <= codec.bound(spec) for payload in cluster.payloads)
            seen += [bytes(payload) for payload in cluster.payloads] + [sums[0].numpy().tobytes()]
        runs.append(seen)
    assert runs[0] == runs[1], "the same input gave other bytes"


@each
def test_what_went_in_came_out_or_is_kept(codec: Codec) -> None:
    """Two of eight steps are abandoned, one of them not finite. Momentum sends more than came in: it has a law of its own."""
    cluster, n = seeded(codec), MATRIX.numel
    put, got = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(8):
        xs = noises(step, n)
        if step == 2:
            xs[1][17] = float("nan")
        sums = cluster.step(xs)
        assert cluster.finite == [step != 2] * WORKERS
        if step in (2, 5):
            cluster.undo()
            cluster.undo()
        else:
            put += torch.stack(xs).double().sum(0)
            got += sums[0].double()
    if "residual" in cluster.states[0] or str(codec) == "identity()":
        if "momentum" in str(codec):
            assert float((got * put).sum()) > 0
        else:
            torch.testing.assert_close(got + cluster.kept(), put, rtol=1e-5, atol=3e-4)
    elif codec.biased or "momentum" in str(codec):
        assert float((got * put).sum()) > 0
    else:
        assert 0.7 < float(got @ put / (put @ put)) < 1.3


@each
def test_a_restored_cluster_goes_on_bit_for_bit(codec: Codec) -> None:
    cluster, fresh, n = seeded(codec), seeded(codec), MATRIX.numel
    for step in range(4):
        cluster.step(noises(step, n))
    fresh.step(noises(77, n))
    for old, new in zip([*cluster.states, cluster.server], [*fresh.states, fresh.server], strict=True):
        restore(new, snapshot(old))
        assert all(np.isfinite(value).all() for value in snapshot(old).values())
    fresh.undo()
    for step in range(4, 6):
        first, second = cluster.step(noises(step, n)), fresh.step(noises(step, n))
        assert torch.equal(first[0], second[0])
        assert [bytes(p) for p in cluster.payloads] == [bytes(p) for p in fresh.payloads]


@each_named
def test_the_order_and_grouping_of_contributions_is_free(name: str) -> None:
    """SUM: payloads of two halves of the members add up to those of all. GATHER: decoded sums add up."""
    codec = kit.EVERY[name]
    cluster = seeded(codec)
    result = memoryview(b"")
    for r in range(len(codec.rounds)):
        payloads = []
        for x, state, out in zip(noises(1, MATRIX.numel), cluster.states, cluster.rooms, strict=True):
            nbytes = codec.start(x, state, out) if r == 0 else codec.next(r - 1, result, state, out)
            payloads.append(out[:nbytes])
        sums = []
        for members in ((0, 1, 2), (2, 0, 1), (0, 1), (2,)):
            acc = codec.zeros(MATRIX, r)
            for place, member in enumerate(members):
                codec.add(r, payloads[member], acc, first=place == 0)
            sums.append([t.clone() for t in held(acc)])
        assert sums[0], "an accumulator without numbers"
        for full, turned, pair, one in zip(*sums, strict=True):
            torch.testing.assert_close(turned, full, rtol=1e-6, atol=1e-5)
            torch.testing.assert_close(pair + one, full, rtol=1e-6, atol=1e-5)
        acc = cluster.accs[r]
        for place, payload in enumerate(payloads):
            codec.add(r, payload, acc, first=place == 0)
        result = memoryview(bytes(cluster.result[: codec.emit(r, acc, cluster.server, cluster.result)]))


@each_named
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_what_is_not_finite_reaches_everyone_and_leaves_nothing(name: str, bad: float) -> None:
    cluster, n = seeded(kit.EVERY[name]), MATRIX.numel
    cluster.step(noises(0, n))
    xs = noises(1, n)
    xs[1][n // 2] = bad
    sums = cluster.step(xs)
    assert cluster.finite == [False] * WORKERS
    assert all(bool(torch.isnan(s).all()) for s in sums)
    assert all(payload.nbytes == 16 for payload in cluster.payloads[1:2])
    cluster.undo()
    sums = cluster.step(noises(2, n))
    assert cluster.finite == [True] * WORKERS
    assert bool(torch.isfinite(sums[0]).all())


@each
@pytest.mark.parametrize("spec", [Spec((0,)), Spec((1,)), Spec((41, 29)), Spec((20_011,))], ids=lambda spec: f"{spec.shape}")
def test_native_and_reference_give_the_same_bytes(codec: Codec, spec: Spec) -> None:
    if len(kit.AVAILABLE) < 2:
        pytest.skip("the native core is not built")
    runs = []
    for backend in kit.AVAILABLE:
        with kit.use(backend):
            cluster, seen = seeded(codec, spec, 2), []
            for step in range(4):
                sums = cluster.step(noises(step, spec.numel, 2))
                seen += [bytes(payload) for payload in cluster.payloads] + [sums[0].numpy().tobytes()]
            runs.append(seen)
    assert runs[0] == runs[1]


UNBIASED = [name for name, text in kit.NAMED.items() if not parse(text).biased and not kit.EVERY[name].keeps]


@pytest.mark.parametrize("text", [*map(kit.NAMED.get, UNBIASED), "randomk(ratio=0.2, unbiased=True)", "qsgd(norm='l2')"])
def test_what_runs_without_feedback_is_unbiased(text: str) -> None:
    """Projected on the true sum, so that any pull shows; 6 deviations of the 60 samples."""
    cluster, n, steps = seeded(parse(text)), MATRIX.numel, 60
    xs = noises(0, n)
    full = torch.stack(xs).double().sum(0)
    along = [float((cluster.step(xs)[0].double() - full) @ full / (full @ full)) for _ in range(steps)]
    samples = torch.tensor(along)
    assert abs(float(samples.mean())) < 6 * float(samples.std()) / steps**0.5 + 1e-4


# ---- without a server, and codecs by themselves


@each_plain
@settings(max_examples=25, deadline=None)
@given(values=ordinary)
def test_sent_and_residual_make_input_and_old_residual(codec: Codec, values: list[float]) -> None:
    wrapped, x = error_feedback(codec), torch.tensor(values, dtype=torch.float32)
    state = wrapped.init(Spec((x.numel(),)))
    for factor in (1.0, -0.75, 3.0):
        v = kit.residual(state) + factor * x
        payload = kit.encode(wrapped, factor * x, state)
        sent = torch.zeros_like(x)
        if wrapped.decode(payload, state, out := torch.empty_like(x)):
            sent = out
        # A large code for a small number leaves a residual with the bits of the code.
        atol = 3e-7 * float(v.abs().max()) if kit.coarse(codec) and values else 1e-44
        torch.testing.assert_close(sent + kit.residual(state), v, rtol=3e-7, atol=atol)


@each_codec
@settings(max_examples=25, deadline=None)
@given(values=anything)
def test_extreme_input_is_coded_or_flagged(codec: Codec, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    spec = Spec((x.numel(),))
    state = codec.init(spec)
    for _ in range(2):
        payload = kit.encode(codec, x, state)
        out = torch.full_like(x, 7.0)
        finite = codec.decode(payload, state, out)
        assert finite or bool(torch.isnan(out).all())
        assert not finite or bool(torch.isfinite(out).all())
        assert not finite or bool(torch.isfinite(x).all())
        if "residual" in state:
            assert bool(torch.isfinite(kit.residual(state)).all())
