"""Encodes sorted positions as the smallest of Elias-Fano, a bitmap and blocks of 16. The kernels pack the bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.compressors import kernels
from commlayer.compressors.payload import Out, expect
from commlayer.errors import CorruptPayload

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

ELIAS_FANO, BITMAP, BLOCKS = 0, 1, 2


WORTH_A_LOOK = 16
"""Fewer positions than this gain too little from blocks to be worth counting them."""


def elias_fano_nbytes(n: int, k: int) -> int:
    """Exact size in bytes for k >= 1 positions below n."""
    low = max(0, (n // k).bit_length() - 1)
    return (k * low + 7) // 8 + (k + (n >> low) + 1 + 7) // 8


def bitmap_nbytes(n: int, k: int = 0) -> int:
    return (n + 7) // 8


NBYTES = {ELIAS_FANO: elias_fano_nbytes, BITMAP: bitmap_nbytes}
DECODERS = {ELIAS_FANO: kernels.ef_decode, BITMAP: kernels.bitmap_decode, BLOCKS: kernels.blocks_decode}


def bound(n: int, cap: int) -> int:
    """The most bytes for up to cap positions. The size grows with the count, except for the rounding of its two parts."""
    return 0 if n == 0 else min(elias_fano_nbytes(n, cap) + 2, bitmap_nbytes(n))


def encode(out: Out, idx: torch.Tensor, n: int) -> tuple[int, int]:
    """Returns (kind, bytes written). No positions take no bytes."""
    k = idx.numel()
    if k == 0:
        return ELIAS_FANO, 0
    sparse, dense = elias_fano_nbytes(n, k), bitmap_nbytes(n)
    if k >= WORTH_A_LOOK and (blocks := kernels.blocks_nbytes(idx, n)) < min(sparse, dense):
        return BLOCKS, kernels.blocks_encode(out[:blocks], idx, n)
    if sparse < dense:
        return ELIAS_FANO, kernels.ef_encode(out[:sparse], idx, n)
    return BITMAP, kernels.bitmap_encode(out[:dense], idx, n)


def decode(kind: int, body: Out, k: int, n: int) -> torch.Tensor:
    """int32 positions, strictly increasing and below n. Raises CorruptPayload otherwise."""
    idx = torch.empty(k, dtype=torch.int32, device=body.device if isinstance(body, torch.Tensor) else None)
    if kind not in DECODERS:
        raise CorruptPayload(f"payload with positions of kind {kind}, this side knows {', '.join(map(str, DECODERS))}")
    if kind != BLOCKS:
        expect("bytes of positions", body.nbytes, NBYTES[kind](n, k) if k else 0)
    if k or body.nbytes:
        DECODERS[kind](idx, n, body)
    return idx
