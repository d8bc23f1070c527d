"""Cuts a bucket into one shard per rank of a node, and finds a plan's shards.

A shard is an ordinary bucket with its own owner, payload and residual. Shards are ready together: the node sums them in one
reduce-scatter and shares their results in one all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from commlayer.records import Bucket, Slice


def cut(slices: Sequence[Slice], parts: int) -> list[tuple[Slice, ...]]:
    """Cuts slices into `parts` runs of nearly equal size; a run may be empty."""
    numel = sum(s.numel for s in slices)
    runs = []
    for low, high in pairwise(numel * i // parts for i in range(parts + 1)):
        run, at = [], 0
        for s in slices:
            first, last = max(low, at), min(high, at + s.numel)
            if first < last:
                run.append(Slice(s.tensor, s.start + first - at, s.start + last - at))
            at += s.numel
        runs.append(tuple(run))
    return runs


def together(buckets: Sequence[Bucket], ranks_per_node: int) -> list[range]:
    """Ranges of places that a node handles as one, in order: the shards of one former bucket, or a single bucket.

    Shards are neighbours of equal size, owned by local ranks 0, 1, ... Each begins in the tensor in which the one before
    ends, so that one gradient makes all of them ready, or nearly so.
    """
    runs: list[range] = []
    place = 0
    while place < len(buckets):
        run = range(place, place + ranks_per_node)
        alike = ranks_per_node > 1 and run.stop <= len(buckets) and _shards([buckets[i] for i in run])
        runs.append(run if alike else range(place, place + 1))
        place = runs[-1].stop
    return runs


def _shards(buckets: Sequence[Bucket]) -> bool:
    sizes = [bucket.numel for bucket in buckets]
    return (
        [bucket.owner for bucket in buckets] == [*range(len(buckets))]
        and max(sizes) - min(sizes) <= 1
        and all(_joined(before.slices[-1], after.slices[0]) for before, after in pairwise(buckets))
    )


def _joined(before: Slice, after: Slice) -> bool:
    return before.tensor == after.tensor and before.stop == after.start
