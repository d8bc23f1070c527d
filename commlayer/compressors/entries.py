"""Compresses the entries (positions and values) of sparse payloads.

Values: int8 and int4 with one scale per block, fp16, bf16, fp32. Positions are sorted and use the smallest of three encodings:
Elias-Fano, a bitmap, and bit masks of blocks of 16. The kernels pack the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commlayer.codec_spec import VALUE_BITS
from commlayer.compressors import kernels
from commlayer.compressors.kernels import Array
from commlayer.compressors.kernels.fallback import ef_nbytes
from commlayer.compressors.payload import Buffer, Out, expect
from commlayer.errors import CorruptPayload

VALUE_KINDS: dict[str, int] = {"int8": 0, "fp16": 1, "fp32": 2, "bf16": 3, "int4": 4}
"""Number of each value format on the wire: the high half of the `aux` byte in a sparse payload's header."""

VALUES_BLOCK = 256
"""Number of entries that share one scale."""

SCALED = ("int8", "int4")
MOST_SCALE: dict[str, np.floating[Any]] = {"int8": kernels.MOST_SCALE, "int4": np.finfo(np.float32).max / np.float32(8)}
"""Largest scale of each format for which every quantized integer times the scale is finite."""


def scales_nbytes(kind: str, count: int) -> int:
    return 4 * -(-count // VALUES_BLOCK) if kind in SCALED else 0


def values_nbytes(kind: str, count: int) -> int:
    """Returns the exact size in bytes of `count` values: the scales, if any, then the entries."""
    return scales_nbytes(kind, count) + (VALUE_BITS[kind] * count + 7) // 8


def encode_values(kind: str, body: Out, val: Array, error: Array, *, saturate: bool) -> bool:
    """Writes `val` to `body`, and the rounding error (val minus the decoded value) to `error`. Returns False if a value became
    infinite. `saturate`: True clamps such values instead; `error` then has the rest."""
    if kind == "fp32":
        kernels.store_f32(body, val)
        error[:] = 0.0
        return True
    k = kernels.of(body)
    if kind in SCALED:
        middle = scales_nbytes(kind, len(val))
        if kind == "int4":
            return bool(k.nibbles_encode(body[middle:], body[:middle], val, error, VALUES_BLOCK))
        error[:] = 0.0
        return bool(k.int8_encode(body[middle:], body[:middle], val, error, VALUES_BLOCK))
    narrow, wide = (k.f32_to_f16, k.f16_to_f32) if kind == "fp16" else (k.f32_to_bf16, k.bf16_to_f32)
    finite = narrow(body, val.clip(-kernels.MOST[kind], kernels.MOST[kind]) if saturate else val)
    wide(error, body)
    error *= -1.0
    error += val
    return bool(finite)


def split_values(codec: str, kind: str, body: Out, count: int) -> tuple[Out, Out]:
    """Splits a body into the bytes of `count` values and the bytes after them.

    Raises CorruptPayload if a scale is invalid or padding is not zero. decode_values checks floats.
    """
    middle = values_nbytes(kind, count)
    if body.nbytes < middle:
        raise CorruptPayload(f"{codec} payload has a body of {body.nbytes} bytes, but {count} values need {middle}")
    if kind in SCALED and not kernels.scales_valid(body[: scales_nbytes(kind, count)], MOST_SCALE[kind]):
        raise CorruptPayload(f"{kind} values contain a scale that is negative, not finite or too large")
    if kind == "int4" and count % 2 and int(body[middle - 1]) >> 4:
        raise CorruptPayload("int4 values have nonzero padding")
    return body[:middle], body[middle:]


def decode_values(kind: str, body: Buffer, count: int) -> Array:
    """Decodes the values of a checked body. Raises CorruptPayload if a value is not finite."""
    val = kernels.empty(count, body)
    if not count:
        return val
    k, middle = kernels.of(body), scales_nbytes(kind, count)
    if kind == "int8":
        k.int8_decode(val, body[middle:], body[:middle], VALUES_BLOCK, True)
    elif kind == "int4":
        k.nibbles_decode(val, body[middle:], body[:middle], VALUES_BLOCK)
    else:
        {"fp32": kernels.copy_f32, "fp16": k.f16_to_f32, "bf16": k.bf16_to_f32}[kind](val, body)
        if not kernels.of(val).all_finite(val):
            raise CorruptPayload("sparse payload contains a value that is not finite")
    return val


ELIAS_FANO, BITMAP, BLOCKS = 0, 1, 2


LEAST_FOR_BLOCKS = 16
"""Minimum number of positions for which the encoding as blocks is tried. For fewer positions the saving is not worth the
computation."""


def bitmap_nbytes(n: int, k: int = 0) -> int:
    return (n + 7) // 8


_NBYTES = {ELIAS_FANO: ef_nbytes, BITMAP: bitmap_nbytes}
_DECODERS = {ELIAS_FANO: "ef_decode", BITMAP: "bitmap_decode", BLOCKS: "blocks_decode"}


def positions_bound(n: int, cap: int) -> int:
    """Returns the maximum size in bytes of up to `cap` positions below n. The size grows with the count, except for the
    rounding of its two parts."""
    return 0 if n == 0 else min(ef_nbytes(n, cap) + 2, bitmap_nbytes(n))


def encode_positions(out: Out, idx: Array, n: int) -> tuple[int, int]:
    """Writes positions below n in the smallest encoding. Returns the number of the encoding and the bytes written; no positions
    use no bytes."""
    k = len(idx)
    if k == 0:
        return ELIAS_FANO, 0
    sparse, dense, on = ef_nbytes(n, k), bitmap_nbytes(n), kernels.of(out)
    if k >= LEAST_FOR_BLOCKS and (blocks := on.blocks_nbytes(idx, n)) < min(sparse, dense):
        return BLOCKS, on.blocks_encode(out[:blocks], idx, n)
    if sparse < dense:
        return ELIAS_FANO, on.ef_encode(out[:sparse], idx, n)
    return BITMAP, on.bitmap_encode(out[:dense], idx, n)


def decode_positions(kind: int, body: Out, k: int, n: int) -> Array:
    """Decodes k positions as int32, strictly increasing and below n. Raises CorruptPayload if the bytes do not encode such
    positions."""
    idx = kernels.empty(k, body, np.int32)
    if kind not in _DECODERS:
        raise CorruptPayload(f"payload has positions in unknown encoding {kind}, known: {', '.join(map(str, _DECODERS))}")
    if kind != BLOCKS:
        expect("bytes of positions", body.nbytes, _NBYTES[kind](n, k) if k else 0)
    if k or body.nbytes:
        getattr(kernels.of(body), _DECODERS[kind])(idx, n, body)
    return idx
