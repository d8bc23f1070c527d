"""Who looks on at each step, in which order. Knows places and functions; called by engine/step_loop.py on every rank alike.

Observers talk to those of other ranks, so all ranks call theirs in one order. It follows from their places alone, never from
when somebody began to look on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple


class Place(IntEnum):
    """First who may change the plan, then who looks at what runs under it."""

    AUTO_PLAN = 0
    """Measures, plans, and goes over to what it has found (autoplan/)."""
    ACCURACY = 1
    """Compares coded with exact gradients, and makes codecs finer or coarser (accuracy/)."""
    TRACE = 2
    """Records the steps of a trace (trace.py)."""
    STALE_PLAN = 3
    """Compares the times of steps with what was predicted (stale_plan.py)."""
    PARAMETER_DRIFT = 4
    """Compares the ranks' parameters (parameter_drift.py)."""
    OTHER = 5


def _nothing() -> None:
    """It does not look on then."""


def _never() -> bool:
    """It does not look at sums."""
    return False


class Observer(NamedTuple):
    """One of them, and what it does when. A CommError that it raises is latched in the worker."""

    place: Place
    who: Any
    after_step: Callable[[], None] = _nothing
    """Averages are written, and the optimizer's step is still to come. With overlap="forward": behind it, ahead of the next
    step's first gradient."""
    before_commit: Callable[[], None] = _nothing
    """Sums are in, and averages not yet written."""
    looks: Callable[[], bool] = _never
    """Whether `before_commit` has something to see in the step under way."""
    after_exchange: Callable[[], None] = _nothing
    """Local steps have been exchanged, when it was time to. Who changes plans may do so then."""
    after_drain: Callable[[], None] = _nothing
    """They have been exchanged ahead of that, for a save, an evaluation, the end or a change of plans, which goes on under the
    same plan."""


class Observers:
    """Those of one session, in order of their places; of one place, who came first goes first."""

    def __init__(self) -> None:
        self._all: list[Observer] = []

    def add(self, observer: Observer) -> None:
        self._all = sorted([*self._all, observer], key=lambda each: each.place)

    def remove(self, who: Any) -> None:
        """It looks on no longer."""
        self._all = [each for each in self._all if each.who is not who]

    def at(self, place: Place) -> list[Any]:
        """Who looks on from there."""
        return [each.who for each in self._all if each.place is place]

    def __iter__(self) -> Iterator[Observer]:
        """Who is added or removed meanwhile counts from the next time on."""
        return iter(tuple(self._all))
