"""4-bit values of sparse payloads on a device. Same names and results as the host's; knows no positions."""

from __future__ import annotations

import torch

from commlayer.compressors.device.dense import yes
from commlayer.gpu.launch import each


def nibbles_encode(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, rest: torch.Tensor | None, block: int) -> bool:
    n, finite = x.numel(), yes(x)
    each("nibbles", "nibbles_measure", 32 * -(-n // block), scale, x, n, block, finite)
    each("nibbles", "nibbles_code", -(-n // 2), q, scale, x, rest, n, block, finite)
    return bool(finite.item())


def nibbles_decode(out: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, block: int) -> None:
    each("nibbles", "nibbles_decode", out.numel(), out, q, scale, out.numel(), block)
