"""Laws that every codec of the table obeys, with and without error feedback, alone and through workers and a server."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import codecs as kit

from commlayer.compressors import (
    Codec,
    bf16,
    error_feedback,
    fp16,
    identity,
    int8,
    kernels,
    parse,
    restore,
    seed,
    snapshot,
    topk,
    two_way,
    wrap,
)
from commlayer.compressors.plan_codecs import FACTORIES
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

each = pytest.mark.parametrize("codec", kit.EACH.values(), ids=kit.EACH)
each_named = pytest.mark.parametrize("name", kit.NAMED)
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


def test_table_contains_every_codec() -> None:
    assert set(kit.NAMED) == set(FACTORIES)
    for name, text in kit.NAMED.items():
        assert text.startswith(f"{name}(")
    assert kit.EVERY["momentum"] == parse(str(kit.EVERY["momentum"]))


@pytest.mark.commit(150)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "x".join(map(str, spec.shape)))
@each
def test_sums_of_any_shape_are_within_the_bound_and_equal_on_all_workers(codec: Codec, spec: Spec) -> None:
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


PAIRS = [two_way(wrap(parse(up)), wrap(parse(down))) for up, down in (
    ("topk(ratio=0.2)", "int8(block=64)"), ("topk(ratio=0.2)", "topk(ratio=1.0, values='fp32')"),
    ("topk(ratio=0.2)", "topk(ratio=0.3)"), ("momentum(int8(block=64))", "topk(ratio=0.3)"))]


@pytest.mark.parametrize("codec", [*kit.EACH.values(), *PAIRS, wrap(parse("momentum(momentum(int8(block=64)), 0.5)"))], ids=str)
def test_applied_plus_residual_equals_input(codec: Codec) -> None:
    """Two of eight steps are aborted, one of them not finite. Momentum sends more than its input and has a separate law."""
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
def test_restored_cluster_continues_bit_for_bit(codec: Codec) -> None:
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
def test_sum_does_not_depend_on_order_or_grouping(name: str) -> None:
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
            acc = codec.new_accumulator(MATRIX, r)
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
def test_non_finite_input_is_flagged_on_all_workers_and_leaves_no_residual(name: str, bad: float) -> None:
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


@pytest.mark.commit(70)
@pytest.mark.parametrize("spec", [Spec((0,)), Spec((1,)), Spec((41, 29)), Spec((20_011,))], ids=lambda spec: f"{spec.shape}")
@each
def test_native_and_reference_produce_the_same_bytes(codec: Codec, spec: Spec) -> None:
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


UNBIASED = [name for name, text in kit.NAMED.items() if not parse(text).biased and not kit.EVERY[name].needs_undo]


@pytest.mark.parametrize("text", [*map(kit.NAMED.get, UNBIASED), "randomk(ratio=0.2, unbiased=True)", "qsgd(norm='l2')"])
def test_codecs_without_feedback_are_unbiased(text: str) -> None:
    """Projected on the true sum, which shows any bias; 6 deviations of the 60 samples."""
    cluster, n, steps = seeded(parse(text)), MATRIX.numel, 60
    xs = noises(0, n)
    full = torch.stack(xs).double().sum(0)
    along = [float((cluster.step(xs)[0].double() - full) @ full / (full @ full)) for _ in range(steps)]
    samples = torch.tensor(along)
    assert abs(float(samples.mean())) < 6 * float(samples.std()) / steps**0.5 + 1e-4


@settings(max_examples=40, deadline=None)
@given(values=ordinary)
def test_sent_plus_residual_equals_input_plus_old_residual(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    for codec in kit.PLAIN:
        wrapped = error_feedback(codec)
        state = wrapped.init(Spec((x.numel(),)))
        for factor in (1.0, -0.75, 3.0):
            v = kit.residual(state) + factor * x
            payload = kit.encode(wrapped, factor * x, state)
            sent = torch.zeros_like(x)
            if wrapped.decode(payload, state, out := torch.empty_like(x)):
                sent = out
            # A large code for a small number leaves a residual with the bits of the code.
            atol = 3e-7 * float(v.abs().max()) if kit.coarse(codec) and values else 1e-44
            assert torch.allclose(sent + kit.residual(state), v, rtol=3e-7, atol=atol), codec


@settings(max_examples=40, deadline=None)
@given(values=anything)
def test_extreme_input_is_encoded_or_flagged(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    spec = Spec((x.numel(),))
    for codec in kit.CODECS:
        state = codec.init(spec)
        for _ in range(2):
            payload = kit.encode(codec, x, state)
            out = torch.full_like(x, 7.0)
            finite = codec.decode(payload, state, out)
            assert finite or bool(torch.isnan(out).all()), codec
            assert not finite or bool(torch.isfinite(out).all()), codec
            assert not finite or bool(torch.isfinite(x).all()), codec
            if "residual" in state:
                assert bool(torch.isfinite(kit.residual(state)).all()), codec


WRAPPED = [error_feedback(codec) for codec in kit.PLAIN]


@pytest.mark.parametrize("codec", WRAPPED, ids=str)
def test_undo_restores_the_residual_and_is_idempotent(codec: Codec) -> None:
    for n in (1, 700, 20_011):
        state, out = codec.init(Spec((n,))), kit.room(codec, Spec((n,)))
        codec.undo(state, torch.zeros(n))
        assert not kit.residual(state).any()
        for step in range(4):
            codec.start(kit.noise(n, 20 + step), state, out)
            x, wanted = kit.noise(n, step), kit.residual(state)
            codec.start(x, state, out)
            codec.undo(state, x)
            torch.testing.assert_close(kit.residual(state), wanted, rtol=1e-6, atol=1e-6)
            once = kit.residual(state)
            codec.undo(state, x)
            assert torch.equal(kit.residual(state), once)


def test_overflowing_sum_leaves_the_server_state_unchanged() -> None:
    codec = error_feedback(topk(ratio=0.5, values="fp32"))
    cluster = kit.Cluster(codec, Spec((100,)), 2)
    cluster.step([kit.noise(100), kit.noise(100, 1)])
    before = kit.residual(cluster.server)
    huge = torch.full((100,), 3e38)
    cluster.step([huge, huge])
    assert cluster.finite == [False, False]
    cluster.undo()
    assert torch.equal(kit.residual(cluster.server), before)
    assert bool(kit.residual(cluster.states[0]).isfinite().all())
    assert not bool((kit.residual(cluster.states[0]) > 1.0).any()), "no huge residual remains"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("residual", float("nan"), "not finite"),
        ("residual", float("inf"), "not finite"),
        ("inner.slope", 0.0, "is 0.0.*0.5 to 40.0"),
        ("inner.slope", -4.0, "is -4.0.*0.5 to 40.0"),
        ("inner.slope", float("nan"), "not finite"),
        ("inner.threshold", -1.0, "is -1.0.*0.0 to 3.4"),
        ("inner.trend", 100.0, "is 100.0.*-0.5 to 0.5"),
        ("inner.doubt", -1.0, "is -1.0.*0.0 to 0.25"),
        ("inner.step", -1, "is -1.* 0 to"),
    ],
)
def test_restore_refuses_impossible_values(name: str, value: float, words: str) -> None:
    codec = error_feedback(topk())
    state = codec.init(Spec((20_000,)))
    kit.encode(codec, kit.noise(20_000), state)
    before, bad = snapshot(state), snapshot(state)
    bad[name] = np.zeros_like(bad[name])
    bad[name].reshape(-1)[-1] = value
    with pytest.raises(ValueError, match=f"codec state {name}: .*{words}.*E-CODEC-STATE"):
        restore(state, bad)
    assert all(np.array_equal(value, before[path]) for path, value in snapshot(state).items())


def test_wrap_adds_feedback_to_codecs_that_need_it() -> None:
    assert wrap(topk()) == error_feedback(topk())
    assert wrap(int8()) == error_feedback(int8())
    assert wrap(identity()) == identity()
    assert wrap(error_feedback(topk())) == error_feedback(topk())
    with pytest.raises(ValueError, match="error_feedback: inner is error_feedback.*E-CODEC-ARGUMENT"):
        error_feedback(error_feedback(topk()))
    with pytest.raises(ValueError, match="error_feedback: inner is topk, .*E-CODEC-ARGUMENT"):
        error_feedback("topk")  # type: ignore[arg-type]


MOST = torch.finfo(torch.float32).max
NARROW = [error_feedback(fp16()), error_feedback(topk(ratio=0.5, values="fp16"))]


@pytest.fixture
def flushing() -> Iterator[None]:
    """As torch.set_flush_denormal(True) leaves a training process."""
    torch.ones(1 << 20).add_(1)  # torch's own threads start now: they would keep the mode of the thread that starts them
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.commit(54)
@pytest.mark.usefixtures("flushing")
@pytest.mark.parametrize("n", [300, 20_011])
@pytest.mark.parametrize("backend", kit.AVAILABLE)
@pytest.mark.parametrize("codec", kit.CODECS, ids=str)
def test_codecs_work_with_flushed_denormals(codec: Codec, backend: str, n: int) -> None:
    """There are fewer nonzero entries than topk selects, denormals among them; output plus residual still equals the input."""
    with kit.use(backend):
        cluster = kit.Cluster(codec, Spec((n,)), 2)
        put, got = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        for step in range(4):
            x = torch.zeros(n)
            x[[3, n // 2]] = torch.tensor([1.5, -0.25]) * (step + 1)
            x[n - 1] = 3e-39
            put += 2 * x.double()
            got += cluster.step([x, x])[0].double()
            assert cluster.finite == [True, True]
        if not kit.coarse(codec):
            torch.testing.assert_close(got + cluster.kept(), put, rtol=1e-2, atol=1e-30)


@pytest.mark.parametrize("codec", [*NARROW, error_feedback(bf16())], ids=str)
def test_values_beyond_the_cast_range_are_sent_over_several_steps(codec: Codec) -> None:
    """A huge entry is clipped to the format's largest number and the rest follows in the next steps; no step is flagged."""
    n, most = 1000, 3.3e38 if "bf16" in str(codec) else 65504.0
    state, spike = codec.init(Spec((n,))), 3.4e38 if "bf16" in str(codec) else 1e5
    x, total = torch.zeros(n), torch.zeros(n, dtype=torch.float64)
    x[7] = spike
    for step in range(3):
        out = torch.empty(n)
        assert codec.decode(kit.encode(codec, x if step == 0 else torch.zeros(n), state), state, out)
        total += out.double()
        assert step or float(out[7]) >= most
    assert float(total[7]) == pytest.approx(spike, rel=1e-3)


