"""Encodes the values of sparse codecs: int8 and int4 with one scale per block, fp16, bf16, fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from commlayer.codec_name import VALUE_BITS
from commlayer.compressors import kernels
from commlayer.compressors.payload import Buffer, Out
from commlayer.errors import CorruptPayload

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

KINDS: dict[str, int] = {"int8": 0, "fp16": 1, "fp32": 2, "bf16": 3, "int4": 4}
"""Numbers on the wire: the high half of the `aux` byte in a sparse header."""

BLOCK = 256
"""Entries per scale."""

SCALED = ("int8", "int4")
MOST_SCALE: dict[str, np.floating[Any]] = {"int8": kernels.MOST_SCALE, "int4": np.finfo(np.float32).max / np.float32(8)}
"""The largest scale: any integer of the kind times it is finite."""


def scales_nbytes(kind: str, count: int) -> int:
    return 4 * -(-count // BLOCK) if kind in SCALED else 0


def nbytes(kind: str, count: int) -> int:
    """Exact size in bytes: the scales, if any, then the entries."""
    return scales_nbytes(kind, count) + (VALUE_BITS[kind] * count + 7) // 8


def encode(kind: str, body: Out, val: torch.Tensor, kept: torch.Tensor, *, saturate: bool) -> bool:
    """Encodes val; kept = val - decoded val. False if a value became infinite; `saturate` clamps, and kept has the rest."""
    if kind == "fp32":
        kernels.store_f32(body, val)
        kept.zero_()
        return True
    if kind in SCALED:
        middle = scales_nbytes(kind, val.numel())
        if kind == "int4":
            return kernels.nibbles_encode(body[middle:], body[:middle], val, kept, BLOCK)
        kept.zero_()
        return kernels.int8_encode(body[middle:], body[:middle], val, kept, BLOCK)
    narrow, wide = (kernels.f32_to_f16, kernels.f16_to_f32) if kind == "fp16" else (kernels.f32_to_bf16, kernels.bf16_to_f32)
    finite = narrow(body, torch.clamp(val, -kernels.MOST[kind], kernels.MOST[kind], out=kept) if saturate else val)
    wide(kept, body)
    torch.sub(val, kept, out=kept)
    return finite


def check(kind: str, body: Buffer, count: int) -> None:
    """Raises CorruptPayload unless `body`, of nbytes(kind, count) bytes, is the only encoding of some finite values."""
    if kind not in SCALED:
        return
    if not kernels.scales_valid(body[: scales_nbytes(kind, count)], MOST_SCALE[kind]):
        raise CorruptPayload(f"{kind} values with a scale that is negative, not finite or too large")
    if kind == "int4" and count % 2 and int(body[-1]) >> 4:
        raise CorruptPayload("int4 values with padding that is not zero")


def cut(codec: str, kind: str, body: Out, count: int) -> tuple[Out, Out]:
    """Splits a body into the checked bytes of `count` values and the bytes after them."""
    middle = nbytes(kind, count)
    if body.nbytes < middle:
        raise CorruptPayload(f"{codec} payload with {body.nbytes} bytes of body, {count} values take {middle}")
    check(kind, body[:middle], count)
    return body[:middle], body[middle:]


def decode(kind: str, body: Buffer, count: int) -> torch.Tensor:
    """The values of a checked body. Raises CorruptPayload if one is not finite."""
    val = torch.empty(count, device=body.device if isinstance(body, torch.Tensor) else None)
    if not count:
        return val
    middle = scales_nbytes(kind, count)
    if kind == "int8":
        kernels.int8_decode(val, body[middle:], body[:middle], BLOCK, assign=True)
    elif kind == "int4":
        kernels.nibbles_decode(val, body[middle:], body[:middle], BLOCK)
    else:
        {"fp32": kernels.copy_f32, "fp16": kernels.f16_to_f32, "bf16": kernels.bf16_to_f32}[kind](val, body)
        if not kernels.all_finite(val):
            raise CorruptPayload("sparse payload with a value that is not finite")
    return val
