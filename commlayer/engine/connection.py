"""What one rank has for its job: process groups, links to coordinator and servers, worker and plan.

`engine/start.py` creates it, `engine/switch.py` switches it to another plan, and the session or the exit of the process closes
it. It makes no decisions.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

import torch

from commlayer.cluster import site_process_group
from commlayer.cluster.child_processes import EmbeddedServer
from commlayer.cluster.collectives import Groups, RowChannel
from commlayer.cluster.server_codecs import expected_nbytes
from commlayer.cluster.uplink import Uplink, leave_job
from commlayer.compressors import codec_of
from commlayer.engine.local_steps import OuterSteps
from commlayer.engine.optimizers import OptimizerMemory
from commlayer.engine.plan_choice import PlanTerms
from commlayer.engine.plan_handover import hand_over
from commlayer.engine.step import Counters, EpochChanged, RootCause, Waiting, WaitNotices, WorkerListener
from commlayer.engine.worker import Worker
from commlayer.errors import CommError, InvalidState, cause_of
from commlayer.observe.prediction_check import StalePlan
from commlayer.records import Job, Plan

log = logging.getLogger("commlayer")

T = TypeVar("T")


class WaitsFor(NamedTuple):
    """How many seconds this rank waits for other ranks after an error or at the end."""

    notice_s: float = 0.0
    """Seconds to wait for the coordinator's report of which rank left or died."""
    verdict_s: float = 0.0
    """Seconds to wait for that report after a failed collective. A collective names no rank, so this includes the time without
    heartbeats after which a worker counts as dead."""
    stay_s: float = 0.0
    """Seconds before the servers that this rank hosts shut down, because other ranks might still use them."""
    silent_s: float = 0.0
    """Seconds without heartbeats after which a peer counts as dead."""


class MemberChanges:
    """How a job handles changes of its members. This class is for jobs whose members stay; `regroup.py` has the other."""

    elastic = False
    """Whether members can leave while the others continue."""

    def __init__(self) -> None:
        self.parted: dict[int, int] = {}
        """Maps the rank of a member that has left to the value of `carried` when it left. The member has no share in later
        steps."""

    def check_interrupts(self, worker: Worker, complete: Callable[[], bool]) -> None:
        """Called repeatedly while a step waits for other ranks, until all data of the step has arrived (`complete`). Raises
        EpochChanged if the remaining ranks must repeat the step."""

    def unfit(self, plan: Plan) -> str:
        """The reason why members cannot change under this plan; "" if they can, or never change."""
        return ""

    def invites(self) -> bool:
        """Whether new members wait to join, and this rank must lead all ranks to a step in which they can join."""
        return False

    def pending(self, wait_s: float) -> bool:
        """Whether members have left and this rank has not switched to the new epoch yet. Waits up to `wait_s` seconds for the
        coordinator's report."""
        return False

    def patience(self) -> float:
        """Seconds that this rank waits after its deadline, because the coordinator decides which ranks are too slow."""
        return 0.0

    def gone(self) -> list[str]:
        """Names of the members that have left, for errors."""
        return []

    def closed_door(self) -> contextlib.AbstractContextManager[None]:
        """Context manager in which no rank can join, because a joining rank would not know of the operation inside."""
        return contextlib.nullcontext()

    def go(self) -> None:
        """Switches to the epoch of the remaining members after EpochChanged. Raises CommError if that fails."""
        raise InvalidState("E-SESSION-CLOSED", "the members of this job cannot change")

    def between(self, plan: Plan | None = None) -> None:
        """Switches to the epoch of the remaining members between two steps, if members have left. `plan`: the plan to which the
        ranks are switching; servers might have it already."""


class ListenerOrder(IntEnum):
    """The order in which listeners are called: local steps begin or end before hooks and checks adapt to them."""

    SCHEDULE = 0
    LOOP = 1
    DRIVER = 2
    OTHER = 3


class EpochListener:
    """A component that follows changes of plan and members. All ranks make each call after the same step."""

    order = ListenerOrder.OTHER

    def catch_up(self) -> None:
        """Called before any joint operation between two steps. Catches up with steps that other ranks might have made already.
        """

    def complete(self) -> None:
        """Called before a save, a load and an orderly end. Completes pending exchanges."""

    def end_rounds(self) -> None:
        """Exchanges all local steps that have not been sent."""

    def before_switch(self) -> None:
        """All ranks can switch to the new plan and are about to."""

    def after_switch(self) -> None:
        """A new plan has taken effect."""

    def after_regroup(self) -> None:
        """The members have changed. Called in the step that is repeated."""

    def after_between(self) -> None:
        """Called after `after_regroup`, if the members changed between two steps. Can use collectives."""

    def shares_moved(self, part: float) -> None:
        """Batch shares change; the computation of a step changes by the factor `part`."""

    def settle(self) -> None:
        """Reports the averages of the last step that the script has cleared; see Worker.mark_discarded."""

    def finish_pending(self) -> None:
        """Waits for results of the last step that are still missing, if results are applied bucket by bucket."""


