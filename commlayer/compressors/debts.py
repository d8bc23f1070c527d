"""Carries residuals from one plan to the next, as values on elements of tensors.

A residual is stored under the key `residual`, at any depth of a state. A worker adds an inherited residual to the next
gradients of the same elements, whatever their new path and codec. So no residual is sent, and none is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from commlayer.compressors.codec import Cut, State
from commlayer.records import Slice

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch


class Debt(NamedTuple):
    """Residual values on elements [start, stop) of a tensor."""

    tensor: int
    start: int
    values: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def owed(state: State, numel: int) -> torch.Tensor | None:
    """The residual of all elements, concatenated where a wrapper keeps it in parts. None if the codec keeps none."""
    parts = list(_residuals(state))
    if not parts or sum(p.numel() for p in parts) != numel:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _residuals(state: State) -> Iterator[torch.Tensor]:
    for name, value in state.items():
        if name == "residual" and isinstance(value, torch.Tensor):
            yield value.reshape(-1)
        elif isinstance(value, dict):
            yield from _residuals(value)


def spread(slices: Sequence[Slice], start: int, values: torch.Tensor) -> Iterator[Debt]:
    """Maps values on a bucket's elements from `start` on to elements of the tensors in its slices."""
    at = 0
    for s in slices:
        low, high = max(start, at), min(start + values.numel(), at + s.numel)
        if low < high:
            yield Debt(s.tensor, s.start + low - at, values[low - start : high - start])
        at += s.numel


def cut_of(slices: Sequence[Slice], word: int) -> Cut:
    """The elements of the slices whose bits are set in `word`."""
    if word == (1 << len(slices)) - 1:
        return None
    edges = [0, *accumulate(s.numel for s in slices)]
    return [(edges[i], edges[i + 1]) for i in range(len(slices)) if word >> i & 1]


def pay(debts: Sequence[Debt], slices: Sequence[Slice]) -> torch.Tensor | None:
    """The part of the inherited residuals that falls on a bucket of these slices, or None."""
    total: torch.Tensor | None = None
    at = 0
    for s in slices:
        for debt in debts:
            low, high = max(s.start, debt.start), min(s.stop, debt.stop)
            if debt.tensor == s.tensor and low < high:
                if total is None:
                    total = torch.zeros(sum(part.numel for part in slices))
                owing = debt.values[low - debt.start : high - debt.start]
                total[at + low - s.start : at + high - s.start] += owing.to(total.device)
        at += s.numel
    return total
