"""Contains everything that one rank has for its job: process groups, links to coordinator and servers, worker and plan.

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
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

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

if TYPE_CHECKING:
    from commlayer.engine.averages import AverageUse

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


class Changes(Protocol):
    """Interface through which a JobContext handles membership changes; `regroup.py` implements it."""

    def check_interrupts(self, worker: Worker, complete: Callable[[], bool]) -> None:
        """Called repeatedly while a step waits for other ranks, until all data of the step has arrived (`complete`). Raises
        EpochChanged if the remaining ranks must repeat the step."""
        ...

    def unfit(self, plan: Plan) -> str:
        """The reason why members cannot change under this plan; "" if they can."""
        ...

    def invites(self) -> bool:
        """Whether new members wait to join, and this rank must lead all ranks to a step in which they can join."""
        ...

    def pending(self, wait_s: float) -> bool:
        """Whether members have left and this rank has not switched to the new epoch yet. Waits up to `wait_s` seconds for the
        coordinator's report."""
        ...

    def patience(self) -> float:
        """Seconds that this rank waits after its deadline, because the coordinator decides which ranks are too slow."""
        ...

    def gone(self) -> list[str]:
        """Names of the members that have left, for errors."""
        ...

    def go(self) -> None:
        """Switches to the epoch of the remaining members after EpochChanged. Raises CommError if that fails."""
        ...

    def between(self, plan: Plan | None = None) -> None:
        """Switches to the epoch of the remaining members between two steps, if members have left. `plan`: the plan to which the
        ranks are switching; servers might have it already."""
        ...


class StateGiver(Protocol):
    """Interface of the object that creates the state for joining ranks; `replica.py` implements it."""

    def given(self, context: JobContext, plan: Plan) -> bytes: ...


class JoinedState(NamedTuple):
    """State that a joining rank has received and applies later."""

    local: Mapping[str, torch.Tensor]
    """State of local steps, as returned by OuterSteps.snapshot."""
    restore: Callable[[], None]
    """Function that restores the optimizer's state."""
    followed: dict[str, str]
    """Results of the functions in JobContext.followers, by name, on the rank that sent this state."""


