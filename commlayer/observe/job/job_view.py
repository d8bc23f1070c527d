"""The state of a job, computed from its events. `commlayer top`, metrics and reports show a JobView and keep no other state.

A view knows no clock. Callers pass the current time, in the clock of the events.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence
from operator import attrgetter
from statistics import fmean, median
from typing import NamedTuple

import msgspec
from msgspec import structs

from commlayer.errors import join_names
from commlayer.observe.events import (
    COORDINATOR,
    AloneEvent,
    CheckpointEvent,
    CostEvent,
    Event,
    JobEvent,
    LinkEvent,
    LogEvent,
    MemberEvent,
    MemberState,
    NoiseScaleEvent,
    PlanEvent,
    QualityEvent,
    StepEvent,
    WaitEvent,
    WaitKind,
    WhatIfEvent,
)

RECENT = 100
"""Number of latest notable events that a view keeps."""
STALE_S = 30.0
"""Seconds after which a wait is no longer shown, unless it is reported again. Waits that last are reported every few
seconds."""
QUIET_S = 10.0
"""Seconds without events after which a worker counts as silent, if no coordinator reports on it."""


def pause_reason(reason: str) -> str:
    """Returns the part of a reason that describes a pause of a home (cli/pauses.py); "" if the home left for another reason.

    >>> pause_reason("pauses until 22:00"), pause_reason("its home has left: pauses until 22:00"), pause_reason("no memory")
    ('pauses until 22:00', 'pauses until 22:00', '')
    """
    found = re.search(r"(?:^|: )(pauses .*)", reason)
    return found[1] if found else ""


class WorkerTotals(msgspec.Struct):
    """Sums over all steps of one worker. Seconds of the first step are not known."""

    steps: int = 0
    timed_steps: int = 0
    """Number of steps whose seconds are known."""
    step_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    dense_bytes: int = 0
    samples: float = 0.0

    def __add__(self, other: WorkerTotals) -> WorkerTotals:
        return WorkerTotals(*(a + b for a, b in zip(structs.astuple(self), structs.astuple(other), strict=True)))

    @classmethod
    def of(cls, event: StepEvent) -> WorkerTotals:
        steps = event.steps
        return cls(steps, steps if event.step_s else 0, steps * event.step_s, steps * event.compute_s, steps * event.exposed_s,
                   steps * event.hidden_s, event.sent_bytes, event.received_bytes, event.dense_bytes, event.samples)


class WorkerView(msgspec.Struct):
    """One worker. `number`: the rank that the worker had when it joined."""

    number: int
    name: str = ""
    state: MemberState = "joined"
    reason: str = ""
    seen: float = 0.0
    """Time of its last event."""
    ended: float = 0.0
    """When it left or died."""
    removed: bool = False
    """True: the job continued without it."""
    step: StepEvent = StepEvent(steps=0)
    """The worker's last event about steps, with `steps` 0 before the first event."""
    link: LinkEvent = LinkEvent()
    totals: WorkerTotals = msgspec.field(default_factory=WorkerTotals)
    successor: int | None = None
    """Number of the worker that joined later on the same machine, after this worker had left."""
    returns: int = 0
    """How often a worker of this machine left before this worker joined in its place."""

    @property
    def present(self) -> bool:
        return self.state in ("joined", "waiting")

    @property
    def up_bytes_per_s(self) -> float:
        """Upload rate: measured on the link, or else the bytes of recent steps over the time of their exchanges."""
        return self.link.up_bytes_per_s or self._while_exchanging(self.step.sent_bytes)

    @property
    def down_bytes_per_s(self) -> float:
        return self.link.down_bytes_per_s or self._while_exchanging(self.step.received_bytes)

    def _while_exchanging(self, nbytes: int) -> float:
        seconds = self.step.steps * (self.step.exposed_s + self.step.hidden_s)
        return nbytes / seconds if seconds > 0 else 0.0

    @property
    def samples_per_s(self) -> float:
        seconds = self.step.steps * self.step.step_s
        return self.step.samples / seconds if seconds > 0 else 0.0


class Missing(NamedTuple):
    """A home that the job has lost, or whose heartbeats are missing."""

    name: str
    since: float
    why: str


class WorkerRow(msgspec.Struct):
    """The state of one worker at one moment, as `commlayer top`, the page and metrics show it. Unknown numbers are 0."""

    number: int
    name: str
    state: str
    note: str
    """Why the worker left, or which members it waits for."""
    returns: int
    """How often its machine has joined again."""
    step: int
    steps: int
    computed_s: float
    waited_s: float
    sent: int
    received: int
    """Sums since the job began. They include the workers of this machine that left before this worker joined in their place."""
    step_s: float
    compute_s: float
    exposed_s: float
    hidden_s: float
    up: float
    up_planned: float
    down: float
    down_planned: float
    """Bytes per second."""
    share: float
    loss: float | None


