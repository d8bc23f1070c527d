"""The controller of a running job: measures steps, probes links, searches for plans, tries them, and rolls slower ones back.

Every rank runs a controller. All ranks exchange reports (report.py) and act on the same reports after the same step, so
collective actions happen in the same order on all ranks. Rank 0 decides on plans (autotune/plan_policy.py) and sends its
requests in its report; all ranks decide on links (autotune/link_policy.py) and codec quality (autotune/quality/policy.py).

    warming ---> measuring ---> watching
       ^                            |
       '---- rank 0 requests it ----'      because steps differ from the prediction, or work has moved between ranks

After each step a rank first does what all ranks do together, then decides by itself, then sends its report. Collective actions
follow from numbers of steps and from reports. If one rank's decisions fail, that rank still takes part in the calls of all
ranks until they have read of the failure in its report; then all ranks pause automatic changes after the same step. An action
of all ranks starts when the next reports show that no rank has failed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

from msgspec import structs

from commlayer.autotune import link_policy, plan_policy
from commlayer.autotune.collapse import CollapseWatch
from commlayer.autotune.planning.search_thread import SearchThread
from commlayer.autotune.quality.policy import CodecChange, GradientError
from commlayer.autotune.report import AloneSpeed, Reports, TuningReport
from commlayer.autotune.shares.policy import WorkerTime
from commlayer.autotune.state import (
    MEASURED_STEPS,
    LinkState,
    Measured,
    Phase,
    Reason,
    TuningRequest,
    TuningState,
)
from commlayer.engine.components import Component, ComponentOrder
from commlayer.errors import CommError
from commlayer.observe.events import AloneEvent, QualityEvent
from commlayer.observe.link_monitor import Rates, SeenStep
from commlayer.observe.prediction_check import StalePlan
from commlayer.planner.model import Link
from commlayer.planner.plan_rules import summarize_plan
from commlayer.records import Plan, digest

if TYPE_CHECKING:
    import torch

    from commlayer.autotune.job_actions import JobActions
    from commlayer.autotune.quality.guard import QualityGuard
    from commlayer.engine.job.job import DistributedJob

T = TypeVar("T")
P = ParamSpec("P")


CAPPED_S = 30.0
"""All ranks wait this long for the first plan under a cap, since a step under the plan before may last for minutes."""


class StepEnd(NamedTuple):
    """The end of a step: its time by time.perf_counter() (0: no step has ended), and the total seconds until then of observers
    and of waiting for communication."""

    at: float = 0.0
    observed_s: float = 0.0
    exposed_s: float = 0.0


class ShareMover(NamedTuple):
    """Functions by which load balancing takes part in the ranks' reports: see shares/load_balancer.py."""

    row: Callable[[], WorkerTime]
    """Returns this rank's measured times for its next report."""
    receive: Callable[[list[WorkerTime], float], None]
    """Receives the measured times of all ranks, and the longest step time of any rank."""


