"""Quantisers and draws on the device against the plain formulas of their contracts, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from cuda_kit import DEVICE, octets, running
from native_kit import KINDS, numbers

from commlayer.compressors import device

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = (1, 8, 33, 257, 4097)
MOST16, LEAST = 0x7F7F, np.float32(2.0**-126)
KEY, STEP = 0x0123456789ABCDEF, 7


@cache
def philox(n: int, key: int, step: int) -> np.ndarray:
    """Word i % 4 of block i / 4, in whole numbers."""
    words = []
    for block in range(-(-n // 4)):
        c = [block & 0xFFFFFFFF, block >> 32, step & 0xFFFFFFFF, step >> 32]
        k0, k1 = key & 0xFFFFFFFF, key >> 32
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        words += c
    return np.array(words[:n], np.uint64)


def bits_of(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).view(np.uint32).astype(np.int64)


def rows_of(v: np.ndarray, block: int) -> np.ndarray:
    rows = np.zeros(-(-v.size // block) * block, np.float32)
    rows[: v.size] = v
    return rows.reshape(-1, block)


def lane_sum(rows: np.ndarray) -> np.ndarray:
    """Sixteen lanes, each in order, then halves onto halves."""
    width = -(-rows.shape[1] // 16) * 16
    lanes = np.zeros((len(rows), 16), np.float32)
    padded = np.zeros((len(rows), width), np.float32)
    padded[:, : rows.shape[1]] = rows
    for begin in range(0, width, 16):
        lanes = lanes + padded[:, begin : begin + 16]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def scale16(size: np.ndarray, most: int) -> np.ndarray:
    return np.where(size >= LEAST, np.minimum((bits_of(size) + 0xFFFF) >> 16, most), 0)


def wide(scale: np.ndarray) -> np.ndarray:
    return (scale.astype(np.uint32) << 16).view(np.float32)[:, None]


def stream(codes: np.ndarray, width: int) -> bytes:
    each = codes.reshape(-1, 1) >> np.arange(width) & 1
    return np.packbits(each.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def linear(v: np.ndarray, block: int, bits: int, dither: bool, euclidean: bool) -> tuple[bytes, bytes, np.ndarray]:
    """(codes, scales, what they say)."""
    rows, top = rows_of(v, block), np.float32(2 ** (bits - 1) - 1)
    size = np.abs(rows).max(1)
    if euclidean:
        size = norm(rows)
    scale = scale16((size / top).astype(np.float32), MOST16 - ((bits - 1) << 7))
    s = wide(scale)
    t = np.where(s == 0, np.float32(0), np.clip(rows / s, -top, top))
    if dither:
        whole = np.floor(t) + (uniforms(rows) < t - np.floor(t))
    else:
        whole = np.rint(t)
    whole = np.where(s == 0, 0, whole)
    said = (s * whole.astype(np.float32)).reshape(-1)[: v.size]
    return stream(whole.reshape(-1)[: v.size].astype(np.int64) & (2**bits - 1), bits), scale.astype(np.uint16).tobytes(), said


def onebit(v: np.ndarray, block: int) -> tuple[bytes, bytes, np.ndarray]:
    rows = rows_of(v, block)
    counts = np.minimum(block, v.size - np.arange(len(rows)) * block).astype(np.float32)
    shrink = np.float32(2.0**-24)
    mean = lane_sum(np.abs(rows)) / counts
    mean = np.where(np.isfinite(mean), mean, lane_sum(np.abs(rows * shrink)) / counts / shrink)
    scale = scale16(mean, MOST16)
    negative = bits_of(rows) >> 31
    said = np.where(negative > 0, -wide(scale), wide(scale)).reshape(-1)[: v.size]
    return stream(negative.reshape(-1)[: v.size], 1), scale.astype(np.uint16).tobytes(), said


def uniforms(rows: np.ndarray) -> np.ndarray:
    return (philox(rows.size, KEY, STEP) >> np.uint64(8)).astype(np.float32).reshape(rows.shape) * np.float32(2.0**-24)


def norm(rows: np.ndarray) -> np.ndarray:
    exponent = np.clip(bits_of(np.abs(rows).max(1)) >> 23, 1, 253).astype(np.uint32)
    small = rows * ((254 - exponent) << 23).view(np.float32)[:, None]
    return np.sqrt(lane_sum(small * small)) * (exponent << 23).view(np.float32)


def ternary(v: np.ndarray, block: int, clip: float) -> tuple[bytes, bytes, np.ndarray]:
    rows = rows_of(v, block)
    size = np.abs(rows).max(1)
    if clip:
        counts = np.minimum(block, v.size - np.arange(len(rows)) * block).astype(np.float32)
        size = np.minimum(size, np.float32(clip) * (norm(rows) / np.sqrt(counts)))
    scale = scale16(size, MOST16)
    s = wide(scale)
    t = np.where(s == 0, np.float32(0), np.clip(rows / s, np.float32(-1), np.float32(1)))
    whole = np.where(s == 0, 0, np.floor(t) + (uniforms(rows) < t - np.floor(t)))
    said, trits = (s * whole.astype(np.float32)).reshape(-1)[: v.size], whole.reshape(-1)[: v.size].astype(int) % 3
    octets_ = bytearray()
    for begin in range(0, v.size, 160):
        group = trits[begin : begin + 160]
        m = -(-len(group) // 5)
        octets_ += bytes(sum(int(trit) * 3**d for d, trit in enumerate(group[j::m])) for j in range(m))
    return bytes(octets_), scale.astype(np.uint16).tobytes(), said


def natural(v: np.ndarray, block: int, bits: int) -> tuple[bytes, bytes, np.ndarray]:
    rows, levels = rows_of(v, block), 2 ** (bits - 1) - 1
    reach = np.minimum((bits_of(np.abs(rows).max(1)) + (1 << 23) - 1) >> 23, 254)
    first = np.maximum(reach - levels, 0)[:, None]
    a, word = bits_of(np.abs(rows)), philox(rows.size, KEY, STEP).astype(np.int64).reshape(rows.shape)
    share = np.abs(rows) * ((253 - first) << 23).astype(np.uint32).view(np.float32)
    carried = np.minimum(((a + (word >> 9)) >> 23) - first, levels)
    level = np.where(a < (first + 1) << 23, uniforms(rows) < share, carried)
    negative = (bits_of(rows) >> 31) * (level > 0)
    size = ((first + level) << 23).astype(np.uint32).view(np.float32)
    said = np.where(level > 0, np.where(negative > 0, -size, size), np.float32(0)).reshape(-1)[: v.size]
    codes = (level + (negative << (bits - 1))).reshape(-1)[: v.size]
    return stream(codes, bits), first.astype(np.uint8).tobytes(), said


def there(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(DEVICE)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("dither", "euclidean"), [(False, False), (True, False), (True, True)])
def test_whole_numbers_of_few_bits(bits: int, dither: bool, euclidean: bool) -> None:
    def formula(v: np.ndarray, block: int) -> tuple[bytes, bytes, np.ndarray]:
        return linear(v, block, bits, dither, euclidean)

    with running():
        for n in SIZES:
            for kind in KINDS:
                for block in (8, 64, 1024):
                    x, old = numbers(n, n, kind=kind), numbers(n, n + 1)
                    run(x, old, block, formula, "linear", (bits, euclidean, dither, KEY, STEP), (bits,))


@pytest.mark.parametrize("kind", KINDS)
def test_signs(kind: str) -> None:
    with running():
        for n in SIZES:
            for block in (8, 64, 1024):
                run(numbers(n, n, kind=kind), numbers(n, n + 1), block, onebit, "onebit", (), ())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [0.0, 2.5])
def test_three_values(clip: float, kind: str) -> None:
    with running():
        for n in (*SIZES, 159, 160, 161):
            for block in (160, 1600):
                def formula(v: np.ndarray, block: int) -> tuple[bytes, bytes, np.ndarray]:
                    return ternary(v, block, clip)

                run(numbers(n, n, kind=kind), numbers(n, n + 1), block, formula, "ternary", (clip, KEY, STEP), ())


@pytest.mark.parametrize("bits", [3, 4, 5, 8])
def test_powers_of_two(bits: int) -> None:
    def formula(v: np.ndarray, block: int) -> tuple[bytes, bytes, np.ndarray]:
        return natural(v, block, bits)

    with running():
        for n in SIZES:
            for kind in KINDS:
                for block in (8, 64, 1024):
                    run(numbers(n, n, kind=kind), numbers(n, n + 1), block, formula, "natural", (bits, KEY, STEP), (bits,))


Formula = Callable[[np.ndarray, int], tuple[bytes, bytes, np.ndarray]]


def run(
    x: np.ndarray, old: np.ndarray, block: int, formula: Formula, name: str, args: tuple[object, ...], shape: tuple[int, ...]
) -> None:
    """Encodes x + old and decodes it again, on the device and by the formula."""
    v = x + old
    finite, n = bool(np.isfinite(v).all()), x.size
    codes, scales, said = formula(np.where(np.isfinite(v), v, 0).astype(np.float32), block)
    q, scale, kept = octets(len(codes)).to(DEVICE), octets(len(scales)).to(DEVICE), there(old)
    assert getattr(device, f"{name}_encode")(q, scale, there(x), kept, block, *args) == finite
    if not finite:
        assert kept.cpu().numpy().tobytes() == old.tobytes()
        return
    assert bytes(q.cpu().numpy()) == codes
    assert bytes(scale.cpu().numpy()) == scales
    assert kept.cpu().numpy().tobytes() == (v - said).astype(np.float32).tobytes()
    for assign in (False, True):
        out = there(x)
        getattr(device, f"{name}_decode")(out, q, scale, block, *shape, assign)
        expected = said if assign else x + said
        assert np.array_equal(out.cpu().numpy()[:n], expected.astype(np.float32))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 33), (1000, 33), (100_000, 777), (2**32 - 1, 50)])
def test_draws_take_one_of_each_stratum(n: int, k: int) -> None:
    words, seed = philox(k, 99, 0), 99
    edges = [j * n // k for j in range(k + 1)]
    expected = [lo + (int(w) * (hi - lo) >> 32) for lo, hi, w in zip(edges, edges[1:], words, strict=False)]
    idx = torch.zeros(k, dtype=torch.int32, device=DEVICE)
    with running():
        device.draw_strata(idx, n, seed)
        assert (idx.cpu().numpy().view(np.uint32) == np.array(expected, np.uint32)).all()
        if n <= 10**6:
            src, val = numbers(n, 1), torch.zeros(k, device=DEVICE)
            device.take(there(src), idx, val)
            assert (val.cpu().numpy() == src[expected]).all()
