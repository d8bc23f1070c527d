"""Prices templates for many bucket sizes at once, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commlayer.planner.pricing.shapes import Shape
from commlayer.planner.pricing.template import Lines, Template

Reals = npt.NDArray[np.float64]


class Stack(NamedTuple):
    """Options side by side for several sizes: `seconds` and `latency` by size, each row with one option after the other."""

    shapes: tuple[Shape, ...]
    seconds: list[list[float]]
    latency: list[list[float]]
    held_s: list[list[float]]
    """Seconds summed over all lanes, by size and option."""


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
    result = zero
    for seconds in each:
        result = np.maximum(result, seconds)
    return result


def alone_s(of: Template, sizes: Reals) -> Reals:
    """Seconds on idle lanes, where no task waits for another's lane."""
    seconds, latency = over(of.seconds, sizes), over(of.latency, sizes)
    zero = np.zeros(len(sizes))
    ends: list[Reals] = []
    at = 0
    for lanes, after, late in zip(of.shape.lanes, of.shape.after, latency, strict=True):
        begin = longest([ends[i] for i in after], zero)
        ends.append(begin + longest(list(seconds[at : at + len(lanes)]), zero) + late)
        at += len(lanes)
    return longest(ends, zero)


def busy_s(of: Template, sizes: Reals) -> dict[str, Reals]:
    busy: dict[str, Reals] = {}
    lanes = (lane for lanes in of.shape.lanes for lane in lanes)
    for lane, seconds in zip(lanes, over(of.seconds, sizes), strict=True):
        busy[lane] = busy[lane] + seconds if lane in busy else seconds
    return busy
