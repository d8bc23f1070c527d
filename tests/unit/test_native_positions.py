"""Elias-Fano, bitmap and CRC-32C: round trips, exact sizes, golden bytes, and damaged bytes."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import codec_kernels as reference
from support.native_builds import SIZES, core, positions

from commlayer.compressors.entries import BLOCKS, decode_positions, encode_positions
from commlayer.errors import CorruptFrame

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
