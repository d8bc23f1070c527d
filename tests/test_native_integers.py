"""Shared-scale integers and low-rank products: reference == vector body == portable body, and Philox by its known answers."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kit import SIZES, bits, core, numbers, portable, unaligned

from commlayer.compressors import reference
from commlayer.compressors.reference.draws import words
from commlayer.compressors.reference.integers import levels, packed_nbytes

quick = settings(max_examples=60, deadline=None)
sizes, seeds = st.sampled_from(SIZES), st.integers(0, 2**32 - 1)
shifts = st.sampled_from([0, 1, 3])
WIDTHS = [4, 8, 12, 16, 32]


def bodies() -> list[tuple[ModuleType, bool]]:
    return [(core, False), (core, True), (reference, False)]


def test_random_words_take_all_of_key_and_step() -> None:
    seen = {words(9, 0, key, step)[4:].numpy().tobytes() for key in (0, 1, 1 << 32) for step in (0, 1, 1 << 32)}
    assert len(seen) == 9


@quick
@given(sizes, seeds, st.sampled_from(["normal", "special", "equal", "spike", "tiny"]), st.sampled_from([8, 24, 1024]),
       st.sampled_from([4, 8]), st.booleans(), shifts)
def test_integers(n: int, seed: int, kind: str, block: int, width: int, dither: bool, shift: int) -> None:
    x = numbers(n, seed, kind=kind)
    results = []
    for module, plain in bodies():
        with portable(plain):
            maxima, guarded_maxima = unaligned(2 * -(-n // block), shift)
            q, guarded = unaligned(packed_nbytes(n, width), shift)
            assert module.int_maxima(maxima, x, block)
            module.int_encode(q, x, maxima, block, width, dither, seed << 31 | 5, seed << 3)
            assert module.int_legal(q, n, width)
            back = np.empty(n, np.float32)
            module.int_decode(back, q, maxima, block, width, width)
            results.append((bytes(guarded_maxima), bytes(guarded), bits(back)))
    assert results[0] == results[1] == results[2]
    back = np.frombuffer(results[0][2], np.float32)
    tops = np.frombuffer(results[0][0], np.uint16, count=-(-n // block), offset=shift).astype(np.uint32) << 16
    most = np.repeat(tops, block)[:n].view(np.float32).astype(np.float64)
    assert (np.abs(x) <= most).all() or kind == "special", "a maximum is rounded up"
    slack = (1.0 if dither else 0.5) + 2e-5
    off = np.abs(back.astype(np.float64) - x) - slack * most / levels(width)
    assert (off[most >= 127 * 2.0**-126] <= 0).all() or kind == "special"


@settings(max_examples=20, deadline=None)
@given(sizes, seeds, st.sampled_from([4, 8]), shifts, st.integers(1, 20))
def test_sums_and_widths(n: int, seed: int, width: int, shift: int, members: int) -> None:
    most = levels(width)
    rng = np.random.default_rng(seed)
    parts = [rng.integers(-most, most + 1, n).astype(np.int32) for _ in range(members)]
    for module, plain in bodies():
        with portable(plain):
            total = torch.full((n,), 99, dtype=torch.int32)
            for i, part in enumerate(parts):
                q, _ = unaligned(packed_nbytes(n, width), shift)
                module.int_pack(q, part, width)
                module.int_add(total, q, width, i == 0)
            assert np.array_equal(total.numpy(), sum(parts))
            for wide in (w for w in WIDTHS if members * most < 1 << w - 1):
                out, guarded = unaligned(packed_nbytes(n, wide), shift)
                module.int_pack(out, total, wide)
                ones = np.full(-(-n // 8), 0x3F80 if width == 8 else 0x4000, np.uint16)
                back = np.empty(n, np.float32)
                module.int_decode(back, out, ones, 8, width, wide)
                unit = np.float32(1.0 if width == 8 else 2.0) / np.float32(most)
                assert np.array_equal(back, unit * sum(parts).astype(np.float32))
                assert set(guarded[shift + len(out) :]) == {0xA5}


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("n", [1, 2, 7, 64, 65])
def test_what_no_encoder_makes_is_seen(width: int, n: int) -> None:
    for module, plain in bodies():
        with portable(plain):
            for place in range(n):
                values = np.zeros(n, np.int32)
                values[place] = -(1 << width - 1)
                q = bytearray(packed_nbytes(n, width))
                module.int_pack(q, values, width)
                assert not module.int_legal(q, n, width)
            if width == 4 and n % 2:
                q = bytearray(packed_nbytes(n, width))
                q[-1] = 0x10
                assert not module.int_legal(q, n, width)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_maxima_see_what_is_not_finite(bad: float) -> None:
    for module, plain in bodies():
        with portable(plain):
            for n in (1, 9, 100):
                x = numbers(n, 1)
                assert module.int_maxima(bytearray(2 * -(-n // 8)), x, 8)
                x[n // 2] = bad
                assert not module.int_maxima(bytearray(2 * -(-n // 8)), x, 8)


@quick
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 6), seeds)
def test_outer(m: int, n: int, rank: int, seed: int) -> None:
    p, q = numbers(m * rank, seed), numbers(n * rank, seed + 1)
    results = []
    for module, plain in bodies():
        with portable(plain):
            out = np.empty(m * n, np.float32)
            module.outer(out, p, q, rank)
            results.append(out.tobytes())
    assert results[0] == results[1] == results[2]
    wanted = p.reshape(rank, m).T.astype(np.float64) @ q.reshape(rank, n)
    assert np.allclose(np.frombuffer(results[0], np.float32).reshape(m, n), wanted, rtol=1e-4, atol=1e-4)


def test_arguments_are_checked() -> None:
    x, q, most = numbers(9, 0), bytearray(9), bytearray(4)
    for call in (
        lambda: core.int_encode(q, x, most, 0, 8, False, 0, 0),
        lambda: core.int_encode(q, x, most, 8, 5, False, 0, 0),
        lambda: core.int_encode(bytearray(8), x, most, 8, 8, False, 0, 0),
        lambda: core.int_encode(q, x, bytearray(3), 8, 8, False, 0, 0),
        lambda: core.int_pack(q, np.zeros(9, np.int32), 7),
        lambda: core.int_decode(x, bytearray(13), most, 8, 8, 12),
        lambda: core.int_legal(q, 10, 8),
        lambda: core.int_legal(q, -1, 8),
        lambda: core.outer(x, x[:3].copy(), x[:2].copy(), 1),
        lambda: core.outer(x, x[:3].copy(), x[:3].copy(), 0),
    ):
        with pytest.raises(ValueError):
            call()
