"""The tuner's search space: dimensions as records, and settings as points in the unit cube."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from commlayer.errors import InvalidInput
from commlayer.records import Record

Settings = dict[str, Any]
"""Settings of a proxy run: a value per dimension, with `codec` spelled out."""


class Dimension(Record, frozen=True):
    """`low` to `high` on a logarithmic scale, or a choice."""

    name: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str | int, ...] = ()

    @property
    def width(self) -> int:
        """Number of coordinates: one per choice for text, since text has no order."""
        return len(self.choices) if self.choices and isinstance(self.choices[0], str) else 1

    def coordinates(self, value: Any) -> list[float]:
        if not self.choices:
            return [math.log(value / self.low) / math.log(self.high / self.low)]
        if self.width > 1:
            # Half, so that another codec is as far away as half the range of a number.
            return [0.5 * (value == choice) for choice in self.choices]
        return [self.choices.index(value) / max(1, len(self.choices) - 1)]

    def at(self, u: float) -> Any:
        """The value at a fraction of the range."""
        if self.choices:
            return self.choices[min(len(self.choices) - 1, int(u * len(self.choices)))]
        return float(f"{self.low * (self.high / self.low) ** u:.4g}")


class SearchSpace(Record, frozen=True):
    """All dimensions. `codec` is a choice of spellings in which {ratio} stands for the ratio."""

    dimensions: tuple[Dimension, ...]

    def at(self, units: list[float]) -> Settings:
        """The raw settings at a point of the unit cube, one coordinate per dimension."""
        return self.plain({d.name: d.at(u) for d, u in zip(self.dimensions, units, strict=True)})

    def plain(self, settings: Settings) -> Settings:
        """Normalizes equivalent settings: a codec without ratio gets the highest ratio, and local steps exclude staleness."""
        if settings.get("stale") and settings.get("local_steps", 1) > 1:
            settings = settings | {"stale": 0}
        ratio = next((d for d in self.dimensions if d.name == "ratio"), None)
        if ratio is not None and "{ratio}" not in str(settings.get("codec", "{ratio}")):
            return settings | {"ratio": ratio.high}
        return settings

    def coordinates(self, settings: Mapping[str, Any]) -> list[float]:
        """These settings as coordinates for the engine."""
        return [x for d in self.dimensions for x in d.coordinates(settings[d.name])]

    def check(self) -> None:
        """Raises a one-line error if no engine could search the space."""
        for d in self.dimensions:
            if not d.choices and not 0 < d.low < d.high < math.inf:
                raise InvalidInput("E-TUNE-ARGUMENT",
                                   f"{d.name}: got {d.low:g} to {d.high:g}, allowed: a range above 0, such as 0.001:0.1")


def spelled(settings: Settings) -> Settings:
    """Settings for a proxy: the ratio inserted into the codec, staleness as a bool."""
    stale = {"stale": bool(settings["stale"])} if "stale" in settings else {}
    return settings | stale | {"codec": str(settings["codec"]).replace("{ratio}", f"{settings['ratio']:g}")}


CODECS = ("fp16()", "int8()", "topk(ratio={ratio}, values='int8')")
DENSE = "identity()"
EXACT: dict[str, Any] = {"codec": DENSE, "local_steps": 1, "stale": 0}
"""The values that do not change what is trained."""


def default_space(*, codecs: tuple[str, ...] = CODECS, ratio: tuple[float, float] = (0.001, 0.3),
                  batches: tuple[int, ...] = (64, 128, 256), local_steps: tuple[int, ...] = (1,),
                  staleness: bool = False) -> SearchSpace:
    """Codec, ratio and batch. Local steps and staleness only on request, since neither is exact."""
    codec, batch = Dimension("codec", choices=(DENSE, *codecs)), Dimension("batch", choices=batches)
    dimensions = [codec, Dimension("ratio", *ratio), batch]
    if any(n > 1 for n in local_steps):
        dimensions.append(Dimension("local_steps", choices=tuple(sorted({EXACT["local_steps"], *local_steps}))))
    if staleness:
        dimensions.append(Dimension("stale", choices=(EXACT["stale"], 1)))
    space = SearchSpace(tuple(dimensions))
    space.check()
    return space
