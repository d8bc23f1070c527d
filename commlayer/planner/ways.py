"""The ways to send a bucket that are worth trying in a cluster, priced as lines over its size. Knows no job and no order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec import structs

from commlayer.planner.costs import Prices, bare
from commlayer.planner.lines import ZERO
from commlayer.planner.model import Profile
from commlayer.planner.problem import Shape, Way
from commlayer.planner.walk import Step

DENSE = "identity()"


class Option(NamedTuple):
    """What a plan decides for a bucket besides its place."""

    path: str
    codec: str = DENSE
    down: str = ""
    by_node: tuple[str, ...] = ()

    @property
    def served(self) -> bool:
        """Whether a summation server takes part."""
        return self.path == "service" or "net.push" in self.path

    def __str__(self) -> str:
        extra = [f"down {self.down}"] if self.down else []
        extra += [f"by node {', '.join(self.by_node)}"] if self.by_node else []
        return " ".join([self.codec, "over", self.path, *(f"({e})" for e in extra)])


class Template(NamedTuple):
    """An option's tasks for every size: a shape, floors and slopes."""

    shape: Shape
    seconds: tuple[tuple[float, float], ...]
    latency: tuple[tuple[float, float], ...]
    nbytes: float
    """Per element, over all of its transfers on one node's links."""

    def way(self, numel: int) -> Way:
        return Way(self.shape, [a + b * numel for a, b in self.seconds], [a + b * numel for a, b in self.latency])


class Ways:
    """Options by number, in one cluster with one set of servers."""

    def __init__(self, prices: Prices, options: Sequence[Option]) -> None:
        self.prices = prices
        self.options = tuple(options)
        self._made: dict[tuple[int, int, int], Template] = {}

    def template(self, option: int, server: int = 0, owner: int = 0) -> Template:
        key = (option, server, owner)
        made = self._made.get(key)
        if made is None:
            o = self.options[option]
            made = self._made[key] = template(self.prices.steps(o.path, o.codec, server, owner, o.down, o.by_node))
        return made

    def loss(self, option: int) -> float:
        """In final quality, if the whole model were sent so."""
        o = self.options[option]
        losses = [codec_loss(self.prices.profile, codec) for codec in o.by_node or (o.codec,)]
        up = sum(losses) / len(losses)
        return max(up, codec_loss(self.prices.profile, o.down)) if o.down else up

    def useful(self, least: int, most: int) -> list[int]:
        """Options that no other one beats, for sizes from `least` to `most` elements, on every lane and in latency and loss.

        Prices are lines, so that what holds at both ends holds between them.
        """
        weights = [(option, [*self._weights(option, least), *self._weights(option, most)]) for option in range(len(self.options))]
        weights.sort(key=lambda pair: (sum(pair[1]), pair[0]))
        kept: list[tuple[int, list[float]]] = []
        for option, mine in weights:
            if not any(all(a <= b for a, b in zip(theirs, mine, strict=True)) for _, theirs in kept):
                kept.append((option, mine))
        return sorted(option for option, _ in kept)

    def _weights(self, option: int, numel: int) -> list[float]:
        """Seconds on each lane, of the longest way through the tasks, and the loss."""
        made = self.template(option)
        way = made.way(numel)
        busy = dict.fromkeys(self._lanes, 0.0)
        ends: list[float] = []
        at = 0
        for lanes, after, latency in zip(way.shape.lanes, way.shape.after, way.latency, strict=True):
            longest = 0.0
            for lane in lanes:
                busy[lane] += way.seconds[at]
                longest = max(longest, way.seconds[at])
                at += 1
            ends.append(max((ends[i] for i in after), default=0.0) + longest + latency)
        return [*busy.values(), max(ends, default=0.0), self.loss(option)]

    @cached_property
    def _lanes(self) -> list[str]:
        shapes = [self.template(option).shape for option in range(len(self.options))]
        return sorted({lane for shape in shapes for lanes in shape.lanes for lane in lanes})


def template(steps: Sequence[Step]) -> Template:
    shape = Shape(tuple(tuple(lane for lane, _ in step.lanes) for step in steps), tuple(step.after for step in steps))
    return Template(
        shape, tuple((line.floor_s, line.slope_s) for step in steps for _, line in step.lanes),
        tuple((step.latency.floor_s, step.latency.slope_s) for step in steps), sum(step.nbytes.slope_s for step in steps),
    )


def codec_loss(profile: Profile, codec: str) -> float:
    """The worst of its entries; 0 for a codec that the profile does not know."""
    return max((c.loss for c in profile.codecs if c.codec == bare(codec)), default=0.0)


def free(profile: Profile) -> Profile:
    """The same where coding takes no time: the bound of what compression could give."""
    codecs = tuple(structs.replace(cost, encode=ZERO, decode=ZERO) for cost in profile.codecs)
    return structs.replace(profile, codecs=codecs, copy=ZERO)

