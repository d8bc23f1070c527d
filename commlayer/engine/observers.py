"""Observers of each training step, and their order. engine/step_loop.py calls them on every rank.

Observers communicate with those of other ranks, so all ranks call theirs in one order. Only places define the order, not the
time at which an observer was added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple


class Place(IntEnum):
    """The order: first those that may change the plan, then those that watch what runs under it."""

    AUTO_PLAN = 0
    """Measures, plans, and switches to a better plan (autotune/plan)."""
    ACCURACY = 1
    """Compares coded with exact gradients, and makes codecs finer or coarser (autotune/quality)."""
    TRACE = 2
    """Records the steps of a trace (trace.py)."""
    STALE_PLAN = 3
    """Compares times of steps with predictions (stale_plan.py)."""
    PARAMETER_DRIFT = 4
    """Compares the ranks' parameters (parameter_drift.py)."""
    OTHER = 5


def _nothing() -> None:
    """Default: the observer does nothing at that point."""


def _never() -> bool:
    """Default: the observer does not read sums."""
    return False


class Observer(NamedTuple):
    """One observer and its callbacks. A CommError that it raises is latched in the worker."""

    place: Place
    who: Any
    after_step: Callable[[], None] = _nothing
    """Averages are written, before the optimizer's step. With overlap="forward": after it, before the next step's first
    gradient."""
    before_commit: Callable[[], None] = _nothing
    """Sums have arrived, and averages are not yet written."""
    looks: Callable[[], bool] = _never
    """Whether `before_commit` reads the sums of the current step."""
    after_exchange: Callable[[], None] = _nothing
    """Local steps have been exchanged on schedule. An observer may change the plan in this call."""
    after_drain: Callable[[], None] = _nothing
    """Local steps have been exchanged early: for a save, an evaluation, the end, or a change of plans. Training continues under
    the same plan."""


class Observers:
    """Those of one session, in the order of their places; at one place, in the order in which they were added."""

    def __init__(self) -> None:
        self._all: list[Observer] = []

    def add(self, observer: Observer) -> None:
        self._all = sorted([*self._all, observer], key=lambda each: each.place)

    def remove(self, who: Any) -> None:
        self._all = [each for each in self._all if each.who is not who]

    def at(self, place: Place) -> list[Any]:
        return [each.who for each in self._all if each.place is place]

    def __iter__(self) -> Iterator[Observer]:
        """Additions and removals during an iteration take effect in the next one."""
        return iter(tuple(self._all))
