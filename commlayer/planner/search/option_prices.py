"""What options cost by bucket of one layout, however steps are taken. Knows no choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

from commlayer.planner.pricing.batched import alone_s, stack
from commlayer.planner.pricing.problem import Load
from commlayer.planner.search.layout import Layout, Piece
from commlayer.planner.search.ways import Ways

K = TypeVar("K")


class OptionPrices:
    """What options cost by bucket, however steps are taken."""

    def __init__(self, ways: Ways, layout: Layout, useful: list[list[int]]) -> None:
        self._ways, self._layout, self._useful = ways, layout, useful

    @cached_property
    def loads(self) -> tuple[list[Load], list[list[float]]]:
        """And seconds on lanes."""
        return loads_of(self._ways, [[(option, 0, 0) for option in mine] for mine in self._useful], self._layout.pieces)

    @cached_property
    def alone_s(self) -> list[float]:
        """Until the bucket is through, were it alone and sent as is soonest."""
        found = [0.0] * len(self._useful)
        for options, buckets in _alike(self._useful):
            numels = np.array([float(self._layout.sizes[b]) for b in buckets])
            soonest = np.min([alone_s(self._ways.template(option), numels) for option in options], axis=0)
            for b, seconds in zip(buckets, soonest, strict=True):
                found[b] = float(seconds)
        return found


def loads_of(
    ways: Ways, useful: Sequence[Sequence[tuple[int, int, int]]], pieces: Sequence[Piece],
) -> tuple[list[Load], list[list[float]]]:
    """By bucket, and the seconds on lanes of each of its options; those with the same options are priced together.

    What is useful is an option with a server and an owner.
    """
    made: dict[int, tuple[Load, list[float]]] = {}
    for options, buckets in _alike(useful):
        stacked = stack([ways.template(*option) for option in options], np.array([float(pieces[b].numel) for b in buckets]))
        for b, seconds, latency, held_s in zip(buckets, stacked.seconds, stacked.latency, stacked.held_s, strict=True):
            made[b] = Load(stacked.shapes, seconds, latency, pieces[b].urgency), held_s
    loads, held = zip(*[made[b] for b in range(len(pieces))], strict=True) if pieces else ((), ())
    return list(loads), list(held)


def _alike(useful: Sequence[Sequence[K]]) -> list[tuple[tuple[K, ...], list[int]]]:
    """Buckets by their options."""
    alike: dict[tuple[K, ...], list[int]] = {}
    for b, mine in enumerate(useful):
        alike.setdefault(tuple(mine), []).append(b)
    return list(alike.items())
