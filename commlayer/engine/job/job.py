"""Defines the state of one rank's job: process groups, links to coordinator and servers, worker and plan.

connect() creates this state, plan_switch.py switches it to another plan, and the session or the exit of the process closes it.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from commlayer.callbacks import ignore
from commlayer.cluster.processes import site_process_group
from commlayer.cluster.processes.child_processes import EmbeddedServer
from commlayer.cluster.processes.collectives import Groups, gather_values
from commlayer.cluster.processes.rows import StepRows
from commlayer.cluster.servers.server_codecs import expected_nbytes
from commlayer.cluster.servers.worker_client import WorkerClient, leave_job
from commlayer.compressors import make_codec
from commlayer.engine.buckets.current_step import Counters
from commlayer.engine.buckets.units import Units
from commlayer.engine.components import Components
from commlayer.engine.hooks.callbacks import weakly
from commlayer.engine.job.fixed_members import FixedMembers
from commlayer.engine.job.plan_agreement import check_plan
from commlayer.engine.job.plan_terms import PlanTerms
from commlayer.engine.job.row_sender import RowSender
from commlayer.engine.job.run_events import NO_UNITS, RunEvents
from commlayer.engine.model.optimizer_state import OptimizerMemory
from commlayer.engine.sync.local_steps import OuterSteps
from commlayer.engine.worker.root_cause import RootCause, WaitsFor
from commlayer.engine.worker.site import LocalSite
from commlayer.engine.worker.waits import Waiting, WaitNotices
from commlayer.engine.worker.worker import Worker
from commlayer.errors import CommError, InvalidInput, InvalidState, exit_reason
from commlayer.observe.events import PlanReason
from commlayer.observe.prediction_check import StalePlan
from commlayer.records import Job, Plan

log = logging.getLogger("commlayer")
T = TypeVar("T")
NO_COUNTERS = Counters()
UNDONE_NBYTES = 64
"""Largest size of a bucket's number and rolled back slices as JSON."""
DROPPED_S = 5.0
"""Longest wait, in seconds, for the end of sessions whose models are gone."""
FORKED = ("this process is a forked child of the one that called attach(), so it is no member of the job: train in the process "
          "that attached the model, or a copy.deepcopy() of the model here")


@dataclasses.dataclass
class JoinedState:
    """State that a joining rank has received, and its progress when it joined."""

    local: Mapping[str, torch.Tensor]
    """State of local steps, as returned by OuterSteps.snapshot."""
    restore: Callable[[], None]
    """Restores the optimizer's state."""
    followed: dict[str, str]
    """Results of the functions in JobContext.followers, by name, as computed by the rank that sent this state."""
    exchanged_steps: int
    """Value of DistributedJob.exchanged_steps, a number of training steps, when this rank joined."""
    fresh: bool = True
    """True: this rank has not finished its first step."""

    def end_first_step(self) -> None:
        """Called after this rank's first step: the script can then make all calls that other ranks make. Restores the received
        optimizer state again, because before that step the script might have changed the optimizer, for example with schedulers
        that catch up. The received state already contains such changes."""
        self.restore()
        self.local, self.restore, self.fresh = {}, ignore, False  # frees memory as large as model and optimizer
        site_process_group.release()


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


def _after_fork() -> None:
    for job in _open:
        job.forked()


os.register_at_fork(after_in_child=_after_fork)


