"""Records the events of steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

NO_BUCKET = -1
EXCHANGE = "exchange"
STEPS_KEPT = 64
"""Number of recorded steps that are kept, enough for a median."""
LANES = {"node": "intra", "net": "network", "all": "network", EXCHANGE: "network"}


class TraceEvent(NamedTuple):
    """An activity from start_s to end_s, in seconds since the step began."""

    op: str
    """Name of the operation, for example "encode@cpu" or "net.allgather"; EXCHANGE for push, summation and download over a
    server together."""
    bucket: int
    """Number of the bucket; NO_BUCKET if the activity belongs to no bucket."""
    start_s: float
    end_s: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def lane(self) -> str:
        """The row (thread) in which trace viewers show the event."""
        scope, _, _ = self.op.partition(".")
        coding, _, device = self.op.partition("@")
        return coding if device else LANES.get(scope, "compute")


class RecordedStep(NamedTuple):
    """The events from the end of one step's averaging to the end of the next step's, without observers' time after that
    averaging. Times are in seconds from the start of this period."""

    ready: dict[int, float]
    """Maps a tensor's number to the time at which its gradient became final."""
    marks: dict[str, float]
    """Times of three events: "backward" (end of the backward pass), "summed" (all buckets received), "end"."""
    events: list[TraceEvent]


class Recorder:
    """Collects the events of one step at a time. Any thread may add events; adding costs one test if recording is off, else one
    append."""

    def __init__(self) -> None:
        self.on = False
        self.steps: list[RecordedStep] = []
        """The latest complete steps since recording was switched on."""
        self._keeps = False
        self._followers: list[Callable[[RecordedStep], None]] = []
        self._begun = False
        self._begin = 0.0
        self._raw: list[tuple[str, int, float, float, int]] = []
        self.ready: dict[int, float] = {}
        self.marks: dict[str, float] = {}

    def switch(self, *, on: bool) -> None:
        """Switches recording on or off. Switching on drops earlier steps and starts at the next step."""
        self._keeps = on
        if on:
            self.steps = []
        self._turn()

    def follow(self, take: Callable[[RecordedStep], None]) -> None:
        """Calls `take` with every complete step, from the next step on and independently of `switch`."""
        self._followers.append(take)
        self._turn()

    def unfollow(self, take: Callable[[RecordedStep], None]) -> None:
        self._followers.remove(take)
        self._turn()

    def _turn(self) -> None:
        wanted = self._keeps or bool(self._followers)
        self._begun = self._begun and self.on and wanted
        self.on = wanted

    def next(self) -> None:
        """Ends a step: later events belong to the next step."""
        if not self.on:
            return
        self.mark("end")
        if self._begun:
            step = RecordedStep(self.ready, self.marks, self.events())
            if self._keeps:
                self.steps = [*self.steps[1 - STEPS_KEPT :], step]
            for take in self._followers:
                take(step)
        self.restart()

    def restart(self) -> None:
        """Begins a step now and discards events recorded since the last step."""
        if not self.on:
            return
        self._begun = True
        self._begin = time.perf_counter()
        self._raw, self.ready, self.marks = [], {}, {}

    def skip(self, seconds: float) -> None:
        """Leaves out the last seconds, which do not belong to training: the present step begins that much later."""
        self._begin += seconds

    def mark(self, name: str) -> None:
        if self.on:
            self.marks[name] = time.perf_counter() - self._begin

    def tensor(self, number: int) -> None:
        if self.on:
            self.ready[number] = time.perf_counter() - self._begin

    def add(self, op: str, bucket: int, start: float, nbytes: int = 0) -> None:
        """Adds an event from `start` (time.perf_counter()) to now."""
        if self.on:
            self._raw.append((op, bucket, start, time.perf_counter(), nbytes))

    def events(self) -> list[TraceEvent]:
        """Returns the events of the present step, in order of their start."""
        events = [TraceEvent(op, bucket, start - self._begin, end - self._begin, nbytes)
                  for op, bucket, start, end, nbytes in self._raw]
        return sorted(events, key=attrgetter("start_s"))
