"""Runs a problem's simulation natively, or in Python if there is no compiler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from commlayer.native import core
from commlayer.planner.pricing.problem import Problem
from commlayer.planner.simulation.reference_simulator import Twin


class Timed(Protocol):
    """Seconds of a step for a choice, which is one option number per bucket."""

    def run(self, choice: list[int], limit: float = math.inf) -> float:
        """Infinity if certainly above `limit`."""

    def sweep(
        self, choice: list[int], buckets: list[int], limit: float, now_s: float = math.nan, most: int = 0,
        only: list[int] | None = None, enough: float = -math.inf, factors: list[float] | None = None,
    ) -> list[float]:
        """Seconds with each option set for all of `buckets`, which have equally many options; infinity if above `limit`.

        `factors`, by option: seconds are multiplied by them before any comparison. `now_s`: seconds of the present choice, if
        known. `most`, up to 8: only this many of the shortest are needed; others may be infinity. `only`: options to try;
        others are infinity. `enough`: the sweep may stop at a step this short.
        """


class Schedule(Timed, Protocol):
    """The simulation of one exchange."""

    def trace(self, choice: list[int]) -> tuple[float, list[float], list[float]]:
        """Also the start and end of each task, by step, then by task in the order of buckets."""


class PortableSchedule:
    """The same without a compiler, about 100 times slower."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def run(self, choice: Sequence[int], limit: float = math.inf) -> float:
        del limit
        return Twin(self.problem, choice).run()

    def trace(self, choice: Sequence[int]) -> tuple[float, list[float], list[float]]:
        twin = Twin(self.problem, choice)
        step_s = twin.run()
        return step_s, twin.start, twin.end

    def sweep(
        self, choice: Sequence[int], buckets: Sequence[int], limit: float, now_s: float = math.nan, most: int = 0,
        only: Sequence[int] | None = None, enough: float = -math.inf, factors: Sequence[float] | None = None,
    ) -> list[float]:
        del limit, now_s, most, enough, factors
        edges = self.problem.bucket_options
        changed = list(choice)
        seconds = []
        for option in range(edges[buckets[0] + 1] - edges[buckets[0]]):
            for b in buckets:
                changed[b] = option
            seconds.append(self.run(changed) if only is None or option in only else math.inf)
        return seconds


def schedule(problem: Problem) -> Schedule:
    if core is None:
        return PortableSchedule(problem)
    native: Schedule = core.Schedule(problem)
    return native
