"""A storm: homes train, and Poisson faults strike them. Returns what happened; bench.storms.figures evaluates it."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import NamedTuple, Protocol

from bench.storms.reports import LEAST, Ended, Stepped
from commlayer.errors import CommError

KILL, HANG, CUT, LEAVE = KINDS = "kill", "hang", "cut", "leave"
FAILED = "failed"
"""A home that has ended although no fault struck it."""
HANG_S, CUT_S, AWAY_S, RESTART_S = 30.0, 20.0, 30.0, 15.0
"""Seconds of real life: a hang, which outlasts detection; a cut; how long a home that leaves is away; from the end of a process
until its home starts again."""
MEET_S, JOIN_S, LEAVE_S, END_S = 180.0, 100.0, 60.0, 60.0
"""Deadlines on this machine: for the start of a job, for a home to join, for a home that was removed to leave, for the end."""
POLL_S = 0.01
AHEAD = 10
"""Number of steps after the newest one with which training ends."""


class Home(Protocol):
    """A home as the storm sees it: see bench.storms.homes and bench.storms.torchft_job."""

    name: str

    @property
    def gone(self) -> bool: ...
    def reports(self) -> list[Stepped | Ended]: ...
    def signal(self, number: int) -> None: ...
    def released(self, reason: str) -> None: ...


class Job(Protocol):
    count: int

    def home(self, slot: int) -> Home: ...
    def cut(self, slot: int) -> None: ...
    def mend(self, slot: int) -> None: ...
    def finish_at(self, step: int) -> bool: ...
    def removals(self) -> list[tuple[float, str]]: ...
    def log(self) -> str: ...


class Fault(NamedTuple):
    """A fault of the schedule. `at_s`: seconds of the time-lapse after the storm's begin."""

    at_s: float
    kind: str


class Strike(NamedTuple):
    """A fault that struck. `name`: of the worker; `at_s`: time.time()."""

    kind: str
    name: str
    at_s: float


class Record(NamedTuple):
    """What happened. Times are time.time()."""

    begin_s: float
    end_s: float
    steps: dict[str, list[Stepped]]
    """By worker."""
    strikes: list[Strike]
    removals: list[tuple[float, str]]
    errors: list[str]
    failed: bool = False
    """Whether the whole job failed. Then the storm ended early."""


def schedule(rate: float, seconds: float, scale: float, seed: int) -> list[Fault]:
    """Poisson faults, `rate` an hour of real life, for `seconds` of a time-lapse that is `scale` times faster. Kinds are dealt
    so that each is as frequent as the others.

    >>> storm = schedule(125, 3600, 10, 0)
    >>> 1200 < len(storm) < 1300, sorted({fault.kind for fault in storm[:4]})
    (True, ['cut', 'hang', 'kill', 'leave'])
    """
    chance, faults, deck = random.Random(f"storm {seed} {rate}"), list[Fault](), list[str]()
    at_s = chance.expovariate(rate * scale / 3600) if rate else seconds
    while at_s < seconds:
        deck = deck or chance.sample(KINDS, len(KINDS))
        faults.append(Fault(at_s, deck.pop()))
        at_s += chance.expovariate(rate * scale / 3600)
    return faults


class _Slot:
    """A home and those that come after it."""

    def __init__(self, storm: Storm, number: int) -> None:
        self._storm, self._number = storm, number
        self._home: Home = storm.job.home(number)
        self.fault = "start"
        """What it has not overcome yet; "" while it trains."""
        self._life: Iterator[None] = self._join()
        self.ended: Ended | None = None
        self._steps: list[Stepped] = []

    def tick(self) -> None:
        for report in self._home.reports():
            if isinstance(report, Ended):
                self.ended = report
            else:
                self._steps.append(report)
        if not self.fault and (self._home.gone or self.ended) and not self._storm.ending:
            self._fail("ended without a fault")
            self.fault, self._life = FAILED, self._begin_again(RESTART_S)
        if self.fault:
            next(self._life, None)

    def strike(self, kind: str) -> None:
        self._storm.strikes.append(Strike(kind, self._home.name, time.time()))
        self.fault = kind
        self._life = {KILL: self._kill, HANG: self._hang, CUT: self._cut, LEAVE: self._leave}[kind]()

    def _fail(self, what: str) -> None:
        why = f": {self.ended.what}" if self.ended and self.ended.what else ""
        self._storm.errors.append(f"{self._home.name or 'a home'} (place {self._number}) {what}{why}")

    def _kill(self) -> Iterator[None]:
        self._home.signal(signal.SIGKILL)
        yield from self._begin_again(RESTART_S)

    def _leave(self) -> Iterator[None]:
        self._home.signal(signal.SIGINT)
        yield from self._begin_again(AWAY_S)

    def _hang(self) -> Iterator[None]:
        """It is killed, or continued, and then it must leave."""
        self._home.signal(signal.SIGSTOP)
        yield from self._wait(HANG_S)
        self._home.signal(self._storm.chance.choice((signal.SIGKILL, signal.SIGCONT)))
        yield from self._return()

    def _cut(self) -> Iterator[None]:
        self._storm.job.cut(self._number)
        yield from self._wait(CUT_S)
        self._storm.job.mend(self._number)
        yield from self._return()

    def _wait(self, seconds: float) -> Iterator[None]:
        until = time.monotonic() + seconds / self._storm.scale
        while time.monotonic() < until:
            yield

    def _return(self) -> Iterator[None]:
        """The home completes exchanges again, or it leaves because it was removed, and a new one starts."""
        before = self._steps[-1].exchanges
        until = time.monotonic() + LEAVE_S
        while not (self._home.gone or self.ended) and time.monotonic() < until:
            if self._steps[-1].exchanges > before + 1:
                self.fault = ""
                return
            yield
        yield from self._begin_again(RESTART_S)

    def _begin_again(self, seconds: float) -> Iterator[None]:
        until = time.monotonic() + LEAVE_S
        while not (self._home.gone or self.ended):
            if time.monotonic() > until:
                self._fail(f"has not left within {LEAVE_S:g} s after: {self.fault}")
                self._home.signal(signal.SIGKILL)
                break
            yield
        self._home.released("a worker of this home has ended")
        yield from self._wait(0.0 if self.ended and self.ended.again else seconds)
        yield from self._join(again=True)

    def _join(self, *, again: bool = False) -> Iterator[None]:
        """Joins, again if there is no place yet, until its first step."""
        until = time.monotonic() + (JOIN_S if again else MEET_S)
        while True:
            if again:
                self._home, self.ended, self._steps = self._storm.job.home(self._number), None, []
            while not self._steps:
                if time.monotonic() > until:
                    self._fail("has not joined in time")
                    until = time.monotonic() + JOIN_S
                if self._home.gone or self.ended:
                    break
                yield
            else:
                break
            if self.ended and not self.ended.again:
                self._fail("could not join")
            self._home.released("a worker of this home has ended")
            again = True
            yield from self._wait(1.0)
        self._storm.steps[self._home.name] = self._steps
        self.fault = ""


