"""Defines the state of the current step that all paths share: its number, units, first error, counters, and arrivals of
buckets.

The worker advances this state to the next step. A path reads it, counts its work, and reports the first error and each arrived
bucket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import torch
from msgspec import structs

from commlayer.cluster.client import root_cause
from commlayer.cluster.process_groups import ANY_PEER
from commlayer.cluster.summation import as_float32
from commlayer.cluster.uplink import Uplink
from commlayer.engine.buckets import WorkerBucket
from commlayer.errors import CommError, InvalidInput, PeerLost
from commlayer.observe.events import EventLog, WaitEvent, WaitKind
from commlayer.observe.step_trace import Recorder
from commlayer.transport.protocol import peer_name


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

    def carried(self, sent_nbytes: int, received_nbytes: int) -> None:
        with self._lock:
            self.sent_nbytes += sent_nbytes
            self.received_nbytes += received_nbytes

    def coded(self, *, encode_s: float = 0.0, decode_s: float = 0.0) -> None:
        with self._lock:
            self.encode_s += encode_s
            self.decode_s += decode_s

    def all_reduced(self, nbytes: int, members: int) -> None:
        """Counts an all-reduce of `nbytes` bytes: in a ring of n members, each sends and receives 2 (n - 1) / n of them."""
        part = 2 * (members - 1) * nbytes // members
        self.carried(part, part)

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


class EpochChanged(Exception):
    """Error: the members of the job are changing, so the current step is abandoned, and the remaining members repeat it."""


class WorkerListener:
    """Interface by which a worker sends questions and reports to its session. This class serves a worker without a session;
    JobContext implements it for others."""

    def check_interrupts(self, complete: Callable[[], bool]) -> None:
        """Polls for interrupts. The training thread calls it before each wait and after each `wake`. It can raise, for example
        EpochChanged. `complete` returns True if all results have arrived."""

    def patience(self) -> float:
        """Returns the seconds to wait after a step's deadline, because the coordinator has yet to decide which worker is lost.
        """
        return 0.0

    def explain(self, error: BaseException) -> BaseException:
        """Replaces an error by a more precise one, or returns it unchanged."""
        return error

    def interrupted(self, cause: str) -> None:
        """Called when the script's exception has ended the wait for a step's results. `cause`: for the other ranks."""

    def settle(self) -> None:
        """Reports to the worker the averages of the last step that the script has cleared; see Worker.mark_discarded."""

    def finish_pending(self) -> None:
        """Waits for results of the last step that are still missing, if results are applied bucket by bucket."""


class Step:
    """State of the step that one worker executes. One object exists for all steps of a Worker."""

    def __init__(
        self, rank: int, generation: int, units: Units, check_interrupts: Callable[[Callable[[], bool]], None], *,
        eager: bool = False,
    ) -> None:
        """`eager`: True if results are applied one by one, in the order in which the next forward pass needs the parameters."""
        self.rank, self.generation, self.units, self.eager = rank, generation, units, eager
        self.check_interrupts = check_interrupts
        self.number = 0
        self.error: BaseException | None = None
        """The first error of any step; None if there is none. It is never cleared and ends the worker."""
        self.waiting_since = 0.0
        """Value of time.monotonic() when the training thread began to wait for results; 0 while it does not wait."""
        self.deadline_s = 0.0
        """Limit in seconds of the training thread's current or last wait, without the time for the coordinator's decision
        (`patience`)."""
        self.counters, self.recorder = Counters(), Recorder()
        self.sent_at = 0.0
        """Value of time.monotonic() when the first bucket of the current exchange was sent; 0 before."""
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

    def wake(self) -> None:
        """Makes the current wait, or the next one, poll for interrupts. Any thread can call it."""
        for arrivals in self._awaited:
            arrivals.wake()

    def failed(self) -> BaseException | None:
        return self.error

    def arrivals(self) -> Arrivals:
        self._awaited.append(Arrivals(lambda: self.check_interrupts(self._whole)))
        return self._awaited[-1]

    def _whole(self) -> bool:
        return all(arrivals.complete for arrivals in self._awaited)


class Arrivals:
    """Counts the buckets of one path whose results the step still waits for. `arrived` is called by lanes, all other methods by
    the training thread."""

    def __init__(self, check_interrupts: Callable[[], None]) -> None:
        self._lock, self._all, self._next = threading.Lock(), threading.Event(), threading.Event()
        self._check_interrupts = check_interrupts
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
        self._next.set()

    @property
    def complete(self) -> bool:
        return self._left <= 0

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._all.set()
        self._next.set()

    def wake(self) -> None:
        """Makes the waiting thread poll for interrupts and then continue to wait."""
        with self._lock:
            self._all.set()
        self._next.set()

    def wait(self, deadline: float) -> bool:
        """Waits until all buckets have arrived or the worker has an error. Returns False if `deadline` passes first."""
        while True:
            with self._lock:
                if self._left <= 0 or self._ended:
                    return True
                self._all.clear()
            self._check_interrupts()
            if not self._all.wait(max(0.0, deadline - time.monotonic())):
                return False

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Waits until `condition()` is true or the worker has an error; every arrival checks the condition again. Returns False
        if `deadline` passes first."""
        while True:
            self._next.clear()
            if condition() or self._ended:
                return True
            self._check_interrupts()
            if not self._next.wait(max(0.0, deadline - time.monotonic())):
                return condition() or self._ended