class JobContext:
    """State of the job of a script without other workers. DistributedJob adds what several workers need.

    No thread refers to this object, except weakly. The job object is therefore freed with the session and the model, and then
    leaves the job.
    """

    plan: Plan | None = None
    groups: Groups | None = None
    joined: JoinedState | None = None
    """The state that this rank received when it joined a running job. The value is None if this rank did not join a running
    job."""
    embedded: Sequence[EmbeddedServer] = ()
    """Servers that this rank hosts."""
    id = 0
    """This rank's number in messages and at the coordinator: the rank that it had when it joined. It does not change when other
    members leave."""
    first_world = 1
    """Number of workers with which the job began. It is the unit of residuals; see Units."""
    waits = WaitsFor()
    site = LocalSite()
    """The ranks over which the model is sharded, if it is."""
    local: OuterSteps | None = None
    """Runs local steps and their exchanges; None unless the plan has local steps."""

    def __init__(self, terms: PlanTerms | None = None, *, logs: bool = True) -> None:
        """`terms`: constraints that the job's plans must respect. `logs`: whether this rank is the one that logs job-wide
        events for its node or home."""
        self.terms, self.logs = terms or PlanTerms(), logs
        self.followers: dict[str, Callable[[], str]] = {}
        """Maps names to functions that return the state of script objects, such as a sampler, as a string for joining ranks."""
        self.passes = 0
        """Number of training steps since the job began, dropped steps included. The value is the same on all ranks."""
        self.training_id = 0
        """Number that names this training in all its checkpoints; 0 before the first one. Resumed jobs continue it."""
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
        self.components, self.members = Components(weakref.proxy(self)), FixedMembers()
        self.stream = RunEvents()
        """The event stream of this rank."""
        self._owner, self._closed = os.getpid(), False
        self._exit: Callable[[], None] | None = None
        """Function that atexit calls. The value is None if this object needs no end."""

    def open(self) -> None:
        """Makes the end of the process close the job; the end of model and session, too."""
        self._exit = weakly(self.at_exit)
        atexit.register(self._exit)
        _open.add(self)

    def __del__(self) -> None:
        if self._exit is not None and not self._closed and os.getpid() == self._owner:
            self.components.clear()  # their pending exchanges are dropped, because the model of this job is gone
            # The garbage collector can run in any thread, even in one whose end close() waits for.
            _dropped.append(threading.Thread(target=self.close, name="commlayer-close"))
            _dropped[-1].start()

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
        return self.members.elastic

    @property
    def generation(self) -> int:
        """Number of the current epoch."""
        return 0

    @property
    def fresh(self) -> bool:
        """True: this rank has joined a running job and has not finished its first step."""
        return self.joined is not None and self.joined.fresh

    @property
    def exchanged_steps(self) -> int:
        """Number of training steps (as `passes` counts) whose effect survives the death of any single rank: averaged steps, and
        local steps in complete exchanges. It is the same on all ranks after the same step."""
        return self.passes - (0 if self.local is None else self.local.unshared_steps)

    def count_step(self) -> None:
        self.passes, self.passed_s = self.passes + 1, time.perf_counter()
        self.stream.step(self.passes, self.passed_s, *self._counted)

    @property
    def _counted(self) -> tuple[Counters, Units]:
        return NO_COUNTERS, NO_UNITS

    def metrics(self) -> dict[str, float]:
        return {"steps": self.passes, **Counters().as_dict(), "reconnects": 0, "resent_nbytes": 0, "kept_nbytes": 0}

    def explain(self, error: BaseException) -> BaseException:
        """Returns an error that names the peer which caused `error`, once that is known."""
        return self.components.explain(error)

    def drop_call(self, error: CommError, generation: int | None = None) -> None:
        """Handles the failure of a call that all ranks make together. Returns if members have left: the call is dropped, and
        the next step runs with the remaining ranks. Otherwise raises the error, with which this rank's part in the job ends.
        `generation`: epoch in which the call began. None: the current epoch."""
        raise error

    def retry_on_epoch_change(self, act: Callable[[], T], *, ends_job: bool = False) -> T:
        """Runs `act`, a function that all ranks run together between two steps. If members leave, the remaining ranks run `act`
        again from its start.

        A collective without one of its ranks fails on all ranks, so all of them repeat it. `ends_job`: in a job whose members
        stay, such a failure ends this rank's part in the job.
        """
        while True:
            generation = self.generation
            try:
                return act()
            except Exception as error:
                comm_error = error if isinstance(error, CommError) else error.__cause__
                if not isinstance(comm_error, CommError) or not (self.elastic or ends_job):
                    raise
                self.drop_call(comm_error, generation)
            self.members.continue_without_departed()

    def log_decision(self, what: str, level: int = logging.WARNING, *, own: bool = False,
                     event_level: int | None = None) -> None:
        """Adds a text to `decisions`, with the number of training steps so far, and logs it. `own`: True: no other rank knows
        of the decision, so this rank logs it even if another rank logs for its node. `event_level`: its level in the event
        stream, for good news that people see without configuring logging."""
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
        """Closes the job when the process exits, if the script has not closed it. The exception that ended the script is
        sent to other ranks as the reason."""
        error = getattr(sys, "last_value", None)
        self.close("" if error is None else exit_reason(error))