class TuningController(Component):
    """Measures and tunes one job, on every rank: after a step on averaged gradients, and after an exchange of local steps."""

    order = ComponentOrder.CONTROLLER

    def __init__(
        self, context: DistributedJob, actions: JobActions, reports: Reports, guard: QualityGuard | None = None, *,
        plans: bool = True,
    ) -> None:
        """`plans`: True: the controller chooses plans."""
        self._context, self._do, self._reports, self.guard = context, actions, reports, guard
        self._plans = plans
        self.state = TuningState(context.plan, leads=plans and context.rank == 0)
        self._steps = 0
        """Number of steps on averaged gradients and of exchanges of local steps."""
        self.shares: ShareMover | None = None
        """Load balancing's part in the reports; None if the script does not balance the load."""
        self._search = SearchThread(actions)
        self._recorded_s: list[float] = []
        """Step times since recording began."""
        self._allowed_bps: list[float] = []
        """`Report.allowed_bps` of the first reports since the last measurement."""
        self._failure: Exception | None = None
        """The error that ended this rank's decisions."""
        self._raised = False
        self.paused = False
        """True: decisions have failed on some rank, so no rank changes anything or sends reports."""
        self._last = StepEnd()
        self._busy = False
        self._collapse: CollapseWatch | None = None
        context.on_close.append(self._close)

    def start(self) -> None:
        """Starts recording steps. Called before the first step, because the second step is sufficient if steps are slow."""
        if self._plans:
            generation = self._context.generation
            try:
                if (plan := self._do.opening()) is not None:
                    self._open(plan)
            except CommError as error:
                self._context.drop_call(error, generation)
            except ValueError as error:  # raised on all ranks, and nothing has changed
                self._log_decision(f"training begins with {summarize_plan(self._context.plan)}: {error}")
            self._record()
            self._collapse = CollapseWatch(self._context, self._usual_s)
            if self.state.leads:
                self._do.prepare_search()

    def _open(self, plan: Plan) -> None:
        """Switches to the plan of the first steps; collective."""
        self._do.switch(plan, by_itself=True)
        self.state = structs.replace(self.state, plan=self._context.plan)
        if self.guard is not None:
            self._attempt(self._guard_entered, self.guard, by_guard=False)
        self._context.note_plan("automatic")
        links = "slow" if plan.steps_locally else "fast"
        self._log_decision(f"the links are {links}, so training begins with {summarize_plan(self._context.plan)}, until a plan "
                           f"is found")

    def _record(self) -> None:
        self._do.record(on=True)
        self._recorded_s = []

    def report(self, loss: float | torch.Tensor) -> None:
        """See Session.log_loss."""
        if self.guard is not None:
            self.guard.report(loss)

    def reads_sums(self) -> bool:
        return self.guard is not None and not self.paused and self.guard.has_work()

    def sums_arrived(self) -> None:
        """Compares compressed with exact gradients in this step, if the quality guard wants to."""
        if self.guard is not None and not self.paused:
            try:
                self.guard.compare(self._steps, self._failure)
            except CommError:
                raise
            except Exception as error:  # the next reports say so
                self._failure = self._failure or error
            self._raise_failure()

    def end_step(self) -> None:
        """Handles the end of a step on averaged gradients. The step ends with its backward pass, also if this call comes in
        the next step, as under sync="forward"."""
        self._tune_after_steps(1, self._context.passed_s)

    def end_exchange(self, *, early: bool) -> None:
        """Handles the end of an exchange of local steps, or of one of their fragments: counts the local steps since the
        previous exchange. An early exchange does not end an outer step, so it only restarts the clock."""
        plan, local = self._context.plan, self._context.local
        if early:
            if local is not None and not local.taken:
                self._begin(time.perf_counter())
        elif not self._busy and plan.steps_locally:
            self._tune_after_steps(plan.exchange_steps, time.perf_counter())

    def _tune_after_steps(self, steps: int, ended: float) -> None:
        """Tunes with the mean step time and wait of the last `steps` steps. `ended`: end of the last one."""
        worker, observed_s = self._context.worker, self._context.observed_s - self._last.observed_s
        step_s = max(0.0, ended - self._last.at - observed_s) / steps if self._last.at else 0.0
        waited_s = (worker.counters.exposed_s - self._last.exposed_s) / steps
        self._busy = True  # a switch first flushes the exchanges in progress
        try:
            if not self.paused:
                self.record_step_time(step_s, waited_s)
        finally:
            self._busy = False
            self._begin(ended)

    def _begin(self, ended: float) -> None:
        """Marks the end of the last step as the beginning of the next one."""
        context = self._context
        self._last = StepEnd(ended, context.observed_s, context.worker.counters.exposed_s)

    def record_step_time(self, step_s: float, waited_s: float) -> None:
        """Handles one step of `step_s` seconds (0: unknown), of which the rank waited `waited_s` for communication."""
        try:
            self._record_step_time(step_s, waited_s)
        except CommError:
            raise
        except Exception:  # all ranks raise this error together: an action of all ranks fails on all of them or on none
            self._pause_tuning()
            raise
        self._raise_failure()

    def _record_step_time(self, step_s: float, waited_s: float) -> None:
        self._steps += 1
        rows = self._reports.read()
        self._reports.step(step_s, waited_s)
        if self._pauses(rows):
            return
        before = self.state.plan
        if self._context.plan is not before:  # the script has set a plan
            self._adapt_to_plan()
        changed = bool(rows) and self._do_agreed()
        if self._planning:
            self._count_step(step_s, waited_s)
        withdrawn = self._context.worker.withdrawn and not changed
        if withdrawn:
            changed = self._plan_after_collapse(step_s, waited_s)
        changed = (bool(rows) and not changed and self._do_requested(rows)) or changed
        same = self.state.plan is before
        if self.guard is not None and same:
            self.guard.schedule(self._steps)
        due = self._due(rows, entered=not same)
        if self._planning and same and not withdrawn:
            self._attempt(self._decide_plan, step_s)
        if rows:
            self._attempt(self._decide, rows, changed=changed or not same)
        if due:
            self._send()
        if self.guard is not None:
            self._attempt(self.guard.prepare)

    @property
    def _planning(self) -> bool:
        """True: plans are automatic now; the same on all ranks. False during a codec's warm-up, whose step times do not
        represent the plan."""
        context = self._context
        return self._plans and context.terms.auto and context.worker.step >= context.worker.plan.warmup

    @property
    def _watched(self) -> LinkState | None:
        """The links, while ranks watch them. The value is None before the links are measured, and while they are measured
        again."""
        return self.state.links if self._planning and self.state.phase is Phase.WATCHING else None

    def _usual_s(self) -> float:
        """Usual step time in seconds; 0 before it is known. Any thread can call it."""
        links = self._watched
        return 0.0 if links is None else links.watch.usual_s

    def _attempt(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Calls `act`, which involves no other rank. After an error this rank makes no further decisions."""
        if self._failure is None:
            try:
                return act(*args, **kwargs)
            except CommError:
                raise
            except Exception as error:
                self._failure = error
        return None

    def _raise_failure(self) -> None:
        """Raises this rank's error, once, when the rank has done what all ranks do together."""
        if self._failure is not None and not self._raised:
            self._raised = True
            raise self._failure

    def _pauses(self, rows: Sequence[TuningReport]) -> bool:
        """Pauses automatic changes on all ranks, if decisions have failed on one of them. Returns whether they have."""
        if failed := [self._context.called(rank) for rank, row in enumerate(rows) if row.failed]:
            self._pause_tuning()
            self._log_decision(f"automatic changes pause after an error on {', '.join(failed)}: the current plan stays",
                               logging.WARNING)
        return bool(failed)

    def _pause_tuning(self) -> None:
        self.paused = True
        self.end()

    def _do_agreed(self) -> bool:
        """Does what all ranks have agreed on. Returns whether the plan has changed."""
        agreed, self.state = self.state.agreed, structs.replace(self.state, agreed=None)
        if isinstance(agreed, CodecChange):
            return self._change_codecs(agreed)
        return agreed is not None and self._await(agreed)

    def _count_step(self, step_s: float, waited_s: float) -> None:
        """Counts a step, and measures after enough steps."""
        self.state = state = structs.replace(self.state, step=self.state.step + 1)
        if state.phase is Phase.WATCHING:
            return
        if step_s:
            self._recorded_s.append(step_s)
        if state.step < state.until:
            return
        # The first steps are recorded already. With local steps, further recorded steps would take too long.
        if state.phase is Phase.MEASURING or (state.links is None and (
                self._context.plan.steps_locally or link_policy.links_hold(*self._do.share_times(step_s, waited_s)))):
            self._measure()
        else:
            self.state = structs.replace(state, phase=Phase.MEASURING, until=state.step + MEASURED_STEPS + 1)
            self._record()

    def _do_requested(self, rows: Sequence[TuningReport]) -> bool:
        """Does what rank 0 requests. Returns whether what the reports say no longer applies."""
        if (links := self._watched) is None:
            return False
        match rows[0].request:
            case TuningRequest.SWITCH:
                self._switch()
            case TuningRequest.MEASURE:
                self.state = structs.replace(self.state, phase=Phase.WARMING, until=self.state.step + 1)
            case TuningRequest.PROBE:
                self._probe(links, median(row.step_s for row in rows))
            case _:
                return False
        return True

    def _due(self, rows: Sequence[TuningReport], *, entered: bool) -> bool:
        """Returns whether all ranks send reports after this step. They do so every few steps while links are watched or load is
        balanced, after a comparison with exact gradients and after its reports, and after a change of plans."""
        compared = (self.guard is not None and self.guard.error is not None) or any(row.compared for row in rows)
        wanted = self._watched is not None or self.shares is not None
        return entered or compared or (wanted and self._reports.due)

    def _send(self) -> None:
        """Sends this rank's report. Acts on the reports of all ranks at once if all ranks have waited for them."""
        report, decisive_s = self._attempt(self._own_report) or (TuningReport(), math.inf)
        rows = self._reports.send(report._replace(failed=float(self._failure is not None)), decisive_s)
        if not rows:
            return
        changed = self._do_requested(rows)
        self._attempt(self._decide, rows, changed=changed)
        if self._reports.confirm(failed=self._failure is not None):
            self._do_agreed()

    def _own_report(self) -> tuple[TuningReport, float]:
        """Returns this rank's report, and the step time above which a step shows a change of the links."""
        request, decisive_s, links = TuningRequest.NOTHING, math.inf, self._watched
        if links is not None:
            decisive_s = links.watch.decisive_s
            if self.state.leads and not self._context.members.catching_up:
                self.state, request = plan_policy.next_request(self.state, time.monotonic())
        error = None
        if self.guard is not None:
            error, self.guard.error = self.guard.error, None
        return TuningReport(
            request=request, carried=self._reports.traffic(), compared=float(error is not None), error=error or GradientError(),
            alone=AloneSpeed(*plan_policy.over_alone(self.state)), allowed_bps=self._do.allowed_bps(),
            time=WorkerTime() if self.shares is None else self.shares.row()), decisive_s

    def _decide_plan(self, step_s: float) -> None:
        """Decides on plans, on the rank that leads."""
        self._take_results()
        if self.state.leads and step_s:
            self._set(*plan_policy.record_step_time(self.state, step_s, self._context.exchanges))
        self._set(plan_policy.on_faster_links(self.state))

    def _decide(self, rows: Sequence[TuningReport], *, changed: bool) -> None:
        """Decides from reports that all ranks have received, so all ranks decide alike. `changed`: True: the plan or the links
        that the reports are about have changed."""
        step_s = median(row.step_s for row in rows)
        if self.shares is not None:
            self.shares.receive([row.time for row in rows], max(row.step_s for row in rows))
        if rows[0].alone.over_alone:  # rank 0 has no other plan to try
            self._compare_alone(rows[0].alone)
            if not changed and (links := self._watched) is not None:
                self._do.remember(links.links)
        if changed:
            return
        if rows[0].compared and self.guard is not None:
            change = self.guard.decide([row.error for row in rows], step_s)
            if change is not None:
                self.state = structs.replace(self.state, agreed=change)
                return  # the links in these reports were measured under the plan that ends
        if (links := self._watched) is not None and all(row.step_s for row in rows):
            self._watch(links, rows, step_s)
        allowed_bps = [row.allowed_bps for row in rows]
        if self._allowed_bps and plan_policy.caps_changed(self._allowed_bps, allowed_bps):
            self.state = structs.replace(self.state, moved=True)
        self._allowed_bps = self._allowed_bps or allowed_bps

    def _compare_alone(self, alone: AloneSpeed) -> None:
        """Says once on each node that one machine alone would be faster."""
        context = self._context
        if context.rank == 0:
            context.stream.over_alone(AloneEvent(**alone._asdict()))
            if self.state.basis is not None:
                self._do.ask_what_if(self.state.basis.inputs)
        if max(alone.over_alone, alone.forecast) < 1 and not context.terms.said_slower:
            context.terms.said_slower = True
            self._log_decision(plan_policy.slower_line(*alone), logging.WARNING)

    def _watch(self, links: LinkState, rows: Sequence[TuningReport], step_s: float) -> None:
        """Decides whether steps show that links have changed."""
        groups = self._context.groups
        traffic, waited_s = tuple(rows[first].carried for first in groups.first_ranks), min(row.waited_s for row in rows)
        if groups.local == 0:
            own = traffic[groups.node]
            self._context.stream.rates(Rates(own.up.bps, own.down.bps), links.watch.planned[groups.node])
        self._set(*link_policy.observe_step(self.state, links, SeenStep(step_s, waited_s, traffic), time.monotonic()))

    def _probe(self, links: LinkState, step_s: float) -> None:
        """Probes the links, and searches for a plan if they have become faster. Under a plan for slow links, steps send too
        little to show that."""
        begin = time.monotonic()
        found = self._do.probe(links.watch.planned)
        self._attempt(self._apply_probe, links, found, step_s, time.monotonic() - begin)

    def _plan_after_collapse(self, step_s: float, waited_s: float) -> bool:
        """Probes the links after an exchange from which some rank has withdrawn contributions, and waits for a plan;
        collective. Returns whether the plan may have changed."""
        if (links := self._watched) is None:
            return False
        self._reports.reset()  # what was carried before the collapse raises no rate
        begin = time.monotonic()
        step_s, _ = self._do.share_times(step_s, waited_s)
        found = self._do.probe([Rates(0.0, 0.0)] * len(links.watch.planned))
        self._attempt(self._apply_probe, links, found, step_s, time.monotonic() - begin, collapsed=True)
        self.state = structs.replace(self.state, agreed=None)  # all ranks wait now
        self._await(link_policy.WAITED_STEPS * step_s)
        return True

    def _apply_probe(
        self, links: LinkState, found: Sequence[Link], step_s: float, took_s: float, *, collapsed: bool = False,
    ) -> None:
        self._set(*link_policy.apply_probe(self.state, links, found, step_s, time.monotonic(), took_s, collapsed=collapsed))
        self._reports.reset()  # the probe's traffic belongs to no step

    def _measure(self) -> None:
        """Measures steps and links, which is collective; then rank 0 starts a search."""
        soon, self.state = self.state.phase is Phase.WARMING, structs.replace(self.state, phase=Phase.WATCHING)
        measured = self._do.measure(self._recorded_s)
        self._allowed_bps = []
        self._attempt(self._measured, measured)
        # A slow step during the search would cost more than waiting for the search, unless the plan was made for such links.
        plan = self._context.plan
        if (soon or measured.uncapped) and not (plan.step_s or plan.steps_locally):
            self._await(max(link_policy.WAITED_STEPS * measured.step_s, CAPPED_S if measured.uncapped else 0.0))

    def _measured(self, measured: Measured) -> None:
        self._set(*link_policy.record_measurement(self.state, measured, time.monotonic(), self._do.node_names()))
        recent = self.state.recent
        self._set(plan_policy.begin_search(self.state, measured.step_s, median(recent) if recent else 0.0, checks=True))

    def _set(self, state: TuningState, reasons: Sequence[Reason] = ()) -> None:
        """Sets the state, and carries out what has changed in it."""
        before, self.state = self.state, state
        terms, context = self._context.terms, self._context
        if state.basis is not before.basis or state.price is not before.price:
            terms.basis, terms.price = state.basis, state.price
        terms.suggested = terms.suggested or state.suggested
        for reason in reasons:
            if isinstance(reason, StalePlan):
                context.events.append(reason)
                self._log_decision(reason.reason)
            else:
                self._log_decision(*reason)
        if state.links is not None and (before.links is None or state.links.links is not before.links.links):
            self._do.pace(state.links.links)
            self._reports.reset()  # what was observed was about the previous rates
        if state.order is not None and state.order is not before.order:
            self._search.start(state.order)

    def _take_results(self) -> None:
        for order, candidate, why in self._search.results():
            self._set(*plan_policy.end_search(self.state, order, candidate, why))

    def _await(self, most_s: float) -> bool:
        """Waits until rank 0's search has ended; collective. A search that takes longer than `most_s` continues while training
        goes on. Returns whether the plan has changed."""
        if self._do.result_of_rank_0(partial(self._searched, most_s)):
            self._switch()
            return True
        return False

    def _searched(self, most_s: float) -> bool:
        """Waits until this rank's search has ended, if one is running. Returns whether it has found a plan. Raises the error
        that ended this rank's decisions."""
        if self._failure is not None:
            raise self._failure
        self._search.join(most_s)
        self._take_results()
        return self.state.proposal is not None

    def _switch(self) -> None:
        """Switches to the plan that rank 0 proposes; collective."""
        proposal = self.state.proposal
        try:
            self._do.switch(None if proposal is None else proposal.candidate.runnable, by_itself=True)
        except ValueError as error:  # raised on all ranks, and nothing has changed
            self.state = plan_policy.drop_refused(self.state)
            self._log_decision(f"kept the current plan: {error}")
            return
        plan, back = self._context.plan, proposal is not None and proposal.back
        self._attempt(self._finish_switch, plan)
        self._context.note_plan("rollback" if back else "automatic")
        self._log_decision(f"switched {'back ' if back else ''}to plan {digest(plan)}: {summarize_plan(plan)}")
        self._adapt_to_plan(own=True)

    def _finish_switch(self, plan: Plan) -> None:
        self._set(*plan_policy.finish_switch(self.state, plan))

    def _change_codecs(self, change: CodecChange) -> bool:
        """Switches to finer or coarser codecs; collective. Returns whether the plan has changed."""
        if self.guard is None or (plan := self.guard.plan_at_floor(change)) is None:
            return False
        try:
            self._do.switch(plan, by_itself=False)
        except ValueError as error:  # raised on all ranks, and nothing has changed
            self._log_decision(f"{change.reason}, but the current plan stays: {error}", logging.WARNING)
            return False
        self._context.note_plan("quality")
        if self._context.rank == 0:
            self._context.stream.log.append(QualityEvent(before=change.before, after=change.after, reason=change.reason))
        self._log_decision(f"{change.reason}: codecs are {'finer' if change.finer else 'coarser'} from now on, "
                           f"{change.before:.3g} -> "
                           f"{change.after:.3g} of the gradient", logging.WARNING if change.finer else logging.INFO)
        self._adapt_to_plan(by_guard=True)
        return True

    def _adapt_to_plan(self, *, own: bool = False, by_guard: bool = False) -> None:
        """Adapts to another active plan. `own`: True: rank 0 proposed it. `by_guard`: True: the quality guard made its codecs
        finer or coarser."""
        self._set(plan_policy.adapt_to_plan(self.state, self._context.plan, own=own))
        if self.state.phase is not Phase.WATCHING and self._plans:
            self._record()
        self._reports.reset()
        if self.guard is not None:
            self._attempt(self._guard_entered, self.guard, by_guard=by_guard)

    def _guard_entered(self, guard: QualityGuard, *, by_guard: bool) -> None:
        self.state = structs.replace(self.state, agreed=guard.adapt_to_plan(self._steps, by_guard=by_guard))

    def end(self) -> None:
        """Stops planning and recording: members may change during a step that is being recorded."""
        if self._plans:
            self._do.record(on=False)
            self._do.close()
        if self._collapse is not None:
            self._collapse.close()

    def _close(self) -> None:
        """Stops planning, and waits for the planner thread: a thread in native code at interpreter exit would crash the
        process."""
        self.end()
        self._search.join()

    def settle(self, deadline_s: float) -> None:
        """Waits up to `deadline_s` seconds for a search to end."""
        self._search.join(deadline_s)
        self._take_results()

    def _log_decision(self, text: str, level: int = logging.INFO) -> None:
        self._context.log_decision(text, level)

    def shares_moved(self, part: float) -> None:
        """Records that work moves between ranks with the next step. `part`: by which fraction of a step's computing."""
        if part >= plan_policy.SHARES_WORTH:
            self.state = structs.replace(self.state, moved=True)
