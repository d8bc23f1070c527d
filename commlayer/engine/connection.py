"""One rank's connection to its job: groups, coordinator and servers, the worker and its plan. Decides nothing.

Made by engine/start.py, moved to another plan by engine/switch.py, closed by its session or at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

import torch

from commlayer.cluster import home_world
from commlayer.cluster.embedded import Embedded
from commlayer.cluster.groups import Groups
from commlayer.cluster.leaving import end as end_part
from commlayer.cluster.rank_rows import RowChannel
from commlayer.cluster.server_codecs import expected_nbytes
from commlayer.cluster.uplink import Uplink
from commlayer.compressors import codec_of
from commlayer.engine.fault import FaultVerdict
from commlayer.engine.local_steps import LocalSteps
from commlayer.engine.optimizer_memory import Stepped
from commlayer.engine.plan_handover import hand_over
from commlayer.engine.plan_terms import PlanTerms
from commlayer.engine.step import Counters, Regroup
from commlayer.engine.wait_notices import Waiting, WaitNotices
from commlayer.engine.worker import Worker
from commlayer.errors import CommError, cause_of
from commlayer.observe import StalePlan
from commlayer.records import Job, Plan

log = logging.getLogger("commlayer")

T = TypeVar("T")


class Waits(NamedTuple):
    """How long this rank waits for others around an error or an end."""

    notice_s: float = 0.0
    """For the coordinator's word who left or died."""
    verdict_s: float = 0.0
    """The same, behind a collective, which names nobody: the silence after which a worker counts as dead comes first."""
    stay_s: float = 0.0
    """Before the servers that this rank hosts end under the others."""
    silent_s: float = 0.0
    """For a peer that gives no sign of life, until it counts as dead."""


class Changes(Protocol):
    """Of members: regroup.py."""

    def heed(self, worker: Worker, here: Callable[[], bool]) -> None:
        """Called by whoever waits for others in a step, until all of it is `here`. Regroup if it is to be done again by those
        who are left."""
        ...

    def unfit(self, plan: Plan) -> str:
        """Why they cannot change under that plan; "" if they can."""
        ...

    def invites(self) -> bool:
        """Whether others wait to be let in, and it is this rank's part to see that all come to a step for that."""
        ...

    def pending(self, wait_s: float) -> bool:
        """Whether members have gone without whom this rank has yet to go on; waits so long to hear of it."""
        ...

    def patience(self) -> float:
        """For how many seconds behind its deadline this rank waits for others, since the coordinator judges who is late."""
        ...

    def gone(self) -> list[str]:
        """Their names in errors."""
        ...

    def go(self) -> None:
        """Behind Regroup: goes over to the view of those who are left. CommError if that fails."""
        ...

    def between(self, plan: Plan | None = None) -> None:
        """The same between two steps, if members have gone. `plan`: goes over to that, which servers may know already."""
        ...


class Giving(Protocol):
    """replica.py."""

    def given(self, made: Connection, plan: Plan) -> bytes: ...


class Joined(NamedTuple):
    """What a rank that joins is given, for when it is needed."""

    local: Mapping[str, torch.Tensor]
    """As LocalSteps.snapshot."""
    restore: Callable[[], None]
    """Puts the optimizer's state in place again."""
    followed: dict[str, str]
    """What `followers` of who gave it have said."""


