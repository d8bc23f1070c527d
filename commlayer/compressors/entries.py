"""Encodes the entries of sparse payloads.

Values: int8 and int4 with one scale per block, fp16, bf16, fp32. Positions, sorted: the smallest of Elias-Fano, a bitmap and
blocks of 16. The kernels pack the bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from commlayer.codec_spec import VALUE_BITS
from commlayer.compressors import kernels
from commlayer.compressors.payload import Buffer, Out, expect
from commlayer.errors import CorruptPayload

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

VALUE_KINDS: dict[str, int] = {"int8": 0, "fp16": 1, "fp32": 2, "bf16": 3, "int4": 4}
"""Numbers on the wire: the high half of the `aux` byte in a sparse header."""

VALUES_BLOCK = 256
"""Entries per scale."""

SCALED = ("int8", "int4")
MOST_SCALE: dict[str, np.floating[Any]] = {"int8": kernels.MOST_SCALE, "int4": np.finfo(np.float32).max / np.float32(8)}
"""The largest scale: any integer of the kind times it is finite."""


def scales_nbytes(kind: str, count: int) -> int:
    return 4 * -(-count // VALUES_BLOCK) if kind in SCALED else 0


def values_nbytes(kind: str, count: int) -> int:
    """Exact size in bytes: the scales, if any, then the entries."""
    return scales_nbytes(kind, count) + (VALUE_BITS[kind] * count + 7) // 8


def encode_values(kind: str, body: Out, val: torch.Tensor, error: torch.Tensor, *, saturate: bool) -> bool:
    """Encodes val; error = val - decoded val. False if a value became infinite; `saturate` clamps, and error has the rest."""
    if kind == "fp32":
        kernels.store_f32(body, val)
        error.zero_()
        return True
    if kind in SCALED:
        middle = scales_nbytes(kind, val.numel())
        if kind == "int4":
            return kernels.nibbles_encode(body[middle:], body[:middle], val, error, VALUES_BLOCK)
        error.zero_()
        return kernels.int8_encode(body[middle:], body[:middle], val, error, VALUES_BLOCK)
    narrow, wide = (kernels.f32_to_f16, kernels.f16_to_f32) if kind == "fp16" else (kernels.f32_to_bf16, kernels.bf16_to_f32)
    finite = narrow(body, torch.clamp(val, -kernels.MOST[kind], kernels.MOST[kind], out=error) if saturate else val)
    wide(error, body)
    torch.sub(val, error, out=error)
    return finite


def check_values(kind: str, body: Buffer, count: int) -> None:
    """Raises CorruptPayload unless `body`, of values_nbytes(kind, count) bytes, is the only encoding of some finite values."""
    if kind not in SCALED:
        return
    if not kernels.scales_valid(body[: scales_nbytes(kind, count)], MOST_SCALE[kind]):
        raise CorruptPayload(f"{kind} values with a scale that is negative, not finite or too large")
    if kind == "int4" and count % 2 and int(body[-1]) >> 4:
        raise CorruptPayload("int4 values with padding that is not zero")


def split_values(codec: str, kind: str, body: Out, count: int) -> tuple[Out, Out]:
    """Splits a body into the checked bytes of `count` values and the bytes after them."""
    middle = values_nbytes(kind, count)
    if body.nbytes < middle:
        raise CorruptPayload(f"{codec} payload with {body.nbytes} bytes of body, {count} values take {middle}")
    check_values(kind, body[:middle], count)
    return body[:middle], body[middle:]


def decode_values(kind: str, body: Buffer, count: int) -> torch.Tensor:
    """The values of a checked body. Raises CorruptPayload if one is not finite."""
    val = torch.empty(count, device=body.device if isinstance(body, torch.Tensor) else None)
    if not count:
        return val
    middle = scales_nbytes(kind, count)
    if kind == "int8":
        kernels.int8_decode(val, body[middle:], body[:middle], VALUES_BLOCK, assign=True)
    elif kind == "int4":
        kernels.nibbles_decode(val, body[middle:], body[:middle], VALUES_BLOCK)
    else:
        {"fp32": kernels.copy_f32, "fp16": kernels.f16_to_f32, "bf16": kernels.bf16_to_f32}[kind](val, body)
        if not kernels.all_finite(val):
            raise CorruptPayload("sparse payload with a value that is not finite")
    return val


ELIAS_FANO, BITMAP, BLOCKS = 0, 1, 2


LEAST_FOR_BLOCKS = 16
"""Fewer positions than this gain too little from blocks to be worth counting them."""


def elias_fano_nbytes(n: int, k: int) -> int:
    """Exact size in bytes for k >= 1 positions below n."""
    low = max(0, (n // k).bit_length() - 1)
    return (k * low + 7) // 8 + (k + (n >> low) + 1 + 7) // 8


def bitmap_nbytes(n: int, k: int = 0) -> int:
    return (n + 7) // 8


_NBYTES = {ELIAS_FANO: elias_fano_nbytes, BITMAP: bitmap_nbytes}
_DECODERS = {ELIAS_FANO: kernels.ef_decode, BITMAP: kernels.bitmap_decode, BLOCKS: kernels.blocks_decode}


def positions_bound(n: int, cap: int) -> int:
    """The most bytes for up to cap positions. The size grows with the count, except for the rounding of its two parts."""
    return 0 if n == 0 else min(elias_fano_nbytes(n, cap) + 2, bitmap_nbytes(n))


def encode_positions(out: Out, idx: torch.Tensor, n: int) -> tuple[int, int]:
    """Returns (kind, bytes written). No positions take no bytes."""
    k = idx.numel()
    if k == 0:
        return ELIAS_FANO, 0
    sparse, dense = elias_fano_nbytes(n, k), bitmap_nbytes(n)
    if k >= LEAST_FOR_BLOCKS and (blocks := kernels.blocks_nbytes(idx, n)) < min(sparse, dense):
        return BLOCKS, kernels.blocks_encode(out[:blocks], idx, n)
    if sparse < dense:
        return ELIAS_FANO, kernels.ef_encode(out[:sparse], idx, n)
    return BITMAP, kernels.bitmap_encode(out[:dense], idx, n)


def decode_positions(kind: int, body: Out, k: int, n: int) -> torch.Tensor:
    """int32 positions, strictly increasing and below n. Raises CorruptPayload otherwise."""
    idx = torch.empty(k, dtype=torch.int32, device=body.device if isinstance(body, torch.Tensor) else None)
    if kind not in _DECODERS:
        raise CorruptPayload(f"payload with positions of kind {kind}, this side knows {', '.join(map(str, _DECODERS))}")
    if kind != BLOCKS:
        expect("bytes of positions", body.nbytes, _NBYTES[kind](n, k) if k else 0)
    if k or body.nbytes:
        _DECODERS[kind](idx, n, body)
    return idx