@pytest.mark.parametrize("codec", NARROW, ids=str)
def test_sums_beyond_the_cast_range_stay_in_the_server_residual(codec: Codec) -> None:
    n = 100
    cluster = kit.Cluster(codec, Spec((n,)), 3)
    x = torch.zeros(n)
    x[7] = 60000.0
    sums = cluster.step([x] * 3)[0].double()
    assert cluster.finite == [True] * 3
    assert float(sums[7]) == 65504.0
    for _ in range(3):
        sums += cluster.step([torch.zeros(n)] * 3)[0].double()
        assert cluster.finite == [True] * 3
    assert float(sums[7]) == pytest.approx(180_000, rel=1e-3)


@pytest.mark.parametrize("backend", kit.AVAILABLE)
@pytest.mark.parametrize("codec", [int8(block=16), topk(ratio=1.0)], ids=str)
def test_largest_floats_are_conserved(codec: Codec, backend: str) -> None:
    wrapped, n = error_feedback(codec), 40
    with kit.use(backend):
        state = wrapped.init(Spec((n,)))
        x = torch.linspace(-1, 1, n) * MOST
        out = torch.empty(n)
        assert wrapped.decode(kit.encode(wrapped, x, state), state, out)
        assert bool(torch.isfinite(out).all())
        torch.testing.assert_close(out.double() + kit.residual(state).double(), x.double(), rtol=0, atol=1e-7 * MOST)


