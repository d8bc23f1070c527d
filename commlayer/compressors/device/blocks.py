"""Positions as blocks of 16 on a device, written in torch except for the block numbers. Names and results as on the host."""

from __future__ import annotations

import torch

from commlayer.compressors.device import sparse
from commlayer.errors import CorruptPayload
from commlayer.gpu.launch import words

BLOCK = 16
COUNT_NBYTES, MASK_NBYTES = 4, 2


def _positions(idx: torch.Tensor) -> torch.Tensor:
    return idx.to(torch.int64) & 0xFFFFFFFF


def _numbers(n: int, count: int) -> tuple[int, int, int]:
    """Blocks below n; the smaller encoding for the numbers of `count` of them; the bytes of that encoding."""
    blocks = -(-n // BLOCK)
    kind, nbytes = sparse.smaller(blocks, count)
    return blocks, kind, nbytes


def _nbytes(n: int, count: int) -> int:
    return COUNT_NBYTES + _numbers(n, count)[2] + MASK_NBYTES * count if count else 0


def blocks_nbytes(idx: torch.Tensor, n: int) -> int:
    return _nbytes(n, (_positions(idx) // BLOCK).unique_consecutive().numel())


def blocks_encode(out: torch.Tensor, idx: torch.Tensor, n: int) -> int:
    """`out` has exactly the size of the encoded positions."""
    where = _positions(idx)
    numbers, owner = (where // BLOCK).unique_consecutive(return_inverse=True)
    count = numbers.numel()
    if count == 0:
        return 0
    blocks, kind, middle = _numbers(n, count)
    masks = torch.zeros(count, dtype=torch.int32, device=idx.device).index_add_(0, owner, (1 << where % BLOCK).to(torch.int32))
    packed = words(middle, idx.device)
    (sparse.bitmap_encode if kind == sparse.BITMAP else sparse.ef_encode)(packed, numbers.to(torch.int32), blocks)
    head = torch.tensor([count], dtype=torch.int64).to(torch.int32).view(torch.uint8).to(idx.device)
    torch.cat([head, packed, masks.to(torch.int16).view(torch.uint8)], out=out)
    return out.numel()


def blocks_decode(idx: torch.Tensor, n: int, src: torch.Tensor) -> None:
    k = idx.numel()
    if k == 0 and src.numel() == 0:
        return
    corrupt = CorruptPayload(f"positions: bytes are not {k} positions below {n}")
    if src.numel() < COUNT_NBYTES:
        raise corrupt
    count = int.from_bytes(bytes(src[:COUNT_NBYTES].tolist()), "little")
    if not 1 <= count <= min(k, -(-n // BLOCK)) or src.numel() != _nbytes(n, count):
        raise corrupt
    blocks, kind, middle = _numbers(n, count)
    numbers = torch.empty(count, dtype=torch.int32, device=idx.device)
    packed = src[COUNT_NBYTES : COUNT_NBYTES + middle]
    try:
        (sparse.bitmap_decode if kind == sparse.BITMAP else sparse.ef_decode)(numbers, blocks, packed)
    except CorruptPayload:
        raise corrupt from None
    halves = src[COUNT_NBYTES + middle :].clone().view(torch.int16).to(torch.int32)
    bits = (halves[:, None] >> torch.arange(BLOCK, dtype=torch.int32, device=idx.device)) & 1
    block, bit = bits.nonzero(as_tuple=True)
    if block.numel() != k or not bits.any(1).all():
        raise corrupt
    where = _positions(numbers)[block] * BLOCK + bit
    if int(where[-1]) >= n:
        raise corrupt
    idx.copy_(where.to(torch.int32))
