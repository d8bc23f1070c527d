"""Memory layout of buckets: slices as views in the shapes of their tensors, parts of tensors, alignment for codecs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from commlayer.compressors.tensors import fresh_zeros
from commlayer.records import Bucket, Job

ALIGN = 64


class Layout:
    """The layout of one bucket. It fits any memory that holds the bucket's elements in order."""

    def __init__(self, bucket: Bucket, job: Job) -> None:
        self.slices = bucket.slices
        self.shapes = [_shape(job, s.tensor, s.start, s.stop) for s in bucket.slices]

    def views(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The slices of x, each in the shape of its tensor. A part of a tensor is flat."""
        views, at = [], 0
        for s, shape in zip(self.slices, self.shapes, strict=True):
            views.append(x[at : at + s.numel].view(shape))
            at += s.numel
        return views

    def pairs(
        self, tensors: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor],
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (view, the same elements of the tensor) of the slices that have a tensor.

        A complete tensor is paired in its own shape, so any strides work. A split one must be contiguous (see `whole`).
        """
        pairs = []
        for view, tensor, s in zip(views, tensors, self.slices, strict=True):
            if tensor is not None:
                pairs.append((view, tensor if view.shape == tensor.shape else tensor.view(-1)[s.start : s.stop]))
        return pairs


def _shape(job: Job, tensor: int, start: int, stop: int) -> tuple[int, ...]:
    info = job.tensors[tensor]
    return info.shape if (start, stop) == (0, info.numel) else (stop - start,)


def aligned(lead: int, nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Memory for `lead` bytes followed by `nbytes` on a 64-byte boundary. It does not come from the allocator's heap, where
    memory of earlier plans would leave holes."""
    room = ALIGN + lead + nbytes + ALIGN
    raw = torch.empty(room, dtype=torch.uint8, pin_memory=True) if pinned else fresh_zeros(-(-room // 4)).view(torch.uint8)
    skip = -(raw.data_ptr() + lead) % ALIGN
    return raw[skip : skip + lead + nbytes]


@contextlib.contextmanager
def whole(targets: Sequence[torch.Tensor | None], cut: Callable[[int], bool]) -> Iterator[list[torch.Tensor | None]]:
    """Yields the targets, with contiguous zeros for split targets that are not contiguous; they are copied back at the end."""
    copies = {t: torch.zeros_like(target, memory_format=torch.contiguous_format) for t, target in enumerate(targets)
              if target is not None and cut(t) and not target.is_contiguous()}
    yield [copies.get(t, target) for t, target in enumerate(targets)]
    for t, copy in copies.items():
        target = targets[t]
        assert target is not None
        target.detach().copy_(copy)
