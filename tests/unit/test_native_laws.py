"""Every kernel: reference == vector body == portable body == several threads, over sizes, special numbers, unaligned memory."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import codec_kernels as reference
from support.native_builds import KINDS, SIZES, bits, core, numbers, portable, positions, same, unaligned

from commlayer.compressors.kernels import MOST_SCALE
from commlayer.errors import CorruptFrame

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
quick = settings(max_examples=60, deadline=None)
sizes = st.sampled_from(SIZES)
seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(KINDS)


@quick
@given(sizes, seeds, kinds, st.sampled_from([0, 1, 3]))
@pytest.mark.parametrize("width", ["f32", "f16", "bf16"])
def test_sums(width: str, n: int, seed: int, kind: str, shift: int) -> None:
    acc, x = numbers(n, seed, kind=kind), numbers(n, seed + 1, kind=kind)
    payload, _ = unaligned(n * (4 if width == "f32" else 2), shift)
    if width == "f32":
        payload[:] = x.tobytes()
    else:
        getattr(reference, f"f32_to_{width}")(payload, x)

    def run(module: ModuleType) -> bytes:
        mine = acc.copy()
        getattr(module, f"add_{width}")(mine, payload)
        return bits(mine)

    same(run)


@quick
@given(sizes, seeds, kinds, st.sampled_from([0, 1]))
@pytest.mark.parametrize(("width", "nan_from"), [("f16", 0x7C01), ("bf16", 0x7F81)])
def test_casts(width: str, nan_from: int, n: int, seed: int, kind: str, shift: int) -> None:
    x = numbers(n, seed, kind=kind)

    def run(module: ModuleType) -> object:
        out, _ = unaligned(2 * n, shift)
        finite = getattr(module, f"f32_to_{width}")(out, x)
        back = np.empty(n, np.float32)
        getattr(module, f"{width}_to_f32")(back, out)
        narrow = np.frombuffer(out, np.uint16).copy()
        narrow[(narrow & 0x7FFF) >= nan_from] = 0x7FFF
        return finite, narrow.tobytes(), bits(back), module.all_finite(x), module.all_finite(x, x[::-1].copy())

    finite = same(run)[0]
    assert finite or kind in ("wild", "special")


@pytest.mark.parametrize("width", ["f16", "bf16"])
def test_every_16_bit_number_survives_the_round_trip(width: str) -> None:
    every = np.arange(65536, dtype=np.uint16)
    for force in (False, True):
        with portable(force):
            wide, back = np.empty(65536, np.float32), np.empty(65536, np.uint16)
            getattr(core, f"{width}_to_f32")(wide, every)
            getattr(core, f"f32_to_{width}")(back, wide)
        finite = np.isfinite(wide)
        assert (back[finite] == every[finite]).all()
        assert np.isnan(wide).sum() == (2046 if width == "f16" else 254)
        expected = np.empty(65536, np.float32)
        getattr(reference, f"{width}_to_f32")(expected, every)
        assert bits(expected) == bits(wide)


def test_rounding_is_to_nearest_even_at_every_boundary() -> None:
    halves = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = ((halves[1:] + halves[:-1]) / 2).astype(np.float32)
    x = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))])
    expected = x.astype(np.float16).view(np.uint16)
    for force in (False, True):
        with portable(force):
            out = np.empty(x.size, np.uint16)
            core.f32_to_f16(out, x)
        assert (out == expected).all()


@quick
@given(sizes, seeds, kinds, st.sampled_from([1, 7, 32, 100, 256, 5000]), st.booleans(), st.sampled_from([0, 1, 2]))
def test_int8(n: int, seed: int, kind: str, block: int, with_residual: bool, shift: int) -> None:
    x, old = numbers(n, seed, kind=kind), numbers(n, seed + 1) if with_residual else None
    acc = numbers(n, seed + 2)
    count = -(-n // block)

    def run(module: ModuleType) -> tuple[object, ...]:
        kept = None if old is None else old.copy()
        q, guarded_q = unaligned(n, shift)
        scale, guarded_scale = unaligned(4 * count, shift)
        finite = module.int8_encode(q, scale, x, kept, block)
        if not finite:
            q[:], scale[:] = bytes(n), bytes(4 * count)  # may hold anything now
        payload = bytes(guarded_q), bytes(guarded_scale)
        decoded, assigned = acc.copy(), acc.copy()
        if finite:
            module.int8_decode(decoded, q, scale, block)
            module.int8_decode(assigned, q, scale, block, True)
        return finite, *payload, b"" if kept is None else kept.tobytes(), bits(decoded), bits(assigned)

    finite, _, _, kept, _, assigned = same(run)
    with np.errstate(all="ignore"):
        v = x if old is None else x + old
    assert finite == bool(np.isfinite(v).all())
    if not finite:
        assert old is None or kept == np.where(np.isfinite(v), v, old).tobytes()
    elif old is not None and kind != "special":
        sent, rest = np.frombuffer(assigned, np.float32), np.frombuffer(kept, np.float32)
        np.testing.assert_allclose(sent + rest, v, rtol=1e-6, atol=1e-6 * float(np.abs(v).max(initial=0)))
        most = float(np.abs(v).max(initial=0))
        above = max(0.0, most - 127 * MOST_SCALE)  # what the largest scale cannot carry
        assert np.abs(rest).max(initial=0) <= max(most / 127 / 2, above) * 1.001 + 1e-30


@quick
@given(sizes, seeds, kinds, st.sampled_from([1e-9, 0.1, 1.0, 2.5, 100.0, float("inf")]), st.floats(0, 0.999), st.data())
@pytest.mark.parametrize("with_residual", [True, False])
def test_select(with_residual: bool, n: int, seed: int, kind: str, threshold: float, place: float, data: st.DataObject) -> None:
    g, old = numbers(n, seed, kind=kind), numbers(n, seed + 1) * np.float32(0.5) if with_residual else None
    start, cap = int(place * n), data.draw(st.sampled_from([n, n // 2, n // 10, n + 5, 3, 0]))

    def run(module: ModuleType) -> tuple[object, ...]:
        kept = None if old is None else old.copy()
        idx, val = np.full(cap, 7, np.uint32), np.full(cap, 7, np.float32)
        k, overflow, finite = module.select(g, kept, threshold, start, idx, val)
        return k, overflow, finite, idx[:k].tobytes(), val[:k].tobytes(), b"" if kept is None else bits(kept)

    k, overflow, finite, idx_bytes, val_bytes, kept_bytes = same(run)
    idx, val = np.frombuffer(idx_bytes, np.uint32), np.frombuffer(val_bytes, np.float32)
    with np.errstate(all="ignore"):
        v = g if old is None else g + old
    passed = np.isfinite(v) & (np.abs(v) >= np.float32(threshold))
    assert k + overflow == passed.sum()
    assert k == min(cap, passed.sum())
    assert finite == bool(np.isfinite(v).all())
    assert (np.diff(idx.astype(np.int64)) > 0).all()
    assert (v[idx] == val).all()
    order = (np.flatnonzero(passed) - start) % max(n, 1)
    assert set((idx.astype(np.int64) - start) % max(n, 1)) == set(np.sort(order)[:cap])
    if old is not None:
        kept = np.frombuffer(kept_bytes, np.float32)
        expected = np.where(np.isfinite(v), v, old)
        expected[idx] = 0
        assert bits(kept) == bits(expected)


def test_select_where_the_room_ends_anywhere_in_a_group() -> None:
    g = numbers(300, 5)
    for cap in range(0, 300, 1):

        def run(module: ModuleType, cap: int = cap) -> tuple[object, ...]:
            memory, full = unaligned(4 * cap, 4)
            idx, val, kept = np.frombuffer(memory, np.uint32), np.zeros(cap, np.float32), np.zeros(300, np.float32)
            k, overflow, _ = module.select(g, kept, 0.3, 17, idx, val)
            return (
                k,
                overflow,
                idx[:k].tobytes(),
                val[:k].tobytes(),
                kept.tobytes(),
                bytes(full[:4]),
                bytes(full[4 + 4 * cap :]),
            )

        assert same(run)[-2:] == (b"\xa5" * 4, b"\xa5" * 16)


@quick
@given(sizes, seeds, st.integers(0, 10**6), st.sampled_from([0, 1, 10, 100, 5000]), st.booleans())
def test_sample_abs(n: int, seed: int, offset: int, count: int, with_residual: bool) -> None:
    g, old = numbers(n, seed, kind="wild"), numbers(n, seed + 1) if with_residual else None

    def run(module: ModuleType) -> bytes:
        out = np.full(count, 7, np.float32)
        module.sample_abs(g, old, offset, out)
        return bits(out)

    same(run)


@quick
@given(st.sampled_from(SIZES[1:]), seeds, st.floats(0, 1), st.sampled_from([1, 5, 64, 5000]))
def test_scatter(n: int, seed: int, density: float, block: int) -> None:
    k = int(n * density)
    idx, val, acc = positions(n, k, seed), numbers(k, seed, kind="wild"), numbers(n, seed + 1)
    q, scale = np.random.default_rng(seed).integers(-127, 128, k).astype(np.int8), numbers(-(-k // block), seed + 2)

    def run(module: ModuleType) -> tuple[bytes, bytes]:
        one, two = acc.copy(), acc.copy()
        module.scatter_add(one, idx, val)
        module.scatter_add_int8(two, idx, q, scale, block)
        return bits(one), bits(two)

    same(run)


@quick
@given(st.sampled_from(SIZES[1:]), seeds, st.floats(0.01, 1), st.integers(0, 10**6))
def test_scatter_refuses_positions_out_of_order_or_range(n: int, seed: int, density: float, where: int) -> None:
    k = max(1, int(n * density))
    idx, val, acc = positions(n, k, seed), numbers(k, seed), numbers(n, seed + 1)
    j = where % k
    bad = idx.copy()
    bad[j] = n + where if j == k - 1 else idx[j + 1]

    def run(module: ModuleType) -> bytes:
        mine = acc.copy()
        with pytest.raises(CorruptFrame):
            module.scatter_add(mine, bad, val)
        with pytest.raises(CorruptFrame):
            module.scatter_add_int8(mine, bad, np.ones(k, np.int8), np.ones(k, np.float32), 1)
        return mine.tobytes()

    assert same(run) == acc.tobytes()


@quick
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 6), seeds)
def test_outer(m: int, n: int, rank: int, seed: int) -> None:
    p, q = numbers(m * rank, seed), numbers(n * rank, seed + 1)

    def run(module: ModuleType) -> bytes:
        out = np.empty(m * n, np.float32)
        module.outer(out, p, q, rank)
        return out.tobytes()

    wanted = p.reshape(rank, m).T.astype(np.float64) @ q.reshape(rank, n)
    assert np.allclose(np.frombuffer(same(run), np.float32).reshape(m, n), wanted, rtol=1e-4, atol=1e-4)


def test_outer_refuses_factors_that_do_not_fit() -> None:
    x = numbers(9, 0)
    for columns, rank in ((2, 1), (3, 0)):
        with pytest.raises(ValueError):
            core.outer(x, x[:3].copy(), x[:columns].copy(), rank)


def test_several_threads_refuse_mistakes_and_numbers_that_are_not_finite() -> None:
    g, old = numbers(4097, 9), numbers(4097, 2)
    core.threads(4, 1)
    try:
        for threshold, start in ((0.0, 0), (1.0, 4097), (1.0, -1)):
            with pytest.raises(ValueError, match="select"):
                core.select(g, None, threshold, start, np.zeros(9, np.uint32), np.zeros(9, np.float32))
        for place in (0, 1638, 4092):
            bad, kept = g.copy(), old.copy()
            bad[place] = np.inf
            assert not core.int8_encode(bytearray(4097), bytearray(172), bad, kept, 96)
    finally:
        core.threads(1, 1)
