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


class Recorder:
    """Collects the events of one step at a time. Off, a mark costs one test; on, one append, which is safe from any thread."""

    def __init__(self) -> None:
        self.on = False
        self._begin = 0.0
        self._raw: list[tuple[str, str, int, float, float, int]] = []
        self.ready: dict[int, float] = {}
        """When each tensor's gradient became final, since the step began."""
        self.marks: dict[str, float] = {}
        """Single points of the step: "forward", "backward", "finish", "commit"."""

    def begin(self) -> None:
        """A step begins now, with its forward pass."""
        if self.on:
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
        """Of the step so far, in order of their start."""
        found = [Event(op, lane, bucket, start - self._begin, end - self._begin, nbytes)
                 for op, lane, bucket, start, end, nbytes in self._raw]
        return sorted(found, key=lambda e: e.start_s)
