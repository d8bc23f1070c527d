"""Quantisers with 16-bit scales, and random draws, on a device.

Encoding a non-finite input returns False; the residual then holds the finite part.
"""

from __future__ import annotations

import torch

from commlayer.compressors.device.dense import finite_or_absorbed, yes
from commlayer.gpu.launch import each


def linear_encode(
    q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, block: int, bits: int,
    euclidean: bool, dither: bool, key: int = 0, step: int = 0,
) -> bool:
    n, finite = x.numel(), yes(x)
    each("quantise", "linear_measure", 32 * -(-n // block), scale, x, residual, n, block, bits, int(euclidean), finite)
    each("quantise", "linear_code", -(-n // 8), q, scale, x, residual, n, block, bits, int(dither), key, step, finite)
    return finite_or_absorbed(finite, x, residual)


def linear_decode(acc: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, block: int, bits: int, assign: bool = False) -> None:
    each("quantise", "linear_decode", -(-acc.numel() // 8), acc, q, scale, acc.numel(), block, bits, int(assign))


def onebit_encode(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, block: int) -> bool:
    n, finite = x.numel(), yes(x)
    each("quantise", "onebit_measure", 32 * -(-n // block), scale, x, residual, n, block, finite)
    each("quantise", "onebit_code", -(-n // 8), q, scale, x, residual, n, block, finite)
    return finite_or_absorbed(finite, x, residual)


def onebit_decode(acc: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, block: int, assign: bool = False) -> None:
    each("quantise", "onebit_decode", -(-acc.numel() // 8), acc, q, scale, acc.numel(), block, int(assign))


def draw_strata(idx: torch.Tensor, n: int, seed: int) -> None:
    each("draws", "draw_strata", idx.numel(), idx, idx.numel(), n, seed)


def take(src: torch.Tensor, idx: torch.Tensor, val: torch.Tensor) -> None:
    """val = src[idx]."""
    each("draws", "take", idx.numel(), src, idx, val, idx.numel())
