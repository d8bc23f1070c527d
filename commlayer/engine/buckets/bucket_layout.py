"""Memory layout of buckets: the slices of tensors that a bucket contains, and its memory."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

import torch

from commlayer.compressors import kernels
from commlayer.records import Bucket, Job


def all_finite(tensor: torch.Tensor) -> bool:
    """Returns True if all elements are finite, for any dtype and device. For a tensor on a GPU the host waits for the result.
    """
    if is_plain(tensor):
        return bool(kernels.host().all_finite(tensor.detach().view(-1)))
    return bool(tensor.isfinite().all())


def scale(x: torch.Tensor, factor: float | torch.Tensor, out: torch.Tensor) -> bool:
    """Writes x times `factor` into `out`, and returns True, if all elements of x are finite. Returns False as soon as some
    element is not; `out` is then unchanged there and later."""
    if isinstance(factor, float) and is_plain(x) and is_plain(out):
        return bool(kernels.host().scale_f32(out.view(-1), x.view(-1), factor))
    if finite := all_finite(x):
        torch.mul(x, factor, out=out)
    return finite


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns True if the host's kernels can work on a tensor."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()


ALIGN = 64
T = TypeVar("T")


class BucketLayout:
    """Layout of one bucket's elements: which slices of which tensors the bucket contains, and the shapes of these slices."""

    def __init__(self, bucket: Bucket, job: Job) -> None:
        self.slices, self.numel = bucket.slices, bucket.numel
        self.shapes = [_shape(job, s.tensor, s.start, s.stop) for s in bucket.slices]

    def views(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Splits x, the elements of a bucket, into views, one for each slice. The view of a complete tensor has the tensor's
        shape; the view of a part of a tensor is flat."""
        views, at = [], 0
        for s, shape in zip(self.slices, self.shapes, strict=True):
            views.append(x[at : at + s.numel].view(shape))
            at += s.numel
        return views

    def pairs(self, tensors: Sequence[torch.Tensor | None], views: Sequence[T]) -> list[tuple[T, torch.Tensor]]:
        """Returns pairs (view, the same elements of the tensor) for all slices whose tensor is not None. `views`: one value
        for each slice.

        A complete tensor can have any strides. A split tensor must be contiguous; see `contiguous`.
        """
        pairs = []
        for view, tensor, shape, s in zip(views, tensors, self.shapes, self.slices, strict=True):
            if tensor is not None:
                pairs.append((view, tensor if tensor.shape == shape else tensor.view(-1)[s.start : s.stop]))
        return pairs


def _shape(job: Job, tensor: int, start: int, stop: int) -> tuple[int, ...]:
    info = job.tensors[tensor]
    return info.shape if (start, stop) == (0, info.numel) else (stop - start,)


def aligned(lead: int, nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocates `lead` bytes followed by `nbytes` bytes, the latter on a 64-byte boundary. The memory comes from the system and
    not from the heap, which would fragment when plans change."""
    room = ALIGN + lead + nbytes + ALIGN
    raw = torch.empty(room, dtype=torch.uint8, pin_memory=True) if pinned \
        else torch.from_numpy(kernels.fresh_zeros(-(-room // 4))).view(torch.uint8)
    skip = -(raw.data_ptr() + lead) % ALIGN
    return raw[skip : skip + lead + nbytes]


def buffer_on(device: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocates a buffer of a bucket."""
    if device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    return aligned(0, numel * dtype.itemsize, pinned=False).view(dtype)


@contextlib.contextmanager
def contiguous(targets: Sequence[torch.Tensor | None], split: Collection[int]) -> Iterator[list[torch.Tensor | None]]:
    """Yields the targets, but a contiguous tensor of zeros instead of each target that is split between buckets and not
    contiguous. At the end these tensors are copied into their targets. `split`: numbers of the split tensors."""
    copies = {t: (target, torch.zeros_like(target, memory_format=torch.contiguous_format))
              for t, target in enumerate(targets) if target is not None and t in split and not target.is_contiguous()}
    yield [copies[t][1] if t in copies else target for t, target in enumerate(targets)] if copies else [*targets]
    for target, copy in copies.values():
        target.detach().copy_(copy)


class BucketMemory:
    """Send buffer `x` and receive buffer `y` of one bucket. Each is followed by a `tail`: one flag per slice, which says that a
    worker used the slice, and the weight. Collectives sum the tail together with the elements. Both buffers can be the same
    memory."""

    def __init__(self, layout: BucketLayout, every: torch.Tensor, every_y: torch.Tensor) -> None:
        self._layout = layout
        self.place(every, every_y)

    def place(self, every: torch.Tensor, every_y: torch.Tensor) -> None:
        """Sets the memory of both buffers. Buckets without a codec can share one memory block."""
        numel = self._layout.numel
        self.all, self.all_y = every, every_y
        self.x, self.tail = every[:numel], every[numel:]
        self.y, self.tail_y = every_y[:numel], every_y[numel:]
        on_host = every.device.type == "cpu"
        self.facts = self.tail.numpy() if on_host else None
        self.facts_y = self.tail_y.numpy() if on_host else None
        """The tails of both buffers as numpy arrays, which are faster to access than tensors, if the buffers are in host
        memory; else None."""
        self.views, self.views_y = self._layout.views(self.x), self._layout.views(self.y)

    def drop_y(self) -> None:
        """Frees the receive buffer, because results stay encoded or sparse."""
        self.y = self.all_y = self.tail_y = torch.empty(0)
        self.facts_y, self.views_y = None, []


def release(x: torch.Tensor) -> None:
    """Returns a buffer's memory to the system. Its contents are lost. Does nothing for pinned memory and on a GPU."""
    if x.device.type == "cpu" and not x.is_pinned():
        kernels.give_back(x.detach().numpy())


def trim() -> None:
    """Returns freed heap memory to the system. Takes a few milliseconds."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc has it, musl does not
        libc.malloc_trim(ctypes.c_size_t(0))
