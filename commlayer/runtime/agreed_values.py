"""What all ranks had of one bucket's buffers (running statistics) after the last exchange. Compares and writes; knows no peers.

A mean of equal values is not that value to the last bit: weights round, and so a buffer that nobody changes would wander. A
buffer's `used` flag says that this rank has changed it. It goes with every path, and what nobody has changed stays as it was.
What all have changed alike an all-reduce of float64 brings back to the bits of narrower types; servers sum float32, which holds
whole numbers of samples times whole values (of a counter), and rounds others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlayer.runtime.layout import Layout


class AgreedValues:
    """`values` are in the bucket's own order, and the same on all ranks."""

    def __init__(self, like: torch.Tensor, layout: Layout) -> None:
        """`like`: memory of the bucket's elements, whose type and device these values get."""
        self.values, self._own = torch.zeros_like(like), torch.zeros_like(like)
        self._layout, self._own_views = layout, layout.views(self._own)
        self._sizes = [s.numel for s in layout.slices]
        self._repeats = torch.tensor(self._sizes, device=like.device)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        """By slice, whether this rank's values are others. On the device: the host waits for nothing."""
        return torch.stack([part.any() for part in torch.ne(x, self.values).split(self._sizes)])

    def commit(
        self, y: torch.Tensor, views_y: Sequence[torch.Tensor], flags: torch.Tensor, factor: float | torch.Tensor,
        targets: Sequence[torch.Tensor | None],
    ) -> None:
        """Writes the means, y times factor, into the targets, or what was agreed where `flags` say that nobody changed it. If
        a rank has values that are not finite, each keeps its own."""
        finite = torch.isfinite(y).all()
        into = [target.detach() for _, target in self._layout.pairs(targets, views_y)]
        torch._foreach_copy_([own for own, _ in self._layout.pairs(targets, self._own_views)], into)
        changed = torch.repeat_interleave(flags > 0, self._repeats, output_size=y.numel())
        mean = torch.where(changed, y.double() * factor, self.values)
        y.copy_(torch.where(finite, mean, self._own))  # rounded once
        views = [view for view, _ in self._layout.pairs(targets, views_y)]
        torch._foreach_copy_(into, views)
        torch._foreach_copy_(views, into)  # as the buffers' own dtype has them
        self.values.copy_(torch.where(finite, y, self.values))
