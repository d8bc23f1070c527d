"""State of the current step that routes share: its number, units, first error, counters, and arrivals of buckets.

The worker advances it. A route reads it, counts its work, reports its first error, and reports each arrived bucket.
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
    """Sums since the start, as Session.stats defines them. Any thread adds bytes and coding time through the methods."""

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
        """An all-reduce of that many bytes: in a ring of n, each member sends and receives 2 (n - 1) / n of them."""
        part = 2 * (members - 1) * nbytes // members
        self.carried(part, part)

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


class Regroup(Exception):
    """The members of the job change: the current step is abandoned and repeated by the remaining members."""


def _nothing(_: Callable[[], bool]) -> None:
    """Default of `heed`: there are no interrupts."""


class Step:
    """One worker's, from its first step to its last."""

    def __init__(self, rank: int, generation: int, units: Units) -> None:
        self.rank, self.generation, self.units = rank, generation, units
        self.number = 0
        self.eager = False
        """Whether results are taken one by one, in the order in which the next forward pass needs them."""
        self.error: BaseException | None = None
        """The first error: it stays, and ends the worker."""
        self.heed: Callable[[Callable[[], bool]], None] = _nothing
        """The training thread calls it before it waits and after each `wake`. It may raise, for example Regroup. The argument
        is a function that returns whether all results have arrived in the meantime."""
        self.counters, self.recorder = Counters(), Recorder()
        self._lock = threading.Lock()
        self._awaited: list[Arrivals] = []

    def latch(self, error: BaseException) -> None:
        """From any thread. Ends all waits for arrivals; the waiting thread then reads the error."""
        with self._lock:
            if self.error is None:
                self.error = error
        for arrivals in self._awaited:
            arrivals.end()

    def wake(self) -> None:
        """From any thread: makes the current wait, or the next one, call `heed`."""
        for arrivals in self._awaited:
            arrivals.wake()

    def failed(self) -> BaseException | None:
        return self.error

    def arrivals(self) -> Arrivals:
        """A new counter of arrivals, for one route."""
        self._awaited.append(Arrivals(lambda: self.heed(self._whole)))
        return self._awaited[-1]

    def _whole(self) -> bool:
        return all(arrivals.here for arrivals in self._awaited)


class Arrivals:
    """Counts the buckets of a route for which the step waits. `arrived` runs on lanes, the rest on the training thread."""

    def __init__(self, heed: Callable[[], None]) -> None:
        self._lock, self._all, self._next = threading.Lock(), threading.Event(), threading.Event()
        self._heed = heed
        self._left = 0
        self._ended = False

    def expect(self, count: int) -> None:
        self._left = count
        self._all.clear()
        if not count:
            self._all.set()

    def arrived(self) -> None:
        """One bucket needs nothing more before the step can end."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._all.set()
        self._next.set()

    @property
    def here(self) -> bool:
        return self._left <= 0

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._all.set()
        self._next.set()

    def wake(self) -> None:
        """Makes the waiting thread call `heed`, then wait on."""
        with self._lock:
            self._all.set()
        self._next.set()

    def wait(self, deadline: float) -> bool:
        """Waits until all have arrived or an error has latched. False when the deadline passed before."""
        while True:
            with self._lock:
                if self._left <= 0 or self._ended:
                    return True
                self._all.clear()
            self._heed()
            if not self._all.wait(max(0.0, deadline - time.monotonic())):
                return False

    def wait_for(self, here: Callable[[], bool], deadline: float) -> bool:
        """Waits in the same way until `here()` is true, which some arrival makes so."""
        while True:
            self._next.clear()
            if here() or self._ended:
                return True
            self._heed()
            if not self._next.wait(max(0.0, deadline - time.monotonic())):
                return here() or self._ended
