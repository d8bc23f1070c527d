"""Shared-scale integers and low-rank products in plain numpy and torch. Slow, obviously right. Knows no headers."""

from __future__ import annotations

import numpy as np
import torch

from commlayer.compressors.reference.draws import uniform, words
from commlayer.compressors.reference.memory import Memory, floats, octets_of, read, write

MOST_BF16 = 0x7F7F
"""The largest finite one."""


def levels(bits: int) -> int:
    return (1 << bits - 1) - 1


def packed_nbytes(n: int, width: int) -> int:
    return (n * width + 7) // 8


def int_maxima(max: Memory, x: Memory, block: int) -> bool:
    v = floats(x)
    magnitudes = _rows(v.abs().view(torch.int32).long(), block)
    most = magnitudes.amax(1) if v.numel() else torch.zeros(0, dtype=torch.long)
    write(max, ((most + 0xFFFF) >> 16).clamp(max=MOST_BF16).to(torch.int16))
    return bool(v.isfinite().all())


def int_encode(q: Memory, x: Memory, max: Memory, block: int, bits: int, dither: bool, key: int, step: int) -> None:
    v, most = floats(x), levels(bits)
    scale = _scales(max, v.numel(), block, bits)
    t = (v * torch.where(scale == 0, torch.zeros_like(scale), 1.0 / scale)).clamp(-most, most)
    if dither:
        u = uniform(words(v.numel(), 0, key, step))
        low = t.floor()
        whole = low + (u < t - low).float()
    else:
        whole = t.round()
    write(q, _pack(torch.where(scale == 0, torch.zeros_like(whole), whole).long(), bits))


def int_legal(q: Memory, n: int, bits: int) -> bool:
    packed = octets_of(q, 0, packed_nbytes(n, bits))
    whole = _unpack(packed, n, bits)
    return bool((whole.abs() <= levels(bits)).all()) and torch.equal(_pack(whole, bits), packed)


def int_add(acc: Memory, q: Memory, bits: int, assign: bool) -> None:
    total = read(acc, torch.int32, octets_of(acc).numel() // 4)
    n = total.numel()
    whole = _unpack(octets_of(q, 0, packed_nbytes(n, bits)), n, bits)
    total.copy_(whole if assign else total + whole)


def int_pack(out: Memory, acc: Memory, width: int) -> None:
    write(out, _pack(read(acc, torch.int32, octets_of(acc).numel() // 4).long(), width))


def int_decode(out: Memory, q: Memory, max: Memory, block: int, bits: int, width: int) -> None:
    total = floats(out)
    n = total.numel()
    whole = _unpack(octets_of(q, 0, packed_nbytes(n, width)), n, width)
    total.copy_(_scales(max, n, block, bits) * whole.float())


def outer(out: Memory, p: Memory, q: Memory, rank: int) -> None:
    left, right = floats(p).view(rank, -1, 1), floats(q).view(rank, 1, -1)
    total = left[0] * right[0]
    for k in range(1, rank):
        total = total + left[k] * right[k]
    floats(out).copy_(total.view(-1))


def _rows(values: torch.Tensor, block: int) -> torch.Tensor:
    """A row for each block, the last one filled up with zeros."""
    count = -(-values.numel() // block)
    rows = torch.zeros(count * block, dtype=values.dtype)
    rows[: values.numel()] = values
    return rows.view(count, block)


def _scales(max: Memory, n: int, block: int, bits: int) -> torch.Tensor:
    """The scale of each element."""
    most = read(max, torch.bfloat16, -(-n // block)).float()
    scale = torch.where(most < levels(bits) * 2.0**-126, torch.zeros_like(most), most / levels(bits))
    return scale.repeat_interleave(block)[:n]


def _pack(whole: torch.Tensor, width: int) -> torch.Tensor:
    bits = whole.unsqueeze(1) >> torch.arange(width) & 1
    return torch.from_numpy(np.packbits(bits.to(torch.uint8).view(-1).numpy(), bitorder="little"))


def _unpack(octets: torch.Tensor, n: int, width: int) -> torch.Tensor:
    bits = torch.from_numpy(np.unpackbits(octets.numpy(), count=n * width, bitorder="little")).view(n, width).long()
    value = (bits << torch.arange(width)).sum(1)
    return value - (bits[:, -1] << width)