def test_no_byte_of_an_int8_payload_decodes_to_infinity() -> None:
    """The largest allowed scale, with the q that no encoder writes; and the scales beyond it."""
    payload = bytearray(kit.encode(int8(block=4), torch.ones(4), {}))
    payload[16:24] = struct.pack("<f4b", kernels.MOST_SCALE, -128, 127, -127, 0)
    out = kit.decoded(int8(block=4), bytes(payload), 4)
    assert out.tolist()[0] == -MOST
    for scale in (np.nextafter(kernels.MOST_SCALE, np.float32(np.inf)), -1.0, float("nan"), float("inf")):
        payload[16:20] = struct.pack("<f", scale)
        with pytest.raises(CorruptFrame, match="scale.*E-PAYLOAD"):
            int8(block=4).decode(bytes(payload), {}, out)


@pytest.mark.parametrize(("codec", "bad", "fed"), [
    (identity(), float("nan"), False), (identity(), -float("inf"), True), (fp16(), float("inf"), True),
    (fp16(), float("nan"), False), (bf16(), float("nan"), True), (bf16(), -float("inf"), False),
], ids=str)
def test_non_finite_dense_body_counts_as_flagged(codec: Codec, bad: float, fed: bool) -> None:
    n = 40
    kind = {"identity": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[codec.name]  # type: ignore[attr-defined]
    payload = bytearray(kit.encode(codec, kit.noise(n), codec.init(Spec((n,)))))
    at = 16 + 11 * kind.itemsize
    payload[at : at + kind.itemsize] = torch.tensor([bad]).to(kind).view(torch.uint8).numpy().tobytes()
    outer = error_feedback(codec) if fed else codec
    state, out = outer.init(Spec((n,))), torch.zeros(n)
    assert outer.decode(bytes(payload), state, out) is False
    assert bool(torch.isnan(out).all())
    acc, server = outer.new_accumulator(Spec((n,)), 0), outer.init_server(Spec((n,)))
    result = kit.room(outer, Spec((n,)))
    good = kit.encode(codec, kit.noise(n), {})
    for order in ([payload, good], [good, payload], [payload, payload]):
        for i, one in enumerate(order):
            outer.add(0, bytes(one), acc, first=i == 0)
        assert not outer.decode(result[: outer.emit(0, acc, server, result)], state, out)
    assert "residual" not in server or bool(torch.isfinite(kit.residual(server)).all())
    outer.add(0, good, acc, first=True)
    assert outer.decode(result[: outer.emit(0, acc, server, result)], state, out)


SPEC = Spec((64, 50))
WRONG: dict[str, torch.Tensor] = {
    "float64 of shape (3200,)": torch.zeros(3200, dtype=torch.float64),
    "bfloat16 of shape (3200,)": torch.zeros(3200, dtype=torch.bfloat16),
    "float32 of shape (3100,)": torch.zeros(3100),
    "float32 of shape (3300,)": torch.zeros(3300),
    "float32 of shape (64, 50)": torch.zeros(64, 50),
    "not contiguous": torch.zeros(6400)[::2],
    "on meta": torch.zeros(3200, device="meta"),
}
FEEDBACK = [parse(text) for text in (
    "error_feedback(int8())", "error_feedback(fp16())", "error_feedback(topk(ratio=0.1))", "error_feedback(powersgd(rank=2))",
    "momentum(error_feedback(int8()))",
)]
PLAIN = [parse(text) for text in (
    "topk(ratio=0.1)", "topk(ratio=0.1, exact=True)", "block_threshold(ratio=0.1)", "randomk(ratio=0.1)", "powersgd(rank=2)",
)]


@pytest.mark.parametrize("codec", FEEDBACK + PLAIN, ids=str)
def test_input_and_output_of_a_wrong_type_or_shape_are_refused(codec: Codec) -> None:
    cluster = kit.Cluster(codec, SPEC, 1)
    cluster.step([kit.noise(3200)])
    state, out = cluster.states[0], kit.room(codec, SPEC)
    before = snapshot(state)
    for report, wrong in WRONG.items():
        calls = [("x", partial(codec.start, wrong, state, out)), ("out", partial(codec.decode, cluster.result, state, wrong))]
        for what, call in calls if codec in FEEDBACK else calls[:1]:
            with pytest.raises(ValueError, match=f"{what} is .*of 3200 elements.*E-CODEC-INPUT") as caught:
                call()
            assert report in str(caught.value)
    assert all(np.array_equal(snapshot(state)[name], value) for name, value in before.items())


@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
def test_state_of_another_spec_or_type_is_refused(codec: Codec) -> None:
    state, other = codec.init(SPEC), codec.init(Spec((32, 101)))
    with pytest.raises(ValueError, match=r"codec state \S+: got float32 of shape \(.*\).* \(.*\).*E-CODEC-STATE"):
        restore(other, snapshot(state))
    for name, value in snapshot(state).items():
        wrong = np.dtype(np.float64 if value.dtype != np.float64 else np.float32)
        with pytest.raises(ValueError, match=rf"codec state {name}: got {wrong}.* {value.dtype}.*E-CODEC-STATE"):
            restore(codec.init(SPEC), {**snapshot(state), name: value.astype(wrong)})
