"""The values of a module's buffers (running statistics) that all ranks had after the last exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from commlayer.compressors.residual_slices import overlaps, split_by_tensor
from commlayer.engine.buckets.bucket_layout import BucketLayout


class SharedBuffers:
    """The values of a bucket of module buffers: those that all ranks had after the last exchange (`values`), and this rank's
    values before it.

    A mean of equal values differs from that value in the last bit, because weights are rounded. An unchanged buffer would
    therefore drift. All ranks send a flag for each buffer, which says that this rank has changed the buffer. A buffer without
    any flag keeps its value. Equal changes on all ranks give the same bits again in narrower types, because means are computed
    in float64.
    """

    def __init__(self, like: torch.Tensor, layout: BucketLayout) -> None:
        """Allocates memory for the values, with the type, device and size of `like`, the bucket's memory."""
        self.values, self._own = torch.zeros_like(like), torch.zeros_like(like)
        self.changed = self._own
        """One flag per slice. 1: this rank has changed the module buffer since the last exchange."""
        self.layout, self._own_views = layout, layout.views(self._own)
        self._sizes = [s.numel for s in layout.slices]
        self._repeats = torch.tensor(self._sizes, device=like.device)

    def changes(self, x: torch.Tensor) -> torch.Tensor:
        """Returns one flag per slice: 1 if this rank has changed the buffer since the last exchange. The flags stay on the
        device, so the host does not wait."""
        return torch.stack([part.any() for part in torch.ne(x, self.values).split(self._sizes)])

    def commit(
        self, y: torch.Tensor, views_y: Sequence[torch.Tensor], flags: torch.Tensor, factor: float | torch.Tensor,
        targets: Sequence[torch.Tensor | None],
    ) -> None:
        """Writes the means, y times factor, into the targets. A buffer that no rank has changed, which means a flag of 0, gets
        its value of the last exchange.

        If the values of some rank are not finite, each rank keeps its own values.
        """
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
"""Maps bucket id to the values of the bucket's module buffers that all ranks had after the last exchange."""


def store_agreed_values(shared: ByBucket, tensors: Sequence[torch.Tensor | None]) -> None:
    """Stores the buffers' current values as the values that are the same on all ranks. `tensors`: the model's buffers, by
    tensor number; None entries are skipped."""
    for buffers in shared.values():
        mine = [tensors[s.tensor] for s in buffers.layout.slices]
        for view, tensor in buffers.layout.pairs(mine, buffers.layout.views(buffers.values)):
            view.copy_(tensor.detach())


def copy_agreed_values(shared: ByBucket, tensors: Sequence[torch.Tensor | None]) -> None:
    """Writes the values that all ranks had after the last exchange into `tensors`, by tensor number."""
    for buffers in shared.values():
        mine = [tensors[s.tensor] for s in buffers.layout.slices]
        for view, tensor in buffers.layout.pairs(mine, buffers.layout.views(buffers.values)):
            tensor.copy_(view)


def copy_known_values(before: ByBucket, after: ByBucket) -> None:
    known = [part for buffers in before.values() for part in split_by_tensor(buffers.layout.slices, 0, buffers.values)]
    for buffers in after.values():
        for at, values in overlaps(known, buffers.layout.slices):
            buffers.values[at : at + len(values)] = values


def snapshot(shared: ByBucket) -> dict[str, torch.Tensor]:
    """Returns copies of the buffers' values after the last exchange. A checkpoint needs them, because between two exchanges of
    local steps the model's buffers have other values."""
    return {f"agreed.{number}": buffers.values.cpu().clone() for number, buffers in shared.items()}


def restore(shared: ByBucket, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restores the values that `snapshot` has returned. Buckets that are missing in `tensors` keep their values."""
    for number, buffers in shared.items():
        if (saved := tensors.get(f"agreed.{number}")) is not None:
            buffers.values.copy_(saved)
