"""Records the history of a run: curves over time, and notable events in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from commlayer.observe.events import Event, LogEvent, MemberEvent, StepEvent
from commlayer.observe.job.job_view import JobView

MOST_POINTS = 1000
"""Number of points of a curve from which neighbours are merged."""
MOST_ROWS = 5000
"""Number of notable events that a page shows."""

Number = float | None
Point = list[Number]
"""Time, step time of all workers (median, slowest, planned), exposed fraction of a step (median, largest), loss, and payload
of all workers in bytes per second (sent, received). None: unknown."""
Notable = tuple[float, str, str]
"""Time, kind and words of an event that a person would want to read."""


def rounded(number: Any) -> Any:
    """Four digits are enough for a person.

    >>> rounded(0.123456), rounded(None)
    (0.1235, None)
    """
    return None if number is None else float(f"{number:.4g}")


class RunCurves:
    """Points of a job's curves over time, at most one a second. When there are MOST_POINTS, neighbours are merged, so that the
    curves of a long run keep their extremes."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._every_s, self._next, self._present = 1.0, 0.0, 0

    def add(self, view: JobView, *, last: bool = False) -> None:
        """Adds a point, unless the previous one is less than a second old. `last`: a worker is about to leave. If it is the
        first one since the previous point, this is the last moment with all workers."""
        if len(view.present) != self._present if last else view.time < self._next:
            return
        stepping = [worker.step for worker in view.present if worker.step.steps * worker.step.step_s > 0]
        if not stepping:
            return
        self._next, self._present = view.time + self._every_s, len(view.present)
        exposed = [step.exposed_s / step.step_s for step in stepping]
        times_s = [step.step_s for step in stepping]
        sent = sum(step.sent_bytes / (step.steps * step.step_s) for step in stepping)
        received = sum(step.received_bytes / (step.steps * step.step_s) for step in stepping)
        self.points.append([round(view.time, 2), *map(rounded, (
            median(times_s), max(times_s), view.plan.step_s or None, median(exposed), max(exposed), view.loss, sent,
            received))])
        if len(self.points) >= MOST_POINTS:
            self.points = [_merged(pair) for pair in zip(self.points[::2], self.points[1::2], strict=False)]
            self._every_s *= 2


def _merged(pair: Sequence[Point]) -> Point:
    """
    >>> _merged([[1.0, 2.0, 3.0, None, 0.5, 0.5, 4.0, 8.0, 8.0], [2.0, 4.0, 9.0, 1.0, 0.5, 0.7, None, 8.0, 8.0]])
    [2.0, 3.0, 9.0, 1.0, 0.5, 0.7, 4.0, 8.0, 8.0]
    """
    joins: list[Callable[[list[float]], float]] = [max, fmean, max, max, fmean, max, fmean, fmean, fmean]
    known = [[number for number in numbers if number is not None] for numbers in zip(*pair, strict=True)]
    return [join(numbers) if numbers else None for join, numbers in zip(joins, known, strict=True)]


class RunRecord:
    """A job's present view with its history: curves, and notable events in words."""

    def __init__(self) -> None:
        self.view, self.curves = JobView(), RunCurves()
        self.events: deque[Notable] = deque(maxlen=MOST_ROWS)
        self.notable = 0
        """Number of notable events so far, with those that were dropped."""

    def apply(self, event: Event) -> None:
        run = self.view.job.run
        if isinstance(event, MemberEvent) and event.state in ("left", "dead"):
            self.curves.add(self.view, last=True)
        self.view.apply(event)
        if self.view.job.run != run:
            self.curves = RunCurves()
        if isinstance(event, StepEvent):
            self.curves.add(self.view)
        if self.view.recent and self.view.recent[-1] is event:
            self.events.append((round(event.time, 2), _kind(event), self.view.words(event)))
            self.notable += 1


def _kind(event: Event) -> str:
    match event:
        case LogEvent():
            return event.level
        case MemberEvent(state=state):
            return state
    return str(event.__struct_config__.tag)
