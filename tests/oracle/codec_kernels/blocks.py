"""Positions as blocks of 16, in plain torch."""

from __future__ import annotations

import torch
from oracle.codec_kernels.memory import Memory, octets_of, positions, read, write
from oracle.codec_kernels.sparse import (
    bitmap_decode,
    bitmap_encode,
    checked_positions,
    corrupt,
    ef_bound,
    ef_decode,
    ef_encode,
)

from commlayer.errors import CorruptPayload

BLOCK = 16


def _numbers(n: int, count: int) -> tuple[int, bool, int]:
    """(blocks below n, whether a bitmap encodes their numbers rather than Elias-Fano, bytes of that encoding)."""
    blocks = -(-n // BLOCK)
    sparse, dense = ef_bound(blocks, count), (blocks + 7) // 8
    return blocks, dense <= sparse, min(sparse, dense)


def blocks_nbytes(idx: Memory, n: int) -> int:
    count = (positions(idx) // BLOCK).unique().numel()
    return 4 + _numbers(n, count)[2] + 2 * count if count else 0


def blocks_encode(out: Memory, idx: Memory, n: int, at: int = 0) -> int:
    where = checked_positions(idx, n)
    if len(where) == 0:
        return 0
    numbers, owner = (where // BLOCK).unique(return_inverse=True)
    masks = torch.zeros(len(numbers), dtype=torch.int32).index_add_(0, owner, (1 << where % BLOCK).to(torch.int32))
    blocks, bitmap, nbytes = _numbers(n, len(numbers))
    packed = torch.zeros(nbytes, dtype=torch.uint8)
    (bitmap_encode if bitmap else ef_encode)(packed, numbers.to(torch.int32), blocks)
    count = torch.tensor([len(numbers)], dtype=torch.int32).view(torch.uint8)
    code = torch.cat([count, packed, masks.to(torch.int16).view(torch.uint8)])
    write(out, code, at)
    return code.numel()


def blocks_decode(idx: Memory, n: int, src: Memory, at: int = 0, nbytes: int = -1) -> int:
    k = len(positions(idx))
    octets = octets_of(src, at, None if nbytes < 0 else nbytes)
    if k == 0 and octets.numel() == 0:
        return 0
    if octets.numel() < 4:
        raise corrupt(k, n)
    count = int(read(octets[:4].clone(), torch.int32, 1)) & 0xFFFFFFFF
    if not 1 <= count <= min(k, -(-n // BLOCK)):
        raise corrupt(k, n)
    blocks, bitmap, middle = _numbers(n, count)
    if octets.numel() != 4 + middle + 2 * count:
        raise corrupt(k, n)
    numbers = torch.zeros(count, dtype=torch.int32)
    try:
        (bitmap_decode if bitmap else ef_decode)(numbers, blocks, octets[4 : 4 + middle])
    except CorruptPayload:
        raise corrupt(k, n) from None
    masks = read(octets[4 + middle :].clone(), torch.int16, count).to(torch.int64)
    bits = (masks[:, None] >> torch.arange(BLOCK)) & 1
    where = (positions(numbers)[:, None] * BLOCK + torch.arange(BLOCK))[bits == 1]
    if not bits.any(1).all() or len(where) != k or int(where[-1]) >= n:
        raise corrupt(k, n)
    write(idx, where.to(torch.int32))
    return k
