"""Elias-Fano, bitmap and CRC-32C: round trips, exact sizes, golden bytes, and damaged bytes."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import codec_kernels as reference
from support.native_builds import SIZES, core, portable, positions, unaligned

from commlayer.compressors.entries import BLOCKS, decode_positions, encode_positions
from commlayer.errors import CorruptFrame
from commlayer.transport import crc

quick = settings(max_examples=80, deadline=None)
seeds = st.integers(0, 2**32 - 1)
FORMATS = ("ef", "bitmap", "blocks")
MODULES = (core, reference)


def nbytes_of(name: str, n: int, idx: np.ndarray) -> int:
    if name == "blocks":
        assert core.blocks_nbytes(idx, n) == reference.blocks_nbytes(idx, n)
        return int(core.blocks_nbytes(idx, n))
    return core.ef_bound(n, len(idx)) if name == "ef" else (n + 7) // 8


def encoded(name: str, idx: np.ndarray, n: int) -> bytearray:
    out = bytearray(nbytes_of(name, n, idx))
    assert getattr(core, f"{name}_encode")(out, idx, n) == len(out)
    return out


@quick
@given(st.sampled_from(SIZES), seeds, st.floats(0, 1))
@pytest.mark.parametrize("name", FORMATS)
def test_round_trip_fills_exactly_the_stated_bytes(name: str, n: int, seed: int, density: float) -> None:
    idx = positions(n, int(n * density), seed)
    nbytes = nbytes_of(name, n, idx)
    results = []
    for module in MODULES:
        out, whole = unaligned(nbytes, 3)
        assert getattr(module, f"{name}_encode")(out, idx, n) == nbytes
        assert set(whole[:3] + whole[3 + nbytes :]) == {0xA5}
        back = np.zeros_like(idx)
        getattr(module, f"{name}_decode")(back, n, out)
        assert (back == idx).all()
        results.append(bytes(out))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", FORMATS)
def test_one_byte_too_few_is_an_error_before_any_write(name: str) -> None:
    out = bytearray(b"\xa5" * (nbytes_of(name, 1000, positions(1000, 10, 1)) - 1))
    with pytest.raises(ValueError):
        getattr(core, f"{name}_encode")(out, positions(1000, 10, 1), 1000)
    assert set(out) == {0xA5}


@quick
@given(st.sampled_from(SIZES[1:]), seeds, st.floats(0, 1), st.data())
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_bytes_are_refused_or_are_other_positions(
    name: str, n: int, seed: int, density: float, data: st.DataObject
) -> None:
    idx = positions(n, int(n * density), seed)
    bad = encoded(name, idx, n)
    for _ in range(data.draw(st.integers(1, 3))):
        if bad:
            bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, -1]))
    bad = bad[: len(bad) - cut] if cut >= 0 else bad + b"\0"
    outcomes = []
    for module in MODULES:
        back = np.full(len(idx), 0xDEAD, np.uint32)
        try:
            getattr(module, f"{name}_decode")(back, n, bad)
        except CorruptFrame:
            assert (back == 0xDEAD).all(), "a refused decode wrote"
            outcomes.append(None)
        else:
            assert (np.diff(back.astype(np.int64)) > 0).all()
            assert not len(back) or back[-1] < n
            assert encoded(name, back, n) == bad, "two spellings of the same positions"
            outcomes.append(back.tobytes())
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("module", MODULES)
def test_golden_bytes(module: ModuleType) -> None:
    idx = np.array([2, 3, 5, 7, 11, 13, 24], np.uint32)
    out = bytearray(16)
    # 32 / 7 gives two low bits: 2 3 1 3 3 1 0; upper parts 0 0 1 1 2 3 6 set bits 0 1 3 4 6 8 12.
    assert module.ef_encode(out, idx, 32) == 4
    assert bytes(out[:4]) == bytes([0b11_01_11_10, 0b00_01_11, 0b0101_1011, 0b0001_0001])
    assert module.bitmap_encode(out, idx, 32) == 4
    assert bytes(out[:4]) == bytes([0b1010_1100, 0b0010_1000, 0, 1])


@pytest.mark.parametrize("density", [0.001, 0.01, 0.05, 0.1])
def test_size_is_near_the_information_in_the_choice(density: float) -> None:
    n = 1_000_000
    k = int(n * density)
    least = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    assert core.ef_bound(n, k) * 8 <= 1.15 * least


@pytest.mark.parametrize("length", [1, 2, 4, 8, 16])
def test_blocks_win_where_positions_come_in_clusters(length: int) -> None:
    """From about three in sixteen on; the choice is made by exact sizes."""
    n, starts = 1_000_000, positions(1_000_000 // 16, 10_000 // length, 5).astype(np.int64)
    idx = (starts[:, None] * 16 + np.arange(length)).reshape(-1).astype(np.int32)
    out = memoryview(bytearray(100_000))
    kind, nbytes = encode_positions(out, idx, n)
    assert nbytes == min(core.ef_bound(n, len(idx)), n // 8, core.blocks_nbytes(idx, n))
    assert (kind == BLOCKS) == (length >= 4)
    assert np.array_equal(decode_positions(kind, out[:nbytes], len(idx), n), idx)


def test_positions_up_to_the_last_of_32_bits() -> None:
    n = 2**32 - 1
    idx = np.array([0, 1, 2**31 - 1, 2**31, n - 2, n - 1], np.uint32)
    for module in MODULES:
        for name in ("ef", "blocks"):
            out = bytearray(nbytes_of(name, n, idx))
            assert getattr(module, f"{name}_encode")(out, idx, n) == len(out)
            back = np.zeros_like(idx)
            getattr(module, f"{name}_decode")(back, n, out)
            assert (back == idx).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("idx", [[3, 3], [4, 3], [0, 100]])
def test_encoding_positions_that_do_not_increase_below_n_is_a_mistake(idx: list[int], name: str) -> None:
    with pytest.raises(ValueError):
        getattr(core, f"{name}_encode")(bytearray(64), np.array(idx, np.uint32), 100)


@quick
@given(st.one_of(st.sampled_from((*SIZES, 767, 768, 12_287, 12_289, 100_003)), st.integers(0, 900)), seeds, st.integers(0, 8),
       st.integers(0, 900))
def test_crc32c_continues_and_agrees(n: int, seed: int, shift: int, cut: int) -> None:
    data, _ = unaligned(n, shift)
    data[:] = np.random.default_rng(seed).bytes(n)
    whole = core.crc32c(data)
    assert core.crc32c(data[cut:], core.crc32c(data[:cut])) == whole
    assert n > 1000 or crc.portable(data) == whole
    with portable(True):
        assert core.crc32c(data) == whole
    assert core.crc32c(b"123456789") == crc.portable(b"123456789") == 0xE3069283
    assert core.crc32c(bytes(32)) == 0x8A9136AA
