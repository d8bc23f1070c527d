"""The step under way, as routes see it: its number, weights, first error, and where to count. Knows no routes and no network.

The worker moves it on. A route reads it, counts what it does, reports the first error and says when a bucket has arrived.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from commlayer.engine.units import Units
from commlayer.observe import Recorder


@dataclasses.dataclass
class Counters:
    """Sums since the start, as Session.stats defines them. Any thread adds bytes and seconds of coding, by the methods."""

    exchanges: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    exposed_s: float = 0.0
    guard_s: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def carried(self, sent_nbytes: int, received_nbytes: int) -> None:
        with self._lock:
            self.sent_nbytes += sent_nbytes
            self.received_nbytes += received_nbytes

    def coded(self, *, encode_s: float = 0.0, decode_s: float = 0.0) -> None:
        with self._lock:
            self.encode_s += encode_s
            self.decode_s += decode_s

    def all_reduced(self, nbytes: int, members: int) -> None:
        """An all-reduce of that many bytes: a ring sends and receives 2 (n - 1) / n of them on each of n members."""
        part = 2 * (members - 1) * nbytes // members
        self.carried(part, part)

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


class Regroup(Exception):
    """The members of the job change: the step under way is none, and is done again by those who are left."""


def _nothing(_: Callable[[], bool]) -> None:
    """Nobody has anything to say."""


class Step:
    """One worker's, from its first step to its last."""

    def __init__(self, rank: int, generation: int, units: Units) -> None:
        self.rank, self.generation, self.units = rank, generation, units
        self.number = 0
        self.eager = False
        """Whether results are wanted one by one, those that the next forward pass needs first ahead of the others."""
        self.error: BaseException | None = None
        """The first error: it stays, and ends the worker."""
        self.heed: Callable[[Callable[[], bool]], None] = _nothing
        """What the training thread does as it begins to wait, and whenever `wake` was called. It may raise: a Regroup, too.
        Hears how to ask whether all has arrived meanwhile."""
        self.counters, self.recorder = Counters(), Recorder()
        self._lock = threading.Lock()
        self._awaited: list[Arrivals] = []

    def latch(self, error: BaseException) -> None:
        """From any thread. Whoever waits for arrivals goes on, and finds the error."""
        with self._lock:
            if self.error is None:
                self.error = error
        for arrivals in self._awaited:
            arrivals.end()

    def wake(self) -> None:
        """From any thread: there is something to heed for who waits, and for who will."""
        for arrivals in self._awaited:
            arrivals.wake()

    def failed(self) -> BaseException | None:
        return self.error

    def arrivals(self) -> Arrivals:
        """For one route."""
        self._awaited.append(Arrivals(lambda: self.heed(self._whole)))
        return self._awaited[-1]

    def _whole(self) -> bool:
        return all(arrivals.here for arrivals in self._awaited)


class Arrivals:
    """How many buckets of a route the step still waits for. `arrived` is called on lanes, the rest on the training thread."""

    def __init__(self, heed: Callable[[], None]) -> None:
        self._lock, self._all, self._next = threading.Lock(), threading.Event(), threading.Event()
        self._heed = heed
        self._left = 0
        self._ended = False

    def expect(self, count: int) -> None:
        """Before a step."""
        self._left = count
        self._all.clear()
        if not count:
            self._all.set()

    def arrived(self) -> None:
        """One needs nothing more for the step to end."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._all.set()
        self._next.set()

    @property
    def here(self) -> bool:
        """Whether all have arrived."""
        return self._left <= 0

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._all.set()
        self._next.set()

    def wake(self) -> None:
        """Whoever waits heeds what there is, and goes on waiting."""
        with self._lock:
            self._all.set()
        self._next.set()

    def wait(self, deadline: float) -> bool:
        """Until all have arrived or an error is known. False when the deadline passed before."""
        while True:
            with self._lock:
                if self._left <= 0 or self._ended:
                    return True
                self._all.clear()
            self._heed()
            if not self._all.wait(max(0.0, deadline - time.monotonic())):
                return False

    def wait_for(self, here: Callable[[], bool], deadline: float) -> bool:
        """The same until `here()`, which some arrival makes true."""
        while True:
            self._next.clear()
            if here() or self._ended:
                return True
            self._heed()
            if not self._next.wait(max(0.0, deadline - time.monotonic())):
                return here() or self._ended