class Storm:
    """A job and what strikes it. `run` yields whenever others may go on, so that several storms share a thread."""

    def __init__(self, job: Job, seconds: float, rate: float, scale: float, seed: int) -> None:
        self.job, self.scale, self._seconds = job, scale, seconds
        self.chance = random.Random(f"places {seed} {rate}")
        self._faults = schedule(rate, seconds, scale, seed)
        self.ending = False
        self.steps: dict[str, list[Stepped]] = {}
        self.strikes: list[Strike] = []
        self.errors: list[str] = []
        self._slots = [_Slot(self, number) for number in range(job.count)]

    def run(self, together: list[Storm]) -> Generator[None, None, Record]:
        """`together`: the storms that begin when the jobs of all have begun. Raises CommError if a job does not begin."""
        if not (yield from self._until(lambda: all(storm.whole for storm in together), MEET_S)):
            print(self.job.log(), file=sys.stderr)
            raise CommError(f"a job has not begun within {MEET_S:g} s", peer="storm", code="E-DEADLINE")
        begin, begin_s = time.monotonic(), time.time()
        waiting: list[str] = []
        while (now := time.monotonic() - begin) < self._seconds and not self.failed:
            while self._faults and self._faults[0].at_s <= now:
                waiting.append(self._faults.pop(0).kind)
            whole = [slot for slot in self._slots if not slot.fault]
            if waiting and len(whole) > LEAST:  # otherwise the fault waits
                self.chance.choice(whole).strike(waiting.pop(0))
            yield from self._tick()
        end_s = time.time()
        if self.failed:
            self.errors.append("the job failed")
            print(self.job.log(), file=sys.stderr)
        else:
            yield from self._end()
        return Record(begin_s, end_s, self.steps, self.strikes, self.job.removals(), self.errors, self.failed)

    @property
    def whole(self) -> bool:
        return not any(slot.fault for slot in self._slots)

    @property
    def failed(self) -> bool:
        """Whether all homes have failed, or a home has begun a job from step 0 while there were others."""
        beginners = sum(steps[0].step == 1 for steps in self.steps.values())
        return beginners > self.job.count or all(slot.fault == FAILED for slot in self._slots)

    def _end(self) -> Generator[None, None, None]:
        """All that are away come back; then, if they can, all end with the same step and compare weights."""
        if not (yield from self._until(lambda: self.whole, JOIN_S + LEAVE_S)):
            late = [(place, slot.fault) for place, slot in enumerate(self._slots) if slot.fault]
            self.errors += [f"place {place} has not overcome: {fault}" for place, fault in late]
        self.ending = True
        survivors = [slot for slot in self._slots if not slot.fault]
        last = max(steps[-1].step for steps in self.steps.values()) + AHEAD
        if not self.job.finish_at(last):
            return
        yield from self._until(lambda: all(slot.ended for slot in survivors), END_S)
        ends = [slot.ended or Ended(0) for slot in survivors]
        self.errors += [f"a survivor has not ended well: {end}" for end in ends if not end.digest or end.step < last]
        if len({(end.step, end.digest) for end in ends}) > 1:
            self.errors.append("survivors have ended with different weights")

    def _until(self, done: Callable[[], bool], seconds: float) -> Generator[None, None, bool]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            yield from self._tick()
            if done():
                return True
        return False

    def _tick(self) -> Generator[None, None, None]:
        for slot in self._slots:
            slot.tick()
        yield


def run(jobs: Mapping[float, Job], seconds: float, scale: float, seed: int) -> dict[float, Record]:
    """Trains for `seconds` after all homes of all jobs have begun. Each job suffers the faults an hour that are its key."""
    storms = {rate: Storm(job, seconds, rate, scale, seed) for rate, job in jobs.items()}
    lives = {rate: storm.run(list(storms.values())) for rate, storm in storms.items()}
    records: dict[float, Record] = {}
    while lives:
        for rate, life in list(lives.items()):
            try:
                next(life)
            except StopIteration as end:
                records[rate] = end.value
                del lives[rate]
        time.sleep(POLL_S)
    return dict(sorted(records.items()))