# ---- factors from gradients to encoded values, and from sums to averages: weights, loss scale, learning rate

class Units:
    """Factors between gradients, encoded values and averages, and this worker's assumption of the total weight.

    Residuals are kept as parts of the mean, without the loss scale. So a change of weights or scale does not change the value
    of an old residual. For that, the total weight must be known before encoding. A worker assumes the total of the last step,
    unless the script provides it. If the assumption is wrong, the server requests that the step be encoded again (Flag.AGAIN).
    """

    def __init__(self, members: int, *, shared: bool) -> None:
        """`shared`: True if several ranks of a node add up their gradients before one of them encodes the sum."""
        self.members, self._shared = members, shared
        self.weight = 1.0
        self.scale = 1.0
        self.rate = 1.0
        self.total = float(members)
        """The total weight of all workers: provided by the script, or assumed equal to that of the previous step."""
        self.weight_known = False
        """True: the script has provided the total weight."""
        self.broken = False
        """True: this worker has aborted the step. Its weight is then sent as NaN, which makes the total weight NaN on all
        workers."""

    def take(self, other: Units) -> None:
        self.weight, self.scale, self.rate = other.weight, other.scale, other.rate
        self.total, self.weight_known = other.total, other.weight_known

    def rate_of(self, bucket: WorkerBucket) -> float:
        """Returns the factor by which a bucket's gradients are multiplied before encoding, apart from weight and loss scale:
        the learning rate if the codec encodes weight updates, else 1."""
        return self.rate if bucket.in_updates else 1.0

    def scale_of(self, bucket: WorkerBucket) -> float:
        """Returns the number by which gradients are divided before encoding: the loss scale, divided by the learning rate if
        the bucket encodes weight updates.

        Without this division, a change of the loss scale would falsify every residual. The same holds for the learning rate in
        codecs of weight updates.
        """
        return 1.0 if bucket.buffer else self.scale / (self.rate if bucket.in_updates else 1.0)

    def gather(self, bucket: WorkerBucket) -> None:
        """Copies a bucket's gradients into its send buffer, in the unit in which they are encoded.

        An inherited residual is scaled by total weight / `members`, unless it is already a part of the mean. With equal
        weights, the send buffer then has the scale of gradients.
        """
        bucket.exchange.total = total = as_float32(self.total)
        if self.broken:
            bucket.gather(0.0, 0.0, 0.0)
            bucket.exchange.weight = math.nan
        else:
            worth = 1.0 if bucket.in_means and bucket.served else total / self.members
            bucket.gather(self.factor(bucket), self.weight, worth)

    def factor(self, bucket: WorkerBucket) -> float:
        """Returns the factor by which gradients are multiplied before encoding. Codecs with residuals encode parts of the mean.
        Paths over collectives apply this scale later, when they know the total weight, so they need not assume it."""
        part = self.weight / self.scale_of(bucket)
        in_parts = bucket.in_means and bucket.served
        return part * (self.members / (bucket.exchange.total or self.total)) if in_parts else part

    def average(self, bucket: WorkerBucket, weight: float) -> float | torch.Tensor | None:
        """Returns the factor from the received sum to the average; None if all workers have weight 0."""
        scale = self.scale_of(bucket)
        with contextlib.suppress(ZeroDivisionError):
            average = bucket.over_weight(scale, weight)
            if bucket.means:
                return 1.0
            return scale / self.members if bucket.in_means else average
        return None

    def weigh(self, weight: float, total: float | None) -> None:
        """Sets this worker's weight from now on. `total`: the sum of all workers' weights; None if the script does not provide
        it.

        Several ranks of a node that share buckets ignore `total`, because all of them must assume the same value: the total
        weight of the last step.
        """
        self.weight, self.weight_known = weight, total is not None and not self._shared
        if total is not None and self.weight_known:
            self.total = total

    def regroup(self, total: float) -> None:
        """Sets the total weight of all workers to `total`, after the members have changed during a step."""
        self.total, self.weight_known = total, False

    def receive(self, total: float) -> None:
        """Stores the total weight of this step, which a server has sent. Ranks of a node that share buckets ignore this value,
        because all of them must assume the same one."""
        if not self._shared:
            self.regroup(total)

    def learn(self, total: float) -> None:
        """Stores the total weight of the finished step, as the assumption for the next one. 0: unknown.

        Raises ValueError if the script provided another total.
        """
        if not total:
            return
        if self.weight_known and abs(total - self.total) > 1e-6 * total:
            raise InvalidInput("E-WEIGHT",
                               f"weight(total={self.total:g}) differs from the sum of all workers' weights, {total:g}: pass "
                               "this sum, or leave total out")
        if not self.weight_known:
            self.total = total