class Connection:
    """What a session holds on to. `worker` is None where there is nobody to average with.

    =====================================  ====================================================================
    attribute                              changed by
    =====================================  ====================================================================
    uplink, embedded, id                   connect(), once
    rows, waits, terms                     connect(), once
    rank, world, groups, members           connect(), regroup.py
    logs                                   connect(), once
    plan, worker                           connect(), switch(), regroup.py
    local                                  exchange_schedule.py
    matched                                switch(), told_lengths.py, newcomer.py
    stepped                                whoever steps: module_driver.py
    decisions, events                      added to by whoever decides
    passes, passed_s, fresh                step_loop.py, exchange_schedule.py
    parted, entered                        regroup.py; newcomer.py
    lets_in                                closed_door()
    in_join                                uneven_inputs.py, module_driver.py
    replica                                start.py
    joined                                 newcomer.py, begun()
    followers                              added to by whoever is followed, as a sampler is
    on_close, on_shares                    added to by whoever has something to end, or wants to hear
    catch_up, before_switch, after_switch  added to by whoever must act around a change of plans
    end_rounds                             exchange_schedule.py
    after_regroup, after_between           added to by whoever must act when members have gone
    bring_in                               added to by whoever lets exchanges run behind steps
    =====================================  ====================================================================
    """

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self.id = 0
        """This rank's number on the wire and at the coordinator: its first rank, whoever has gone since."""
        self.members: Changes | None = None
        """Where the members of the job may change."""
        self.groups: Groups | None = None
        self.rows: RowChannel | None = None
        """What observers (observers.py) of all ranks tell each other, in their order."""
        self.uplink: Uplink | None = None
        self.embedded: list[Embedded] = []
        self.plan: Plan | None = None
        self.worker: Worker | None = None
        self.waits = Waits()
        self.terms = PlanTerms()
        """What its plans have to heed."""
        self.local: LocalSteps | None = None
        """Under a plan of local steps."""
        self.matched: bool | None = None
        """Whether all ranks make means of changes as long as the changes; None: they have not told each other yet."""

        self.replica: Giving | None = None
        """What who joins is given here. None where nobody can be taken in."""
        self.followers: dict[str, Callable[[], str]] = {}
        """By name: who of the script's own, such as a sampler, says what who joins must know of it."""
        self.joined: Joined | None = None
        """What this rank was given, where it has joined a running job."""
        self.fresh = False
        """Whether it has, and its first step is still to come."""
        self.in_join = False
        """Whether it is inside session.join(): ranks may stand in different places of their scripts."""
        self.lets_in = True
        """Whether members may join in what is at hand."""
        self.passes = 0
        """Training steps since the job began, the same on all ranks, those that were dropped among them."""
        self.passed_s = 0.0
        """By time.perf_counter: the end of the last one's backward pass. backward() may wait for averages first, or not."""

        self.parted: dict[int, int] = {}
        """By member that has gone: `carried` as it then was, so that it has no part in later steps."""
        self.entered = 0
        """`carried` as it was when this rank joined the running job."""

        self.logs = True
        """Whether this rank is the one of its node, or home, that logs what all ranks know."""
        self.decisions: list[str] = []
        """What was decided in this run, at which step, and why."""
        self.events: list[StalePlan] = []
        """The same as records, as far as there are any."""

        self.on_close: list[Callable[[], None]] = []
        """What else is to be closed with it."""
        self.on_shares: list[Callable[[float], None]] = []
        """Who wants to hear, on all ranks after the same step, that work moves: by what part a step's computing changes."""
        self.catch_up: list[Callable[[], object]] = []
        """Called ahead of all that ranks do together between two steps: does what others may have done already."""
        self.end_rounds: list[Callable[[], object]] = []
        """Called on all ranks behind the same step: exchanges until all steps are in what all ranks have."""
        self.before_switch: list[Callable[[], None]] = []
        self.after_switch: list[Callable[[], None]] = []
        """Called on all ranks between the same two steps, when it is known that all can go over, and when they have."""
        self.stepped: Stepped | None = None
        """What the optimizer makes of gradients, where one was given."""
        self.after_regroup: list[Callable[[], None]] = []
        """Called on all ranks in the same step when members have gone, and the others go on."""
        self.after_between: list[Callable[[], None]] = []
        """The same behind that, where it is between two steps: those who are left may ask each other."""
        self.bring_in: list[Callable[[], object]] = []
        """Called on all ranks between the same two steps, ahead of a save, a load and an orderly end: brings in what is under
        way."""

        self._verdict = FaultVerdict()
        self._notices: WaitNotices | None = None
        self._owner = os.getpid()
        self._closed = False

    @property
    def exchanges(self) -> int:
        """Whole exchanges since the start, the same on all ranks between two steps. `worker.step` is the number of the next
        one on the wire: it goes on after a restored checkpoint, and an exchange that was dropped has one, too."""
        return 0 if self.worker is None else self.worker.counters.exchanges

    @property
    def carried(self) -> int:
        """So many of the training steps, as `passes` counts them, are in what all ranks have, whoever dies: those that are
        averaged, and of local steps those of exchanges that are whole. The same on all ranks behind the same step."""
        return self.passes - (0 if self.local is None else self.local.behind)

    def passed(self) -> None:
        """The backward pass of a training step is over."""
        self.passes, self.passed_s = self.passes + 1, time.perf_counter()

    def given(self, plan: Plan) -> bytes:
        """What this rank gives to who joins, under the plan that then stands."""
        assert self.replica is not None
        return self.replica.given(self, plan)

    @contextlib.contextmanager
    def closed_door(self) -> Iterator[None]:
        """Nobody is let in: who joins would not know what is done here."""
        self.lets_in, before = False, self.lets_in
        try:
            yield
        finally:
            self.lets_in = before

    def begun(self) -> None:
        """The first step behind joining is whole: the script may do all that it does elsewhere. What it did to the optimizer
        ahead of that, as schedulers do that catch up, the others have done to theirs."""
        self.fresh = False
        if self.joined is not None:
            self.joined.restore()
            self.joined = Joined({}, lambda: None, self.joined.followed)  # the rest is as large as model and optimizer
        home_world.release()

    def stats(self) -> dict[str, float]:
        counters = Counters() if self.worker is None else self.worker.counters
        resumed = None if self.uplink is None else self.uplink.resumed
        return {"steps": self.passes, **counters.as_dict(), "reconnects": 0 if resumed is None else resumed.breaks,
                "resent_nbytes": 0 if resumed is None else resumed.resent_nbytes,
                "kept_nbytes": 0 if resumed is None else resumed.kept_nbytes}

    def worker_for(self, plan: Plan, job: Job, device: torch.device, generation: int = 1) -> Worker:
        """A worker that runs this plan here; it takes no part in anything until `follow`."""
        assert self.uplink is not None
        codecs = {b.id: codec_of(b, self.rank // plan.ranks_per_node, plan) for b in plan.buckets}
        return Worker(
            job, plan, codecs, device, rank=self.id, members=self.world, generation=generation, groups=self.groups,
            transport=self.uplink.transport, recycle=self.uplink.recycle, explain=self.explain,
        )

    def follow(self, worker: Worker) -> None:
        """From now on what the coordinator says of the others goes to this worker, and is kept for `explain`."""
        assert self.uplink is not None
        self.worker = worker
        self.uplink.limit_kept(max((expected_nbytes(worker.plan, n) for n in range(worker.plan.servers)), default=0))

        def fail(error: CommError) -> None:
            self._verdict.fall(error)
            worker.latch(error)

        def left(peer: str, exchanges: int) -> None:
            if (missed := worker.ended.hear(peer, exchanges)) is not None:
                fail(missed)

        self.uplink.follow(fail, worker.stalled, left, worker.generation)
        if self._notices is None:
            self._notices = WaitNotices(self._waiting, self.uplink.called, self.waits.silent_s, self.log)
            self.on_close.append(self._notices.close)
        if (members := self.members) is not None:
            worker.now.heed = lambda here: members.heed(worker, here)
            worker.patience = members.patience

    def _waiting(self) -> Waiting | None:
        """What waits for other ranks now, if anything does: a step, or a call between two steps."""
        in_step = self.worker is not None and self.worker.waiting_since
        return self.worker if in_step or self.groups is None else self.groups

    def hand_on(self, old: Worker, new: Worker) -> None:
        """`new` goes on where `old` stopped, and owes what that owed."""
        hand_over(old, new, *(() if self.stepped is None else (self.stepped.effect, self.stepped.rate)))

    def broke(self, error: CommError) -> None:
        """Something that ranks do together between steps: for good, and the error is raised; or since members have gone, and
        then it is left, Regroup is raised, and the next step goes on with those who are left."""
        assert self.worker is not None
        if self.worker.error is None and self.members is not None and self.members.pending(self.waits.verdict_s):
            raise Regroup from error
        self.worker.latch(error)
        self.worker.check()

    def anew(self, act: Callable[[], T]) -> T:
        """What all ranks do together between two steps; again, from its beginning, with those who are left if members go.

        A collective that lacks one who is gone fails on all who are left, so all of them begin again.
        """
        while True:
            try:
                return act()
            except Regroup:
                assert self.members is not None
            except Exception as error:
                broken = error if isinstance(error, CommError) else error.__cause__
                if self.members is None or not isinstance(broken, CommError):
                    raise
                with contextlib.suppress(Regroup):
                    self.broke(broken)
            self.members.between()

    def explain(self, error: BaseException) -> BaseException:
        """Who is to blame for it, as the coordinator knows soon."""
        error = self._verdict.explain(error, self.uplink, notice_s=self.waits.notice_s, verdict_s=self.waits.verdict_s)
        if isinstance(error, CommError) and self.uplink is not None:
            error.call(", ".join(map(self.uplink.called, error.peer.split(", "))))
        return error

    # ---- what people see

    def say(self, what: str, level: int = logging.WARNING, *, own: bool = False) -> None:
        """Adds a decision to `decisions`, with the number of training steps so far, and logs it. `own`: no other rank knows
        it, so this one logs it whatever its place in the node."""
        self.decisions.append(f"step {self.passes}: {what}")
        if own:
            log.log(level, "%s", self.decisions[-1])
        else:
            self.log(self.decisions[-1], level)

    def log(self, line: str, level: int = logging.INFO) -> None:
        """Logs what all ranks know: once on each node, and in each home."""
        if self.logs:
            log.log(level, "%s", line)

    def called(self, place: int) -> str:
        """A rank, by its place among those that train: "rank 2 (ben)", or "rank 2" where all nodes have one name."""
        number = place if self.groups is None else self.groups.members.ranks[place]
        name = "" if self.uplink is None else self.uplink.name_of(self.uplink.view.members[place].rank)
        return f"rank {number} ({name})" if name else f"rank {number}"

    # ---- the end

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, reason: str = "") -> None:
        if self._closed or os.getpid() != self._owner:
            return  # a forked copy of the trainer has no part in the job
        self._closed = True
        atexit.unregister(self.at_exit)
        if not reason and self.worker is not None and self.worker.error is None:
            try:
                for act in self.bring_in:
                    act()
            except Exception as failed:  # of an optimizer, too: whatever it is, the others must hear of the end
                log.warning("an exchange that was under way at the end is not in the weights: %s", failed)
            self.worker.rest()
        error: BaseException | None = self._verdict.error
        broken = ""
        if self.worker is not None:
            error = self.worker.error or error
            self.worker.close()
        if error is not None:
            broken = f"it had an error: {error}".splitlines()[0]
        if (reason or broken) and self.rows is not None:
            self.rows.forget()
        exchanges = -1 if self.worker is None else self.worker.step
        end_part(self.uplink, self.embedded, reason or broken, exchanges, stay_s=self.waits.stay_s,
                 notice_s=self.waits.notice_s)
        for end in self.on_close:
            end()
        if self.groups is not None:
            self.groups.close()

    def at_exit(self) -> None:
        """The end of a script that did not close: the exception that ended it is the reason that others hear."""
        error = getattr(sys, "last_value", None)
        self.close("" if error is None else cause_of(error))
