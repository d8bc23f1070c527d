"""Defines the state of one rank's job: process groups, links to coordinator and servers, worker and plan.

`engine/start.py` creates this state, `engine/switch.py` switches it to another plan, and the session or the exit of the process
closes it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from commlayer.cluster import site_process_group
from commlayer.cluster.child_processes import EmbeddedServer
from commlayer.cluster.collectives import Groups, RowChannel
from commlayer.cluster.server_codecs import expected_nbytes
from commlayer.cluster.uplink import Uplink, leave_job
from commlayer.compressors import codec_of
from commlayer.engine.hooks import weakly
from commlayer.engine.local_steps import OuterSteps
from commlayer.engine.optimizers import OptimizerMemory
from commlayer.engine.plan_choice import PlanTerms
from commlayer.engine.plan_handover import hand_over
from commlayer.engine.run_events import NO_UNITS, RunEvents
from commlayer.engine.step import Counters, EpochChanged, RootCause, Units, Waiting, WaitNotices, WorkerListener
from commlayer.engine.worker import Worker
from commlayer.errors import CommError, InvalidInput, InvalidState, cause_of
from commlayer.observe.events import PlanReason
from commlayer.observe.prediction_check import StalePlan
from commlayer.records import Job, Plan

log = logging.getLogger("commlayer")

T = TypeVar("T")
NO_COUNTERS = Counters()
DROPPED_S = 5.0
"""Longest wait, in seconds, for the end of sessions whose models are gone."""
FORKED = ("this process is a forked child of the one that called attach(), so it is no member of the job: train in the process "
          "that attached the model, or a copy.deepcopy() of the model here")


class WaitsFor(NamedTuple):
    """Numbers of seconds that this rank waits for other ranks after an error or at the end."""

    notice_s: float = 0.0
    """Seconds to wait for the coordinator's report of which rank left or died."""
    verdict_s: float = 0.0
    """Seconds to wait for the coordinator's report of a lost rank after a failed collective. A collective names no rank, so
    this includes the time without heartbeats after which a worker counts as dead."""
    stay_s: float = 0.0
    """Seconds that the servers hosted by this rank continue after the rank's end, because other ranks might still use them."""
    silent_s: float = 0.0
    """Seconds without heartbeats after which a peer counts as dead."""