class JoinedState:
    """State that a joining rank has received, and its progress when it joined."""

    def __init__(self, local: Mapping[str, torch.Tensor], restore: Callable[[], None], followed: dict[str, str], carried: int
                 ) -> None:
        self.local, self._restore = local, restore
        """`local`: state of local steps, as returned by OuterSteps.snapshot. `_restore` restores the optimizer's state."""
        self.followed = followed
        """Results of the functions in JobContext.followers, by name, on the rank that sent this state."""
        self.carried = carried
        """Value of DistributedJob.carried when this rank joined."""
        self.fresh = True
        """Whether this rank has not finished its first step."""

    def begun(self) -> None:
        """Ends the special state after the first step: from now on the script can make all calls that other ranks make.
        Restores the received optimizer state again, because before that step the script might have changed the optimizer, for
        example with schedulers that catch up. The received state already contains such changes."""
        self._restore()
        self.local, self._restore, self.fresh = {}, _nothing, False  # they are as large as model and optimizer
        site_process_group.release()


def _nothing() -> None:
    """Does nothing: the optimizer's state is restored already."""


class JobContext:
    """What a session knows of its job. This class is for a script without other workers; DistributedJob for all others."""

    plan: Plan | None = None
    groups: Groups | None = None
    joined: JoinedState | None = None
    """The state that this rank received when it joined a running job; None if it did not join."""
    embedded: Sequence[EmbeddedServer] = ()
    """Servers that this rank hosts."""
    id = 0
    """This rank's number in messages and at the coordinator: its initial rank, which does not change when other members leave.
    """

    def __init__(self, terms: PlanTerms | None = None, *, logs: bool = True) -> None:
        """`terms`: constraints that the job's plans must respect. `logs`: whether this rank logs events that all ranks know, on
        behalf of its node or home."""
        self.terms, self.logs = terms or PlanTerms(), logs
        self.followers: dict[str, Callable[[], str]] = {}
        """Maps names to functions that return the state of script objects, such as a sampler, as a string for joining ranks."""
        self.passes = 0
        """Number of training steps since the job began, dropped steps included. The same on all ranks."""
        self.passed_s = 0.0
        """Value of time.perf_counter() when the last backward pass ended. backward() itself can return later, after averages
        have arrived."""
        self.decisions: list[str] = []
        """Decisions made in this run, as text with step and reason."""
        self.events: list[StalePlan] = []
        """Decisions that have a structured record."""
        self.on_close: list[Callable[[], None]] = []
        """Functions to call when the connection closes."""
        self._owner, self._closed = os.getpid(), False

    @property
    def rank(self) -> int:
        return 0

    @property
    def world(self) -> int:
        return 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """For each rank, the initial rank of its worker."""
        return tuple(range(self.world))

    @property
    def elastic(self) -> bool:
        """Whether workers can leave while the others continue."""
        return False

    @property
    def fresh(self) -> bool:
        """Whether this rank has joined a running job and has not finished its first step."""
        return self.joined is not None and self.joined.fresh

    @property
    def carried(self) -> int:
        """Number of training steps (as `passes` counts) that are not lost if any single rank dies: averaged steps, and local
        steps in complete exchanges. The same on all ranks after the same step."""
        return self.passes

    def passed(self) -> None:
        self.passes, self.passed_s = self.passes + 1, time.perf_counter()

    def metrics(self) -> dict[str, float]:
        return {"steps": self.passes, **Counters().as_dict(), "reconnects": 0, "resent_nbytes": 0, "kept_nbytes": 0}

    def explain(self, error: BaseException) -> BaseException:
        """Returns an error that names the peer which caused `error`, once that is known."""
        return error

    # ---- decisions and logs

    def say(self, what: str, level: int = logging.WARNING, *, own: bool = False) -> None:
        """Adds a decision to `decisions`, with the number of training steps so far, and logs it. `own`: no other rank knows of
        the decision, so this rank logs it even if another one logs for its node."""
        self.decisions.append(f"step {self.passes}: {what}")
        if own:
            log.log(level, "%s", self.decisions[-1])
        else:
            self.log(self.decisions[-1], level)

    def log(self, line: str, level: int = logging.INFO) -> None:
        """Logs an event that all ranks know, once on each node and in each home."""
        if self.logs:
            log.log(level, "%s", line)

    # ---- the end

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, reason: str = "") -> None:
        if self._closed or os.getpid() != self._owner:
            return  # a forked copy of the trainer is not a member of the job
        self._closed = True
        atexit.unregister(self.at_exit)
        self._leave(reason)
        for end in self.on_close:
            end()

    def _leave(self, reason: str) -> None:
        """Leaves the job, before the functions in `on_close` are called."""

    def at_exit(self) -> None:
        """Closes the connection when the process exits, if the script did not. The exception that ended the script is sent to
        other ranks as the reason."""
        error = getattr(sys, "last_value", None)
        self.close("" if error is None else cause_of(error))


