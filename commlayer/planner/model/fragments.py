"""Cuts a plan's buckets into fragments that are exchanged in turns. Pure: knows buckets by number and slices, and no worker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

from commlayer.records import Slice


class Cut(Protocol):
    """A bucket, or what becomes one."""

    @property
    def slices(self) -> tuple[Slice, ...]: ...
    @property
    def numel(self) -> int: ...


def fragments_of(buckets: Sequence[Cut], count: int) -> list[list[int]]:
    """The places of each fragment's buckets, in the plan's order, of about equal elements. ValueError if there are too few.

    A fragment is a stretch of the plan, since collectives go in its order. All of a tensor is in one: what an outer optimizer
    keeps is by tensors.
    """
    if count == 1:
        return [list(range(len(buckets)))]
    edges = _edges(buckets)
    if len(edges) <= count:
        raise ValueError(f"fragments={count}: the plan's buckets make {len(edges) - 1} at most, for all of a tensor is in one")
    sums = list(accumulate([b.numel for b in buckets], initial=0))
    done = [sums[edge] for edge in edges]
    chosen = [0]
    for part in range(1, count):
        free = range(chosen[-1] + 1, len(edges) - (count - part))
        chosen.append(min(free, key=lambda i, part=part: (abs(done[i] * count - done[-1] * part), i)))  # type: ignore[misc]
    cuts = [*(edges[i] for i in chosen), len(buckets)]
    return [list(range(low, high)) for low, high in pairwise(cuts)]


def most_fragments(buckets: Sequence[Cut]) -> int:
    """Into how many they can be cut."""
    return len(_edges(buckets)) - 1


def _edges(buckets: Sequence[Cut]) -> list[int]:
    """Places ahead of which no tensor is left half; the first and the last among them."""
    ends: dict[int, int] = {}
    for place, bucket in enumerate(buckets):
        for s in bucket.slices:
            ends[s.tensor] = place
    edges, reach = [0], 0
    for place, bucket in enumerate(buckets):
        reach = max(reach, *(ends[s.tensor] for s in bucket.slices))
        if reach == place:
            edges.append(place + 1)
    return edges
