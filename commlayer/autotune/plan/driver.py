"""Shell of automatic planning (plan "auto"): sends events of the job to policy.py and carries out its actions.

It holds what decisions must not depend on: the connection, the clock, rank 0's planner thread and the process group. All
ranks count steps alike, so collective actions happen after the same step on each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from statistics import fmean

import torch

from commlayer.autotune.plan import replanner
from commlayer.autotune.plan.measuring import (
    PROBE_AGAIN_S,
    PROBE_S,
    gathered,
    links_of,
    measured,
    meter_of,
    pace,
    probed,
    seen_by,
)
from commlayer.autotune.plan.policy import begin, decide
from commlayer.autotune.plan.replanner import PlanLimits, Replanner
from commlayer.autotune.plan.state import (
    Action,
    ActivePlan,
    AwaitPlan,
    Candidate,
    Events,
    Fact,
    LogLine,
    Measure,
    MeasuringDone,
    PaceSenders,
    PlanningDone,
    Probe,
    ProbeDone,
    Proposing,
    ReadReports,
    RecordSteps,
    ReplanVerdict,
    ReportDue,
    ReportsRead,
    ReportStale,
    ResetWindow,
    SetActivePlan,
    ShareReport,
    SharesMoved,
    ShareStepTime,
    StartPlanning,
    StepDone,
    StepReport,
    StepTimes,
    SuggestSetting,
    Switch,
    SwitchDone,
    SwitchRefused,
    WaitDone,
)
from commlayer.cluster.collectives import Groups, Rows, gather
from commlayer.engine.connection import JobContext
from commlayer.engine.spacing import row_spacing
from commlayer.engine.switch import switch
from commlayer.errors import CommError
from commlayer.observe import Direction, InterfaceCounters
from commlayer.records import Job

SEARCH_S = 60.0
"""A search is aborted if training has waited this long for it. Planning takes seconds."""


def auto_of(connection: JobContext) -> AutoPlan | None:
    """The driver, for a job of several nodes whose plan was left to commlayer; otherwise None."""
    worker, groups = connection.worker, connection.groups
    single = groups is None or groups.world == groups.ranks_per_node
    if not connection.terms.auto or worker is None or groups is None or single or not worker.plan.servers:
        return None
    auto_plan = AutoPlan(connection, worker.job)
    auto_plan.start()
    return auto_plan


class AutoPlan:
    """Every rank calls `after_step` after a step on averaged gradients, and `after_exchange` after an exchange of local steps.
    """

    def __init__(self, connection: JobContext, job: Job, *, probe_s: float = PROBE_S, keep: bool = False) -> None:
        """With `keep` it searches for plans and never switches. `probe_s` limits the time of all probes together."""
        self._connection, self._job, self._probe_s = connection, job, probe_s
        per_node = 1 if connection.groups is None else connection.groups.ranks_per_node
        self._state = begin(connection.rank, per_node=per_node, keep=keep)
        self._replanner = Replanner(connection)
        self._meter: InterfaceCounters | None = None
        self._reports: StepReports | None = None
        self._thread: threading.Thread | None = None
        self._news: deque[PlanningDone | SharesMoved] = deque()
        """Results of other threads, processed at the end of the next step."""
        self._ended = 0.0
        """End of the last step reported here; 0 before the first."""
        self._besides_s = self._exposed_s = 0.0
        """Seconds that decisions have taken since then, and the total wait for communication up to then."""
        self._busy = False
        connection.on_close.append(self._close)
        connection.on_shares.append(lambda part: self._news.append(SharesMoved(part)))

    @property
    def verdicts(self) -> list[ReplanVerdict]:
        """The verdict of each planning; filled on rank 0 only."""
        return [] if self._state.lead is None else list(self._state.lead.verdicts)

    def start(self) -> None:
        """Called before the first step, because the second step is sufficient if steps are slow."""
        if not self._state.keep and (meter := meter_of(self._connection)) is not None:
            self._meter = meter
            self._connection.on_close.append(meter.close)
        self._record()

    def after_step(self) -> None:
        """A step ends with its backward pass, also if this call comes in the next step, as it does with overlap="forward"."""
        self._after(1, self._connection.passed_s)

    def _after(self, steps: int, ended: float) -> None:
        """Handles `steps` steps, the last one ended at `ended`. A CommError is latched in the worker if another rank is lost.
        """
        worker = self._connection.worker
        assert worker is not None
        if not (self._connection.terms.auto or self._state.keep):
            return  # the script has set a plan since
        if worker.step < worker.plan.warmup:
            return  # the same on all ranks: step times during warm-up do not represent the plan
        step_s = max(0.0, ended - self._ended - self._besides_s) / steps if self._ended else 0.0
        waited_s = (worker.counters.exposed_s - self._exposed_s) / steps
        if self._reports is not None:
            self._reports.step(step_s, waited_s)
        begin = time.perf_counter()
        self._busy = True  # a switch first flushes the exchanges in progress
        try:
            self._feed(StepDone(self._connection.exchanges, step_s, self._meanwhile(), waited_s))
        except CommError as error:
            self._connection.broke(error)
        finally:
            self._busy = False
        self._begin(ended, time.perf_counter() - begin)

    def _begin(self, ended: float, besides_s: float = 0.0) -> None:
        """Marks the end of the last step as the beginning of the next one."""
        assert self._connection.worker is not None
        self._ended, self._besides_s, self._exposed_s = ended, besides_s, self._connection.worker.counters.exposed_s

    def after_exchange(self) -> None:
        """Called after local steps, or one of their fragments, have been exchanged: counts the local steps since then."""
        plan = self._connection.plan
        assert plan is not None
        if not self._busy and plan.steps_locally:
            self._after(plan.local_steps // plan.fragments, time.perf_counter())

    def after_drain(self) -> None:
        """Called after an early exchange of local steps: restarts the clock, because it ends no outer step."""
        local = self._connection.local
        if local is not None and not local.taken:
            self._begin(time.perf_counter())

    def end(self) -> None:
        """Stops planning and recording: members may change during a step that is being recorded."""
        if self._connection.worker is not None:
            self._switch_recorders(on=False)
        self._replanner.close()

    def _close(self) -> None:
        """Also joins the planner thread: a thread in native code at interpreter exit would crash the process."""
        self.end()
        if self._thread is not None:
            self._thread.join(SEARCH_S)

    def settle(self, deadline_s: float) -> list[ReplanVerdict]:
        """Waits up to `deadline_s` for planning to end. Returns the verdicts."""
        if self._thread is not None:
            self._thread.join(deadline_s)
        self._feed(self._meanwhile())
        return self.verdicts

    def _feed(self, fact: Fact) -> None:
        self._state, actions = decide(self._state, fact, time.monotonic())
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        """Carries out one action. Its result is the next fact."""
        connection = self._connection
        match action:
            case LogLine():
                connection.say(action.text, logging.WARNING if action.warning else logging.INFO)
            case SuggestSetting():
                connection.terms.suggested = True
                connection.say(action.text, logging.WARNING)
            case ReportStale():
                connection.events.append(action.event)
            case SetActivePlan():
                connection.terms.basis, connection.terms.price = action.basis, action.price
            case PaceSenders():
                pace(connection, action.links)
            case ResetWindow():
                if self._reports is not None:
                    self._reports.afresh()
            case RecordSteps():
                self._record()
            case ShareStepTime():
                groups, pace_s = self._groups(), [action.step_s, action.waited_s]
                paces = groups.gather_all(torch.tensor(pace_s, dtype=torch.float64, device=groups.device))
                self._feed(StepTimes(float(paces[:, 0].median()), float(paces[:, 1].min())))
            case Measure():
                self._measure()
            case ReadReports():
                self._hear()
            case ShareReport():
                assert self._reports is not None
                self._feed(ReportsRead(tuple(self._reports.tell(action.word, action.plan_s, action.slow_s))))
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
        connection = self._connection
        traffic = None if self._meter is None else seen_by(self._meter)
        measurements = measured(connection, self._job, self._probe_s, traffic)
        self._replanner.measured(measurements)
        rows = measurements.rows
        computing_s = () if any(row.balanced for row in rows) else tuple(row.compute_s for row in rows)
        shares = connection.members is None  # jobs that workers may leave refuse a Controller
        self._feed(MeasuringDone(tuple(links_of(connection, rows)), measurements.step_s, computing_s,
                            tuple(map(connection.called, range(len(rows)))), shares))
        if self._reports is None and not self._state.keep:
            assert connection.rows is not None
            self._reports = StepReports(connection.rows.rows(), self._meter)

    def _hear(self) -> None:
        assert self._reports is not None
        self._feed(ReportsRead(tuple(self._reports.heard())))
        if self._reports.due:
            self._feed(ReportDue())

    def _probe(self, order: Probe) -> None:
        start, connection, old = time.monotonic(), self._connection, self._replanner.rows
        assert self._state.links is not None
        up_bps, down_bps, _ = probed(connection, PROBE_AGAIN_S, expected=self._state.links.watch.planned[self._groups().node])
        rows = gathered(connection, old[connection.rank]._replace(up_bps=up_bps, down_bps=down_bps))
        took_s = time.monotonic() - start
        self._feed(ProbeDone(tuple(links_of(connection, rows)), took_s, order.plan_s, order.step_s))

    def _start_planning(self, order: StartPlanning) -> None:
        self._join()
        try:
            # On the training thread, between two steps: it tries the script's optimizer and restores the random state of
            # all threads.
            limits = replanner.limits_of(self._connection, self._replanner.rows)
        except Exception as error:
            self._news.append(PlanningDone(order, None, f"{type(error).__name__}: {error}"))
            return
        self._thread = threading.Thread(target=self._plan, args=(order, limits), name="commlayer-planner", daemon=True)
        self._thread.start()

    def _plan(self, order: StartPlanning, limits: PlanLimits) -> None:
        """Runs on the planner thread, so it only appends its result."""
        candidate, why = None, ""
        try:
            candidate = self._replanner.find(order.current, order.known, order.links, limits)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        self._news.append(PlanningDone(order, candidate, why))

    def _await_plan(self, most_s: float) -> None:
        groups = self._groups()
        if self._thread is not None:
            self._thread.join(min(most_s, SEARCH_S))
            self._feed(self._meanwhile())
        has_plan = self._state.lead is not None and isinstance(self._state.lead.phase, Proposing)
        self._feed(WaitDone(bool(gather(groups, [has_plan])[0][0])))

    def _switch(self, candidate: Candidate | None) -> None:
        connection = self._connection
        previous = connection.plan
        try:
            switch(connection, None if candidate is None else candidate.runnable, by_itself=True)
        except ValueError as error:  # raised on all ranks, and nothing has changed
            self._feed(SwitchRefused(str(error)))
            return
        assert connection.plan is not None
        assert previous is not None
        self._feed(SwitchDone(connection.plan, previous))

    # ---- helpers of actions

    def _join(self) -> None:
        """Ends a search that hangs, before the other ranks time out."""
        if self._thread is not None:
            self._thread.join(SEARCH_S)
            if self._thread.is_alive():
                self._replanner.stop()
                self._thread.join()

    def _meanwhile(self) -> Events:
        connection, news = self._connection, list[PlanningDone | SharesMoved]()
        while self._news:
            news.append(self._news.popleft())
        assert connection.plan is not None
        return Events(ActivePlan(connection.plan, connection.terms.basis, connection.terms.price), tuple(news),
                         connection.terms.error_multiplier)

    def _groups(self) -> Groups:
        assert self._connection.groups is not None
        return self._connection.groups


# ---- exchange of rows about steps between all ranks
#
# A row is sent after a step and read after the next one, so that no rank waits. If a step was slow on every rank, all wait
# for the rows at once: that costs little then, and the next step may be as slow. All ranks act on the same rows after the
# same step.

class StepReports:
    """All ranks create one together and call it after the same steps: `step`, `heard`, then `tell` if it is `due`."""

    def __init__(self, rows: Rows, meter: InterfaceCounters | None = None) -> None:
        """`meter` is set on the rank that reads its node's counters."""
        self._rows, self._meter = rows, meter
        self._since: list[tuple[float, float]] = []
        self._held: list[StepReport] = []
        self._every, self._left = 1, 1
        self._costs_s: deque[float] = deque(maxlen=5)
        self._cost_s = 0.0

    def heard(self) -> list[StepReport]:
        """Rows of an earlier step that have not been returned yet; may be empty."""
        begin = time.perf_counter()
        if self._rows.under_way:
            self._held = self._read()
            self._cost_s += time.perf_counter() - begin
        rows, self._held = self._held, []
        return rows

    def step(self, seconds: float, waited_s: float) -> None:
        """Records a step: its time, and this rank's wait for communication in it."""
        self._since.append((seconds, waited_s))
        self._left -= 1

    def afresh(self) -> None:
        """Discards observations that do not apply to the next steps."""
        self._since.clear()
        if self._meter is not None:
            self._meter.look()

    @property
    def due(self) -> bool:
        """Whether the next row must be sent now."""
        return self._left <= 0 and bool(self._since)

    def tell(self, word: int, plan_s: float, slow_s: float) -> list[StepReport]:
        """Sends this rank's row. Returns all rows if all ranks wait for them, as after a step longer than `slow_s`."""
        begin = time.perf_counter()
        self._costs_s.append(self._cost_s)
        step_s, waited_s = map(fmean, zip(*self._since, strict=True))
        self._since = []
        up, down = (Direction(), Direction()) if self._meter is None else self._meter.look()
        cost_s = min(self._costs_s)  # other load on the machine can only increase the cost
        row = StepReport(word, plan_s, step_s > slow_s, step_s, cost_s, waited_s, *up, *down)
        self._rows.start(*row)
        self._cost_s = time.perf_counter() - begin
        self._left = self._every
        if not row.at_once:
            return []
        rows = self._read()
        if not all(row.at_once for row in rows):
            self._held = rows  # returned by `heard` after the next step, as on the other ranks
            return []
        return rows

    def _read(self) -> list[StepReport]:
        rows = [StepReport(*row) for row in self._rows.read()]
        self._every = row_spacing(max(row.cost_s for row in rows), max(row.step_s for row in rows))
        return rows
