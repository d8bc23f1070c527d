"""The ways to send a bucket that are worth trying in a cluster, priced as lines over its size. Knows no job and no order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from commlayer.planner.costs import Prices, bare
from commlayer.planner.lines import ZERO
from commlayer.planner.model import Profile
from commlayer.planner.problem import COMPUTE, Shape, Way, shape_of
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
        self._useful: dict[tuple[int, int], list[int]] = {}
        of = {bare(option): codec_loss(prices.profile, option) for o in options for option in (o.codec, o.down, *o.by_node)}
        self.losses = [_loss(option, of) for option in self.options]
        """In final quality, if the whole model were sent so; by option."""

    def template(self, option: int, server: int = 0, owner: int = 0) -> Template:
        key = (option, server, owner)
        made = self._made.get(key)
        if made is None:
            o = self.options[option]
            made = self._made[key] = template(self.prices.steps(o.path, o.codec, server, owner, o.down, o.by_node))
        return made

    def useful(self, least: int, most: int) -> list[int]:
        """A few options for sizes from `least` to `most` elements: of each level of loss those that are best in some respect.

        Prices are lines, so that what is best at both ends is best between them.
        """
        if (least, most) in self._useful:
            return self._useful[least, most]
        levels: dict[float, list[int]] = {}
        for option in range(len(self.options)):
            levels.setdefault(round(self.losses[option], 6), []).append(option)
        kept: dict[int, list[float]] = {}
        for _, level in sorted(levels.items()):
            prices = {option: [*self._respects(option, least), *self._respects(option, most)] for option in level}
            best = {min(level, key=lambda o: (prices[o][i], sum(prices[o]), o)) for i in range(len(prices[level[0]]))}
            for option in sorted(best):
                if not any(all(a <= b for a, b in zip(theirs, prices[option], strict=True)) for theirs in kept.values()):
                    kept[option] = prices[option]
        found = self._useful[least, most] = sorted(kept)
        return found

    def _respects(self, option: int, numel: int) -> list[float]:
        """What an option can be best in: done soonest alone; the busiest lane; both; links; coding; the GPU left alone."""
        way = self.template(option).way(numel)
        busy: dict[str, float] = {}
        ends: list[float] = []
        at = 0
        for lanes, after, latency in zip(way.shape.lanes, way.shape.after, way.latency, strict=True):
            longest = 0.0
            for lane in lanes:
                busy[lane] = busy.get(lane, 0.0) + way.seconds[at]
                longest = max(longest, way.seconds[at])
                at += 1
            ends.append(max((ends[i] for i in after), default=0.0) + longest + latency)
        alone, busiest = max(ends, default=0.0), max(busy.values(), default=0.0)
        of: dict[str, float] = {}
        for lane, seconds in busy.items():
            kind = lane.partition(":")[0]
            of[kind] = max(of.get(kind, 0.0), seconds)
        links = max(of.get("up", 0.0), of.get("down", 0.0), of.get("intra", 0.0))
        coding = max(of.get("cpu", 0.0), of.get("server", 0.0))
        gpu = of.get(COMPUTE, 0.0)
        return [alone, busiest, alone + busiest, links, coding, gpu + alone, gpu + links]


def template(steps: Sequence[Step]) -> Template:
    return Template(
        shape_of(steps), tuple((line.floor_s, line.slope_s) for step in steps for _, line in step.lanes),
        tuple((step.latency.floor_s, step.latency.slope_s) for step in steps), sum(step.nbytes.slope_s for step in steps),
    )


def _loss(option: Option, of: dict[str, float]) -> float:
    losses = [of[bare(codec)] for codec in option.by_node or (option.codec,)]
    up = sum(losses) / len(losses)
    return max(up, of[bare(option.down)]) if option.down else up


def codec_loss(profile: Profile, codec: str) -> float:
    """The worst of its entries; 0 for a codec that the profile does not know."""
    return max((c.loss for c in profile.codecs if c.codec == bare(codec)), default=0.0)


def free(profile: Profile) -> Profile:
    """The same where coding takes no time: the bound of what compression could give."""
    codecs = tuple(structs.replace(cost, encode=ZERO, decode=ZERO) for cost in profile.codecs)
    return structs.replace(profile, codecs=codecs, copy=ZERO)

