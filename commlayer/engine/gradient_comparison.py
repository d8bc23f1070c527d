"""Compares, on a piece of a bucket, what was sent and what came back with the exact gradients. Knows buckets and groups.

It looks between the end of a step's exchange and its commit: then `y` holds the sum that came back, the gradients are as they
were, and what is kept back is the residual. So nothing is copied on the way of a gradient, and only looking costs.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

from commlayer.cluster.groups import Groups
from commlayer.compressors.debts import owed
from commlayer.engine.bucket import WorkerBucket
from commlayer.engine.codec_floor import exchanges_gradients, lossy
from commlayer.engine.worker import Worker
from commlayer.observe.fidelity import Dots

GOLDEN = 0.6180339887498949
"""Its multiples, modulo 1, visit all parts of a model evenly however soon one stops."""


class Piece(NamedTuple):
    """Elements start to stop of a bucket, and what was kept back of them before the step (None where that says nothing)."""

    bucket: WorkerBucket
    start: int
    stop: int
    owing: torch.Tensor | None


NOTHING_SAID = Dots(*[math.nan] * 4)
"""Of a step that pays an earlier plan's debts: more goes out than its gradients."""


def watched(worker: Worker) -> list[WorkerBucket]:
    """The buckets that lose something and whose results are the gradients of the step. The same on all ranks."""
    return [b for b in worker.buckets
            if lossy(b.planned) and not b.buffer and not b.late and exchanges_gradients(b.planned)]


def piece(buckets: list[WorkerBucket], number: int, most: int) -> Piece:
    """The `number`th one, of at most so many elements; buckets take turns by their sizes. The same on all ranks."""
    at = int(number * GOLDEN % 1.0 * sum(f.numel for f in buckets))
    for bucket in buckets:
        if at < bucket.numel:
            break
        at -= bucket.numel
    start = max(0, min(at, bucket.numel - most))
    stop = min(bucket.numel, start + most)
    kept = _kept(bucket)
    return Piece(bucket, start, stop, None if kept is None else kept[start:stop].clone())


def exact(worker: Worker, of: Piece) -> torch.Tensor:
    """This rank's gradients there, as they go into the sum: weighted, and without loss scale."""
    bucket = of.bucket
    made = torch.zeros(of.stop - of.start, device=bucket.x.device)
    if worker.weight == 0.0:
        return made
    at = 0
    for source, s in zip(bucket.sources, bucket.slices, strict=True):
        low, high = max(at, of.start), min(at + s.numel, of.stop)
        if low < high and source is not None:
            first = s.start - at  # the source is the whole tensor
            made[low - of.start : high - of.start] = source.detach().reshape(-1)[first + low : first + high]
        at += s.numel
    return made.mul_(worker.units.factor(bucket))


def here(worker: Worker, of: Piece, mine: torch.Tensor, groups: Groups, deadline_s: float) -> Dots:
    """What left this node and what is kept back of it, from the residual before and after. All ranks of a node call it.

    Not finite where the step says nothing.
    """
    if groups.ranks_per_node > 1 and of.bucket.served:
        mine = mine.clone()
        groups.inside.out.reduce(mine, of.bucket.owner).wait(time.monotonic() + deadline_s)
    if of.owing is None:
        return Dots()
    if of.bucket.carried is not None:
        return NOTHING_SAID
    kept = _kept(of.bucket)
    assert kept is not None
    after = kept[of.start : of.stop].to(mine.device)
    return dots(mine, mine + of.owing.to(mine.device) - after, after)


def everywhere(of: Piece, mine: torch.Tensor, groups: Groups, deadline_s: float) -> Dots:
    """All ranks together: the sum that came back against the exact one, which this all-reduce makes of `mine`, in place."""
    groups.allreduce(mine).wait(time.monotonic() + deadline_s)
    if of.bucket.carried is not None:
        return NOTHING_SAID
    return dots(mine, of.bucket.y[of.start : of.stop])


def dots(x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor | None = None) -> Dots:
    """In one pass over a few thousand elements; one wait for the device."""
    pairs = [(x, x), (x, y), (y, y), (kept, kept) if kept is not None else (x.new_zeros(1), x.new_zeros(1))]
    return Dots(*torch.stack([torch.dot(a, b) for a, b in pairs]).tolist())


def _kept(bucket: WorkerBucket) -> torch.Tensor | None:
    """Its residual, where that is of this rank's own gradients: not of sums on the way, nor inside a node."""
    if not bucket.coded:
        return None
    return owed(bucket.state, bucket.numel)
