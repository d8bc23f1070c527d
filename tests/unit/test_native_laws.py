"""Every kernel: reference == vector body == portable body == several threads, over sizes, special numbers, unaligned memory."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import codec_kernels as reference
from support.native_builds import SIZES, bits, core, numbers, portable, positions, same

from commlayer.errors import CorruptFrame

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
quick = settings(max_examples=60, deadline=None)
sizes = st.sampled_from(SIZES)
seeds = st.integers(0, 2**32 - 1)


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
