"""Simulates a round of exchanges in as many turns as the plan has fragments; mostly one.

A turn sends its fragment. It ends when the fragment is merged and the steps until the next turn are computed; only then the
next turn begins. Turns never overlap, so each pays its own latencies, and a round takes the sum of its turns.
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
    places: list[int]
    """Its buckets, which the problem numbers from 0."""
    problem: Problem
    paces: tuple[Pace, ...]


def turns_of(
    job: Job, timing: Timing, buckets: Sequence[Cut], loads: Sequence[Load], nodes: Sequence[Group], recipe: Recipe, *,
    priority: bool,
) -> list[Turn]:
    """The turns of a round. ValueError if there are too few buckets for the fragments."""
    turns = []
    if behind := behind_s(timing, [load.urgency for load in loads], nodes, recipe):
        loads = awaited(loads, behind)
    for places in fragments_of(buckets, recipe.fragments):
        paces = pace(job, timing, [buckets[b].slices for b in places], nodes, recipe)
        problem = flatten([loads[b] for b in places], paces, tail_s=tail(timing, nodes, recipe), priority=priority)
        turns.append(Turn(places, problem, paces))
    return turns


class Round:
    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._each = [schedule(turn.problem) for turn in turns]
        self.schedule: Timed = self._each[0] if len(turns) == 1 else self
        self._at = {b: (number, place) for number, turn in enumerate(turns) for place, b in enumerate(turn.places)}
        self._last: list[tuple[list[int], float]] = [([], math.nan)] * len(turns)
        """For each turn, the choice that was simulated last and its seconds."""

    def critical(self, choice: Sequence[int]) -> set[int]:
        """Buckets whose change could shorten the round."""
        result: set[int] = set()
        for turn, each in zip(self._turns, self._each, strict=True):
            mine = [choice[b] for b in turn.places]
            _, starts, ends = each.trace(mine)
            result |= {turn.places[place] for place in critical(turn.problem, mine, starts, ends)}
        return result

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
        """`most` and `enough` apply to the round, so each turn is swept completely."""
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
