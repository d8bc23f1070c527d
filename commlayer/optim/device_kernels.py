"""CUDA kernels of the lazy optimizers. Names and arguments are those of commlayer._core.

Positions are checked as on the CPU; the check waits for the device once.
"""

from __future__ import annotations

import torch

from commlayer.gpu.launch import each
from commlayer.optim.torch_kernels import check_positions, coordinates, flat_positions, huge_pages

__all__ = ["adam_catch_up", "adam_sparse", "coordinates", "flat_positions", "huge_pages", "sgd_catch_up", "sgd_sparse"]


def sgd_sparse(
    w: torch.Tensor, v: torch.Tensor | None, stamp: torch.Tensor | None, now: int, rows: torch.Tensor, idx: torch.Tensor,
    g: torch.Tensor, rate: float, momentum: float, gain: float, decay: float, nesterov: bool,
) -> int:
    check_positions(idx, w.numel())
    each("lazy", "sgd_sparse", idx.numel(), w, v, w.numel(), stamp, now, rows, idx, g, idx.numel(), float(rate),
         float(momentum), float(gain), float(decay), int(nesterov))
    return idx.numel()


def sgd_catch_up(w: torch.Tensor, v: torch.Tensor | None, stamp: torch.Tensor, now: int, rows: torch.Tensor) -> None:
    each("lazy", "sgd_catch_up", stamp.numel(), w, v, stamp, w.numel(), now, rows)


def adam_sparse(
    w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, stamp: torch.Tensor | None, now: int, rows: torch.Tensor,
    idx: torch.Tensor, g: torch.Tensor, step: torch.Tensor,
) -> int:
    check_positions(idx, w.numel())
    each("lazy", "adam_sparse", idx.numel(), w, m, v, w.numel(), stamp, now, rows, idx, g, idx.numel(), step)
    return idx.numel()


def adam_catch_up(
    w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, stamp: torch.Tensor, now: int, rows: torch.Tensor
) -> None:
    each("lazy", "adam_catch_up", stamp.numel(), w, m, v, stamp, w.numel(), now, rows)
