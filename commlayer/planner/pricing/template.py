"""An option's tasks for every bucket size: a shape, and lines that give seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from commlayer.planner.pricing.path_work import WalkedOp
from commlayer.planner.pricing.problem import COMPUTE, PricedWay
from commlayer.planner.pricing.shapes import Shape, shape_of

Lines = tuple[tuple[float, float], ...]
"""Floors and slopes."""
CODERS = (f"{COMPUTE}:", "cpu:")


class Template(NamedTuple):
    """The tasks of a walked path."""

    steps: tuple[WalkedOp, ...]
    shape: Shape
    seconds: Lines
    """By task, then by lane."""
    latency: Lines
    nbytes: float
    """Bytes per element, over all of the bucket's transfers on one node's links."""

    def way(self, numel: int) -> PricedWay:
        return PricedWay(self.shape, [a + b * numel for a, b in self.seconds], [a + b * numel for a, b in self.latency])

    @property
    def coding(self) -> list[tuple[str, tuple[float, float]]]:
        """Lines on lanes that encode or decode at workers."""
        lanes = chain.from_iterable(self.shape.lanes)
        return [(lane, line) for lane, line in zip(lanes, self.seconds, strict=True) if lane.startswith(CODERS)]

    def sent(self, numel: int) -> list[int]:
        """Bytes sent, by task."""
        return [int(step.nbytes(numel) + 0.5) for step in self.steps]


def template(steps: Sequence[WalkedOp]) -> Template:
    return Template(
        tuple(steps), shape_of(steps), tuple([(line.floor_s, line.slope_s) for step in steps for _, line in step.lanes]),
        tuple([(step.latency.floor_s, step.latency.slope_s) for step in steps]), sum(step.nbytes.slope_s for step in steps),
    )
