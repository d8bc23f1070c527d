"""Defines the state of the current step that all paths share: its number, units, first error, counters, and arrivals of
buckets.

The worker advances this state to the next step. A path reads it, counts its work, and reports the first error and each arrived
bucket.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence

from commlayer.cluster.processes.bounded_calls import CHECK_S
from commlayer.engine.buckets.bucket import WorkerBucket
from commlayer.engine.buckets.units import Units
from commlayer.observe.step_trace import Recorder


@dataclasses.dataclass
class Counters:
    """Totals since the start of the session, noise scale and agreement, as Session.metrics defines them. Any thread can add
    bytes and codec time through the methods."""

    exchanges: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    exposed_s: float = 0.0
    exchange_s: float = 0.0
    guard_s: float = 0.0
    noise_scale: float = 0.0
    """Gradient noise scale in batches of one worker; 0: not known."""
    agreement: float = 0.0
    """Mean cosine between two workers' changes in local steps; 0: not known."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def count_bytes(self, sent_nbytes: int, received_nbytes: int) -> None:
        with self._lock:
            self.sent_nbytes += sent_nbytes
            self.received_nbytes += received_nbytes

    def count_codec_times(self, *, encode_s: float = 0.0, decode_s: float = 0.0) -> None:
        with self._lock:
            self.encode_s += encode_s
            self.decode_s += decode_s

    def all_reduced(self, nbytes: int, members: int) -> None:
        """Counts an all-reduce of `nbytes` bytes: in a ring of n members, each sends and receives 2 (n - 1) / n of them."""
        part = 2 * (members - 1) * nbytes // members
        self.count_bytes(part, part)

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


class Step:
    """State of the step that one worker executes. A Worker uses the same object for all steps."""

    def __init__(
        self, rank: int, generation: int, units: Units, *, eager: bool = False,
    ) -> None:
        """`eager`: True if results are applied one by one, in the order in which the next forward pass needs the parameters."""
        self.rank, self.generation, self.units, self.eager = rank, generation, units, eager
        self.joined = 0
        """See Header.joined."""
        self.number = 0
        self.error: BaseException | None = None
        """The first error of any step. The value is None if no error has occurred. A stored error is never cleared and ends the
        worker."""
        self.waiting_since = 0.0
        """Value of time.monotonic() when the training thread began to wait for results; 0 while it does not wait."""
        self.deadline_s = 0.0
        """Limit in seconds of the training thread's current or last wait, without the time for the coordinator's decision
        (`patience`)."""
        self.counters, self.recorder = Counters(), Recorder()
        self.sent_at = 0.0
        """Value of time.monotonic() when the first bucket of the current exchange was sent; 0 before."""
        self.stalled: dict[int, tuple[int, tuple[int, ...]]] = {}
        """For each bucket, by id: the last report of its server, with the step, and the workers for which the server waits."""
        self._lock = threading.Lock()
        self._awaited: list[Arrivals] = []

    def latch(self, error: BaseException) -> None:
        """Stores an error, unless there is one already, and ends all waits for arrivals; the waiting thread then reads the
        error. Any thread can call it."""
        with self._lock:
            if self.error is None:
                self.error = error
        for arrivals in self._awaited:
            arrivals.end()

    def failed(self) -> BaseException | None:
        return self.error

    def arrivals(self) -> Arrivals:
        self._awaited.append(Arrivals())
        return self._awaited[-1]


class Arrivals:
    """Counts the buckets of one path whose results the step still waits for. `arrived` is called by lanes, all other methods by
    the training thread."""

    def __init__(self) -> None:
        self._lock, self._all, self._next = threading.Lock(), threading.Event(), threading.Event()
        self._all.set()
        self._left = 0
        self._ended = False
        self.last_at = 0.0
        """Value of time.monotonic() when the last of all buckets arrived."""

    def expect(self, count: int) -> None:
        self._left = count
        self._all.clear()
        if not count:
            self._all.set()

    def arrived(self) -> None:
        """Counts one more bucket for which the step no longer has to wait. Called by lanes."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.last_at = time.monotonic()
                self._all.set()
        if not self._next.is_set():
            self._next.set()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._all.set()
        self._next.set()

    def wait(self, deadline: float) -> bool:
        """Waits until all buckets have arrived or the worker has an error. Returns False if `deadline` passes first."""
        return self._ended or _wait(self._all, deadline)

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Waits until `condition()` is true or the worker has an error; every arrival checks the condition again. Returns False
        if `deadline` passes first."""
        while True:
            self._next.clear()
            if condition() or self._ended:
                return True
            if not _wait(self._next, deadline):
                return condition() or self._ended


def _wait(event: threading.Event, deadline: float) -> bool:
    """Waits for the event until `deadline`. Each wait is short: Ctrl-C would not end a wait that begins just after it."""
    while not event.wait(max(0.0, min(CHECK_S, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
    return True


BROKEN = "its backward pass broke off"


def aborted_by(buckets: Sequence[WorkerBucket], *, by_this_worker: bool) -> str:
    """Returns which worker aborted the step and why; "" if none did. `buckets`: those with results of this step.
    `by_this_worker`: True if this worker aborted it."""
    if reason := next((bucket.exchange.abandoned for bucket in buckets if bucket.exchange.abandoned), ""):
        return reason
    broken = by_this_worker or any(math.isnan(bucket.exchange.weight) for bucket in buckets)
    return f"a worker: {BROKEN}" if broken else ""


def is_withdrawn(buckets: Sequence[WorkerBucket]) -> bool:
    """Returns True if a worker has withdrawn its contribution to one of these buckets."""
    return any(bucket.exchange.kept is not None for bucket in buckets)
