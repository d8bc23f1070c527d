"""An option's tasks for every size of bucket: a shape, and lines that become seconds. Knows no job, no order and no choice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commlayer.planner.problem import Shape, Way, shape_of
from commlayer.planner.walk import Step

Reals = npt.NDArray[np.float64]
Lines = tuple[tuple[float, float], ...]
"""Floors and slopes."""


class Template(NamedTuple):
    """The tasks of a walked path."""

    steps: tuple[Step, ...]
    shape: Shape
    seconds: Lines
    """By task, then by lane."""
    latency: Lines
    nbytes: float
    """Per element, over all of its transfers on one node's links."""

    def way(self, numel: int) -> Way:
        return Way(self.shape, [a + b * numel for a, b in self.seconds], [a + b * numel for a, b in self.latency])

    def sent(self, numel: int) -> list[int]:
        """Bytes, by task."""
        return [int(step.nbytes(numel) + 0.5) for step in self.steps]

    def alone_s(self, sizes: Reals) -> Reals:
        """Seconds on idle lanes, where no task waits for another's lane."""
        seconds, latency = over(self.seconds, sizes), over(self.latency, sizes)
        zero = np.zeros(len(sizes))
        ends: list[Reals] = []
        at = 0
        for lanes, after, late in zip(self.shape.lanes, self.shape.after, latency, strict=True):
            begin = longest([ends[i] for i in after], zero)
            ends.append(begin + longest(list(seconds[at : at + len(lanes)]), zero) + late)
            at += len(lanes)
        return longest(ends, zero)

    def busy_s(self, sizes: Reals) -> dict[str, Reals]:
        """Seconds of each lane."""
        busy: dict[str, Reals] = {}
        lanes = (lane for lanes in self.shape.lanes for lane in lanes)
        for lane, seconds in zip(lanes, over(self.seconds, sizes), strict=True):
            busy[lane] = busy[lane] + seconds if lane in busy else seconds
        return busy


class Stack(NamedTuple):
    """Options side by side for several sizes: `seconds` and `latency` by size, and in each row one option after the other."""

    shapes: tuple[Shape, ...]
    seconds: list[list[float]]
    latency: list[list[float]]
    held_s: list[list[float]]
    """Seconds on all lanes together, by size and option."""


def template(steps: Sequence[Step]) -> Template:
    return Template(
        tuple(steps), shape_of(steps), tuple([(line.floor_s, line.slope_s) for step in steps for _, line in step.lanes]),
        tuple([(step.latency.floor_s, step.latency.slope_s) for step in steps]), sum(step.nbytes.slope_s for step in steps),
    )


def stack(templates: Sequence[Template], sizes: Reals) -> Stack:
    seconds: list[list[float]] = over(tuple(chain.from_iterable([each.seconds for each in templates])), sizes).T.tolist()
    latency: list[list[float]] = over(tuple(chain.from_iterable([each.latency for each in templates])), sizes).T.tolist()
    cuts = list(pairwise(accumulate([len(each.seconds) for each in templates], initial=0)))
    return Stack(tuple([each.shape for each in templates]), seconds, latency,
                 [[sum(row[start:stop]) for start, stop in cuts] for row in seconds])


def over(lines: Lines, sizes: Reals) -> Reals:
    """A row for each line, a column for each size."""
    values = np.array(lines).reshape(-1, 2)
    return values[:, :1] + values[:, 1:] * sizes


def longest(each: Sequence[Reals], zero: Reals) -> Reals:
    found = zero
    for seconds in each:
        found = np.maximum(found, seconds)
    return found
