"""Keeps the values of a bucket's buffers (running statistics) that all ranks had after the last exchange.

A mean of equal values differs from that value in the last bit, because weights round. So an unchanged buffer would drift. A
buffer's `used` flag means that this rank has changed it. It is sent on every path, and a buffer without any flag keeps its
value. Equal changes on all ranks give the same bits again in narrower types, because all-reduces and servers compute means in
float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from commlayer.compressors.feedback import split_by_tensor
from commlayer.engine.layout import Layout


class SharedBuffers:
    """Of one bucket. `values` are in the bucket's own order, and the same on all ranks."""

    def __init__(self, like: torch.Tensor, layout: Layout) -> None:
        """`like`: memory of the bucket's elements, whose type and device the values get."""
        self.values, self._own = torch.zeros_like(like), torch.zeros_like(like)
        self.layout, self._own_views = layout, layout.views(self._own)
        self._sizes = [s.numel for s in layout.slices]
        self._repeats = torch.tensor(self._sizes, device=like.device)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        """By slice, whether this rank's values have changed. Stays on the device, so the host does not wait."""
        return torch.stack([part.any() for part in torch.ne(x, self.values).split(self._sizes)])

    def commit(
        self, y: torch.Tensor, views_y: Sequence[torch.Tensor], flags: torch.Tensor, factor: float | torch.Tensor,
        targets: Sequence[torch.Tensor | None],
    ) -> None:
        """Writes the means, y times factor, into the targets. Where `flags` show no change, writes the agreed values.

        If some rank's values are not finite, each rank keeps its own."""
        finite = torch.isfinite(y).all()
        into = [target.detach() for _, target in self.layout.pairs(targets, views_y)]
        torch._foreach_copy_([own for own, _ in self.layout.pairs(targets, self._own_views)], into)
        changed = torch.repeat_interleave(flags > 0, self._repeats, output_size=y.numel())
        mean = torch.where(changed, y.double() * factor, self.values)
        y.copy_(torch.where(finite, mean, self._own))  # rounded once
        views = [view for view, _ in self.layout.pairs(targets, views_y)]
        torch._foreach_copy_(into, views)
        torch._foreach_copy_(views, into)  # rounded to the buffers' own dtype
        self.values.copy_(torch.where(finite, y, self.values))


ByBucket = Mapping[int, SharedBuffers]
"""By bucket number."""


def agree(shared: ByBucket, tensors: Sequence[torch.Tensor | None]) -> None:
    """Records the buffers, which are now the same on all ranks. `tensors` by number; None entries are skipped."""
    for its in shared.values():
        mine = [tensors[s.tensor] for s in its.layout.slices]
        for view, tensor in its.layout.pairs(mine, its.layout.views(its.values)):
            view.copy_(tensor.detach())


def agreed(shared: ByBucket, tensors: Sequence[torch.Tensor | None]) -> None:
    """The reverse: writes the values after the last exchange into the tensors, by number."""
    for its in shared.values():
        mine = [tensors[s.tensor] for s in its.layout.slices]
        for view, tensor in its.layout.pairs(mine, its.layout.views(its.values)):
            tensor.copy_(view)


def pass_on(before: ByBucket, after: ByBucket) -> None:
    known = [part for its in before.values() for part in split_by_tensor(its.layout.slices, 0, its.values)]
    for its in after.values():
        at = 0
        for s in its.layout.slices:
            for part in known:
                low, high = max(s.start, part.start), min(s.stop, part.stop)
                if part.tensor == s.tensor and low < high:
                    place = at - s.start
                    its.values[place + low : place + high] = part.values[low - part.start : high - part.start]
            at += s.numel


def snapshot(shared: ByBucket) -> dict[str, torch.Tensor]:
    """For a checkpoint: between two exchanges of local steps, no model file holds these values."""
    return {f"agreed.{number}": its.values.cpu().clone() for number, its in shared.items()}


def restore(shared: ByBucket, tensors: Mapping[str, torch.Tensor]) -> None:
    """The reverse. Missing values stay unchanged."""
    for number, its in shared.items():
        if (saved := tensors.get(f"agreed.{number}")) is not None:
            its.values.copy_(saved)
