"""Splits a plan's buckets into fragments that are exchanged one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

from commlayer.errors import InvalidInput
from commlayer.records import Slice


class Cut(Protocol):
    """A bucket, or a group of slices that becomes one."""

    @property
    def slices(self) -> tuple[Slice, ...]: ...
    @property
    def numel(self) -> int: ...


def fragments_of(buckets: Sequence[Cut], count: int) -> list[list[int]]:
    """Places of each fragment's buckets in the plan's order, balanced by elements. ValueError if there are too few buckets.

    A fragment is a contiguous part of the plan, since collectives run in its order. The buckets of a cut tensor may be in
    several fragments.
    """
    if count == 1:
        return [list(range(len(buckets)))]
    if len(buckets) < count:
        raise InvalidInput("E-SYNC-FRAGMENTS", f"fragments={count}: the plan's buckets make {len(buckets)} at most")
    done = list(accumulate([b.numel for b in buckets], initial=0))
    cuts = [0]
    for part in range(1, count):
        free = range(cuts[-1] + 1, len(buckets) + 1 - (count - part))
        cuts.append(min(free, key=lambda i, part=part: (abs(done[i] * count - done[-1] * part), i)))  # type: ignore[misc]
    return [list(range(low, high)) for low, high in pairwise([*cuts, len(buckets)])]


def most_fragments(count: int, every: int, buckets: int) -> int:
    """The largest divisor of `every` that is at most `count` and at most the number of buckets.

    >>> most_fragments(4, 12, 3), most_fragments(4, 8, 3), most_fragments(4, 8, 9)
    (3, 2, 4)
    """
    return max(number for number in range(1, max(1, min(count, buckets)) + 1) if every % number == 0)


def ranges_of(buckets: Iterable[Cut]) -> dict[int, list[tuple[int, int]]]:
    """Element ranges that these buckets hold, by tensor; adjacent ranges are joined."""
    by_tensor: dict[int, list[tuple[int, int]]] = {}
    for s in sorted((s for bucket in buckets for s in bucket.slices), key=lambda s: (s.tensor, s.start)):
        ranges = by_tensor.setdefault(s.tensor, [])
        if ranges and ranges[-1][1] == s.start:
            ranges[-1] = ranges[-1][0], s.stop
        else:
            ranges.append((s.start, s.stop))
    return by_tensor
