"""A bucket's result as the entries that came, in place of dense memory. Knows slices; no codec and no optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from commlayer.compressors import kernels
from commlayer.runtime.layout import Layout

MOST_NUMEL = 2**31 - 1
"""Of a bucket: torch compares positions as signed numbers."""


class SparseResult:
    """One, until the next is here."""

    def __init__(self, layout: Layout, idx: torch.Tensor, values: torch.Tensor) -> None:
        self._layout, self._idx, self._values = layout, idx, values
        self._starts = [0, *accumulate(s.numel for s in layout.slices)]
        self._cuts: list[int] = torch.searchsorted(idx, torch.tensor(self._starts, dtype=torch.int32)).tolist()

    def entries(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a slice: positions in its tensor, and values."""
        low, high = self._cuts[number], self._cuts[number + 1]
        return self._idx[low:high] + (self._layout.slices[number].start - self._starts[number]), self._values[low:high]

    def write(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """targets = elements times factor, by slice; None leaves one out."""
        views = [torch.empty(0) if target is None else self._slice(number).view(shape)
                 for number, (shape, target) in enumerate(zip(self._layout.shapes, targets, strict=True))]
        for view, target in self._layout.pairs(targets, views):
            torch.mul(view, factor, out=target.detach())

    def _slice(self, number: int) -> torch.Tensor:
        low, high = self._cuts[number], self._cuts[number + 1]
        start, stop = self._starts[number], self._starts[number + 1]
        return _spread(self._idx[low:high] - start, self._values[low:high], stop - start)

    def whole(self) -> torch.Tensor:
        """All elements."""
        return _spread(self._idx, self._values, self._starts[-1])


def _spread(idx: torch.Tensor, values: torch.Tensor, numel: int) -> torch.Tensor:
    made = torch.zeros(numel)
    kernels.scatter_add(made, idx, values)
    return made