class DistributedJob(JobContext):
    """State of a job of several workers on one of them, which the components of this rank share.

    `connect()` creates it. changing_members.py replaces `groups`, plan_switch.py the worker.
    """

    groups: Groups
    plan: Plan

    def __init__(
        self, terms: PlanTerms, own: int, groups: Groups, rows: StepRows, uplink: WorkerClient, memory: OptimizerMemory,
        plan: Plan, job: Job, *, generation: int = 1, logs: bool = True, waits: WaitsFor = WaitsFor(),
        embedded: Sequence[EmbeddedServer] = (), matched: bool = False, joined: JoinedState | None = None, first_world: int = 0,
        site: LocalSite | None = None,
    ) -> None:
        """`own`: this rank's number in messages. `matched`: True if all ranks use norm-matched averaging. `first_world`: 0: the
        present number of workers. `site`: the ranks over which the model is sharded; None: it is not sharded."""
        super().__init__(terms, logs=logs)
        self.id, self.groups, self.uplink, self.embedded, self.waits = own, groups, uplink, embedded, waits
        uplink.children = embedded
        self.rows = rows
        """The rows of numbers that components of all ranks send to each other."""
        rows.failed = weakly(self._row_failed)
        self.memory, self.matched, self.joined = memory, matched, joined
        self.first_world, self.site = first_world or groups.world, site or LocalSite()
        self._root_cause = RootCause(uplink, waits)
        self.components.add(self._root_cause)
        self.components.add(RowSender(rows))
        self.stream.log.rank, self.stream.dense_nbytes = own, 4 * job.numel
        self.stream.rtt_s = lambda: uplink.membership.report.rtt_s
        uplink.membership.report.events = self.stream.log
        self.follow(self.worker_for(plan, job, groups.device, generation))
        notices = WaitNotices(weakly(self._waiting), uplink.display_name, waits.silent_s,
                              partial(weakly(self.log), event=False), self.stream.log)
        self.on_close += [rows.close, notices.close]

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def world(self) -> int:
        return self.groups.world

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.uplink.epoch.members) if self.elastic else super().ranks

    def withdraw(self) -> int:
        """See Worker.withdraw. Sites of several ranks withdraw nothing, because only one of their ranks would know."""
        return self.worker.withdraw() if self.groups.ranks_per_node == 1 else 0

    @property
    def norms_differ(self) -> bool:
        """True: sites of unlike sizes add the parts of a sharded model's norm in unlike orders."""
        return bool(self.site.shards) and len({*map(len, self.groups.sites), *self.members.joining_sizes}) > 1

    @property
    def generation(self) -> int:
        return self.uplink.epoch.generation

    @property
    def exchanges(self) -> int:
        """Number of complete exchanges since the start. Between two steps it is the same on all ranks. `worker.step` is another
        number: it counts messages, continues after a restored checkpoint and also counts dropped exchanges."""
        return self.worker.counters.exchanges

    @property
    def _counted(self) -> tuple[Counters, Units]:
        return self.worker.counters, self.worker.units

    def note_plan(self, reason: PlanReason) -> None:
        """Adds the current plan to the event stream. Rank 0 does this for all ranks."""
        if self.rank == 0:
            self.stream.plan(self.plan, reason)

    def stepped_apart(self) -> bool:
        """Returns True if local steps have left the optimizers in different states on different ranks."""
        return self.local is not None and self.memory.has_optimizer_state

    def can_restart_optimizer(self, ahead: int = 0) -> bool:
        """Returns True if the automatic plan's return to averaged gradients, `ahead` steps from now, may drop this rank's
        optimizer state, because it contains only the job's first steps."""
        return self.local is not None and self.memory.can_restart(self.passes + ahead)

    def stays_apart(self, ahead: int = 0) -> bool:
        """Returns True if the optimizers' states exclude a return to averaged gradients `ahead` steps from now."""
        return self.stepped_apart() and not self.can_restart_optimizer(ahead)

    def metrics(self) -> dict[str, float]:
        resumed = self.uplink.transport
        return {"steps": self.passes, **self.worker.counters.as_dict(), "reconnects": resumed.breaks,
                "resent_nbytes": resumed.resent_nbytes, "kept_nbytes": resumed.kept_nbytes}

    def worker_for(self, plan: Plan, job: Job, device: torch.device, generation: int = 1) -> Worker:
        """Creates a worker that runs this plan. The new worker is idle until `follow` makes it the current one."""
        codecs = {b.id: make_codec(b, self.groups.node, plan) for b in plan.buckets}
        return Worker(
            job, plan, codecs, device, rank=self.id, members=self.first_world, generation=generation, groups=self.groups,
            transport=self.uplink.transport, recycle=self.uplink.recycle, components=weakref.proxy(self.components),
            site=self.site,
        )

    def check_plan(self, plan: Plan) -> None:
        """Raises ValueError if this job cannot run the plan."""
        if plan.servers > (servers := len(self.uplink.epoch.servers)):
            raise InvalidInput("E-PLAN-SWITCH", f"plan: it needs {plan.servers} servers, but the job has {servers}")
        groups, worker = self.groups, self.worker
        check_plan(plan, worker.job, len(groups.sites), plan.ranks_per_node if self.elastic else groups.ranks_per_node,
                   worker.device, self.terms.forbids, reachable=groups.members.reachable)

    def follow(self, worker: Worker) -> None:
        """Makes a worker and its plan the current ones. This worker receives the coordinator's reports about other ranks; the
        reports are also kept for `explain`."""
        self.worker = worker
        self.plan = worker.plan
        self.rows.begin(worker.now.generation)
        self.rows.transport.stalled = worker.now.stalled
        self.uplink.limit_bodies(max(expected_nbytes(worker.plan, n) for n in range(max(1, worker.plan.servers))))

        root_cause = self._root_cause

        def fail(error: CommError) -> None:
            root_cause.record(error)
            worker.latch(error)

        def left(peer: str, exchanges: int) -> None:
            if (error := worker.finished_peers.add(peer, exchanges)) is not None:
                fail(error)

        self.uplink.subscribe(fail, worker.stalled, left, worker.now.generation)

    def _row_failed(self) -> BaseException | None:
        """Returns why no row of all ranks can arrive any more. Returns None if there is no such reason."""
        return self.worker.error

    def all_undone(self, undone: dict[int, int]) -> dict[int, int]:
        """Returns the rollbacks of all ranks, from the result of Worker.roll_back on each. Only if the model is sharded, ranks
        have different buckets."""
        if not self.site.shards:
            return undone
        rows = gather_values(self.groups, undone, dict[int, int], UNDONE_NBYTES * (1 + len(self.plan.buckets)), "rollbacks")
        return {bucket: bits for row in rows for bucket, bits in row.items()}

    def _waiting(self) -> Waiting:
        """Returns the step, or the call between two steps, that might be waiting for other ranks now."""
        return self.worker if self.worker.waiting_since else self.groups

    def drop_call(self, error: CommError, generation: int | None = None) -> None:
        worker, entered = self.worker, generation not in (None, self.generation)
        if worker.error is None and (entered or self.members.departed(self.waits.verdict_s)):
            log.info("members changed, so a call of all ranks was dropped: %s", error)
            return
        worker.latch(error)
        worker.check()
        raise error

    def called(self, place: int) -> str:
        """Returns the display name of a rank, given its index among the current members: "rank 2 (ben)", or "rank 2" if all
        nodes have the same name."""
        name = self.uplink.worker_name(self.uplink.epoch.members[place].rank)
        return f"rank {self.groups.members.ranks[place]} ({name})" if name else f"rank {self.groups.members.ranks[place]}"

    def forked(self) -> None:
        self.worker.forked(InvalidState("E-FORKED", FORKED))

    def _leave(self, reason: str) -> None:
        worker = self.worker
        if not reason and worker.error is None:
            try:
                self.components.close()
            except Exception as failed:  # even an optimizer's error: the other ranks must still be notified below
                log.warning("the last exchange failed when the session closed, so the weights do not include it: "
                            "%s", failed)
            worker = self.worker
            worker.finish_exchanges()
        error = worker.error or self._root_cause.error
        worker.close()
        reason = reason or ("" if error is None else f"it had an error: {error}".splitlines()[0])
        self.stream.left(reason)
        if reason:
            self.rows.forget()
        self.rows.finish()
        leave_job(self.uplink, self.embedded, reason, worker.step, stay_s=self.waits.stay_s, notice_s=self.waits.notice_s)

    def close(self, reason: str = "") -> None:
        if not self._closed and os.getpid() == self._owner:
            super().close(reason)
            self.groups.close()
