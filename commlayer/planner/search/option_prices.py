"""Prices each bucket's options in one layout, and cuts buckets into the plan's parts, for all sync modes.

There are many sync modes, and most send buckets by the same few options; prices and parts are computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np

from commlayer.codec_spec import parse_spec
from commlayer.planner.model.default_plan import ELEMENT_NBYTES, least_spread_nbytes, spread
from commlayer.planner.model.fragments import fragments_of
from commlayer.planner.pricing.batched import alone_s, stack
from commlayer.planner.pricing.hidden_links import hidden
from commlayer.planner.pricing.path_cost import Prices
from commlayer.planner.pricing.problem import Load
from commlayer.planner.search.layout import Layout, Piece
from commlayer.planner.search.placement import assign
from commlayer.planner.search.ways import Ways

K = TypeVar("K")

SHARED = 4
"""Target number of parts of the model per server; fewer could be balanced badly."""
LEAST_NBYTES = 16 << 10
"""Least bytes of a part when cutting every bucket for every server is tried."""
ANY = -1
"""Placeholder for a part that may go to the server with the least load."""


class CandidatePart(NamedTuple):
    """A bucket of the future plan."""

    origin: int
    """The searched bucket of which this is all or a part."""
    piece: Piece
    option: int
    server: int
    owner: int


class OptionPrices:
    """Prices of options by bucket, for all sync modes."""

    def __init__(self, ways: Ways, layout: Layout, useful: list[list[int]]) -> None:
        self.ways, self._layout, self._useful = ways, layout, useful
        ranks = {node.ranks for node in ways.prices.cluster.nodes if node.ranks}
        self.per_node = ranks.pop() if len(ranks) == 1 else 1
        self._weights: dict[tuple[int, int], int] = {}
        self._parts: dict[tuple[tuple[int, ...], int, int], list[CandidatePart]] = {}
        self._placed: dict[tuple[tuple[int, ...], int, int], list[Load]] = {}

    @cached_property
    def hidden(self) -> OptionPrices:
        """The prices with links reduced to what hidden transfers can rely on."""
        prices = self.ways.prices
        reduced = Prices(hidden(prices.cluster), prices.profile, prices.hosts, spread=prices.spread)
        return OptionPrices(self.ways.at(reduced), self._layout, self._useful)

    @cached_property
    def loads(self) -> tuple[list[Load], list[list[float]]]:
        """Loads, and seconds on lanes."""
        return loads_of(self.ways, [[(option, 0, 0) for option in mine] for mine in self._useful], self._layout.pieces)

    @cached_property
    def alone_s(self) -> list[float]:
        """Seconds until each bucket is done, if sent alone by its fastest option."""
        shortest = [0.0] * len(self._useful)
        for options, buckets in _alike(self._useful):
            numels = np.array([float(self._layout.pieces[b].numel) for b in buckets])
            soonest = np.min([alone_s(self.ways.template(option), numels) for option in options], axis=0)
            for b, seconds in zip(buckets, soonest, strict=True):
                shortest[b] = float(seconds)
        return shortest

    def parts(self, sent: tuple[int, ...], finely: int, turns: int = 1) -> list[CandidatePart]:
        """Cuts and places the buckets of a plan; each is sent by the option of that number in `sent`.

        A bucket priced as spread over all servers is cut: each server gets at least `finely` parts of the model, and a part
        of each turn. Served buckets go to the server with the least load, and among a node's ranks to the one with the least.
        """
        key = sent, max(finely, turns), turns
        if key not in self._parts:
            self._parts[key] = self._cut(*key)
        return self._parts[key]

    def placed(self, sent: tuple[int, ...], finely: int, turns: int = 1) -> list[Load]:
        """Loads of these parts, each on its own server."""
        key = sent, max(finely, turns), turns
        if key not in self._placed:
            parts = self.parts(*key)
            ways = [((part.option, part.server, part.owner),) for part in parts]
            self._placed[key], _ = loads_of(self.ways.placed, ways, [part.piece for part in parts])
        return self._placed[key]

    def _cut(self, sent: tuple[int, ...], finely: int, turns: int) -> list[CandidatePart]:
        ways, layout = self.ways, self._layout
        hosts, bound_for = len(ways.prices.hosts), ways.prices.spread
        new_parts, total = list[CandidatePart](), sum(piece.numel for piece in layout.pieces)
        least_nbytes = least_spread_nbytes(turns) if finely == SHARED else LEAST_NBYTES
        for b, (size, option) in enumerate(zip(layout.sizes, sent, strict=True)):
            cuts = ways.options[option].served and not parse_spec(ways.options[option].codec).needs_shape
            numel = layout.pieces[b].numel
            parts = -(-numel * finely * hosts // max(1, total)) if cuts else 1
            parts = max(1, min(parts, hosts, numel * ELEMENT_NBYTES // least_nbytes))
            each = len(set(bound_for)) > 1 and parts == hosts  # servers sum unequal parts, in proportion to their links
            even = [size * i // parts for i in range(1, parts)]
            ends = [int(size * end) for end in accumulate(bound_for[:-1])] if each else even
            new_parts += [CandidatePart(b, piece, option, host if each else ANY, 0)
                     for host, piece in enumerate(layout.cut(b, tuple(ends)))]
        served = [i for i, part in enumerate(new_parts) if ways.options[part.option].served]
        weights = {i: self._weight(new_parts[i].option, new_parts[i].piece.numel) for i in served}
        for i, owner in zip(served, spread(list(weights.values()), self.per_node), strict=True):
            new_parts[i] = new_parts[i]._replace(owner=owner)
        loads = [0.0] * hosts
        for places in fragments_of([part.piece for part in new_parts], min(turns, len(new_parts))):
            free = [i for i in places if i in weights and new_parts[i].server == ANY]
            if turns > 1:  # a turn waits for the server with the most bytes, so place the largest first
                free.sort(key=lambda i: -weights[i])
            for i, server in zip(free, assign([weights[i] for i in free], bound_for or (1.0,), loads), strict=True):
                new_parts[i] = new_parts[i]._replace(server=server)
        return [part._replace(server=max(part.server, 0)) for part in new_parts]

    def _weight(self, option: int, numel: int) -> int:
        """Bytes on all links."""
        if (option, numel) not in self._weights:
            self._weights[option, numel] = sum(self.ways.template(option).sent(numel))
        return self._weights[option, numel]


def loads_of(
    ways: Ways, useful: Sequence[Sequence[tuple[int, int, int]]], pieces: Sequence[Piece],
) -> tuple[list[Load], list[list[float]]]:
    """Loads by bucket, and each option's seconds on lanes. An option comes with a server and an owner; buckets with the
    same options are priced together."""
    by_bucket: dict[int, tuple[Load, list[float]]] = {}
    for options, buckets in _alike(useful):
        stacked = stack([ways.template(*option) for option in options], np.array([float(pieces[b].numel) for b in buckets]))
        for b, seconds, latency, held_s in zip(buckets, stacked.seconds, stacked.latency, stacked.held_s, strict=True):
            by_bucket[b] = Load(stacked.shapes, seconds, latency, pieces[b].urgency), held_s
    loads, held = zip(*[by_bucket[b] for b in range(len(pieces))], strict=True) if pieces else ((), ())
    return list(loads), list(held)


def _alike(useful: Sequence[Sequence[K]]) -> list[tuple[tuple[K, ...], list[int]]]:
    """Groups buckets by their options."""
    alike: dict[tuple[K, ...], list[int]] = {}
    for b, mine in enumerate(useful):
        alike.setdefault(tuple(mine), []).append(b)
    return list(alike.items())