class JobView:
    """The state of one job, computed from the events that were applied so far. Events of one sender must be applied in
    order."""

    def __init__(self) -> None:
        self.recent: deque[Event] = deque(maxlen=RECENT)
        """The latest events that a person would want to read: everything but steps, links and repeated waits."""
        self.time = 0.0
        """Time of the newest event."""
        self.coordinated = False
        """True: the events of a coordinator are among the applied ones, so the coordinator reports silent members."""
        self.costs = CostEvent()
        """The coordinator's counts; zeros before the first report."""
        self._clear(JobEvent())

    def _clear(self, job: JobEvent) -> None:
        self.job, self.begun = job, job.time
        """`begun`: time of the job's first event."""
        self.workers: dict[int, WorkerView] = {}
        self.others: dict[str, MemberEvent] = {}
        """Servers, and homes before the job begins, by their names in events."""
        self.plan = PlanEvent()
        """The current plan; without a digest before the first one."""
        self.waits: dict[tuple[int, WaitKind], WaitEvent] = {}
        self.quality, self.noise_scale, self.checkpoint = QualityEvent(), NoiseScaleEvent(), CheckpointEvent()
        self.alone = AloneEvent()
        """The speed compared with the fastest machine alone; zeros before it is known."""
        self.what_if, self.costs = WhatIfEvent(), structs.replace(self.costs, kwh=0.0)
        self.plan_changes: Counter[str] = Counter()
        """Number of plan changes after the start, by reason."""

    def apply(self, event: Event) -> None:
        self.time = max(self.time, event.time)
        self.coordinated = self.coordinated or event.rank == COORDINATOR
        if isinstance(event, JobEvent):
            self._apply_job(event)
        worker = self._worker(event.rank) if event.rank >= 0 else None
        if worker is not None:
            worker.seen = max(worker.seen, event.time)
        match event:
            case StepEvent() if worker is not None:
                worker.step = event
                worker.totals += WorkerTotals.of(event)
            case LinkEvent() if worker is not None:
                worker.link = event
            case WaitEvent():
                self._apply_wait(event)
            case PlanEvent() if event.digest != self.plan.digest:
                self.plan_changes.update([event.reason] if event.reason != "start" else [])
                self.plan = event
                self.recent.append(event)
            case MemberEvent():
                self._apply_member(event)
            case QualityEvent():
                self.quality = event if event.cosine else structs.replace(event, cosine=self.quality.cosine,
                                                                          residual=self.quality.residual)
                if event.after:
                    self.recent.append(event)
            case NoiseScaleEvent():
                self.noise_scale = event
            case AloneEvent():
                self.alone = event
            case WhatIfEvent() if event.rank == min((each.number for each in self.present), default=0):  # the one that plans
                self.what_if = event
            case CostEvent() if event.rank == COORDINATOR:
                self.costs = event
            case CheckpointEvent():
                self.checkpoint = event
                self.recent.append(event)
            case LogEvent():
                self.recent.append(event)

    def _apply_job(self, event: JobEvent) -> None:
        if event.run != self.job.run:
            self._clear(event)
        self.job = structs.replace(self.job, world=event.world, name=event.name or self.job.name,
                                   version=event.version or self.job.version)
        if event.rank >= 0 and event.host:
            self._worker(event.rank).name = event.host

    def _apply_wait(self, event: WaitEvent) -> None:
        key = event.rank, event.what
        before = self.waits.pop(key, None)
        known = any(wait.names == event.names for wait in self.waits.values())  # another rank's, which is shown already
        if not event.over:
            self.waits[key] = event
        begins = not event.over and (before is None or before.names != event.names)
        ends = event.over and before is not None
        if not known and (begins or ends):
            self.recent.append(event)

    def _apply_member(self, event: MemberEvent) -> None:
        kind, _, number = event.member.partition(" ")
        if kind == "worker" and number.isdecimal():
            worker = self._worker(int(number))
            if (worker.state, worker.reason) == (event.state, event.reason) and worker.name:
                return
            if event.state == "joined" and not worker.seen:
                self._replace_predecessor(worker, event.name)
            worker.name, worker.state, worker.reason = event.name or worker.name, event.state, event.reason
            worker.removed = event.continues
            if not worker.present:
                worker.ended = event.time
                self.waits = {key: wait for key, wait in self.waits.items() if key[0] != worker.number}
        else:
            self.others[event.member] = event
        self.recent.append(event)

    def _replace_predecessor(self, worker: WorkerView, name: str) -> None:
        """Records that `worker` replaces a worker of the same machine that has left, if there is one."""
        for old in self.workers.values():
            if name and old.name == name and not old.present and old.successor is None and old is not worker:
                old.successor, worker.returns = worker.number, old.returns + 1
                return

    def _worker(self, number: int) -> WorkerView:
        if number not in self.workers:
            self.workers[number] = WorkerView(number)
        return self.workers[number]

    @property
    def present(self) -> list[WorkerView]:
        """Workers that have not left, sorted by number."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.present]

    @property
    def rows(self) -> list[WorkerView]:
        """The workers to show, by number: without those whose machine has joined again."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.successor is None]

    def row(self, worker: WorkerView, now: float) -> WorkerRow:
        """Returns the displayed values of a worker at the time `now`."""
        step, link, totals, state = worker.step, worker.link, self.totals(worker), self.status(worker, now)
        names = [name for (rank, _), wait in self.waits.items() if rank == worker.number for name in wait.names]
        note = worker.reason or (f"for {', '.join(map(self.display, names))}" if state == "waits" and names else "")
        return WorkerRow(
            worker.number, self.display(f"worker {worker.number}"), state, note, worker.returns, step.step, totals.steps,
            totals.compute_s, totals.exposed_s, totals.sent_bytes, totals.received_bytes, step.step_s, step.compute_s,
            step.exposed_s, step.hidden_s, worker.up_bytes_per_s, link.planned_up_bytes_per_s, worker.down_bytes_per_s,
            link.planned_down_bytes_per_s, step.share, step.loss)

    def totals(self, worker: WorkerView) -> WorkerTotals:
        """Returns the sums of a row: of this worker, and of the workers that left before it joined in their place."""
        before = next((old for old in self.workers.values() if old.successor == worker.number), None)
        return worker.totals + self.totals(before) if before else worker.totals

    @property
    def _counting_workers(self) -> list[WorkerView]:
        """The workers that count for the job's numbers: the present workers, and all workers once the job is over."""
        return self.present or self.rows

    @property
    def over(self) -> bool:
        """True: the job had workers, and all of them have left or died."""
        return bool(self.workers) and not self.present

    @property
    def failures(self) -> list[str]:
        """Once the job is over: the workers that did not finish, each with the reason; first those that ended the job."""
        ended = sorted((worker for worker in self.rows if worker.reason), key=attrgetter("removed")) if self.over else []
        return [f"{self.display(f'worker {worker.number}')}: {worker.reason}" for worker in ended]

    @property
    def failed(self) -> bool:
        """True: the job is over, and a worker without which the job could not continue has not finished: as in
        membership.failure."""
        return self.over and any((each.reason or each.state == "dead") and not each.removed for each in self.workers.values())

    def missing(self, now: float) -> list[Missing]:
        """Returns the homes that a running job misses at the time `now`: homes that were lost and have not joined again, and
        silent homes. Homes that have finished are not missing."""
        missing = []
        for worker in [] if self.over else self.rows:
            peer, since, why = f"worker {worker.number}", worker.ended, worker.reason
            if self.status(worker, now) == "silent":
                waits = [wait.time - wait.waited_s for wait in self.waits.values() if peer in wait.names]
                since, why = min(waits, default=worker.seen), "no heartbeats" if self.coordinated else "no events"
            elif worker.present or not (why or worker.state == "dead"):
                continue
            missing.append(Missing(self.display(peer), since, why))
        return missing

    @property
    def total_steps(self) -> int:
        """Number of steps that the script will take; 0: unknown."""
        return max((worker.step.total for worker in self._counting_workers), default=0)

    @property
    def left_s(self) -> float:
        """Seconds until the script's last step at the present speed; 0: unknown."""
        return 0.0 if self.over else max(0, self.total_steps - self.step) * self.step_s

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that all workers have sent, with those that have left."""
        return sum(worker.totals.sent_bytes for worker in self.workers.values())

    @property
    def received_bytes(self) -> int:
        return sum(worker.totals.received_bytes for worker in self.workers.values())

    @property
    def step(self) -> int:
        return max((worker.step.step for worker in self.workers.values()), default=0)

    @property
    def step_s(self) -> float:
        """Median step time of the workers; 0: unknown."""
        times_s = [worker.step.step_s for worker in self._counting_workers if worker.step.step_s]
        return median(times_s) if times_s else 0.0

    @property
    def loss(self) -> float | None:
        """Mean of the workers' last losses. The value is None if no worker has reported a loss."""
        losses = [worker.step.loss for worker in self._counting_workers if worker.step.loss is not None]
        return fmean(losses) if losses else None

    @property
    def samples_per_s(self) -> float:
        return sum(worker.samples_per_s for worker in self._counting_workers)

    def current_waits(self, now: float) -> list[WaitEvent]:
        """The waits that still last, with `waited_s` at the time `now`. Returns one event for each set of members that are
        waited for. Members without heartbeats come first, because they are the cause of other waits."""
        if self.over:
            return []
        order: Sequence[WaitKind] = ("heartbeat", "join", "step", "call")
        waits: dict[tuple[str, ...], WaitEvent] = {}
        for wait in sorted(self.waits.values(), key=lambda wait: order.index(wait.what)):
            age_s = max(0.0, now - wait.time)
            if age_s > STALE_S or self._wait_is_over(wait):
                continue
            wait = structs.replace(wait, waited_s=wait.waited_s + age_s)
            known = waits.get(wait.names)
            if known is None:
                waits[wait.names] = wait
            elif known.what == wait.what:
                limits_s = [each.limit_s for each in (known, wait) if each.limit_s]
                waits[wait.names] = structs.replace(known, waited_s=max(known.waited_s, wait.waited_s),
                                                    limit_s=min(limits_s, default=0.0))
        named = [wait for wait in waits.values() if wait.names]
        return named or list(waits.values())

    def _wait_is_over(self, wait: WaitEvent) -> bool:
        """True: the sender has made steps since, so the wait is over, although the event about its end has not arrived."""
        worker = self.workers.get(wait.rank)
        return worker is not None and worker.step.time > wait.time

    def waiting(self, now: float) -> list[str]:
        """Describes the waits of the job at the time `now`, in words."""
        return [self.words(wait) for wait in self.current_waits(now)]

    def notices(self, now: float) -> list[str]:
        """Describes problems that need attention at the time `now`, in words: waits, and whether one machine alone would be
        faster."""
        alone, notices = self.alone, self.waiting(now)
        if 0 < max(alone.over_alone, alone.forecast) < 1 and not self.over:
            remedy = f"; sync='auto' would be {alone.auto_times:.1f}x as fast" if alone.auto_times > 1 else ""
            notices.append(f"slower than one machine alone: {alone.over_alone:.2f}x{remedy}")
        return notices

    def status(self, worker: WorkerView, now: float) -> str:
        """The state of a worker in one word."""
        peer = f"worker {worker.number}"
        if not worker.present:
            return worker.state
        if any(wait.what == "heartbeat" and peer in wait.names for wait in self.waits.values()):
            return "silent"
        if any(key[0] == worker.number and not self._wait_is_over(wait) for key, wait in self.waits.items()):
            return "waits"
        if not worker.step.steps:
            return "starts"
        quiet_s = max(QUIET_S, 3 * worker.step.step_s)
        return "silent" if not self.coordinated and now - worker.seen > quiet_s else "trains"

    def display(self, peer: str) -> str:
        """The name of a member for people: that of its machine, with its number unless the machine has only one worker.

        >>> view = JobView()
        >>> view.apply(MemberEvent(member="worker 2", name="ben"))
        >>> view.display("worker 2"), view.display("server 0")
        ('ben', 'server 0')
        """
        kind, _, number = peer.partition(" ")
        if kind == "worker" and number.isdecimal() and (worker := self.workers.get(int(number))) is not None and worker.name:
            alone = sum(other.name == worker.name and other.successor is None for other in self.workers.values()) <= 1
            return worker.name if alone else f"{worker.name}#{number}"
        return peer.removeprefix("home ")

    def words(self, event: Event) -> str:
        """An event in words, for a list of events."""
        match event:
            case WaitEvent():
                # A process that has not joined has no name; its number might be that of a worker of an earlier run.
                names = join_names(event.names if event.what == "join" else [*map(self.display, event.names)],
                                   4) or "other ranks"
                if event.over:
                    return f"no longer waiting for {names}"
                what = {"join": " to join", "heartbeat": ", which sends no heartbeats"}.get(event.what, "")
                of = f" of {event.limit_s:.0f}" if event.limit_s else ""
                return f"waiting for {names}{what}, {event.waited_s:.0f}{of} s"
            case PlanEvent():
                return f"plan {event.digest[:8]} ({event.reason}): {event.summary}"
            case MemberEvent():
                state = {"joined": "joined", "left": "left", "dead": "is dead", "waiting": "waits for the others"}[event.state]
                return f"{self.display(event.member)} {state}{event.reason and f': {event.reason}'}"
            case QualityEvent():
                finer = "finer" if event.after > event.before else "coarser"
                return f"codecs are {finer}, {event.before:.3g} to {event.after:.3g} of the gradient: {event.reason}"
            case CheckpointEvent():
                return f"checkpoint {event.action} at step {event.step:,} in {event.directory}"
            case LogEvent():
                sender = f"{self.display(f'worker {event.rank}')}: " if event.rank > 0 else ""  # rank 0 reports for all
                return f"{sender}{event.text}{event.code and f' [{event.code}]'}"
        return type(event).__name__
