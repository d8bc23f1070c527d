"""The agreed values of all buckets of buffers: set at the start, handed to the next plan, saved and restored. Between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from commlayer.compressors.debts import spread
from commlayer.runtime.bucket import WorkerBucket


def agree(buckets: Sequence[WorkerBucket], tensors: Sequence[torch.Tensor | None]) -> None:
    """All ranks have the same buffers now. Tensors are by their numbers; what is none is left out."""
    for bucket in buckets:
        if bucket.agreed is not None:
            mine = [tensors[s.tensor] for s in bucket.slices]
            for view, tensor in bucket.layout.pairs(mine, bucket.layout.views(bucket.agreed.values)):
                view.copy_(tensor.detach())


def pass_on(before: Sequence[WorkerBucket], after: Sequence[WorkerBucket]) -> None:
    """What was agreed under one plan, to the buckets of the next."""
    known = [part for bucket in before if bucket.agreed is not None
             for part in spread(bucket.slices, 0, bucket.agreed.values)]
    for bucket in after:
        at = 0
        for s in bucket.slices if bucket.agreed is not None else ():
            assert bucket.agreed is not None
            for part in known:
                low, high = max(s.start, part.start), min(s.stop, part.stop)
                if part.tensor == s.tensor and low < high:
                    place = at - s.start
                    bucket.agreed.values[place + low : place + high] = part.values[low - part.start : high - part.start]
            at += s.numel


def snapshot(buckets: Sequence[WorkerBucket]) -> dict[str, torch.Tensor]:
    """For a checkpoint: between two exchanges of local steps no model's file holds it."""
    return {f"agreed.{bucket.id}": bucket.agreed.values.cpu().clone() for bucket in buckets if bucket.agreed is not None}


def restore(buckets: Sequence[WorkerBucket], tensors: Mapping[str, torch.Tensor]) -> None:
    """The reverse. What is not there stays as it is."""
    for bucket in buckets:
        if bucket.agreed is not None and (saved := tensors.get(f"agreed.{bucket.id}")) is not None:
            bucket.agreed.values.copy_(saved)