class DistributedJob(JobContext, WorkerListener):
    """A job of several workers, as one of them sees it. Its components share this state.

    `connect()` creates it; `regroup.py` replaces `groups`, and `regroup.py` and `switch.py` the worker.
    """

    groups: Groups
    plan: Plan

    def __init__(
        self, terms: PlanTerms, own: int, groups: Groups, rows: RowChannel, uplink: Uplink, memory: OptimizerMemory,
        plan: Plan, job: Job, *, generation: int = 1, logs: bool = True, waits: WaitsFor = WaitsFor(),
        embedded: Sequence[EmbeddedServer] = (), matched: bool = False, joined: JoinedState | None = None,
    ) -> None:
        """`own`: this rank's number in messages. `matched`: all ranks use norm-matched averaging."""
        super().__init__(terms, logs=logs)
        self.id, self.groups, self.uplink, self.embedded, self.waits = own, groups, uplink, embedded, waits
        self.rows = rows
        """Exchanges rows of numbers between the observers (observers.py) of all ranks, in the same order on each rank."""
        self.memory, self.matched, self.joined = memory, matched, joined
        self.members = MemberChanges()
        self.local: OuterSteps | None = None
        """The local steps in progress; None unless the plan has local steps."""
        self.listeners: list[EpochListener] = []
        self._verdict = RootCause()
        self.follow(self.worker_for(plan, job, groups.device, generation))
        notices = WaitNotices(self._waiting, uplink.display_name, waits.silent_s, self.log)
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
        """Number of complete exchanges since the start; between two steps it is the same on all ranks. It differs from
        `worker.step`, which numbers messages, continues after a restored checkpoint and also counts dropped exchanges."""
        return self.worker.counters.exchanges

    @property
    def carried(self) -> int:
        return self.passes - (0 if self.local is None else self.local.behind)

    def stepped_apart(self) -> bool:
        """Whether local steps have left the optimizers in different states on different ranks."""
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
            transport=self.uplink.transport, recycle=self.uplink.recycle, listener=self,
        )

    def follow(self, worker: Worker) -> None:
        """Makes a worker and its plan the current ones. The coordinator's reports about other ranks are sent to it and are kept
        for `explain`."""
        self.worker = worker
        self.plan = worker.plan
        self.uplink.limit_kept(max((expected_nbytes(worker.plan, n) for n in range(worker.plan.servers)), default=0))

        def fail(error: CommError) -> None:
            self._verdict.fall(error)
            worker.latch(error)

        def left(peer: str, exchanges: int) -> None:
            if (error := worker.finished_peers.add(peer, exchanges)) is not None:
                fail(error)

        self.uplink.subscribe(fail, worker.stalled, left, worker.now.generation)

    def hand_on(self, old: Worker, new: Worker) -> None:
        """Transfers residuals and step number from worker `old` to worker `new`, which continues the job."""
        hand_over(old, new, self.memory.effect, self.memory.rate)

    def _waiting(self) -> Waiting:
        """The step, or the call between two steps, that might be waiting for other ranks now."""
        return self.worker if self.worker.waiting_since else self.groups

    # ---- what the worker asks and reports

    def check_interrupts(self, complete: Callable[[], bool]) -> None:
        self.members.check_interrupts(self.worker, complete)

    def patience(self) -> float:
        return self.members.patience()

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

    # ---- joint operations between two steps

    def catch_up(self) -> None:
        for listener in self.listeners:
            listener.catch_up()

    def complete(self) -> None:
        """Completes pending exchanges. All ranks call it after the same step."""
        for listener in self.listeners:
            listener.complete()

    def broke(self, error: CommError) -> None:
        """Handles the failure of a joint operation between steps. If members have left, raises EpochChanged: the operation is
        dropped and the next step runs with the remaining ranks. Otherwise the failure is permanent and `error` is raised."""
        worker = self.worker
        if worker.error is None and self.members.pending(self.waits.verdict_s):
            raise EpochChanged from error
        worker.latch(error)
        worker.check()

    def anew(self, act: Callable[[], T]) -> T:
        """Runs a joint operation of all ranks between two steps. If members leave, the remaining ranks repeat `act` from its
        start.

        A collective that lacks one rank fails on all ranks, so all of them repeat the operation.
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
        """Display name of a rank, given its index among the current members: "rank 2 (ben)", or "rank 2" if all nodes have the
        same name."""
        name = self.uplink.name_of(self.uplink.view.members[place].rank)
        return f"rank {self.groups.members.ranks[place]} ({name})" if name else f"rank {self.groups.members.ranks[place]}"

    # ---- the end

    def _leave(self, reason: str) -> None:
        worker = self.worker
        if not reason and worker.error is None:
            try:
                self.complete()
            except Exception as failed:  # even an optimizer's error: the other ranks must still be notified below
                log.warning("the last exchange failed when the session closed, so the weights do not include it: "
                            "%s", failed)
            worker = self.worker
            worker.rest()
        error = worker.error or self._verdict.error
        worker.close()
        reason = reason or ("" if error is None else f"it had an error: {error}".splitlines()[0])
        if reason:
            self.rows.forget()
        leave_job(self.uplink, self.embedded, reason, worker.step, stay_s=self.waits.stay_s, notice_s=self.waits.notice_s)

    def close(self, reason: str = "") -> None:
        if not self._closed and os.getpid() == self._owner:
            super().close(reason)
            self.groups.close()
