"""Defines observers of training steps, and the order in which step/step_loop.py calls them on every rank.

Observers communicate with those of other ranks, so all ranks must call them in the same order. The order depends only on
ObserverOrder, not on the time at which an observer was added.

An error in an observer never ends training: `Observers` reports it once and calls the observer again after the next step,
because other ranks may wait for that observer's messages. Only errors of communication pass on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, TypeVar

from commlayer.engine.buckets.current_step import EpochChanged
from commlayer.engine.job.job import JobContext
from commlayer.errors import CommError

T = TypeVar("T")


class ObserverOrder(IntEnum):
    """Order in which observers are called: first those that might change the plan, then those that only measure under the plan.
    """

    CONTROLLER = 0
    """The controller (autotune/): measures, chooses plans, compares sent with exact gradients, and switches plans."""
    TRACE = 1
    """The trace (trace.py): records the steps of a trace."""
    STALE_PLAN = 2
    """The watch on a requested plan (below): compares times of steps with predictions."""
    PARAMETER_DRIFT = 3
    """The check for replica divergence (parameter_drift.py): compares the ranks' parameters."""
    OTHER = 4


def _nothing() -> None:
    """Default callback: does nothing."""


def _never() -> bool:
    """Default for `looks`: `before_commit` reads no sums."""
    return False


class Observer(NamedTuple):
    """One observer and its callbacks. If a callback raises a CommError, the worker stores the error, and later steps fail with
    it. See `Observers.run` for other errors."""

    place: ObserverOrder
    who: Any
    after_step: Callable[[], None] = _nothing
    """Called when averages are written, before the optimizer's step. Under sync="forward" it is called after that step, before
    the next step's first gradient."""
    before_commit: Callable[[], None] = _nothing
    """Called when sums have arrived and averages are not written yet."""
    looks: Callable[[], bool] = _never
    """Returns True if `before_commit` reads the sums of the current step."""
    after_exchange: Callable[[], None] = _nothing
    """Called after a scheduled exchange of local steps. The observer can change the plan in this call."""
    after_drain: Callable[[], None] = _nothing
    """Called after an early exchange of local steps: for a checkpoint, an evaluation, the end, or a change of plans. Training
    continues under the same plan."""


class Observers:
    """The observers of one session, in the order of ObserverOrder; observers of equal order are called in the order in which
    they were added."""

    def __init__(self, connection: JobContext) -> None:
        self._connection = connection
        self._all: list[Observer] = []
        self._failed: set[int] = set()
        """Numbers (`id`) of the observers whose errors are reported already."""

    def add(self, observer: Observer) -> None:
        def guarded(call: Callable[[], None]) -> Callable[[], None]:
            return partial(self.run, observer.who, call, otherwise=None)

        observer = observer._replace(
            after_step=guarded(observer.after_step), before_commit=guarded(observer.before_commit),
            looks=partial(self.run, observer.who, observer.looks, otherwise=False),
            after_exchange=guarded(observer.after_exchange), after_drain=guarded(observer.after_drain))
        self._all = sorted([*self._all, observer], key=lambda each: each.place)

    def run(self, who: Any, act: Callable[[], T], *, otherwise: T) -> T:
        """Calls `act` of the observer `who`. Its first error is reported with its traceback; later ones are ignored."""
        try:
            return act()
        except (CommError, EpochChanged):
            raise
        except Exception as error:
            if id(who) not in self._failed:
                self._failed.add(id(who))
                self._connection.report_failure(type(who).__name__, error)
            return otherwise

    def remove(self, who: Any) -> None:
        self._all = [each for each in self._all if each.who is not who]

    def at(self, place: ObserverOrder) -> list[Any]:
        return [each.who for each in self._all if each.place is place]

    def __iter__(self) -> Iterator[Observer]:
        """Iterates over a copy: observers that are added or removed during an iteration change only the next one."""
        return iter(tuple(self._all))
