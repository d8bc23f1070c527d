"""Laws that every codec of the table obeys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import codecs as kit

from commlayer.compressors import Codec, Round, error_feedback
from commlayer.records import Spec

each = pytest.mark.parametrize("codec", kit.CODECS, ids=str)
each_plain = pytest.mark.parametrize("codec", kit.PLAIN, ids=str)
ordinary = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=200)
anything = st.lists(st.floats(width=32), max_size=100)


@each
def test_is_a_codec(codec: Codec) -> None:
    assert isinstance(codec, Codec)
    assert hash(codec) == hash(codec)
    assert 0 < codec.id < 240


@each
@pytest.mark.parametrize("n", kit.SIZES)
def test_payloads_stay_within_the_bound_and_results_are_finite(codec: Codec, n: int) -> None:
    cluster = kit.Cluster(codec, Spec((n,)), 2)
    for step in range(4):
        x = kit.noise(n, step) * 10.0 ** (step % 3)
        before = x.clone()
        sums = cluster.step([x, -0.5 * x])
        assert cluster.finite == [True, True]
        assert all(bool(torch.isfinite(s).all()) for s in sums)
        assert torch.equal(x, before), "the input was modified"


@each
def test_a_million_elements(codec: Codec) -> None:
    n = 1 << 20
    x = kit.noise(n)
    payload = kit.encode(codec, x, codec.init(Spec((n,))))
    out = kit.decoded(codec, payload, n)
    assert payload.nbytes <= codec.bound(Spec((n,)))
    assert bool(torch.isfinite(out).all())
    assert float((out * x).sum()) > 0


@each
def test_same_input_same_bytes(codec: Codec) -> None:
    runs = []
    for _ in range(2):
        state = codec.init(Spec((20_011,)))
        runs.append([bytes(kit.encode(codec, kit.noise(20_011, step), state)) for step in range(4)])
    assert runs[0] == runs[1]


@each_plain
@settings(max_examples=25, deadline=None)
@given(values=ordinary)
def test_sent_and_residual_make_input_and_old_residual(codec: Codec, values: list[float]) -> None:
    wrapped, x = error_feedback(codec), torch.tensor(values, dtype=torch.float32)
    state = wrapped.init(Spec((x.numel(),)))
    for factor in (1.0, -0.75, 3.0):
        v = state["residual"] + factor * x
        payload = kit.encode(wrapped, factor * x, state)
        sent = torch.zeros_like(x)
        if wrapped.decode(payload, state, out := torch.empty_like(x)):
            sent = out
        # A large code for a small number leaves a residual with the bits of the code.
        atol = 3e-7 * float(v.abs().max()) if kit.coarse(codec) and values else 1e-44
        torch.testing.assert_close(sent + state["residual"], v, rtol=3e-7, atol=atol)


@each
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
            assert bool(torch.isfinite(state["residual"]).all())


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_input_of_any_origin(codec: Codec, dtype: torch.dtype) -> None:
    x = kit.noise(5000).to(dtype).float()
    out = kit.decoded(codec, kit.encode(codec, x, codec.init(Spec((5000,)))), 5000)
    assert float((out * x).sum()) > 0.04 * float((x * x).sum())
    if str(codec) == "fp16()" and dtype == torch.float16:
        assert torch.equal(out, x)


@each
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("n", [3, 5000])
def test_non_finite_input_is_flagged_everywhere(codec: Codec, bad: float, n: int) -> None:
    cluster = kit.Cluster(codec, Spec((n,)), 3)
    xs = [kit.noise(n, i) for i in range(3)]
    cluster.step(xs)
    xs[1][n // 2] = bad
    for first in range(3):
        sums = cluster.step(xs[first:] + xs[:first])
        assert cluster.finite == [False] * 3
        assert all(bool(torch.isnan(s).all()) for s in sums)
    sums = cluster.step([kit.noise(n, 9)] * 3)
    assert cluster.finite == [True] * 3
    assert bool(torch.isfinite(sums[0]).all())


@each
@pytest.mark.parametrize("n", [1, 700, 20_011])
def test_server_sums_what_three_workers_sent(codec: Codec, n: int) -> None:
    cluster = kit.Cluster(codec, Spec((n,)), 3)
    for step in range(3):
        sums = cluster.step([kit.noise(n, 10 * step + i) for i in range(3)])
        sent = sum(kit.decoded(codec, payload, n).double() for payload in cluster.payloads)
        assert torch.equal(sums[0], sums[1])
        torch.testing.assert_close(kit.summed(codec, cluster.accs[0], n).double(), sent, rtol=1e-5, atol=1e-6)
        if codec.rounds == (Round.SUM,):
            torch.testing.assert_close(sums[0].double(), sent, rtol=1e-5, atol=1e-6)


@each
def test_nothing_is_lost_between_workers_and_server(codec: Codec) -> None:
    n = 20_011
    cluster = kit.Cluster(codec, Spec((n,)), 3)
    put, got = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(6):
        xs = [kit.noise(n, 10 * step + i) for i in range(3)]
        put += torch.stack(xs).double().sum(0)
        got += cluster.step(xs)[0].double()
    if "residual" in cluster.states[0]:
        torch.testing.assert_close(got + cluster.kept(), put, rtol=1e-4, atol=1e-4)
    else:
        assert float((got * put).sum()) > 0


@pytest.mark.parametrize("codec", [c for c in kit.PLAIN if c.rounds == (Round.SUM,)], ids=str)
def test_sum_rounds_are_linear(codec: Codec) -> None:
    """To the rounding of the values. Of one and the same step: a later one may draw other entries."""
    a, b = kit.noise(999, 1), kit.noise(999, 2)
    whole, *parts = (kit.decoded(codec, kit.encode(codec, x, codec.init(Spec((999,)))), 999) for x in (a + b, a, b))
    coarse = next((2.0**-bits for name, bits in (("fp16", 10), ("bf16", 7)) if name in str(codec)), 1e-6)
    torch.testing.assert_close(whole, parts[0] + parts[1], rtol=coarse, atol=4 * coarse * float(whole.abs().max()))


@each
@pytest.mark.parametrize("n", [0, 1, 700, 20_011])
def test_backends_give_the_same_bytes(codec: Codec, n: int) -> None:
    if len(kit.AVAILABLE) < 2:
        pytest.skip("the native core is not built")
    runs = []
    for backend in kit.AVAILABLE:
        with kit.use(backend):
            state, seen = codec.init(Spec((n,))), []
            for step in range(5):
                payload = kit.encode(codec, kit.noise(n, step) * 4.0 ** (step % 3), state)
                seen += [bytes(payload), kit.decoded(codec, payload, n).numpy().tobytes()]
            runs.append([*seen, state["residual"].numpy().tobytes()] if "residual" in state else seen)
    assert runs[0] == runs[1]


@each
def test_the_first_contribution_overwrites_what_was_there(codec: Codec) -> None:
    n = 5000
    acc, state = codec.zeros(Spec((n,)), 0), codec.init(Spec((n,)))
    acc["sum"].fill_(float("nan"))
    payload = kit.encode(codec, kit.noise(n), state)
    codec.add(0, payload, acc, first=True)
    assert torch.equal(kit.summed(codec, acc, n), kit.decoded(codec, payload, n))
    codec.add(0, payload, acc, first=False)
    assert torch.equal(kit.summed(codec, acc, n), 2 * kit.decoded(codec, payload, n))
