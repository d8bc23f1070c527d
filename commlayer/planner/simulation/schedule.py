"""Runs the simulation of a problem natively, or in Python where there is no compiler. Knows no paths, prices or plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from commlayer.native import core
from commlayer.planner.pricing.problem import Problem
from commlayer.planner.simulation.reference_simulator import Twin


class Timed(Protocol):
    """Seconds of a step for a choice: of each bucket, one of its options by number."""

    def run(self, choice: list[int], limit: float = math.inf) -> float:
        """Infinity if sure to be above `limit`."""

    def sweep(
        self, choice: list[int], buckets: list[int], limit: float, now_s: float = math.nan, most: int = 0,
        only: list[int] | None = None, enough: float = -math.inf, factors: list[float] | None = None,
    ) -> list[float]:
        """Seconds with each option in turn for all these buckets, which have equally many; infinity if above `limit`.

        `factors`, by option: what seconds are multiplied by before they are compared with anything.

        `now_s`: what the choice takes as it is, if that is known. `most`, up to 8: only so many, the shortest, are of use, and
        others may be infinity. `only`: options that count; others are infinity. `enough`: so short a step is as good as any.
        """


class Schedule(Timed, Protocol):
    """Of all that goes at once."""

    def trace(self, choice: list[int]) -> tuple[float, list[float], list[float]]:
        """Also when each task starts and ends, by step and then by task in the order of buckets."""


class PortableSchedule:
    """The same without a compiler, some 100 times slower."""

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
        found = []
        for option in range(edges[buckets[0] + 1] - edges[buckets[0]]):
            for b in buckets:
                changed[b] = option
            found.append(self.run(changed) if only is None or option in only else math.inf)
        return found


def schedule(problem: Problem) -> Schedule:
    if core is None:
        return PortableSchedule(problem)
    made: Schedule = core.Schedule(problem)
    return made
