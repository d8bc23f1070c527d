"""Events of a step, measured or predicted, and where a worker's threads leave them. Knows times and names only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

NO_BUCKET = -1
EXCHANGE = "exchange"
KEPT = 64
"""Steps: enough for any median."""
LANES = {"node": "intra", "net": "network", "all": "network", EXCHANGE: "network"}


class Event(NamedTuple):
    """Something that took from start_s to end_s, in seconds since the step began."""

    op: str
    """As paths spell it: "encode@cpu", "net.allgather"; EXCHANGE for a server's push, sum and result together."""
    bucket: int
    """NO_BUCKET for what is no bucket's."""
    start_s: float
    end_s: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def lane(self) -> str:
        """Where people look for it, whoever recorded or predicted it."""
        scope, _, _ = self.op.partition(".")
        coding, _, device = self.op.partition("@")
        return coding if device else LANES.get(scope, "compute")


class RecordedStep(NamedTuple):
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
        self.steps: list[RecordedStep] = []
        """Whole ones, since it was switched on; of many the latest."""
        self._keeps = False
        self._followers: list[Callable[[RecordedStep], None]] = []
        self._begun = False
        self._begin = 0.0
        self._raw: list[tuple[str, int, float, float, int]] = []
        self.ready: dict[int, float] = {}
        self.marks: dict[str, float] = {}

    def switch(self, *, on: bool) -> None:
        """On, it collects from the next step's begin; what it had collected before is dropped."""
        self._keeps = on
        if on:
            self.steps = []
        self._turn()

    def follow(self, take: Callable[[RecordedStep], None]) -> None:
        """From the next step's begin every whole step goes to `take`, too, whoever switches it on or off meanwhile."""
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
        """One step's averaging is over: what follows belongs to the next step."""
        if not self.on:
            return
        self.mark("end")
        if self._begun:
            step = RecordedStep(self.ready, self.marks, self.events())
            if self._keeps:
                self.steps = [*self.steps[1 - KEPT :], step]
            for take in self._followers:
                take(step)
        self.restart()

    def restart(self) -> None:
        """A step begins now, whatever was recorded of one before."""
        if not self.on:
            return
        self._begun = True
        self._begin = time.perf_counter()
        self._raw, self.ready, self.marks = [], {}, {}

    def mark(self, name: str) -> None:
        if self.on:
            self.marks[name] = time.perf_counter() - self._begin

    def tensor(self, number: int) -> None:
        if self.on:
            self.ready[number] = time.perf_counter() - self._begin

    def add(self, op: str, bucket: int, start: float, nbytes: int = 0) -> None:
        """From `start`, of time.perf_counter(), to now."""
        if self.on:
            self._raw.append((op, bucket, start, time.perf_counter(), nbytes))

    def events(self) -> list[Event]:
        """Of the step under way, in order of their start."""
        found = [Event(op, bucket, start - self._begin, end - self._begin, nbytes)
                 for op, bucket, start, end, nbytes in self._raw]
        return sorted(found, key=lambda e: e.start_s)
