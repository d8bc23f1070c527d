"""Runs the simulation of a problem natively, or in Python where there is no compiler. Knows no paths, prices or plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from commlayer.native import core
from commlayer.planner.pricing.problem import Problem
from commlayer.planner.simulation.reference_simulator import Twin


class Schedule(Protocol):
    """Seconds of a step for a choice: of each bucket, one of its options by number."""

    def run(self, choice: list[int]) -> float: ...

    def trace(self, choice: list[int]) -> tuple[float, list[float], list[float]]:
        """Also when each task starts and ends, by step and then by task in the order of buckets."""

    def sweep(self, choice: list[int], buckets: list[int], limit: float, now_s: float = math.nan) -> list[float]:
        """Seconds with each option in turn for all these buckets, which have equally many; infinity if above `limit`.

        `now_s`: what the choice takes as it is, if that is known.
        """


class PortableSchedule:
    """The same without a compiler, some 100 times slower."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def run(self, choice: Sequence[int]) -> float:
        return Twin(self.problem, choice).run()

    def trace(self, choice: Sequence[int]) -> tuple[float, list[float], list[float]]:
        twin = Twin(self.problem, choice)
        step_s = twin.run()
        return step_s, twin.start, twin.end

    def sweep(
        self, choice: Sequence[int], buckets: Sequence[int], limit: float, now_s: float = math.nan,
    ) -> list[float]:
        del limit, now_s
        edges = self.problem.bucket_options
        changed = list(choice)
        found = []
        for option in range(edges[buckets[0] + 1] - edges[buckets[0]]):
            for b in buckets:
                changed[b] = option
            found.append(self.run(changed))
        return found


def schedule(problem: Problem) -> Schedule:
    if core is None:
        return PortableSchedule(problem)
    made: Schedule = core.Schedule(problem)
    return made
