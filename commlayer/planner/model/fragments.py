"""Cuts a plan's buckets into fragments that are exchanged in turns. Pure: knows buckets by number and slices, and no worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

from commlayer.records import Slice

UNEVEN = 0.5
"""By such a part of a turn may turns be uneven, so that a tensor stays whole."""


class Cut(Protocol):
    """A bucket, or what becomes one."""

    @property
    def slices(self) -> tuple[Slice, ...]: ...
    @property
    def numel(self) -> int: ...


def fragments_of(buckets: Sequence[Cut], count: int) -> list[list[int]]:
    """The places of each fragment's buckets, in the plan's order, of about equal elements. ValueError if there are too few.

    A fragment is a stretch of the plan, since collectives go in its order. A tensor that is cut into several buckets may go in
    several turns, but stays whole where turns are nearly as even: its parts go to several servers, and a turn is to keep all
    of them busy.
    """
    if count == 1:
        return [list(range(len(buckets)))]
    if len(buckets) < count:
        raise ValueError(f"fragments={count}: the plan's buckets make {len(buckets)} at most")
    done, within = list(accumulate([b.numel for b in buckets], initial=0)), _within(buckets)

    def unevenness(place: int, part: int) -> tuple[float, int]:
        return abs(done[place] * count - done[-1] * part) + UNEVEN * done[-1] * within[place], place

    cuts = [0]
    for part in range(1, count):
        free = range(cuts[-1] + 1, len(buckets) + 1 - (count - part))
        cuts.append(min(free, key=lambda place, part=part: unevenness(place, part)))  # type: ignore[misc]
    return [list(range(low, high)) for low, high in pairwise([*cuts, len(buckets)])]


def _within(buckets: Sequence[Cut]) -> list[bool]:
    """By place, whether a tensor has parts on both sides of it."""
    last = {s.tensor: place for place, bucket in enumerate(buckets) for s in bucket.slices}
    found, reach = [False], -1
    for place, bucket in enumerate(buckets):
        reach = max([reach, *(last[s.tensor] for s in bucket.slices)])
        found.append(reach > place)
    return found


def ranges_of(buckets: Iterable[Cut]) -> dict[int, list[tuple[int, int]]]:
    """By tensor, which of its elements these buckets hold: from and to, neighbours as one."""
    found: dict[int, list[tuple[int, int]]] = {}
    for s in sorted((s for bucket in buckets for s in bucket.slices), key=lambda s: (s.tensor, s.start)):
        ranges = found.setdefault(s.tensor, [])
        if ranges and ranges[-1][1] == s.start:
            ranges[-1] = ranges[-1][0], s.stop
        else:
            ranges.append((s.start, s.stop))
    return found