class MemberChanges:
    """Handles changes of the job's members. This class is for jobs whose members stay; `regroup.py` defines the class for other
    jobs."""

    elastic = False
    """True: members can leave while the others continue."""

    def __init__(self) -> None:
        self.parted: dict[int, int] = {}
        """Maps the rank of each member that has left to the job's value of `carried`, a number of training steps, when the
        member left."""

    def check_interrupts(self, worker: Worker, complete: Callable[[], bool]) -> None:
        """Called repeatedly while a step waits for other ranks, until all data of the step has arrived (`complete`). Raises
        EpochChanged if the remaining ranks must repeat the step."""

    def unfit(self, plan: Plan) -> str:
        """Returns the reason why members cannot change under this plan; "" if they can, or if members of this job never change.
        """
        return ""

    def invites(self) -> bool:
        """Returns True if new members wait to join, so that this rank must lead all ranks to a step in which they can join."""
        return False

    def pending(self, wait_s: float) -> bool:
        """Returns True if members have left and this rank has not switched to the new epoch yet. Waits up to `wait_s` seconds
        for the coordinator's report."""
        return False

    def patience(self) -> float:
        """Returns how many seconds this rank waits after its deadline, during which the coordinator decides which ranks are too
        slow."""
        return 0.0

    def gone(self) -> list[str]:
        """Returns the names of the members that have left, for error messages."""
        return []

    def closed_door(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for operations that a joining rank would not know of: no rank can join inside it."""
        return contextlib.nullcontext()

    def go(self) -> None:
        """Switches to the epoch of the remaining members after EpochChanged. Raises CommError if that fails."""
        raise InvalidState("E-SESSION-CLOSED", "the members of this job cannot change")

    def between(self, plan: Plan | None = None) -> None:
        """Switches to the epoch of the remaining members, if members have left between two steps. `plan`: the plan to which the
        ranks are switching; servers might have it already."""


class ListenerOrder(IntEnum):
    """Order in which a job calls its EpochListeners: local steps begin or end first, and hooks and checks then adapt to the new
    sync mode."""

    SCHEDULE = 0
    LOOP = 1
    DRIVER = 2
    OTHER = 3


class EpochListener:
    """A component that adapts to changes of plan and members. All ranks make each call after the same step."""

    order = ListenerOrder.OTHER

    def catch_up(self) -> None:
        """Called before all ranks make a call together between two steps. Counts and exchanges local steps that other ranks
        might have counted already."""

    def complete(self) -> None:
        """Called before a save, before a load and by the default finish(). Completes pending exchanges."""

    def finish(self) -> None:
        """Called at the normal end. Completes pending exchanges."""
        self.complete()

    def end_rounds(self) -> None:
        """Exchanges the weight changes of all local steps that have not been exchanged."""

    def before_switch(self) -> None:
        """Called when all ranks have checked that they can switch to the new plan, before the switch."""

    def after_switch(self) -> None:
        """Called when a new plan has taken effect."""

    def after_regroup(self) -> None:
        """Called when the members have changed, in the step that is repeated."""

    def after_between(self) -> None:
        """Called after `after_regroup`, if the members changed between two steps. The listener can use collectives."""

    def shares_moved(self, part: float) -> None:
        """Called when the balancer changes the workers' shares of the batch. This rank's computation per step takes `part`
        times as long."""

    def settle(self) -> None:
        """Reports to the worker the averages of the last step that the script has cleared; see Worker.mark_discarded."""

    def finish_pending(self) -> None:
        """Waits for results of the last step that are still missing, if results are applied bucket by bucket."""


class JoinedState:
    """State that a joining rank has received, and its progress when it joined."""

    def __init__(self, local: Mapping[str, torch.Tensor], restore: Callable[[], None], followed: dict[str, str], carried: int
                 ) -> None:
        self.local, self._restore = local, restore
        """`local`: state of local steps, as returned by OuterSteps.snapshot. `_restore`: function that restores the optimizer's
        state."""
        self.followed = followed
        """Results of the functions in JobContext.followers, by name, as computed by the rank that sent this state."""
        self.carried = carried
        """Value of DistributedJob.carried, a number of training steps, when this rank joined."""
        self.fresh = True
        """True: this rank has not finished its first step."""

    def begun(self) -> None:
        """Called after this rank's first step: the script can then make all calls that other ranks make. Restores the received
        optimizer state again, because before that step the script might have changed the optimizer, for example with schedulers
        that catch up. The received state already contains such changes."""
        self._restore()
        self.local, self._restore, self.fresh = {}, _nothing, False  # frees memory as large as model and optimizer
        site_process_group.release()


def _nothing() -> None:
    """Default of `_restore`: does nothing, because the optimizer's state is restored already."""


_open: weakref.WeakSet[JobContext] = weakref.WeakSet()
"""Jobs of this process that nothing has closed yet."""
_dropped: list[threading.Thread] = []
"""Threads that close jobs whose models are gone."""


def end_dropped() -> None:
    """Ends sessions whose models are gone and which the script has not closed. All ranks call it in attach(), so that such
    sessions end on all ranks."""
    if _open:
        gc.collect()
    while _dropped:
        _dropped.pop().join(DROPPED_S)


def _in_child() -> None:
    for job in _open:
        job.forked()


os.register_at_fork(after_in_child=_in_child)


class JobContext:
    """State of the job of a script without other workers. DistributedJob adds what several workers need.

    No thread refers to this object, except weakly. So it is freed with the session and the model, and then leaves the job.
    """

    plan: Plan | None = None
    groups: Groups | None = None
    joined: JoinedState | None = None
    """The state that this rank received when it joined a running job; None if it did not join."""
    embedded: Sequence[EmbeddedServer] = ()
    """Servers that this rank hosts."""
    id = 0
    """This rank's number in messages and at the coordinator: the rank that it had when it joined. It does not change when other
    members leave."""

    def __init__(self, terms: PlanTerms | None = None, *, logs: bool = True) -> None:
        """`terms`: constraints that the job's plans must respect. `logs`: True if this rank logs, for its node or home, the
        events that all ranks know."""
        self.terms, self.logs = terms or PlanTerms(), logs
        self.followers: dict[str, Callable[[], str]] = {}
        """Maps names to functions that return the state of script objects, such as a sampler, as a string for joining ranks."""
        self.passes = 0
        """Number of training steps since the job began, dropped steps included. It is the same on all ranks."""
        self.passed_s = 0.0
        """Value of time.perf_counter() when the last backward pass ended. backward() itself can return later, after the
        averages have arrived."""
        self.observed_s = 0.0
        """Total seconds of observers between steps, which belong neither to computing nor to communication."""
        self.decisions: list[str] = []
        """Decisions of this run, such as changes of plan, as text with step and reason."""
        self.events: list[StalePlan] = []
        """Decisions in `decisions` that also have a structured record."""
        self.on_close: list[Callable[[], None]] = []
        self.stream = RunEvents()
        """The event stream of this rank."""
        self._owner, self._closed = os.getpid(), False
        self._exit: Callable[[], None] | None = None
        """Function that atexit calls; None if this object needs no end."""

    def open(self) -> None:
        """Makes the end of the process close the job; the end of model and session, too."""
        self._exit = weakly(self.at_exit)
        atexit.register(self._exit)
        _open.add(self)

    def __del__(self) -> None:
        if self._exit is not None and not self._closed and os.getpid() == self._owner:
            self.drop()
            # The garbage collector can run in any thread, even in one whose end close() waits for.
            _dropped.append(threading.Thread(target=self.close, name="commlayer-close"))
            _dropped[-1].start()

    def drop(self) -> None:
        """Drops pending exchanges, because the model of this job is gone."""

    def forked(self) -> None:
        """Called in a forked child of this process."""

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child of the process that called attach()."""
        if os.getpid() != self._owner:
            raise InvalidState("E-FORKED", FORKED)

    @property
    def rank(self) -> int:
        return 0

    @property
    def world(self) -> int:
        return 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Returns, for each current rank, the rank that its worker had when it joined the job."""
        return tuple(range(self.world))

    @property
    def elastic(self) -> bool:
        """True: workers can leave while the others continue."""
        return False

    @property
    def fresh(self) -> bool:
        """True: this rank has joined a running job and has not finished its first step."""
        return self.joined is not None and self.joined.fresh

    @property
    def carried(self) -> int:
        """Number of training steps (as `passes` counts) whose effect survives the death of any single rank: averaged steps, and
        local steps in complete exchanges. It is the same on all ranks after the same step."""
        return self.passes

    def passed(self) -> None:
        self.passes, self.passed_s = self.passes + 1, time.perf_counter()
        self.stream.step(self.passes, self.passed_s, *self._counted)

    @property
    def _counted(self) -> tuple[Counters, Units]:
        return NO_COUNTERS, NO_UNITS

    def metrics(self) -> dict[str, float]:
        return {"steps": self.passes, **Counters().as_dict(), "reconnects": 0, "resent_nbytes": 0, "kept_nbytes": 0}

    def explain(self, error: BaseException) -> BaseException:
        """Returns an error that names the peer which caused `error`, once that is known."""
        return error

    # ---- decisions and logs

    def say(self, what: str, level: int = logging.WARNING, *, own: bool = False, event_level: int | None = None) -> None:
        """Adds a text to `decisions`, with the number of training steps so far, and logs it. `own`: no other rank knows of the
        decision, so this rank logs it even if another rank logs for its node. `event_level`: its level in the event stream, for
        good news that people see without configuring logging."""
        self.decisions.append(f"step {self.passes}: {what}")
        if own:
            self.stream.text(self.decisions[-1], level)
            log.log(level, "%s", self.decisions[-1])
        else:
            self.log(self.decisions[-1], level, event_level=event_level)

    def log(self, line: str, level: int = logging.INFO, *, event: bool = True, event_level: int | None = None) -> None:
        """Logs an event that all ranks know, once on each node and in each home. `event`: False if the event stream has an
        event of another kind about it."""
        if event and self.rank == 0 and level >= logging.INFO:
            self.stream.text(line, level if event_level is None else event_level)
        if self.logs:
            log.log(level, "%s", line)

    def report_failure(self, what: str, error: Exception) -> None:
        """Logs an error in a part of commlayer that training does not need. The rank on which it arose logs the traceback."""
        text = f"step {self.passes}: an error in {what}; training continues: {type(error).__name__}: {error}"
        if isinstance(error, InvalidInput) and error.code == "E-OTHER-RANK":
            self.log(text, logging.WARNING)
        else:
            log.error("%s [E-OBSERVER]", text, exc_info=error)
            self.stream.failure(text, "E-OBSERVER", error)

    # ---- the end

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, reason: str = "") -> None:
        if self._closed or os.getpid() != self._owner:
            return  # a forked copy of the trainer is not a member of the job
        self._closed = True
        _open.discard(self)
        if self._exit is not None:
            atexit.unregister(self._exit)
        self.stream.flush()
        self._leave(reason)
        for end in self.on_close:
            end()
        self.stream.close()

    def _leave(self, reason: str) -> None:
        """Leaves the job, before the functions in `on_close` are called."""
        self.stream.left(reason)

    def at_exit(self) -> None:
        """Closes the connection when the process exits, if the script has not closed it. The exception that ended the script is
        sent to other ranks as the reason."""
        error = getattr(sys, "last_value", None)
        self.close("" if error is None else cause_of(error))


