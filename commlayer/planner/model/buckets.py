"""Cuts and fuses a job's tensors into buckets. Knows limits of bytes, but not what is sent how."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from commlayer.planner.model.default_plan import ELEMENT_NBYTES, fused
from commlayer.planner.model.float64 import DOUBLE
from commlayer.planner.model.thin import is_thin
from commlayer.records import MAX_BUCKET_NBYTES, Job, Slice


class Limits(NamedTuple):
    """How tensors become buckets."""

    fuse_nbytes: int
    cut_nbytes: int
    matrix_nbytes: int = 0
    """Where a codec needs matrices, these stay whole up to so many bytes."""


class Sort(IntEnum):
    """What a bucket holds. Only gradients are coded, and doubles are rounded by whatever is no all-reduce. Thin ones are
    gradients of which little travels, if they are sent as they are or rounded."""

    GRADIENTS = 0
    BUFFERS = 1
    DOUBLES = 2
    THIN = 3


KIB, MIB = 1 << 10, 1 << 20
MOST_BUCKETS = 100
"""Limits grow with the model, so that about so many buckets remain: each has a cost of its own, here and at run time."""
TRIED = (Limits(256 * KIB, 2 * MIB), Limits(MIB, 4 * MIB), Limits(4 * MIB, 16 * MIB), Limits(25 * MIB, 100 * MIB))
"""From overlap (small buckets go out early) to few calls (each pays latency and floors)."""


def limits(
    job: Job, most: int = MAX_BUCKET_NBYTES, *, matrices: bool = False, small: bool = True,
) -> tuple[Limits, ...]:
    """The limits worth trying for a model of this size, without repetitions. `most`: bytes that a bucket may have.

    `small`: also each tensor by itself, as in Espresso. Dozens of biases in buckets of their own cost more than their prices.
    """
    floor = job.numel * ELEMENT_NBYTES // MOST_BUCKETS
    tried = (Limits(min(max(a, floor), most), min(max(b, floor), most)) for a, b, _ in TRIED)
    alone = [Limits(0, most)] if small and len(job.tensors) <= MOST_BUCKETS * 2 else []
    kept = most if matrices else 0
    return tuple(dict.fromkeys([limit._replace(matrix_nbytes=kept) for limit in (*tried, *alone)]))


def groups(job: Job, limit: Limits) -> list[tuple[Slice, ...]]:
    """Slices by bucket, in the order in which backward makes them ready; buffers last."""
    made = list(fused(job, limit.fuse_nbytes, limit.fuse_nbytes, limit.cut_nbytes, 1, False, limit.matrix_nbytes))
    return sorted(made, key=lambda group: (is_buffer(job, group), readiness(job, group), -min(s.tensor for s in group),
                                           group[0].start))


def between(group: tuple[Slice, ...], start: int, stop: int) -> tuple[Slice, ...]:
    """
    >>> between((Slice(3, 0, 10), Slice(4, 5, 9)), 8, 13)
    (Slice(tensor=3, start=8, stop=10), Slice(tensor=4, start=5, stop=8))
    """
    found = []
    at = 0
    for part in group:
        numel = part.stop - part.start
        first, last = max(start - at, 0), min(stop - at, numel)
        if first < last:
            found.append(Slice(part.tensor, part.start + first, part.start + last))
        at += numel
        if at >= stop:
            break
    return tuple(found)


def is_buffer(job: Job, group: tuple[Slice, ...]) -> bool:
    return job.tensors[group[0].tensor].buffer


def sort_of(job: Job, group: tuple[Slice, ...]) -> Sort:
    if job.tensors[group[0].tensor].dtype == DOUBLE:
        return Sort.DOUBLES
    if is_buffer(job, group):
        return Sort.BUFFERS
    return Sort.THIN if is_thin(job, group[0].tensor) else Sort.GRADIENTS


def readiness(job: Job, group: tuple[Slice, ...]) -> float:
    """Seconds from the start of backward until all of it is final; buffers are announced when backward is over."""
    if job.timing is None:
        return 0.0
    return job.timing.backward_s if is_buffer(job, group) else max(job.timing.ready_s[s.tensor] for s in group)
