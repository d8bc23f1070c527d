"""Numbers at the edges of their formats: denormals flushed to zero, casts that overflow, scales near the largest float."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support import codecs as kit

from commlayer.compressors import Codec, bf16, error_feedback, fp16, identity, int8, kernels, parse, restore, snapshot, topk
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

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


@pytest.mark.usefixtures("flushing")
@pytest.mark.parametrize("codec", kit.CODECS, ids=str)
@pytest.mark.parametrize("backend", kit.AVAILABLE)
@pytest.mark.parametrize("n", [300, 20_011])
def test_codecs_work_where_denormals_are_flushed(codec: Codec, backend: str, n: int) -> None:
    """Fewer entries that are not zero than topk wants, denormals among them: what is put in is what comes out and is kept."""
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
def test_what_a_cast_cannot_hold_is_sent_bit_by_bit(codec: Codec) -> None:
    """One huge entry is cut to the format's largest number and follows in the next steps; no step is flagged."""
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
def test_a_sum_that_a_cast_cannot_hold_stays_at_the_server(codec: Codec) -> None:
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
def test_the_largest_numbers_lose_nothing(codec: Codec, backend: str) -> None:
    wrapped, n = error_feedback(codec), 40
    with kit.use(backend):
        state = wrapped.init(Spec((n,)))
        x = torch.linspace(-1, 1, n) * MOST
        out = torch.empty(n)
        assert wrapped.decode(kit.encode(wrapped, x, state), state, out)
        assert bool(torch.isfinite(out).all())
        torch.testing.assert_close(out.double() + kit.residual(state).double(), x.double(), rtol=0, atol=1e-7 * MOST)


def test_no_byte_of_an_int8_payload_decodes_to_infinity() -> None:
    """The largest scale that is allowed, with the q that no encoder writes; and the scales beyond it."""
    payload = bytearray(kit.encode(int8(block=4), torch.ones(4), {}))
    payload[16:24] = struct.pack("<f4b", kernels.MOST_SCALE, -128, 127, -127, 0)
    out = kit.decoded(int8(block=4), bytes(payload), 4)
    assert out.tolist()[0] == -MOST
    for scale in (np.nextafter(kernels.MOST_SCALE, np.float32(np.inf)), -1.0, float("nan"), float("inf")):
        payload[16:20] = struct.pack("<f", scale)
        with pytest.raises(CorruptFrame, match="scale.*E-PAYLOAD"):
            int8(block=4).decode(bytes(payload), {}, out)


@pytest.mark.parametrize("codec", [identity(), fp16(), bf16()], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fed", [False, True])
def test_a_dense_body_that_is_not_finite_counts_as_flagged(codec: Codec, bad: float, fed: bool) -> None:
    n = 40
    kind = {"identity": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[codec.name]  # type: ignore[attr-defined]
    payload = bytearray(kit.encode(codec, kit.noise(n), codec.init(Spec((n,)))))
    at = 16 + 11 * kind.itemsize
    payload[at : at + kind.itemsize] = torch.tensor([bad]).to(kind).view(torch.uint8).numpy().tobytes()
    outer = error_feedback(codec) if fed else codec
    state, out = outer.init(Spec((n,))), torch.zeros(n)
    assert outer.decode(bytes(payload), state, out) is False
    assert bool(torch.isnan(out).all())
    acc, server = outer.zeros(Spec((n,)), 0), outer.init_server(Spec((n,)))
    result = kit.room(outer, Spec((n,)))
    good = kit.encode(codec, kit.noise(n), {})
    for order in ([payload, good], [good, payload], [payload, payload]):
        for i, one in enumerate(order):
            outer.add(0, bytes(one), acc, first=i == 0)
        assert not outer.decode(result[: outer.emit(0, acc, server, result)], state, out)
    assert "residual" not in server or bool(torch.isfinite(kit.residual(server)).all())
    outer.add(0, good, acc, first=True)
    assert outer.decode(result[: outer.emit(0, acc, server, result)], state, out)


# ---- Tensors and states that are not what a codec's state was made for: ValueError naming both sides, and nothing c

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


@pytest.mark.parametrize("report", WRONG)
@pytest.mark.parametrize("codec", FEEDBACK + PLAIN, ids=str)
def test_input_of_another_kind(codec: Codec, report: str) -> None:
    state, out = codec.init(SPEC), kit.room(codec, SPEC)
    codec.start(kit.noise(3200), state, out)
    before = snapshot(state)
    with pytest.raises(ValueError, match="x is .*of 3200 elements.*E-CODEC-INPUT") as caught:
        codec.start(WRONG[report], state, out)
    assert report in str(caught.value)
    after = snapshot(state)
    assert all(np.array_equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("report", WRONG)
@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
def test_output_of_another_kind(codec: Codec, report: str) -> None:
    cluster = kit.Cluster(codec, SPEC, 1)
    cluster.step([kit.noise(3200)])
    with pytest.raises(ValueError, match="out is .*of 3200 elements.*E-CODEC-INPUT") as caught:
        codec.decode(cluster.result, cluster.states[0], WRONG[report])
    assert report in str(caught.value)


@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
def test_a_state_of_another_spec_or_type_is_refused(codec: Codec) -> None:
    state, other = codec.init(SPEC), codec.init(Spec((32, 101)))
    with pytest.raises(ValueError, match=r"codec state \S+: got float32 of shape \(.*\).* \(.*\).*E-CODEC-STATE"):
        restore(other, snapshot(state))
    for name, value in snapshot(state).items():
        wrong = np.dtype(np.float64 if value.dtype != np.float64 else np.float32)
        with pytest.raises(ValueError, match=rf"codec state {name}: got {wrong}.* {value.dtype}.*E-CODEC-STATE"):
            restore(codec.init(SPEC), {**snapshot(state), name: value.astype(wrong)})
