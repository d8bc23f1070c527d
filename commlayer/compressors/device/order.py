"""Order among magnitudes on a device, in torch: for what is rare, so it may wait. Same names and results as the host's."""

from __future__ import annotations

import torch

ABS = 0x7FFFFFFF


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    """As integers: in the order of magnitudes, NaN above infinity."""
    return x.view(torch.int32) & ABS


def kth_abs(g: torch.Tensor, residual: torch.Tensor | None, rank: int, scratch: torch.Tensor) -> float:
    v = g if residual is None else g + residual
    return float(_magnitudes(v).kthvalue(v.numel() + 1 - rank).values.view(torch.float32))


def count_above(x: torch.Tensor, cut: float) -> int:
    return int((x >= torch.tensor(cut, dtype=torch.float32)).sum())


def trim(
    residual: torch.Tensor | None, n: int, idx: torch.Tensor, val: torch.Tensor, count: int, keep: int, start: int,
    scratch: torch.Tensor,
) -> int:
    """As cuda/trim.cu, which the queued form of topk uses."""
    where, values = idx[:count].to(torch.int64) & 0xFFFFFFFF, val[:count].clone()
    order = torch.cat([(where >= start).nonzero().view(-1), (where < start).nonzero().view(-1)])
    best = order[_magnitudes(values)[order].sort(descending=True, stable=True).indices[:keep]]
    kept = torch.zeros(count, dtype=torch.bool, device=idx.device)
    kept[best] = True
    if residual is not None:
        residual[where[~kept]] += values[~kept]
    idx[:keep] = where[kept].to(torch.int32)
    val[:keep] = values[kept]
    return keep
