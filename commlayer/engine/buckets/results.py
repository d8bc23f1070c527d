"""Results of a bucket as sparse entries, or encoded until they are written, without dense memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from commlayer.compressors import kernels
from commlayer.compressors.codec import NAN, OneRound
from commlayer.compressors.plan_codecs import result_codec
from commlayer.engine.buckets.bucket_layout import BucketLayout


class SparseResult:
    def __init__(self, layout: BucketLayout, idx: torch.Tensor, values: torch.Tensor) -> None:
        self._layout, self._idx, self._values = layout, idx, values
        self._starts = [0, *accumulate(s.numel for s in layout.slices)]
        self._cuts: list[int] = torch.searchsorted(idx, torch.tensor(self._starts, dtype=torch.int32)).tolist()

    def entries(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sparse entries of slice `number`: element positions in the slice's tensor, and values."""
        low, high = self._cuts[number], self._cuts[number + 1]
        return self._idx[low:high] + (self._layout.slices[number].start - self._starts[number]), self._values[low:high]

    def write(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes each slice times `factor` into its target. A target of None skips a slice. Elements without an entry become 0.
        """
        for number, target in self._layout.pairs(targets, range(len(targets))):
            to, (idx, values) = target.detach(), self._slice(number)
            if to.is_contiguous() and to.dtype == torch.float32:
                kernels.host().scatter_add(to.zero_().view(-1), idx, values * factor)
            else:
                torch.mul(_spread(idx, values, to.numel()).view(to.shape), factor, out=to)

    def _slice(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = self._cuts[number], self._cuts[number + 1]
        return self._idx[low:high] - self._starts[number], self._values[low:high]

    def to_dense(self) -> torch.Tensor:
        return _spread(self._idx, self._values, self._starts[-1])


def _spread(idx: torch.Tensor, values: torch.Tensor, numel: int) -> torch.Tensor:
    dense = torch.zeros(numel)
    kernels.host().scatter_add(dense, idx, values)
    return dense


def codec_of_results(codec: Any) -> OneRound | None:
    """Returns the codec that can check a result on arrival and decode it later. Returns None if `codec` cannot do both."""
    inner = result_codec(codec)
    return inner if isinstance(inner, OneRound) and type(inner).decode is OneRound.decode else None


class EncodedResult:
    """The encoded result of one bucket, kept until the bucket's next exchange."""

    def __init__(self, codec: OneRound, layout: BucketLayout, body: memoryview) -> None:
        """Checks the received bytes `body` completely, and raises CorruptFrame as `decode` would. After that, decoding cannot
        fail."""
        self._codec, self._layout, self.body = codec, layout, body
        self._parts = codec.unpack(body, layout.numel)

    @property
    def finite(self) -> bool:
        return self._parts is not None

    def write(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Decodes each slice, times `factor`, into its target. A target of None skips a slice."""
        into = [(number, target.detach()) for number, target in self._layout.pairs(targets, range(len(targets)))]
        if len(targets) == 1 and into and into[0][1].is_contiguous() and into[0][1].dtype == torch.float32:
            self._decode(into[0][1].view(-1))
            into[0][1].mul_(factor)
        elif into:
            views = self._layout.views(self.to_dense().mul_(factor))
            torch._foreach_copy_([to for _, to in into], [views[number] for number, _ in into])

    def to_dense(self) -> torch.Tensor:
        elements = torch.empty(self._layout.numel)
        self._decode(elements)
        return elements

    def _decode(self, out: torch.Tensor) -> None:
        if self._parts is None:
            out.fill_(NAN)
        else:
            self._codec.apply(self._parts, out, assign=True)
