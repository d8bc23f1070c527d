"""What options cost by bucket of one layout, and what buckets become, however steps are taken. Prefers none.

Ways of taking steps are many, and most of them send buckets by the same few options: cut and priced once, these serve all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np

from commlayer.codec_name import named
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
"""Parts of the model that each server gets: fewer may be shared badly."""
LEAST_NBYTES = 16 << 10
"""Of a part, where it is tried whether a bucket should be cut for every server."""
ANY = -1
"""Server of a part that may go to whichever has least."""


class CandidatePart(NamedTuple):
    """A bucket of the plan to be."""

    origin: int
    """The bucket that was searched, of which this is all or a part."""
    piece: Piece
    option: int
    server: int
    owner: int


class OptionPrices:
    """What options cost by bucket, however steps are taken."""

    def __init__(self, ways: Ways, layout: Layout, useful: list[list[int]]) -> None:
        self.ways, self._layout, self._useful = ways, layout, useful
        ranks = {node.ranks for node in ways.prices.cluster.nodes if node.ranks}
        self.per_node = ranks.pop() if len(ranks) == 1 else 1
        self._weights: dict[tuple[int, int], int] = {}
        self._parts: dict[tuple[tuple[int, ...], int, int], list[CandidatePart]] = {}
        self._placed: dict[tuple[tuple[int, ...], int, int], list[Load]] = {}

    @cached_property
    def hidden(self) -> OptionPrices:
        """The same with links that carry what transfers can count on that are to hide."""
        prices = self.ways.prices
        made = Prices(hidden(prices.cluster), prices.profile, prices.hosts, spread=prices.spread)
        return OptionPrices(self.ways.at(made), self._layout, self._useful)

    @cached_property
    def loads(self) -> tuple[list[Load], list[list[float]]]:
        """And seconds on lanes."""
        return loads_of(self.ways, [[(option, 0, 0) for option in mine] for mine in self._useful], self._layout.pieces)

    @cached_property
    def alone_s(self) -> list[float]:
        """Until the bucket is through, were it alone and sent as is soonest."""
        found = [0.0] * len(self._useful)
        for options, buckets in _alike(self._useful):
            numels = np.array([float(self._layout.pieces[b].numel) for b in buckets])
            soonest = np.min([alone_s(self.ways.template(option), numels) for option in options], axis=0)
            for b, seconds in zip(buckets, soonest, strict=True):
                found[b] = float(seconds)
        return found

    def parts(self, sent: tuple[int, ...], finely: int, turns: int = 1) -> list[CandidatePart]:
        """What buckets become that are sent so: each by the option of that number.

        Buckets of servers go where least of its part has gone so far, and among a node's ranks where least has.
        What was priced as spread over all servers is cut: so that each server gets `finely` parts of the model, at least, and
        a part of each turn.
        """
        key = sent, max(finely, turns), turns
        if key not in self._parts:
            self._parts[key] = self._cut(*key)
        return self._parts[key]

    def placed(self, sent: tuple[int, ...], finely: int, turns: int = 1) -> list[Load]:
        """These parts, each on its own server."""
        key = sent, max(finely, turns), turns
        if key not in self._placed:
            parts = self.parts(*key)
            ways = [((part.option, part.server, part.owner),) for part in parts]
            self._placed[key], _ = loads_of(self.ways.placed, ways, [part.piece for part in parts])
        return self._placed[key]

    def _cut(self, sent: tuple[int, ...], finely: int, turns: int) -> list[CandidatePart]:
        ways, layout = self.ways, self._layout
        hosts, bound_for = len(ways.prices.hosts), ways.prices.spread
        made, total = list[CandidatePart](), sum(piece.numel for piece in layout.pieces)
        least_nbytes = least_spread_nbytes(turns) if finely == SHARED else LEAST_NBYTES
        for b, (size, option) in enumerate(zip(layout.sizes, sent, strict=True)):
            cuts = ways.options[option].served and not named(ways.options[option].codec).shaped
            numel = layout.pieces[b].numel
            parts = -(-numel * finely * hosts // max(1, total)) if cuts else 1
            parts = max(1, min(parts, hosts, numel * ELEMENT_NBYTES // least_nbytes))
            each = len(set(bound_for)) > 1 and parts == hosts  # servers sum unequal parts, as their links ask for
            even = [size * i // parts for i in range(1, parts)]
            ends = [int(size * end) for end in accumulate(bound_for[:-1])] if each else even
            made += [CandidatePart(b, piece, option, host if each else ANY, 0)
                     for host, piece in enumerate(layout.cut(b, tuple(ends)))]
        served = [i for i, part in enumerate(made) if ways.options[part.option].served]
        weights = {i: self._weight(made[i].option, made[i].piece.numel) for i in served}
        for i, owner in zip(served, spread(list(weights.values()), self.per_node), strict=True):
            made[i] = made[i]._replace(owner=owner)
        loads = [0.0] * hosts
        for places in fragments_of([part.piece for part in made], min(turns, len(made))):
            free = [i for i in places if i in weights and made[i].server == ANY]
            if turns > 1:  # a turn waits for the server with most of it, so the largest first
                free.sort(key=lambda i: -weights[i])
            for i, server in zip(free, assign([weights[i] for i in free], bound_for or (1.0,), loads), strict=True):
                made[i] = made[i]._replace(server=server)
        return [part._replace(server=max(part.server, 0)) for part in made]

    def _weight(self, option: int, numel: int) -> int:
        """Bytes on all links."""
        if (option, numel) not in self._weights:
            self._weights[option, numel] = sum(self.ways.template(option).sent(numel))
        return self._weights[option, numel]


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
