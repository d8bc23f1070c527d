"""Events of a step, measured or predicted, and where a worker's threads leave them. Knows times and names only."""

from __future__ import annotations

import time
from typing import NamedTuple


class Event(NamedTuple):
    """Something that took from start_s to end_s, in seconds since the step began."""

    op: str
    lane: str
    bucket: int
    start_s: float
    end_s: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Step(NamedTuple):
    """What was recorded from the end of one step's averaging to the end of the next one's."""

    ready: dict[int, float]
    """When each tensor's gradient became final."""
    marks: dict[str, float]
    """Single points: "backward" when it was over, "summed" when all buckets were in, "end"."""
    events: list[Event]


class Recorder:
    """Collects the events of one step at a time. Off, a mark costs one test; on, one append, which is safe from any thread."""

    def __init__(self) -> None:
        self.on = False
        self.steps: list[Step] = []
        """Whole ones, since it was switched on."""
        self._begun = False
        self._begin = 0.0
        self._raw: list[tuple[str, str, int, float, float, int]] = []
        self.ready: dict[int, float] = {}
        self.marks: dict[str, float] = {}

    def switch(self, *, on: bool) -> None:
        """On, it collects from the next step's begin; what it had collected before is dropped."""
        self.on, self._begun = on, False
        if on:
            self.steps = []

    def next(self) -> None:
        """One step's averaging is over: what follows belongs to the next step."""
        if not self.on:
            return
        self.mark("end")
        if self._begun:
            self.steps.append(Step(self.ready, self.marks, self.events()))
        self._begun = True
        self._begin = time.perf_counter()
        self._raw, self.ready, self.marks = [], {}, {}

    def mark(self, name: str) -> None:
        if self.on:
            self.marks[name] = time.perf_counter() - self._begin

    def tensor(self, number: int) -> None:
        if self.on:
            self.ready[number] = time.perf_counter() - self._begin

    def add(self, op: str, lane: str, bucket: int, start: float, nbytes: int = 0) -> None:
        """From `start`, of time.perf_counter(), to now."""
        if self.on:
            self._raw.append((op, lane, bucket, start, time.perf_counter(), nbytes))

    def events(self) -> list[Event]:
        """Of the step under way, in order of their start."""
        found = [Event(op, lane, bucket, start - self._begin, end - self._begin, nbytes)
                 for op, lane, bucket, start, end, nbytes in self._raw]
        return sorted(found, key=lambda e: e.start_s)
