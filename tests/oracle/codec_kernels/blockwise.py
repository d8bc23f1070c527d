"""Parts of the blockwise quantisers in plain torch: blocks as rows, their measures, 16-bit scales, streams of codes.

The last row is padded with zeros, which change no measure.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from oracle.codec_kernels.memory import Memory, floats, octets_of, read, total, write

LEAST = 2.0**-126
"""Below this a scale would not be a normal number: the block counts as zeros."""

MOST16 = 0x7F7F
"""The bits of the largest finite bfloat16."""

LANES = 16


def rows_of(v: torch.Tensor, block: int) -> torch.Tensor:
    count = -(-v.numel() // block)
    rows = torch.zeros(count * block, dtype=v.dtype)
    rows[: v.numel()] = v
    return rows.view(count, block)


def counts_of(n: int, block: int) -> torch.Tensor:
    """Elements in each row."""
    count = -(-n // block)
    counts = torch.full((count,), block)
    if count:
        counts[-1] = n - (count - 1) * block
    return counts


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def of_bits(u: torch.Tensor) -> torch.Tensor:
    return u.to(torch.int32).view(torch.float32)


def most_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().amax(1) if rows.numel() else torch.zeros(len(rows))


def lane_sum(rows: torch.Tensor) -> torch.Tensor:
    """The float32 sum of each row, in the order of native/src/blockwise.h."""
    width = -(-rows.shape[1] // LANES) * LANES
    padded = torch.zeros(len(rows), width)
    padded[:, : rows.shape[1]] = rows
    lanes = torch.zeros(len(rows), LANES)
    for part in padded.split(LANES, 1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def norm_of(rows: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    exponent = (bits(most) >> 23).clamp(1, 253)
    small = rows * of_bits((254 - exponent) << 23)[:, None]
    return lane_sum(small * small).sqrt() * of_bits(exponent << 23)


def scale16(size: torch.Tensor, most: int) -> torch.Tensor:
    """bfloat16 as int64 bits: the smallest one not below size, at most `most`, and 0 if size is too small."""
    up = ((bits(size) + 0xFFFF) >> 16).clamp(max=most)
    return torch.where(size >= LEAST, up, torch.zeros_like(up))


def wide16(scale: torch.Tensor) -> torch.Tensor:
    return of_bits(scale << 16)


def read16(scale: Memory, n: int, block: int) -> torch.Tensor:
    """The scales of payload bytes as a column of float32."""
    return read(scale, torch.bfloat16, -(-n // block)).float()[:, None]


def write16(scale: Memory, value: torch.Tensor) -> None:
    write(scale, value.to(torch.int16))


def put_stream(out: Memory, codes: torch.Tensor, width: int) -> None:
    """Writes codes of `width` bits each, the lowest bit first."""
    each = (codes.view(-1, 1) >> torch.arange(width)) & 1
    write(out, torch.from_numpy(np.packbits(each.to(torch.uint8).numpy().reshape(-1), bitorder="little")))


def get_stream(src: Memory, n: int, width: int) -> torch.Tensor:
    octets = octets_of(src, 0, (n * width + 7) // 8)
    each = torch.from_numpy(np.unpackbits(octets.numpy(), bitorder="little")[: n * width]).view(n, width)
    return (each.to(torch.int64) << torch.arange(width)).sum(1)


def encode(x: Memory, residual: Memory | None, block: int, code: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """`code` takes the blocks as rows, writes the payload and returns the decoded payload.

    Where x + residual is not finite, the residual takes its finite part. In blocks before the first bad one the residual takes
    the rounding error plus the decoded values, as the native kernels do: they find the bad block after encoding the earlier
    ones.
    """
    v = total(x, residual)
    finite = v.isfinite()
    rows = rows_of(torch.where(finite, v, torch.zeros_like(v)), block)
    sent = code(rows)
    kept = rows - sent
    good = bool(finite.all())
    if residual is not None:
        old = floats(residual)
        if good:
            old.copy_(kept.view(-1)[: v.numel()])
        else:
            first = int((~finite).nonzero()[0]) // block * block
            back = (kept + sent).view(-1)
            old[:first] = back[:first]
            old[first:] = torch.where(finite, v, old)[first:]
    return good


def decode(acc: Memory, value: torch.Tensor, *, assign: bool) -> None:
    target = floats(acc)
    value = value.view(-1)[: target.numel()]
    target.copy_(value if assign else target + value)
