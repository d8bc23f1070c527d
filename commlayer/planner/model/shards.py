"""A bucket cut into one part for each rank of a node, and which buckets of a plan are such parts. Knows slices, no costs.

A shard is a bucket like any other, with its owner, its payload and its residual. What makes shards of several buckets is that
they are ready together: then the node sums them in one reduce-scatter and hands their results on in one all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from commlayer.records import Bucket, Slice


def cut(slices: Sequence[Slice], parts: int) -> list[tuple[Slice, ...]]:
    """In so many runs of nearly equal size; a run may be empty."""
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
    """The places of buckets that go through a node as one, in order: the shards of one stretch of a tensor, or a bucket alone.

    Shards stand side by side, have the local ranks as owners in turn and one size, and each begins in the tensor in which the
    one before ends: so one gradient makes them ready, or nearly so.
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
