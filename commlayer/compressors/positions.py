"""Positions of sparse entries as bytes: the smaller of Elias-Fano and a bitmap. Knows sizes; the bit work is the kernels'."""

from __future__ import annotations

import torch

from commlayer.compressors import kernels
from commlayer.compressors.codec import Out
from commlayer.compressors.payload import expect
from commlayer.errors import CorruptFrame

ELIAS_FANO, BITMAP = 0, 1


def elias_fano_nbytes(n: int, k: int) -> int:
    """Exact size for k >= 1 positions below n."""
    low = max(0, (n // k).bit_length() - 1)
    return (k * low + 7) // 8 + (k + (n >> low) + 1 + 7) // 8


def bitmap_nbytes(n: int, k: int = 0) -> int:
    return (n + 7) // 8


NBYTES = {ELIAS_FANO: elias_fano_nbytes, BITMAP: bitmap_nbytes}


def bound(n: int, cap: int) -> int:
    """Most bytes for up to cap positions: the size grows with the count but for the rounding of its two parts."""
    return 0 if n == 0 else min(elias_fano_nbytes(n, cap) + 2, bitmap_nbytes(n))


def encode(out: Out, idx: torch.Tensor, n: int) -> tuple[int, int]:
    """(kind, bytes written). No positions take no bytes."""
    k = idx.numel()
    if k == 0:
        return ELIAS_FANO, 0
    sparse, dense = elias_fano_nbytes(n, k), bitmap_nbytes(n)
    if sparse < dense:
        return ELIAS_FANO, kernels.ef_encode(out[:sparse], idx, n)
    return BITMAP, kernels.bitmap_encode(out[:dense], idx, n)


def decode(kind: int, body: Out, k: int, n: int) -> torch.Tensor:
    """int32 positions, strictly increasing and below n; CorruptFrame otherwise."""
    idx = torch.empty(k, dtype=torch.int32, device=body.device if isinstance(body, torch.Tensor) else None)
    if kind not in NBYTES:
        raise CorruptFrame(f"payload with positions of kind {kind}, this side knows {ELIAS_FANO} and {BITMAP}")
    expect("bytes of positions", body.nbytes, NBYTES[kind](n, k) if k else 0)
    if k:
        (kernels.ef_decode if kind == ELIAS_FANO else kernels.bitmap_decode)(idx, n, body)
    return idx
