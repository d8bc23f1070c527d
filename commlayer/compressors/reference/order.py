"""Order among magnitudes in plain torch: the k-th largest, trimming candidates. Knows no headers and no codecs."""

from __future__ import annotations

import torch

from commlayer.compressors.reference.memory import Memory, floats, positions, read, total, write

_ABS = 0x7FFFFFFF


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    """As integers: in the order of magnitudes, NaN above infinity."""
    return x.view(torch.int32) & _ABS


def kth_abs(g: Memory, residual: Memory | None, rank: int, scratch: Memory) -> float:
    v = total(g, residual)
    if not 1 <= rank <= v.numel():
        raise ValueError(f"kth_abs: got rank {rank} of {v.numel()}, need 1 <= rank <= n")
    found = _magnitudes(v).kthvalue(v.numel() + 1 - rank).values
    return float(found.view(torch.float32))


def count_above(x: Memory, cut: float) -> int:
    return int((floats(x) >= torch.tensor(cut, dtype=torch.float32)).sum())


def trim(residual: Memory | None, n: int, idx: Memory, val: Memory, count: int, keep: int, start: int, scratch: Memory) -> int:
    if not 1 <= keep <= count <= n:
        raise ValueError(f"trim: got {keep} of {count} of {n}, need 1 <= keep <= count <= n")
    where, values = positions(idx)[:count], read(val, torch.float32, count).clone()
    order = torch.cat([(where >= start).nonzero().view(-1), (where < start).nonzero().view(-1)])
    best = order[_magnitudes(values)[order].sort(descending=True, stable=True).indices[:keep]]
    kept = torch.zeros(count, dtype=torch.bool)
    kept[best] = True
    if residual is not None:
        floats(residual)[where[~kept]] += values[~kept]
    write(idx, where[kept].to(torch.int32))
    write(val, values[kept])
    return keep
