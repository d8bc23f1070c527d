"""Where the slices of one bucket lie in flat memory, in the shapes of their tensors. Knows positions; no codecs, no values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlayer.records import Bucket, Job


class Layout:
    """One bucket's. The same for all memory that holds its elements in its order."""

    def __init__(self, bucket: Bucket, job: Job) -> None:
        self.slices = bucket.slices
        self.shapes = [_shape(job, s.tensor, s.start, s.stop) for s in bucket.slices]

    def views(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The slices in x, each in the shape of its tensor; a part of a tensor is flat."""
        views, at = [], 0
        for s, shape in zip(self.slices, self.shapes, strict=True):
            views.append(x[at : at + s.numel].view(shape))
            at += s.numel
        return views

    def pairs(
        self, tensors: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor],
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (view, the same elements of the tensor) of the slices that have a tensor.

        A whole tensor is paired in its own shape, so any strides will do; a cut one must be contiguous (see `whole`).
        """
        pairs = []
        for view, tensor, s in zip(views, tensors, self.slices, strict=True):
            if tensor is not None:
                pairs.append((view, tensor if view.shape == tensor.shape else tensor.view(-1)[s.start : s.stop]))
        return pairs


def _shape(job: Job, tensor: int, start: int, stop: int) -> tuple[int, ...]:
    info = job.tensors[tensor]
    return info.shape if (start, stop) == (0, info.numel) else (stop - start,)
