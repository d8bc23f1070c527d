"""Cuts and fuses a job's tensors into buckets."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from commlayer.planner.model.default_plan import ELEMENT_NBYTES, fused
from commlayer.planner.model.float64 import DOUBLE
from commlayer.planner.model.thin import is_thin
from commlayer.records import MAX_BUCKET_NBYTES, Job, Slice


class Limits(NamedTuple):
    """Size limits for turning tensors into buckets."""

    fuse_nbytes: int
    cut_nbytes: int
    matrix_nbytes: int = 0
    """For codecs that need matrices: a matrix up to this size stays whole."""


class Sort(IntEnum):
    """Kind of a bucket's contents. Only gradients are compressed. Every path except all-reduce rounds doubles. THIN:
    mostly zero gradients, whose zeros are not sent if they go uncompressed or rounded."""

    GRADIENTS = 0
    BUFFERS = 1
    DOUBLES = 2
    THIN = 3


KIB, MIB = 1 << 10, 1 << 20
MOST_BUCKETS = 100
"""Approximate limit for the number of buckets; size limits grow with the model to keep it. Each bucket costs planning time
and run time."""
TRIED = (Limits(256 * KIB, 2 * MIB), Limits(MIB, 4 * MIB), Limits(4 * MIB, 16 * MIB), Limits(25 * MIB, 100 * MIB))
"""From good overlap (small buckets start early) to few calls (each pays latency and fixed costs)."""


def limits(
    job: Job, most: int = MAX_BUCKET_NBYTES, *, matrices: bool = False, small: bool = True,
) -> tuple[Limits, ...]:
    """Distinct limits worth trying for a model of this size. `most`: largest bucket in bytes.

    `small`: also try each tensor alone, as in Espresso. For dozens of biases this costs more than the prices say.
    """
    floor = job.numel * ELEMENT_NBYTES // MOST_BUCKETS
    tried = (Limits(min(max(a, floor), most), min(max(b, floor), most)) for a, b, _ in TRIED)
    alone = [Limits(0, most)] if small and len(job.tensors) <= MOST_BUCKETS * 2 else []
    kept = most if matrices else 0
    return tuple(dict.fromkeys([limit._replace(matrix_nbytes=kept) for limit in (*tried, *alone)]))


def groups(job: Job, limit: Limits) -> list[tuple[Slice, ...]]:
    """Slices by bucket, in the order in which backward makes them ready; buffers last."""
    unsorted = list(fused(job, limit.fuse_nbytes, limit.fuse_nbytes, limit.cut_nbytes, 1, False, limit.matrix_nbytes))
    return sorted(unsorted, key=lambda group: (is_buffer(job, group), readiness(job, group), -min(s.tensor for s in group),
                                           group[0].start))


def between(group: tuple[Slice, ...], start: int, stop: int) -> tuple[Slice, ...]:
    """Elements [start, stop) of a group, as slices.

    >>> between((Slice(3, 0, 10), Slice(4, 5, 9)), 8, 13)
    (Slice(tensor=3, start=8, stop=10), Slice(tensor=4, start=5, stop=8))
    """
    parts = []
    at = 0
    for part in group:
        numel = part.stop - part.start
        first, last = max(start - at, 0), min(stop - at, numel)
        if first < last:
            parts.append(Slice(part.tensor, part.start + first, part.start + last))
        at += numel
        if at >= stop:
            break
    return tuple(parts)


def is_buffer(job: Job, group: tuple[Slice, ...]) -> bool:
    return job.tensors[group[0].tensor].buffer


def sort_of(job: Job, group: tuple[Slice, ...]) -> Sort:
    if job.tensors[group[0].tensor].dtype == DOUBLE:
        return Sort.DOUBLES
    if is_buffer(job, group):
        return Sort.BUFFERS
    return Sort.THIN if is_thin(job, group[0].tensor) else Sort.GRADIENTS


def readiness(job: Job, group: tuple[Slice, ...]) -> float:
    """Seconds from the start of backward until all of the bucket is final. Buffers are ready when backward ends."""
    if job.timing is None:
        return 0.0
    return job.timing.backward_s if is_buffer(job, group) else max(job.timing.ready_s[s.tensor] for s in group)