class JobContext(WorkerListener):
    """State shared by a session's components. `worker` is None if there are no other ranks to average with.

    =====================================  ====================================================================
    attribute                              changed by
    =====================================  ====================================================================
    uplink, embedded, id                   connect(), once
    rows, waits, terms                     connect(), once
    rank, world, groups, members           connect(), regroup.py
    logs                                   connect(), once
    plan, worker                           connect(), switch(), regroup.py
    local                                  exchange_schedule.py
    matched                                switch(), exchange_schedule.py, replica.py
    stepped                                module_driver.py
    decisions, events                      appended to by components that decide
    passes, passed_s, fresh                step_loop.py, exchange_schedule.py
    parted, entered                        regroup.py; replica.py
    lets_in                                closed_door()
    in_join                                uneven_inputs.py, module_driver.py
    replica                                start.py
    joined                                 replica.py, begun()
    followers                              script objects whose state joining ranks need, such as a sampler
    on_close, on_shares                    callbacks: end of the connection; moved work
    catch_up, before_switch, after_switch  callbacks: change of plan
    end_rounds                             exchange_schedule.py
    after_regroup, after_between           callbacks: members have left
    complete_exchanges                     callbacks: exchanges that run after their step
    =====================================  ====================================================================
    """

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self.id = 0
        """This rank's number in messages and at the coordinator: its initial rank, which does not change when other members
        leave."""
        self.members: Changes | None = None
        """Handles changes of the job's members; None if they cannot change."""
        self.groups: Groups | None = None
        self.rows: RowChannel | None = None
        """Exchanges rows of numbers between the observers (observers.py) of all ranks, in the same order on each rank."""
        self.uplink: Uplink | None = None
        self.embedded: list[EmbeddedServer] = []
        self.plan: Plan | None = None
        self.worker: Worker | None = None
        self.waits = WaitsFor()
        self.terms = PlanTerms()
        """Constraints that the job's plans must respect."""
        self.local: OuterSteps | None = None
        """The local steps in progress; None unless the plan has local steps."""
        self.matched: bool | None = None
        """Whether all ranks use norm-matched averaging; None until the ranks have compared their settings."""

        self.replica: StateGiver | None = None
        """Object that creates the state which a joining rank receives from this rank; None if no rank can join."""
        self.followers: dict[str, Callable[[], str]] = {}
        """Maps names to functions that return the state of script objects, such as a sampler, as a string for joining ranks."""
        self.joined: JoinedState | None = None
        """The state that this rank received when it joined a running job; None if it did not join."""
        self.fresh = False
        """Whether this rank has joined a running job and has not finished its first step."""
        self.in_join = False
        """Whether this rank is inside session.join(), where ranks can be at different positions in their scripts."""
        self.lets_in = True
        """Whether new members can join during the current operation."""
        self.passes = 0
        """Number of training steps since the job began, dropped steps included. The same on all ranks."""
        self.passed_s = 0.0
        """Value of time.perf_counter() when the last backward pass ended. backward() itself can return later, after averages
        have arrived."""

        self.parted: dict[int, int] = {}
        """Maps the rank of a member that has left to the value of `carried` when it left. The member has no share in later
        steps."""
        self.entered = 0
        """Value of `carried` when this rank joined the running job; 0 if it did not join."""

        self.logs = True
        """Whether this rank logs events that all ranks know, on behalf of its node or home."""
        self.decisions: list[str] = []
        """Decisions made in this run, as text with step and reason."""
        self.events: list[StalePlan] = []
        """Decisions that have a structured record."""

        self.on_close: list[Callable[[], None]] = []
        """Functions to call when the connection closes."""
        self.on_shares: list[Callable[[float], None]] = []
        """Functions to call on all ranks after the same step when batch shares change. The argument is the factor by which a
        step's computation changes."""
        self.catch_up: list[Callable[[], object]] = []
        """Functions to call before any joint operation between two steps. They catch up with steps that other ranks might have
        made already."""
        self.end_rounds: list[Callable[[], object]] = []
        """Functions to call on all ranks after the same step. They exchange all local steps that have not been sent."""
        self.before_switch: list[Callable[[], None]] = []
        self.after_switch: list[Callable[[], None]] = []
        """Functions to call on all ranks between the same two steps. `before_switch`: once all ranks can switch plans.
        `after_switch`: after the switch."""
        self.stepped: OptimizerMemory | None = None
        """Describes how the optimizer transforms gradients; None if no optimizer was given."""
        self.after_regroup: list[Callable[[], None]] = []
        """Functions to call on all remaining ranks in the same step, after members have left."""
        self.after_between: list[Callable[[], None]] = []
        """Functions to call after `after_regroup`, if the members left between two steps. They can use collectives."""
        self.average_use: AverageUse | None = None
        """Observes how the script uses averages; None without an optimizer's averages."""
        self.finish_overlap: Callable[[], object] | None = None
        """Waits for results that arrive during a forward pass; None if there are none."""
        self.complete_exchanges: list[Callable[[], object]] = []
        """Functions to call on all ranks between the same two steps, before a save, a load and an orderly end. They complete
        pending exchanges."""

        self._verdict = RootCause()
        self._notices: WaitNotices | None = None
        self._owner = os.getpid()
        self._closed = False

    @property
    def active_worker(self) -> Worker:
        """The worker of a job with other ranks. Components that exist only in such a job use it."""
        if self.worker is None:
            raise InvalidState("E-SESSION-CLOSED", "this session has no other ranks")
        return self.worker

    def change_epoch(self) -> None:
        """Switches to the epoch of the remaining members, after EpochChanged."""
        self._changes.go()

    @property
    def _changes(self) -> Changes:
        if self.members is None:
            raise InvalidState("E-SESSION-CLOSED", "the members of this job cannot change")
        return self.members

    @property
    def exchanges(self) -> int:
        """Number of complete exchanges since the start; between two steps it is the same on all ranks. It differs from
        `worker.step`, which numbers messages, continues after a restored checkpoint and also counts dropped exchanges."""
        return 0 if self.worker is None else self.worker.counters.exchanges

    @property
    def carried(self) -> int:
        """Number of training steps (as `passes` counts) that are not lost if any single rank dies: averaged steps, and local
        steps in complete exchanges. The same on all ranks after the same step."""
        return self.passes - (0 if self.local is None else self.local.behind)

    def stepped_apart(self) -> bool:
        """Whether local steps have left the optimizers in different states on different ranks."""
        return self.local is not None and self.stepped is not None and self.stepped.remembers

    def passed(self) -> None:
        self.passes, self.passed_s = self.passes + 1, time.perf_counter()

    def given(self, plan: Plan) -> bytes:
        """The state that this rank sends to a joining rank, under the given plan."""
        assert self.replica is not None
        return self.replica.given(self, plan)

    @contextlib.contextmanager
    def closed_door(self) -> Iterator[None]:
        """Context manager in which no rank can join, because a joining rank would not know of the operation inside."""
        self.lets_in, before = False, self.lets_in
        try:
            yield
        finally:
            self.lets_in = before

    def begun(self) -> None:
        """Ends the special state of a joined rank after its first step: from now on the script can make all calls that other
        ranks make. Restores the received optimizer state again, because before that step the script might have changed the
        optimizer, for example with schedulers that catch up. The received state already contains such changes."""
        self.fresh = False
        if self.joined is not None:
            self.joined.restore()
            self.joined = JoinedState({}, lambda: None, self.joined.followed)  # the rest is as large as model and optimizer
        site_process_group.release()

    def metrics(self) -> dict[str, float]:
        counters = Counters() if self.worker is None else self.worker.counters
        resumed = None if self.uplink is None else self.uplink.transport
        return {"steps": self.passes, **counters.as_dict(), "reconnects": 0 if resumed is None else resumed.breaks,
                "resent_nbytes": 0 if resumed is None else resumed.resent_nbytes,
                "kept_nbytes": 0 if resumed is None else resumed.kept_nbytes}

    def worker_for(self, plan: Plan, job: Job, device: torch.device, generation: int = 1) -> Worker:
        """Creates a worker that runs this plan. It is idle until `follow` makes it current."""
        assert self.uplink is not None
        codecs = {b.id: codec_of(b, self.rank // plan.ranks_per_node, plan) for b in plan.buckets}
        return Worker(
            job, plan, codecs, device, rank=self.id, members=self.world, generation=generation, groups=self.groups,
            transport=self.uplink.transport, recycle=self.uplink.recycle, listener=self,
        )

    def follow(self, worker: Worker) -> None:
        """Makes a worker the current one. The coordinator's reports about other ranks are sent to it and are kept for
        `explain`."""
        assert self.uplink is not None
        self.worker = worker
        self.uplink.limit_kept(max((expected_nbytes(worker.plan, n) for n in range(worker.plan.servers)), default=0))

        def fail(error: CommError) -> None:
            self._verdict.fall(error)
            worker.latch(error)

        def left(peer: str, exchanges: int) -> None:
            if (error := worker.finished_peers.add(peer, exchanges)) is not None:
                fail(error)

        self.uplink.subscribe(fail, worker.stalled, left, worker.now.generation)
        if self._notices is None:
            self._notices = WaitNotices(self._waiting, self.uplink.display_name, self.waits.silent_s, self.log)
            self.on_close.append(self._notices.close)

    def _waiting(self) -> Waiting | None:
        """The step, or the call between two steps, that might be waiting for other ranks now; None if there are none."""
        in_step = self.worker is not None and self.worker.waiting_since
        return self.worker if in_step or self.groups is None else self.groups

    def check_interrupts(self, complete: Callable[[], bool]) -> None:
        if self.members is not None and self.worker is not None:
            self.members.check_interrupts(self.worker, complete)

    def patience(self) -> float:
        return 0.0 if self.members is None else self.members.patience()

    def settle(self) -> None:
        if self.average_use is not None:
            self.average_use.settle()

    def finish_pending(self) -> None:
        if self.finish_overlap is not None:
            self.finish_overlap()

    def hand_on(self, old: Worker, new: Worker) -> None:
        """Transfers residuals and step number from worker `old` to worker `new`, which continues the job."""
        hand_over(old, new, *(() if self.stepped is None else (self.stepped.effect, self.stepped.rate)))

    def broke(self, error: CommError) -> None:
        """Handles the failure of a joint operation between steps. If members have left, raises EpochChanged: the operation is
        dropped and the next step runs with the remaining ranks. Otherwise the failure is permanent and `error` is raised."""
        worker = self.active_worker
        if worker.error is None and self.members is not None and self.members.pending(self.waits.verdict_s):
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
                if self.members is None or not isinstance(comm_error, CommError):
                    raise
                with contextlib.suppress(EpochChanged):
                    self.broke(comm_error)
            self._changes.between()

    def explain(self, error: BaseException) -> BaseException:
        """Returns an error that names the peer which caused `error`, once the coordinator has reported it."""
        error = self._verdict.explain(error, self.uplink, notice_s=self.waits.notice_s, verdict_s=self.waits.verdict_s)
        if isinstance(error, CommError) and self.uplink is not None:
            error.call(", ".join(map(self.uplink.display_name, error.peer.split(", "))))
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

    def called(self, place: int) -> str:
        """Display name of a rank, given its index among the current members: "rank 2 (ben)", or "rank 2" if all nodes have the
        same name."""
        number = place if self.groups is None else self.groups.members.ranks[place]
        name = "" if self.uplink is None else self.uplink.name_of(self.uplink.view.members[place].rank)
        return f"rank {number} ({name})" if name else f"rank {number}"

    # ---- the end

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, reason: str = "") -> None:
        if self._closed or os.getpid() != self._owner:
            return  # a forked copy of the trainer is not a member of the job
        self._closed = True
        atexit.unregister(self.at_exit)
        if not reason and self.worker is not None and self.worker.error is None:
            try:
                for act in self.complete_exchanges:
                    act()
            except Exception as failed:  # even an optimizer's error: the other ranks must still be notified below
                log.warning("the last exchange failed when the session closed, so the weights do not include it: "
                            "%s", failed)
            self.worker.rest()
        error: BaseException | None = self._verdict.error
        error_text = ""
        if self.worker is not None:
            error = self.worker.error or error
            self.worker.close()
        if error is not None:
            error_text = f"it had an error: {error}".splitlines()[0]
        if (reason or error_text) and self.rows is not None:
            self.rows.forget()
        exchanges = -1 if self.worker is None else self.worker.step
        leave_job(self.uplink, self.embedded, reason or error_text, exchanges, stay_s=self.waits.stay_s,
                 notice_s=self.waits.notice_s)
        for end in self.on_close:
            end()
        if self.groups is not None:
            self.groups.close()

    def at_exit(self) -> None:
        """Closes the connection when the process exits, if the script did not. The exception that ended the script is sent to
        other ranks as the reason."""
        error = getattr(sys, "last_value", None)
        self.close("" if error is None else cause_of(error))


@contextlib.contextmanager
def between_steps(context: JobContext) -> Iterator[tuple[Groups | None, int, int]]:
    """Context manager for collectives between two steps: completes pending exchanges, and gives the groups (None if there are
    no other workers), this rank and the number of workers."""
    for act in context.complete_exchanges:
        act()
    yield context.groups, context.rank, context.world
