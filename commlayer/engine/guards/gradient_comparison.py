"""Compares sent and received values with the exact gradients, for a sampled piece of a bucket.

The comparison runs after a step's exchange, before its averages are written. At that time the receive buffer contains the sum,
the gradients are unchanged, and the residual is the part that was not sent. Steps without a comparison therefore cost nothing.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

from commlayer.cluster.processes.collectives import Groups
from commlayer.compressors.feedback import find_residual
from commlayer.engine.buckets.bucket import EncodedBucket, WorkerBucket
from commlayer.engine.job.codec_floor import exchanges_gradients, is_lossy
from commlayer.engine.worker.worker import Worker
from commlayer.observe.fidelity import Dots
from commlayer.records import Bucket, Job, Plan

GOLDEN = 0.6180339887498949
"""The golden ratio. Its multiples modulo 1 are the positions of the sampled pieces, so the pieces cover a model evenly, however
many are sampled."""


class SampledPiece(NamedTuple):
    """Elements `start` to `stop` of a bucket, and a copy of their residuals before the step. The copy is None if this rank
    keeps no residuals of its own gradients. `bucket` is None if another rank of the site has the shards of the bucket."""

    planned: Bucket
    bucket: WorkerBucket | None
    start: int
    stop: int
    owing: torch.Tensor | None


NOTHING_SAID = Dots(*[math.nan] * 4)
"""Result for a step that cannot be compared, because it also sent residuals of an earlier plan."""


def compared_buckets(plan: Plan, job: Job) -> list[Bucket]:
    """Returns the lossily compressed buckets whose results belong to the same step as their gradients."""
    return [b for b in plan.buckets
            if is_lossy(b) and not job.tensors[b.slices[0].tensor].buffer and not b.stale and exchanges_gradients(b)]


def piece(worker: Worker, buckets: list[Bucket], number: int, most: int) -> SampledPiece:
    """Returns the `number`th sampled piece, of at most `most` elements. Buckets are chosen in proportion to their sizes. The
    piece is the same on all ranks."""
    at = int(number * GOLDEN % 1.0 * sum(b.numel for b in buckets))
    for planned in buckets:
        if at < planned.numel:
            break
        at -= planned.numel
    start = max(0, min(at, planned.numel - most))
    stop = min(planned.numel, start + most)
    bucket = next((b for b in worker.buckets if b.id == planned.id), None)
    residual = _own_residual(bucket)
    return SampledPiece(planned, bucket, start, stop, None if residual is None else residual[start:stop].clone())


def exact_gradients(worker: Worker, of: SampledPiece) -> torch.Tensor:
    """Returns this rank's gradients of the piece as they are added to the sum: weighted, and without loss scale."""
    bucket = of.bucket
    gradients = torch.zeros(of.stop - of.start, device=worker.device)
    if bucket is None or worker.units.weight == 0.0:
        return gradients
    at = 0
    for source, s in zip(bucket.sources, bucket.slices, strict=True):
        low, high = max(at, of.start), min(at + s.numel, of.stop)
        if low < high and source is not None:
            first = s.start - at  # the source contains all elements of the tensor
            gradients[low - of.start : high - of.start] = source.detach().reshape(-1)[first + low : first + high]
        at += s.numel
    return gradients.mul_(worker.units.factor(bucket, bucket.exchange.weight or worker.units.total))


def compare_on_node(of: SampledPiece, mine: torch.Tensor, groups: Groups, deadline_s: float) -> Dots:
    """Compares the values that this node sent with the exact values (`mine`), using the residuals before and after. All ranks
    of a node call it.

    The result is not finite if the step cannot be compared.
    """
    if len(groups.site) > 1 and of.planned.served:
        mine = mine.clone()
        groups.inside.out.reduce(mine, of.planned.owner_in(range(len(groups.site)))).wait(time.monotonic() + deadline_s)
    residual = _own_residual(of.bucket)
    if of.bucket is None or of.owing is None or residual is None:
        return Dots()
    if of.bucket.ledger.sent is not None:
        return NOTHING_SAID
    after = residual[of.start : of.stop].to(mine.device)
    return dots(mine, mine + of.owing.to(mine.device) - after, after)


def compare_sums(of: SampledPiece, mine: torch.Tensor, groups: Groups, deadline_s: float) -> Dots:
    """Compares the received sum with the exact sum, which an all-reduce computes in place in `mine`. All ranks call it
    together. The result is zero on ranks that do not have the bucket."""
    groups.allreduce(mine).wait(time.monotonic() + deadline_s)
    if of.bucket is None:
        return Dots()
    if of.bucket.ledger.sent is not None:
        return NOTHING_SAID
    return dots(mine, of.bucket.y[of.start : of.stop])


def dots(x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor | None = None) -> Dots:
    """Returns the scalar products of x with itself, x with y, y with itself, and `kept` with itself. On a GPU the host waits
    once."""
    pairs = [(x, x), (x, y), (y, y), (kept, kept) if kept is not None else (x.new_zeros(1), x.new_zeros(1))]
    return Dots(*torch.stack([torch.dot(a, b) for a, b in pairs]).tolist())


def _own_residual(bucket: WorkerBucket | None) -> torch.Tensor | None:
    """Returns the bucket's residual, if it belongs to this rank's own gradients and not to partial sums or a node's sum; else
    None."""
    if not isinstance(bucket, EncodedBucket):
        return None
    residual = find_residual(bucket.ledger.state)
    return None if residual is None else torch.as_tensor(residual)
