"""Kernels of the default codecs in numpy, for installations without a compiler. The functions are slow and produce the same
bytes as the native kernels.

The kernels of this module are enough for identity, fp16, bf16, int8, int4 and topk, with error feedback and momentum. Names and
arguments equal those of commlayer._core; native/include/commlayer.h specifies each kernel. Arrays are float32 or int32 in CPU
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from commlayer.errors import CorruptPayload, InvalidInput

FAMILIES = ("identity", "fp16", "bf16", "int8", "int4", "topk", "error_feedback", "momentum")

F32, U32, I32, U16, U8 = np.float32, np.uint32, np.int32, np.uint16, np.uint8
SMALLEST = F32(2.0**-126)
"""Smallest normal float32. A block with a smaller scale is sent as zeros."""
MOST_SCALE = F32(np.finfo(F32).max / 128)
INT4_LEVELS, INT4_MOST16 = 7, 0x7F7F - (3 << 7)
RUN = 16
"""Number of positions per block, for the encoding of positions as blocks."""

Array = npt.NDArray[Any]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    raise unsupported(name)


def unsupported(what: str) -> InvalidInput:
    return InvalidInput("E-CODEC-BACKEND", f"{what} needs the native core, which is not installed. Without it only these "
                                           f"codecs are available: {', '.join(FAMILIES)}. Install a C++ compiler and reinstall "
                                           "commlayer")


def _view(memory: Any, dtype: Any) -> Array:
    """Returns the memory of an array, a tensor or a buffer as a flat array of `dtype`, without a copy."""
    array = memory.numpy() if hasattr(memory, "numpy") else np.frombuffer(memory, U8)
    return array.reshape(-1).view(dtype)


def _total(x: Any, residual: Any) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return _view(x, F32) if residual is None else _view(x, F32) + _view(residual, F32)


def _wide(bits: Array) -> Array:
    """Converts bfloat16 bits to float32."""
    return (bits.astype(U32) << 16).view(F32)


def all_finite(x: Any, residual: Any = None) -> bool:
    return bool(np.isfinite(_total(x, residual)).all())


def sum_squares(x: Any, factor: float) -> int:
    rounded = np.rint(_view(x, F32) * F32(factor)).astype(np.int64)
    return int(np.dot(rounded, rounded))


def add_f32(acc: Any, x: Any) -> None:
    _store(acc, _view(x, F32), assign=False)


def add_f16(acc: Any, x: Any) -> None:
    _store(acc, _view(x, np.float16).astype(F32), assign=False)


def add_bf16(acc: Any, x: Any) -> None:
    _store(acc, _wide(_view(x, U16)), assign=False)


def _store(acc: Any, values: Array, *, assign: bool) -> None:
    """Adds values to the accumulator, or overwrites it."""
    target = _view(acc, F32)
    with np.errstate(over="ignore", invalid="ignore"):
        target[:] = values if assign else target + values


def scale_f32(dst: Any, src: Any, factor: float) -> bool:
    finite = all_finite(src)
    if finite:
        with np.errstate(over="ignore"):
            np.multiply(_view(src, F32), F32(factor), out=_view(dst, F32))
    return finite


def f32_to_f16(dst: Any, src: Any) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = _view(src, F32).astype(np.float16)
    _view(dst, np.float16)[:] = narrow
    return bool(np.isfinite(narrow).all())


def f32_to_bf16(dst: Any, src: Any) -> bool:
    bits = _view(src, U32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    narrow = np.where(np.isnan(_view(src, F32)), bits >> 16 | 0x40, rounded).astype(U16)
    _view(dst, U16)[:] = narrow
    return bool(np.isfinite(_wide(narrow)).all())


def f16_to_f32(dst: Any, src: Any) -> None:
    _view(dst, F32)[:] = _view(src, np.float16)


def bf16_to_f32(dst: Any, src: Any) -> None:
    _view(dst, F32)[:] = _wide(_view(src, U16))


def _rows(v: Array, block: int) -> Array:
    """Returns blocks of `v` as rows. The last row is padded with zeros, which do not change its largest magnitude."""
    rows = np.zeros((-(-v.size // block), block), v.dtype)
    rows.reshape(-1)[: v.size] = v
    return rows


def _largest(rows: Array) -> Array:
    largest: Array = np.abs(rows).max(1, keepdims=True, initial=0)
    return largest


def _encode(x: Any, residual: Any, block: int, code: Callable[[Array], Array]) -> bool:
    """Compresses x + residual with `code`, which receives blocks as rows, writes the payload and returns the decompressed
    blocks. The residual becomes the rounding error; if x + residual is not finite, the residual becomes its finite part."""
    v = _total(x, residual)
    finite = np.isfinite(v)
    rows = _rows(np.where(finite, v, F32(0)), block)
    decoded, good = code(rows), bool(finite.all())
    if residual is not None:
        kept = _view(residual, F32)
        kept[:] = (rows - decoded).reshape(-1)[: v.size] if good else np.where(finite, v, kept)
    return good


def _levels(rows: Array, scales: Array, top: int) -> Array:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        levels = np.where(scales == 0, F32(0), np.clip(rows / scales, -top, top))
    return np.rint(levels).astype(np.int8)


def int8_encode(q: Any, scale: Any, x: Any, residual: Any, block: int) -> bool:
    def code(rows: Array) -> Array:
        most = _largest(rows)
        scales = np.where(most < F32(127) * SMALLEST, F32(0), np.minimum(most / F32(127), MOST_SCALE))
        quanta = _levels(rows, scales, 127)
        _view(q, np.int8)[:] = quanta.reshape(-1)[: _view(q, np.int8).size]
        _view(scale, F32)[:] = scales.reshape(-1)
        return scales * quanta.astype(F32)

    return _encode(x, residual, block, code)


def int8_decode(acc: Any, q: Any, scale: Any, block: int, assign: bool = False) -> None:
    _store(acc, _unscaled(_view(q, np.int8).astype(F32), _view(scale, F32), block), assign=assign)


def _unscaled(levels: Array, scales: Array, block: int) -> Array:
    unscaled: Array = np.repeat(scales, block)[: levels.size] * levels
    return unscaled


def linear_encode(q: Any, scale: Any, x: Any, residual: Any, block: int, bits: int, euclidean: bool, dither: bool,
                  key: int = 0, step: int = 0) -> bool:
    if bits != 4 or euclidean or dither:
        raise unsupported("qsgd")

    def code(rows: Array) -> Array:
        size = _largest(rows) / F32(INT4_LEVELS)
        up = np.minimum((size.view(U32).astype(np.uint64) + 0xFFFF) >> 16, INT4_MOST16)
        scales = np.where(size >= SMALLEST, up, 0).astype(U16)
        levels = _levels(rows, _wide(scales), INT4_LEVELS)
        _view(scale, U16)[:] = scales.reshape(-1)
        packed = _view(q, U8)
        codes = np.zeros(2 * packed.size, U8)
        n = _view(x, F32).size
        codes[:n] = levels.reshape(-1)[:n].view(U8) & 15
        packed[:] = codes[::2] | codes[1::2] << 4  # two's complement, the even element in the low half of a byte
        return _wide(scales) * levels.astype(F32)

    return _encode(x, residual, block, code)


def linear_decode(acc: Any, q: Any, scale: Any, block: int, bits: int, assign: bool = False) -> None:
    if bits != 4:
        raise unsupported("qsgd")
    n, packed = _view(acc, F32).size, _view(q, U8)
    codes = np.stack([packed & 15, packed >> 4], 1).reshape(-1)[:n].astype(np.int16)
    levels = np.where(codes > 7, codes - 16, codes).astype(F32)
    _store(acc, _unscaled(levels, _wide(_view(scale, U16)), block), assign=assign)


def _magnitudes(x: Array) -> Array:
    """Returns the magnitudes of float32 numbers as integers with the same order; NaN is larger than infinity."""
    return (x.view(U32) & 0x7FFFFFFF).astype(np.int64)


def select(g: Any, residual: Any, threshold: float, start: int, idx: Any, val: Any) -> tuple[int, int, bool]:
    v = _total(g, residual)
    finite = np.isfinite(v)
    with np.errstate(invalid="ignore", over="ignore"):
        passed = np.flatnonzero((np.abs(v) >= F32(threshold)) & finite)
    scanned = np.concatenate([passed[passed >= start], passed[passed < start]])
    taken = np.sort(scanned[: min(_view(idx, I32).size, _view(val, F32).size)])
    _view(idx, I32)[: taken.size] = taken
    _view(val, F32)[: taken.size] = v[taken]
    if residual is not None:
        kept = _view(residual, F32)
        kept[:] = np.where(finite, v, kept)
        kept[taken] = 0.0
    return taken.size, passed.size - taken.size, bool(finite.all())


def sample_abs(g: Any, residual: Any, offset: int, out: Any) -> None:
    v, target = _total(g, residual), _view(out, F32)
    if v.size == 0 or target.size == 0:
        target.fill(0)
        return
    sample, groups = np.arange(target.size), (target.size + 3) // 4 | 1
    target[:] = np.abs(v[(offset + sample // 4 * v.size // groups + sample % 4) % v.size])


def kth_abs(g: Any, residual: Any, rank: int, scratch: Any) -> float:
    magnitudes = _magnitudes(_total(g, residual))
    return float(np.partition(magnitudes, magnitudes.size - rank)[magnitudes.size - rank].astype(U32).view(F32))


def count_above(x: Any, cut: float) -> int:
    return int((_view(x, F32) >= F32(cut)).sum())


def trim(residual: Any, n: int, idx: Any, val: Any, count: int, keep: int, start: int, scratch: Any) -> int:
    where, values = _positions(idx)[:count], _view(val, F32)[:count].copy()
    order = np.concatenate([np.flatnonzero(where >= start), np.flatnonzero(where < start)])
    kept = np.zeros(count, bool)
    kept[order[np.argsort(-_magnitudes(values)[order], kind="stable")[:keep]]] = True
    if residual is not None:
        _view(residual, F32)[where[~kept]] += values[~kept]
    _view(idx, I32)[:keep] = where[kept].astype(U32).view(I32)
    _view(val, F32)[:keep] = values[kept]
    return keep


def scatter_add(acc: Any, idx: Any, val: Any) -> None:
    where = _positions(idx)
    if not _increasing(where, _view(acc, F32).size):
        raise CorruptPayload(f"scatter_add: positions must increase and be below {_view(acc, F32).size}")
    with np.errstate(over="ignore", invalid="ignore"):
        _view(acc, F32)[where] += _view(val, F32)


def scatter_add_int8(acc: Any, idx: Any, q: Any, scale: Any, block: int) -> None:
    scatter_add(acc, idx, _unscaled(_view(q, np.int8).astype(F32), _view(scale, F32), block))


def _positions(idx: Any) -> Array:
    return _view(idx, U32).astype(np.int64)


def _increasing(where: Array, n: int) -> bool:
    return bool((where < n).all() and (where[1:] > where[:-1]).all())


def ef_nbytes(n: int, k: int) -> int:
    """Returns the size in bytes of the Elias-Fano encoding of k >= 1 positions below n."""
    return (k * _low_bits(n, k) + 7) // 8 + (k + (n >> _low_bits(n, k)) + 1 + 7) // 8


def _low_bits(n: int, k: int) -> int:
    return max(0, (n // k).bit_length() - 1)


def _packed(bits: Array) -> Array:
    return np.packbits(bits.astype(U8).reshape(-1), bitorder="little")


def _ef_bytes(where: Array, n: int) -> Array:
    k = where.size
    if k == 0:
        return np.zeros(0, U8)
    low = _low_bits(n, k)
    upper = np.zeros(k + (n >> low) + 1, U8)
    upper[(where >> low) + np.arange(k)] = 1
    return np.concatenate([_packed(where[:, None] >> np.arange(low) & 1), _packed(upper)])


def _ef_positions(octets: Array, n: int, k: int) -> Array | None:
    if k == octets.size == 0:
        return np.zeros(0, np.int64)
    if not 1 <= k <= n or octets.size != ef_nbytes(n, k):
        return None
    low = _low_bits(n, k)
    middle = (k * low + 7) // 8
    lower, upper = (np.unpackbits(part, bitorder="little") for part in (octets[:middle], octets[middle:]))
    ones = np.flatnonzero(upper)
    if lower[k * low :].any() or upper[k + (n >> low) + 1 :].any() or ones.size != k:
        return None
    digits = lower[: k * low].reshape(k, low).astype(np.int64) << np.arange(low)
    where: Array = (ones - np.arange(k) << low) + digits.sum(1)
    return where


def _bitmap_bytes(where: Array, n: int) -> Array:
    bits = np.zeros(n, U8)
    bits[where] = 1
    return _packed(bits)


def _bitmap_positions(octets: Array, n: int, k: int) -> Array | None:
    bits = np.unpackbits(octets, bitorder="little")
    return None if octets.size != (n + 7) // 8 or bits[n:].any() else np.flatnonzero(bits)


def _numbers(n: int, count: int) -> tuple[int, bool, int]:
    """Returns the number of blocks below n, True if a bitmap encodes the block numbers (False: Elias-Fano), and the size of
    that encoding in bytes."""
    blocks = -(-n // RUN)
    sparse, dense = ef_nbytes(blocks, count), (blocks + 7) // 8
    return blocks, dense <= sparse, min(sparse, dense)


def _blocks_bytes(where: Array, n: int) -> Array:
    numbers, owner = np.unique(where // RUN, return_inverse=True)
    if numbers.size == 0:
        return np.zeros(0, U8)
    masks = np.zeros(numbers.size, np.int64)
    np.add.at(masks, owner, 1 << where % RUN)
    blocks, bitmap, _ = _numbers(n, numbers.size)
    packed = (_bitmap_bytes if bitmap else _ef_bytes)(numbers, blocks)
    return np.concatenate([np.array([numbers.size], U32).view(U8), packed, masks.astype(U16).view(U8)])


def _blocks_positions(octets: Array, n: int, k: int) -> Array | None:
    if k == octets.size == 0:
        return np.zeros(0, np.int64)
    count = int(octets[:4].copy().view(U32)[0]) if octets.size >= 4 else 0
    if not 1 <= count <= min(k, -(-n // RUN)):
        return None
    blocks, bitmap, middle = _numbers(n, count)
    if octets.size != 4 + middle + 2 * count:
        return None
    numbers = (_bitmap_positions if bitmap else _ef_positions)(octets[4 : 4 + middle], blocks, count)
    bits = octets[4 + middle :].copy().view(U16)[:, None] >> np.arange(RUN) & 1
    if numbers is None or numbers.size != count or not _increasing(numbers, blocks) or not bits.any(1).all():
        return None
    where: Array = (numbers[:, None] * RUN + np.arange(RUN))[bits == 1]
    return where


def blocks_nbytes(idx: Any, n: int) -> int:
    return _blocks_bytes(_positions(idx), n).size


def _encoder(pack: Callable[[Array, int], Array]) -> Callable[[Any, Any, int], int]:
    def encode(out: Any, idx: Any, n: int) -> int:
        octets = pack(_positions(idx), n)
        _view(out, U8)[: octets.size] = octets
        return octets.size

    return encode


def _decoder(unpack: Callable[[Array, int, int], Array | None]) -> Callable[[Any, int, Any], None]:
    """Makes a kernel of `unpack`, which returns None if the bytes have the wrong size or nonzero padding."""
    def decode(idx: Any, n: int, src: Any) -> None:
        k = _view(idx, I32).size
        where = unpack(_view(src, U8), n, k)
        if where is None or where.size != k or not _increasing(where, n):
            raise CorruptPayload(f"sparse payload: its bytes do not encode {k} increasing positions below {n}")
        _view(idx, U32)[:] = where

    return decode


ef_encode, ef_decode = _encoder(_ef_bytes), _decoder(_ef_positions)
bitmap_encode, bitmap_decode = _encoder(_bitmap_bytes), _decoder(_bitmap_positions)
blocks_encode, blocks_decode = _encoder(_blocks_bytes), _decoder(_blocks_positions)
