"""A bucket's result as sparse entries, without dense memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from commlayer.compressors import kernels
from commlayer.engine.layout import Layout

MOST_NUMEL = 2**31 - 1
"""Of a bucket: torch compares positions as signed numbers."""


class SparseResult:
    def __init__(self, layout: Layout, idx: torch.Tensor, values: torch.Tensor) -> None:
        self._layout, self._idx, self._values = layout, idx, values
        self._starts = [0, *accumulate(s.numel for s in layout.slices)]
        self._cuts: list[int] = torch.searchsorted(idx, torch.tensor(self._starts, dtype=torch.int32)).tolist()

    def entries(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in the slice's tensor, and values."""
        low, high = self._cuts[number], self._cuts[number + 1]
        return self._idx[low:high] + (self._layout.slices[number].start - self._starts[number]), self._values[low:high]

    def write(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Sets targets to elements times factor, by slice; None skips one."""
        for number, (s, shape, target) in enumerate(zip(self._layout.slices, self._layout.shapes, targets, strict=True)):
            if target is None:
                continue
            to = target.detach() if target.shape == shape else target.detach().view(-1)[s.start : s.stop]
            idx, values = self._slice(number)
            if to.is_contiguous() and to.dtype == torch.float32:
                kernels.scatter_add(to.zero_().view(-1), idx, values * factor)
            else:
                torch.mul(_spread(idx, values, s.numel).view(shape), factor, out=to)

    def _slice(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = self._cuts[number], self._cuts[number + 1]
        return self._idx[low:high] - self._starts[number], self._values[low:high]

    def whole(self) -> torch.Tensor:
        return _spread(self._idx, self._values, self._starts[-1])


def _spread(idx: torch.Tensor, values: torch.Tensor, numel: int) -> torch.Tensor:
    dense = torch.zeros(numel)
    kernels.scatter_add(dense, idx, values)
    return dense
