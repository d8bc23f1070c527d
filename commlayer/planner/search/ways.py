"""Options for sending a bucket in one cluster, priced as lines over its size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from msgspec import structs

from commlayer.planner.model.cluster import Profile
from commlayer.planner.model.learning import Excess, Recipe
from commlayer.planner.model.option import Option
from commlayer.planner.pricing.batched import Reals, alone_s, busy_s, longest
from commlayer.planner.pricing.lines import ZERO
from commlayer.planner.pricing.path_cost import Prices
from commlayer.planner.pricing.problem import COMPUTE
from commlayer.planner.pricing.steps_needed import Excesses
from commlayer.planner.pricing.template import Template

EDGES = np.exp2(np.arange(32))
"""Elements at the ends of octaves of size."""


class Ways:
    """Options by number, in one cluster with one set of servers.

    `recipe`: the sync mode by which options are compared. Without `steps_count` all steps count equally.
    """

    def __init__(
        self, prices: Prices, options: Sequence[Option], recipe: Recipe = Recipe(""), *, steps_count: bool = False,
    ) -> None:
        self.prices, self.recipe, self.steps_count = prices, recipe, steps_count
        self.options = tuple(options)
        self._known = Excesses(prices.profile)
        self._useful: dict[tuple[int, int], list[int]] = {}
        self._unbeaten: dict[tuple[int, int], list[int]] = {}
        self._at_edges: dict[int, list[list[float]]] = {}
        self.excess, self.losses = self.under(recipe)
        """By option, if the whole model used it: excess steps, and relative increase of the loss."""

    def under(self, recipe: Recipe) -> tuple[list[float], list[float]]:
        """`excess` and `losses` under another recipe, both by cautious estimates."""
        by_codec: dict[tuple[tuple[str, ...], str], Excess] = {}
        for o in self.options:
            key = o.by_node or (o.codec,), o.down
            if key not in by_codec:
                by_codec[key] = self._known.of(*key, recipe)
        each = [by_codec[o.by_node or (o.codec,), o.down] for o in self.options]
        return [one.high if self.steps_count else 0.0 for one in each], [one.loss_high for one in each]

    def at(self, prices: Prices) -> Ways:
        return Ways(prices, self.options, self.recipe, steps_count=self.steps_count)

    @cached_property
    def placed(self) -> Ways:
        """The same options with each bucket on one server, instead of spread over all servers."""
        prices = self.prices
        return self.at(Prices(prices.cluster, prices.profile, prices.hosts)) if prices.spread else self

    def template(self, option: int, server: int = 0, owner: int = 0) -> Template:
        o = self.options[option]
        return self.prices.template(o.path, o.codec, server, owner, o.down, o.by_node)

    def useful(self, least: int, most: int) -> list[int]:
        """A few options for sizes from `least` to `most` elements: for each level of steps and loss, the best ones by some
        criterion.

        Prices are linear, so an option that is best at both ends is best between them.
        """
        if (least, most) in self._useful:
            return self._useful[least, most]
        levels: dict[tuple[float, float], list[int]] = {}
        for option in range(len(self.options)):
            levels.setdefault((round(self.excess[option], 6), round(self.losses[option], 6)), []).append(option)
        kept: dict[int, list[float]] = {}
        for (_, loss), level in sorted(levels.items()):
            prices = {option: [*self._respects(option, least), *self._respects(option, most)] for option in level}
            ranked = sorted(level, key=lambda option: sum(prices[option]))
            best = {min(ranked, key=lambda option: prices[option][i]) for i in range(len(prices[level[0]]))}
            for option in sorted(best):
                mine = [*prices[option], loss]
                if not any(all(a <= b for a, b in zip(theirs, mine, strict=True)) for theirs in kept.values()):
                    kept[option] = mine
        chosen = self._useful[least, most] = sorted(kept)
        return chosen

    def unbeaten(self, least: int, most: int) -> list[int]:
        """Options for these sizes that no other option beats in loss, steps, time on every lane and time alone."""
        if (least, most) in self._unbeaten:
            return self._unbeaten[least, most]
        sizes = np.array([float(least), float(most)])
        busy = [busy_s(self.template(option), sizes) for option in range(len(self.options))]
        lanes = sorted({lane for each in busy for lane in each})
        column = {lane: 2 * i for i, lane in enumerate(lanes)}
        weights = np.zeros((len(busy), 2 * len(lanes) + 4))
        for option, (row, each) in enumerate(zip(weights, busy, strict=True)):
            for lane, seconds in each.items():
                row[column[lane] : column[lane] + 2] = seconds
            row[-4:-2] = alone_s(self.template(option), sizes)
            row[-2:] = self.losses[option], self.excess[option]
        kept: list[int] = []
        # Cheap options first: they beat most others. The first of equal options stays.
        for option in np.argsort(weights.sum(axis=1), kind="stable").tolist():
            if not (weights[kept] <= weights[option]).all(axis=1).any():
                kept.append(option)
        chosen = self._unbeaten[least, most] = sorted(kept)
        return chosen

    def _respects(self, option: int, numel: int) -> list[float]:
        if numel & (numel - 1):
            return _respects(self.template(option), np.array([float(numel)]))[0]
        if option not in self._at_edges:
            self._at_edges[option] = _respects(self.template(option), EDGES)
        return self._at_edges[option][numel.bit_length() - 1]


def _respects(template: Template, sizes: Reals) -> list[list[float]]:
    """Criteria by size: time alone; busiest lane; both; links; coding; load on GPUs plus time alone; load on GPUs plus
    links."""
    busy = busy_s(template, sizes)
    zero = np.zeros(len(sizes))
    of: dict[str, list[Reals]] = {}
    for lane, seconds in busy.items():
        of.setdefault(lane.partition(":")[0], []).append(seconds)

    def most(*kinds: str) -> Reals:
        return longest([seconds for kind in kinds for seconds in of.get(kind, ())], zero)

    alone, busiest = alone_s(template, sizes), longest(list(busy.values()), zero)
    links, gpu = most("up", "down", "intra"), most(COMPUTE)
    respects = [alone, busiest, alone + busiest, links, most("cpu", "server"), gpu + alone, gpu + links]
    rows: list[list[float]] = np.stack(respects, axis=1).tolist()
    return rows


def free(profile: Profile) -> Profile:
    """The profile with coding that takes no time: the limit of what compression could gain."""
    codecs = tuple(structs.replace(cost, encode=ZERO, decode=ZERO) for cost in profile.codecs)
    return structs.replace(profile, codecs=codecs, copy=ZERO)

