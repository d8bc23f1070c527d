"""What a round exchanges, in as many turns as the plan has fragments; mostly one, of everything. Knows no paths and no plans.

A turn sends its part of the buckets, and is over when that is merged and the steps until the next turn are computed. Only then
the next one begins: no two are on their way at once, so each pays its own latencies, and a round takes the sum of its turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from commlayer.planner.model.equal_nodes import Group
from commlayer.planner.model.fragments import Cut, fragments_of
from commlayer.planner.model.learning import Recipe
from commlayer.planner.pricing.problem import Load, Pace, Problem, flatten
from commlayer.planner.simulation.computing import awaited, behind_s, pace, tail
from commlayer.planner.simulation.critical_path import critical
from commlayer.planner.simulation.schedule import Timed, schedule
from commlayer.records import Job, Timing


class Turn(NamedTuple):
    """Of a round."""

    places: list[int]
    """Its buckets'; the problem numbers them from 0."""
    problem: Problem
    paces: tuple[Pace, ...]


def turns_of(
    job: Job, timing: Timing, buckets: Sequence[Cut], loads: Sequence[Load], nodes: Sequence[Group], recipe: Recipe, *,
    priority: bool,
) -> list[Turn]:
    """ValueError if the buckets make too few fragments."""
    made = []
    if behind := behind_s(timing, [load.urgency for load in loads], nodes, recipe):
        loads = awaited(loads, behind)
    for places in fragments_of(buckets, recipe.fragments):
        paces = pace(job, timing, [buckets[b].slices for b in places], nodes, recipe)
        problem = flatten([loads[b] for b in places], paces, tail_s=tail(timing, nodes, recipe), priority=priority)
        made.append(Turn(places, problem, paces))
    return made


class Round:
    """Simulates all of its turns."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._each = [schedule(turn.problem) for turn in turns]
        self.schedule: Timed = self._each[0] if len(turns) == 1 else self
        self._at = {b: (number, place) for number, turn in enumerate(turns) for place, b in enumerate(turn.places)}
        self._last: list[tuple[list[int], float]] = [([], math.nan)] * len(turns)
        """Of each turn the choice that was simulated last."""

    def critical(self, choice: Sequence[int]) -> set[int]:
        """Buckets whose change could shorten it."""
        found: set[int] = set()
        for turn, each in zip(self._turns, self._each, strict=True):
            mine = [choice[b] for b in turn.places]
            _, starts, ends = each.trace(mine)
            found |= {turn.places[place] for place in critical(turn.problem, mine, starts, ends)}
        return found

    def run(self, choice: list[int], limit: float = math.inf) -> float:
        seconds = 0.0
        for number in range(len(self._turns)):
            seconds += self._turn_s(number, choice, limit - seconds)
            if seconds > limit:
                return math.inf
        return seconds

    def sweep(
        self, choice: list[int], buckets: list[int], limit: float, now_s: float = math.nan, most: int = 0,
        only: list[int] | None = None, enough: float = -math.inf, factors: list[float] | None = None,
    ) -> list[float]:
        """`most` and `enough` are of the round: each turn is swept through."""
        del now_s, most, enough
        changed: dict[int, list[int]] = {}
        for b in buckets:
            number, place = self._at[b]
            changed.setdefault(number, []).append(place)
        rest = sum(self._turn_s(number, choice) for number in range(len(self._turns)) if number not in changed)
        left = limit / min(factors or [1.0]) - rest
        swept = [self._each[number].sweep([choice[b] for b in self._turns[number].places], places, left, math.nan, 0, only)
                 for number, places in changed.items()]
        return [rest + sum(each) for each in zip(*swept, strict=True)]

    def _turn_s(self, number: int, choice: Sequence[int], limit: float = math.inf) -> float:
        mine = [choice[b] for b in self._turns[number].places]
        before, seconds = self._last[number]
        if before != mine:
            seconds = self._each[number].run(mine, limit)
            if seconds < math.inf:
                self._last[number] = mine, seconds
        return seconds