# ---- measures how long a worker computes in each step, without its waits for other ranks

LAPS_KEPT = 256
"""Largest number of measured steps that are kept for `take`; older measurements are dropped."""


class StepTiming(NamedTuple):
    """Computation time of one step. `step` counts from 0. `seconds` extends from the end of the previous averaging to the end
    of this step's backward pass."""

    step: int
    seconds: float


class Stopwatch:
    """Measures the computation time of every step, without waits for other ranks. On CUDA it records events in the stream,
    because the host only enqueues work."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._begin: float | torch.cuda.Event | None = None
        self._skipped_s = 0.0
        self._laps: deque[tuple[int, float | torch.cuda.Event, float | torch.cuda.Event, float]] = deque(maxlen=LAPS_KEPT)

    def start(self) -> None:
        """Starts to time a step, after an averaging has ended. Calling it again restarts the time."""
        self._begin, self._skipped_s = self._now(), 0.0

    def drop(self) -> None:
        """Discards the current measurement, because this step has no computation."""
        self._begin = None

    def skip(self, seconds: float) -> None:
        """Excludes `seconds` of waiting or other work from the current measurement."""
        self._skipped_s += seconds

    def stop(self, step: int) -> None:
        if self._begin is not None:
            self._laps.append((step, self._begin, self._now(), self._skipped_s))
            self._begin = None

    def take(self) -> list[StepTiming]:
        """Returns the measurements that are complete and were not returned before."""
        laps = []
        while self._laps:
            step, begin, end, skipped_s = self._laps[0]
            if self._on_device:
                if not cast(torch.cuda.Event, end).query():
                    break
                seconds = cast(torch.cuda.Event, begin).elapsed_time(cast(torch.cuda.Event, end)) / 1e3
            else:
                seconds = cast(float, end) - cast(float, begin)
            self._laps.popleft()
            laps.append(StepTiming(step, max(0.0, seconds - skipped_s)))
        return laps

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


# ---- detects whether a worker aborted the step that was just exchanged, and which one
# A worker whose backward pass failed sends an abort when its next pass begins, instead of its gradients. To servers the abort
# is a flag with a line of text, to collectives a weight of NaN. So all workers receive it with the result.

BROKEN = "its backward pass broke off"


def aborted_by(buckets: Sequence[WorkerBucket], *, by_this_worker: bool) -> str:
    """Returns which worker aborted the step and why; "" if none did. `buckets`: those with results of this step.
    `by_this_worker`: True if this worker aborted it."""
    if reason := next((bucket.exchange.abandoned for bucket in buckets if bucket.exchange.abandoned), ""):
        return reason
    # Collectives run in plan order, so the last weight covers the workers that finished the backward pass.
    last = [bucket for bucket in buckets if not bucket.served][-1:]
    weights = [bucket.exchange.weight for bucket in buckets if bucket.served] + [bucket.summed_weight() for bucket in last]
    return f"a worker: {BROKEN}" if by_this_worker or any(map(math.isnan, weights)) else ""


# ---- finds the peer that caused an error, once the coordinator has had time to report it

class RootCause:
    """Stores which peer the coordinator first reported as lost, or that the coordinator itself does not respond."""

    def __init__(self) -> None:
        self.error: CommError | None = None
        self._heard = threading.Event()

    def fall(self, error: CommError) -> None:
        self.error = self.error or error
        self._heard.set()

    def explain(self, error: BaseException, link: Uplink | None, *, notice_s: float, verdict_s: float) -> BaseException:
        """Returns a more precise error for a failed collective, or for a server that ended with the job, if one is known; else
        the same error.

        A collective names no peer, so this function waits up to `verdict_s` seconds for the coordinator to report a dead
        worker. After an error of a server it waits up to `notice_s` seconds.
        """
        if link is None or not isinstance(error, CommError):
            return error
        if error.peer == ANY_PEER:
            self._heard.wait(verdict_s)
        elif error.peer.startswith("server"):
            self._heard.wait(notice_s)
        if self.error is not None:
            # The reported peer might have lost the same peer first, and have left because of that.
            return self.error if error.peer in ("", ANY_PEER) else root_cause((self.error, error))
        if error.peer == ANY_PEER and link.embedded and not link.coordinated:
            silent = f"the coordinator {link.address} that it hosts does not respond"
            return PeerLost(f"{silent} ({error.what})", peer=peer_name(0), step=error.step, bucket=error.bucket)
        return link.with_address(error)


# ---- logs which members a rank waits for: a line after 5 s, more at growing intervals, and one when the wait is over

FIRST_S = 5.0
GROWTH = 2.0
EVENT_S = 2.0
"""Seconds of a wait after which it is an event, and between two events about it."""
LOOK_S = 1.0
"""Seconds between two checks whether the training thread still waits. The training thread only stores when its wait began, or
0; the logging thread reads this value."""


class Waiting(Protocol):
    """An object that waits for peers: the current worker, or the process groups of a call between two steps."""

    @property
    def wait_kind(self) -> WaitKind: ...

    @property
    def waiting_since(self) -> float: ...

    @property
    def waits_s(self) -> float: ...

    def missing(self) -> tuple[str, ...]: ...


class WaitNotices:
    """Thread that logs which peers the training thread waits for, until close()."""

    def __init__(self, waiting: Callable[[], Waiting | None], called: Callable[[str], str], silent_s: float,
                 log: Callable[[str, int], None], events: EventLog) -> None:
        """Starts the thread. `waiting` returns None if the thread must end. `called` returns a peer's name for the user. A peer
        that is silent for `silent_s` seconds counts as dead. `events` receives an event about each wait of EVENT_S and more."""
        self._waiting, self._called, self._silent_s, self._log, self._events = waiting, called, silent_s, log, events
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-waits", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        since, peers, next_s = 0.0, "", FIRST_S
        shown: WaitEvent | None = None
        while not self._closing.wait(LOOK_S):
            if (waiting := self._waiting()) is None:
                return
            now = time.monotonic()
            begun = waiting.waiting_since
            if shown is not None and begun != since:
                self._events.append(structs.replace(shown, waited_s=now - since, over=True))
                shown = None
            elif begun and begun == since and now - since >= EVENT_S:
                names = waiting.missing()
                if shown is None or shown.names != names or now - since - shown.waited_s >= EVENT_S:
                    shown = WaitEvent(what=waiting.wait_kind, names=names, waited_s=now - since, limit_s=waiting.waits_s)
                    self._events.append(shown)
            if begun != since:
                if peers:
                    self._log(f"continues after {now - since:.0f} s of waiting for {peers}", logging.WARNING)
                since, peers, next_s = begun, "", FIRST_S
            elif since and now - since >= next_s:
                peers, next_s = ", ".join(map(self._called, waiting.missing())) or "other ranks", GROWTH * next_s
                self._log(f"waiting for {peers}: {now - since:.0f} s, up to {waiting.waits_s:.0f} s "
                          f"({self._silent_s:.0f} s without a sign of life)", logging.WARNING)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2 * LOOK_S)
