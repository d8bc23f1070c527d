"""Plan "auto" of a running job: feeds what happens to decide.py, and carries out what it decides.

Has what decisions must not know: the connection, the clock, the thread that plans on rank 0 beside the training, and the group
in which ranks exchange rows. All ranks count steps alike, so what they do together happens after a step that each knows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import torch

from commlayer.autotune.plan import loss_limits
from commlayer.autotune.plan.actions import (
    Action,
    Afresh,
    AwaitPlan,
    Describe,
    Hear,
    Measure,
    Pace,
    Probe,
    RecordSteps,
    Report,
    Say,
    StartPlanning,
    Suggest,
    Switch,
    Tell,
    TellPace,
)
from commlayer.autotune.plan.candidate import Candidate, ReplanVerdict
from commlayer.autotune.plan.decide import begin, decide
from commlayer.autotune.plan.facts import (
    Awaited,
    Due,
    Fact,
    Heard,
    InForce,
    Meanwhile,
    Measured,
    PaceTold,
    Planned,
    Probed,
    Refused,
    SharesMoved,
    StepOver,
    Switched,
)
from commlayer.autotune.plan.link_probes import gathered, links_of, meter_of, pace, probed, seen_by
from commlayer.autotune.plan.loss_limits import Limits
from commlayer.autotune.plan.measuring import PROBE_AGAIN_S, PROBE_S, measured
from commlayer.autotune.plan.replan import Replanner
from commlayer.autotune.plan.state import Proposing
from commlayer.autotune.plan.step_reports import StepReports
from commlayer.cluster.all_or_none import gather
from commlayer.cluster.groups import Groups
from commlayer.engine.connection import Connection
from commlayer.engine.switch import switch
from commlayer.errors import CommError
from commlayer.observe import InterfaceCounters
from commlayer.records import Job

SEARCH_S = 60.0
"""A search that takes longer, all the while that training waits for it, is given up. Planning takes seconds."""


def auto_of(connection: Connection) -> AutoPlan | None:
    """For a job whose plan was left to commlayer and which has a network to plan for: one of several nodes."""
    worker, groups = connection.worker, connection.groups
    single = groups is None or groups.world == groups.ranks_per_node
    if not connection.terms.auto or worker is None or groups is None or single or not worker.plan.servers:
        return None
    made = AutoPlan(connection, worker.job)
    made.start()
    return made


class AutoPlan:
    """Every rank calls `after_step` behind each step on averaged gradients, and `after_exchange` behind each of local ones."""

    def __init__(self, connection: Connection, job: Job, *, probe_s: float = PROBE_S, keep: bool = False) -> None:
        """`keep`: looks for plans and changes none. `probe_s`: seconds of all probes together."""
        self._connection, self._job, self._probe_s = connection, job, probe_s
        per_node = 1 if connection.groups is None else connection.groups.ranks_per_node
        self._state = begin(connection.rank, per_node=per_node, keep=keep)
        self._replanner = Replanner(connection)
        self._meter: InterfaceCounters | None = None
        self._reports: StepReports | None = None
        self._thread: threading.Thread | None = None
        self._news: deque[Planned | SharesMoved] = deque()
        """From other threads, for the next step's end."""
        self._ended = 0.0
        """When the last step that it heard of ended; 0 before the first."""
        self._besides_s = self._exposed_s = 0.0
        """Since then: what its own decisions have taken; and up to then, what steps have waited for communication."""
        self._busy = False
        connection.on_close.append(self._close)
        connection.on_shares.append(lambda part: self._news.append(SharesMoved(part)))

    @property
    def verdicts(self) -> list[ReplanVerdict]:
        """On rank 0: what each planning found."""
        return [] if self._state.lead is None else list(self._state.lead.verdicts)

    def start(self) -> None:
        """Ahead of the first step: where steps are slow, the second tells enough."""
        if not self._state.keep and (meter := meter_of(self._connection)) is not None:
            self._meter = meter
            self._connection.on_close.append(meter.close)
        self._record()

    def after_step(self) -> None:
        """A step ends with its backward pass, whenever it is looked at: under overlap="forward" that is in the next one's, and
        from there to the end of a step that is waited for is no step."""
        self._after(1, self._connection.passed_s)

    def _after(self, steps: int, ended: float) -> None:
        """`steps` have ended since the last time, the last one then. CommError, latched in the worker, if another rank is
        gone."""
        worker = self._connection.worker
        assert worker is not None
        if not (self._connection.terms.auto or self._state.keep):
            return  # somebody has asked for a plan since
        if worker.step < worker.plan.warmup:
            return  # on all ranks: what steps take then says nothing of the plan
        step_s = max(0.0, ended - self._ended - self._besides_s) / steps if self._ended else 0.0
        waited_s = (worker.counters.exposed_s - self._exposed_s) / steps
        if self._reports is not None:
            self._reports.step(step_s, waited_s)
        begin = time.perf_counter()
        self._busy = True  # a change of plans first catches up with exchanges that are due
        try:
            self._feed(StepOver(self._connection.exchanges, step_s, self._meanwhile(), waited_s))
        except CommError as error:
            self._connection.broke(error)
        finally:
            self._busy = False
        self._begin(ended, time.perf_counter() - begin)

    def _begin(self, ended: float, besides_s: float = 0.0) -> None:
        """The next step begins where the last one ended."""
        assert self._connection.worker is not None
        self._ended, self._besides_s, self._exposed_s = ended, besides_s, self._connection.worker.counters.exposed_s

    def after_exchange(self) -> None:
        """Local steps have been exchanged, in turns if there are several: the end of as many steps."""
        plan = self._connection.plan
        assert plan is not None
        if not self._busy and plan.steps_locally:
            self._after(plan.local_steps // plan.fragments, time.perf_counter())

    def after_drain(self) -> None:
        """Local steps have been exchanged before it was time to, which is the end of no round."""
        local = self._connection.local
        if local is not None and not local.taken:
            self._begin(time.perf_counter())

    def end(self) -> None:
        """It looks for plans no longer. A step that is recorded now counts for nobody: members may change in it."""
        if self._connection.worker is not None:
            self._switch_recorders(on=False)
        self._replanner.close()

    def _close(self) -> None:
        """Nor does its thread run on: one inside native code when the interpreter ends would take the process down."""
        self.end()
        if self._thread is not None:
            self._thread.join(SEARCH_S)

    def settle(self, deadline_s: float) -> list[ReplanVerdict]:
        """What planning has found, when it is over or that time is."""
        if self._thread is not None:
            self._thread.join(deadline_s)
        self._feed(self._meanwhile())
        return self.verdicts

    def _feed(self, fact: Fact) -> None:
        self._state, actions = decide(self._state, fact, time.monotonic())
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        """Does what was decided. What comes of it is the next fact."""
        made = self._connection
        match action:
            case Say():
                made.say(action.text, logging.WARNING if action.warning else logging.INFO)
            case Suggest():
                made.terms.suggested = True
                made.say(action.text, logging.WARNING)
            case Report():
                made.events.append(action.event)
            case Describe():
                made.terms.basis, made.terms.price = action.basis, action.price
            case Pace():
                pace(made, action.links)
            case Afresh():
                if self._reports is not None:
                    self._reports.afresh()
            case RecordSteps():
                self._record()
            case TellPace():
                groups, pace_s = self._groups(), [action.step_s, action.waited_s]
                told = groups.gather_all(torch.tensor(pace_s, dtype=torch.float64, device=groups.device))
                self._feed(PaceTold(float(told[:, 0].median()), float(told[:, 1].min())))
            case Measure():
                self._measure()
            case Hear():
                self._hear()
            case Tell():
                assert self._reports is not None
                self._feed(Heard(tuple(self._reports.tell(action.word, action.plan_s, action.slow_s))))
            case Probe():
                self._probe(action)
            case StartPlanning():
                self._start_planning(action)
            case AwaitPlan():
                self._await_plan(action.most_s)
            case Switch():
                self._switch(action.candidate)

    # ---- actions

    def _record(self) -> None:
        self._switch_recorders(on=True)
        if self._state.lead is not None:
            self._replanner.start()

    def _switch_recorders(self, *, on: bool) -> None:
        assert self._connection.worker is not None
        self._connection.worker.recorder.switch(on=on)
        if self._connection.local is not None:
            self._connection.local.recorder.switch(on=on)

    def _measure(self) -> None:
        made = self._connection
        seen = None if self._meter is None else seen_by(self._meter)
        measurements = measured(made, self._job, self._probe_s, seen)
        self._replanner.measured(measurements)
        rows = measurements.rows
        computing_s = () if any(row.balanced for row in rows) else tuple(row.compute_s for row in rows)
        shares = made.members is None  # where workers may leave no Controller is taken
        self._feed(Measured(tuple(links_of(made, rows)), measurements.step_s, computing_s,
                            tuple(map(made.called, range(len(rows)))), shares))
        if self._reports is None and not self._state.keep:
            assert made.rows is not None
            self._reports = StepReports(made.rows.rows(), self._meter)

    def _hear(self) -> None:
        assert self._reports is not None
        self._feed(Heard(tuple(self._reports.heard())))
        if self._reports.due:
            self._feed(Due())

    def _probe(self, order: Probe) -> None:
        start, made, old = time.monotonic(), self._connection, self._replanner.rows
        assert self._state.links is not None
        up_bps, down_bps, _ = probed(made, PROBE_AGAIN_S, expected=self._state.links.watch.planned[self._groups().node])
        rows = gathered(made, old[made.rank]._replace(up_bps=up_bps, down_bps=down_bps))
        took_s = time.monotonic() - start
        self._feed(Probed(tuple(links_of(made, rows)), took_s, order.plan_s, order.step_s))

    def _start_planning(self, order: StartPlanning) -> None:
        self._join()
        try:
            # Here, between two steps: it tries the script's optimizer, and what a trial draws it puts back for all threads.
            limits = loss_limits.limits_of(self._connection, self._replanner.rows)
        except Exception as error:
            self._news.append(Planned(order, None, f"{type(error).__name__}: {error}"))
            return
        self._thread = threading.Thread(target=self._plan, args=(order, limits), name="commlayer-planner", daemon=True)
        self._thread.start()

    def _plan(self, order: StartPlanning, limits: Limits) -> None:
        """On a thread of its own, so it only leaves its result."""
        found, why = None, ""
        try:
            found = self._replanner.find(order.current, order.known, order.links, limits)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        self._news.append(Planned(order, found, why))

    def _await_plan(self, most_s: float) -> None:
        groups = self._groups()
        if self._thread is not None:
            self._thread.join(min(most_s, SEARCH_S))
            self._feed(self._meanwhile())
        found = self._state.lead is not None and isinstance(self._state.lead.phase, Proposing)
        self._feed(Awaited(bool(gather(groups, [found])[0][0])))

    def _switch(self, candidate: Candidate | None) -> None:
        made = self._connection
        left = made.plan
        try:
            switch(made, None if candidate is None else candidate.runnable, by_itself=True)
        except ValueError as error:  # on all ranks, and nothing has changed
            self._feed(Refused(str(error)))
            return
        assert made.plan is not None
        assert left is not None
        self._feed(Switched(made.plan, left))

    # ---- what actions need

    def _join(self) -> None:
        """A search that hangs is ended, long before the others would wonder."""
        if self._thread is not None:
            self._thread.join(SEARCH_S)
            if self._thread.is_alive():
                self._replanner.stop()
                self._thread.join()

    def _meanwhile(self) -> Meanwhile:
        made, news = self._connection, list[Planned | SharesMoved]()
        while self._news:
            news.append(self._news.popleft())
        assert made.plan is not None
        return Meanwhile(InForce(made.plan, made.terms.basis, made.terms.price), tuple(news), made.terms.harder)

    def _groups(self) -> Groups:
        assert self._connection.groups is not None
        return self._connection.groups