class DistributedJob(JobContext, WorkerListener):
    """State of a job of several workers on one of them, which the components of this rank share.

    `connect()` creates it. `regroup.py` replaces `groups`; `regroup.py` and `switch.py` replace the worker.
    """

    groups: Groups
    plan: Plan

    def __init__(
        self, terms: PlanTerms, own: int, groups: Groups, rows: RowChannel, uplink: Uplink, memory: OptimizerMemory,
        plan: Plan, job: Job, *, generation: int = 1, logs: bool = True, waits: WaitsFor = WaitsFor(),
        embedded: Sequence[EmbeddedServer] = (), matched: bool = False, joined: JoinedState | None = None,
    ) -> None:
        """`own`: this rank's number in messages. `matched`: True if all ranks use norm-matched averaging."""
        super().__init__(terms, logs=logs)
        self.id, self.groups, self.uplink, self.embedded, self.waits = own, groups, uplink, embedded, waits
        uplink.children = embedded
        self.rows = rows
        """Exchanges rows of numbers between the observers (observers.py) of all ranks, in the same order on each rank."""
        self.memory, self.matched, self.joined = memory, matched, joined
        self.members = MemberChanges()
        self.local: OuterSteps | None = None
        """Runs local steps and their exchanges; None unless the plan has local steps."""
        self.listeners: list[EpochListener] = []
        self._verdict = RootCause()
        self.stream.log.rank, self.stream.dense_nbytes = own, 4 * job.numel
        self.stream.rtt_s = lambda: uplink.membership.report.rtt_s
        uplink.membership.report.events = self.stream.log
        self.follow(self.worker_for(plan, job, groups.device, generation))
        notices = WaitNotices(weakly(self._waiting), uplink.display_name, waits.silent_s,
                              partial(weakly(self.log), event=False), self.stream.log)
        self.on_close += [rows.close, notices.close]

    def listen(self, listener: EpochListener) -> None:
        self.listeners = sorted([*self.listeners, listener], key=lambda each: each.order)

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def world(self) -> int:
        return self.groups.world

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.uplink.view.members) if self.elastic else super().ranks

    @property
    def elastic(self) -> bool:
        return self.members.elastic

    @property
    def exchanges(self) -> int:
        """Number of complete exchanges since the start. Between two steps it is the same on all ranks. `worker.step` is another
        number: it counts messages, continues after a restored checkpoint and also counts dropped exchanges."""
        return self.worker.counters.exchanges

    @property
    def carried(self) -> int:
        return self.passes - (0 if self.local is None else self.local.behind)

    @property
    def _counted(self) -> tuple[Counters, Units]:
        return self.worker.counters, self.worker.units

    def note_plan(self, reason: PlanReason) -> None:
        """Adds the current plan to the event stream. Rank 0 does this for all ranks."""
        if self.rank == 0:
            self.stream.plan(self.plan, reason)

    def stepped_apart(self) -> bool:
        """Returns True if local steps have left the optimizers in different states on different ranks."""
        return self.local is not None and self.memory.remembers

    def metrics(self) -> dict[str, float]:
        resumed = self.uplink.transport
        return {"steps": self.passes, **self.worker.counters.as_dict(), "reconnects": resumed.breaks,
                "resent_nbytes": resumed.resent_nbytes, "kept_nbytes": resumed.kept_nbytes}

    # ---- workers

    def worker_for(self, plan: Plan, job: Job, device: torch.device, generation: int = 1) -> Worker:
        """Creates a worker that runs this plan. It is idle until `follow` makes it current."""
        codecs = {b.id: codec_of(b, self.rank // plan.ranks_per_node, plan) for b in plan.buckets}
        return Worker(
            job, plan, codecs, device, rank=self.id, members=self.world, generation=generation, groups=self.groups,
            transport=self.uplink.transport, recycle=self.uplink.recycle, listener=weakref.proxy(self),
        )

    def follow(self, worker: Worker) -> None:
        """Makes a worker and its plan the current ones. This worker receives the coordinator's reports about other ranks; the
        reports are also kept for `explain`."""
        self.worker = worker
        self.plan = worker.plan
        self.uplink.limit_kept(max((expected_nbytes(worker.plan, n) for n in range(worker.plan.servers)), default=0))

        verdict = self._verdict

        def fail(error: CommError) -> None:
            verdict.fall(error)
            worker.latch(error)

        def left(peer: str, exchanges: int) -> None:
            if (error := worker.finished_peers.add(peer, exchanges)) is not None:
                fail(error)

        self.uplink.subscribe(fail, worker.stalled, left, worker.now.generation)

    def hand_on(self, old: Worker, new: Worker) -> None:
        """Transfers residuals and step number from worker `old` to worker `new`, which continues the job."""
        hand_over(old, new, self.memory.effect, self.memory.rate)

    def _waiting(self) -> Waiting:
        """Returns the step, or the call between two steps, that might be waiting for other ranks now."""
        return self.worker if self.worker.waiting_since else self.groups

    # ---- what the worker asks and reports

    def check_interrupts(self, complete: Callable[[], bool]) -> None:
        self.members.check_interrupts(self.worker, complete)

    def patience(self) -> float:
        return self.members.patience()

    def interrupted(self, cause: str) -> None:
        self.uplink.close(cause)  # the other ranks fail at once; servers of this rank continue until close()

    def settle(self) -> None:
        for listener in self.listeners:
            listener.settle()

    def finish_pending(self) -> None:
        for listener in self.listeners:
            listener.finish_pending()

    def explain(self, error: BaseException) -> BaseException:
        error = self._verdict.explain(error, self.uplink, notice_s=self.waits.notice_s, verdict_s=self.waits.verdict_s)
        if isinstance(error, CommError):
            error.call(", ".join(map(self.uplink.display_name, error.peer.split(", "))))
        return error

    # ---- calls that all ranks make together between two steps

    def catch_up(self) -> None:
        for listener in self.listeners:
            listener.catch_up()

    def complete(self) -> None:
        """Completes pending exchanges. All ranks call it after the same step."""
        for listener in self.listeners:
            listener.complete()

    def broke(self, error: CommError) -> None:
        """Handles the failure of a call that all ranks make together between two steps. If members have left, raises
        EpochChanged: the call is dropped and the next step runs with the remaining ranks. Otherwise raises `error`."""
        worker = self.worker
        if worker.error is None and self.members.pending(self.waits.verdict_s):
            raise EpochChanged from error
        worker.latch(error)
        worker.check()

    def anew(self, act: Callable[[], T]) -> T:
        """Runs `act`, a function that all ranks run together between two steps. If members leave, the remaining ranks run `act`
        again from its start.

        A collective without one of its ranks fails on all ranks, so all of them repeat it.
        """
        while True:
            try:
                return act()
            except EpochChanged:
                pass
            except Exception as error:
                comm_error = error if isinstance(error, CommError) else error.__cause__
                if not self.elastic or not isinstance(comm_error, CommError):
                    raise
                with contextlib.suppress(EpochChanged):
                    self.broke(comm_error)
            self.members.between()

    def called(self, place: int) -> str:
        """Returns the display name of a rank, given its index among the current members: "rank 2 (ben)", or "rank 2" if all
        nodes have the same name."""
        name = self.uplink.name_of(self.uplink.view.members[place].rank)
        return f"rank {self.groups.members.ranks[place]} ({name})" if name else f"rank {self.groups.members.ranks[place]}"

    # ---- the end

    def drop(self) -> None:
        self.listeners = []

    def forked(self) -> None:
        self.worker.forked(InvalidState("E-FORKED", FORKED))

    def _leave(self, reason: str) -> None:
        worker = self.worker
        if not reason and worker.error is None:
            try:
                for listener in self.listeners:
                    listener.finish()
            except Exception as failed:  # even an optimizer's error: the other ranks must still be notified below
                log.warning("the last exchange failed when the session closed, so the weights do not include it: "
                            "%s", failed)
            worker = self.worker
            worker.rest()
        error = worker.error or self._verdict.error
        worker.close()
        reason = reason or ("" if error is None else f"it had an error: {error}".splitlines()[0])
        self.stream.left(reason)
        if reason:
            self.rows.forget()
        leave_job(self.uplink, self.embedded, reason, worker.step, stay_s=self.waits.stay_s, notice_s=self.waits.notice_s)

    def close(self, reason: str = "") -> None:
        if not self._closed and os.getpid() == self._owner:
            super().close(reason)
            self.groups.close()
