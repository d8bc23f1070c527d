"""The controller of a running job: measures steps, probes links, searches for plans, tries them, and rolls slower ones back.

Every rank runs a controller. All ranks exchange reports (report.py) and act on the same reports after the same step, so
collective actions happen in the same order on all ranks. Rank 0 decides on plans (autotune/plan_policy.py) and sends its
requests in its report; all ranks decide on codec quality (autotune/quality.py) and links.

    warming ---> measuring ---> watching
       ^                            |
       '---- rank 0 requests it ----'      because steps differ from the prediction, or work has moved between ranks

After each step a rank first does what all ranks do together, then decides by itself, then sends its report. Collective actions
follow from numbers of steps and from reports. So a rank whose decisions fail still does with the others what they do, until
they have read in its report that it has failed; then all ranks pause automatic changes after the same step. What all ranks
decide to do together they do when the next reports show that no rank has failed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec import structs

from commlayer.autotune import plan_policy
from commlayer.autotune.plan_policy import (
    Candidate,
    Lead,
    LinkState,
    LogLine,
    Notice,
    Proposal,
    SearchRequest,
    Suggestion,
    TuningRequest,
    rates_of,
)
from commlayer.autotune.quality import CodecChange, GradientError
from commlayer.autotune.report import Alone, Report, Reports
from commlayer.autotune.shares.policy import WorkerTime
from commlayer.engine.components import Component, Order
from commlayer.errors import CommError
from commlayer.observe.events import AloneEvent, QualityEvent
from commlayer.observe.link_monitor import LinkWatch, Rates, SeenStep, differ, slower, spelled
from commlayer.observe.prediction_check import StalePlan
from commlayer.planner.model import Link
from commlayer.planner.plan_rules import summary_of
from commlayer.records import Plan, digest

if TYPE_CHECKING:
    import torch

    from commlayer.autotune.guard import QualityGuard
    from commlayer.autotune.job_actions import JobActions, Measured
    from commlayer.engine.job.job import DistributedJob

T = TypeVar("T")

WARM_STEPS = 2
"""Number of warm-up steps. They determine thresholds, buckets and the forward order, and their times do not represent later
steps."""
MEASURED_STEPS = 5
SOON_S, LINKS_HOLD = 0.75, 1 / 3
"""Links count as limiting if a step takes at least SOON_S, and all ranks wait for communication for at least the fraction
LINKS_HOLD of it. Then a plan for shorter steps is worth more than exact measurements: the first steps are measured at the end
of the warm-up, and all ranks wait for the plan. No plan shortens computing, which takes longest in the first steps."""
WAITED_STEPS = 2
"""All ranks wait for a plan for at most the time of this many steps."""
UNEVEN, UNEVEN_S = 1.5, 0.005
"""A rank counts as slow if it computes this many times as long as the fastest rank, and this many seconds longer. Contention
for processors and a few system calls explain less."""
SEARCH_S = 60.0
"""Seconds after which a search is aborted for which training waits. Planning takes seconds."""


class Phase(Enum):
    WARMING = "warming"
    """The first steps, or the rest of the step in which rank 0 requested measuring."""
    MEASURING = "measuring"
    """Steps are recorded, as measurements for a plan."""
    WATCHING = "watching"
    """Ranks exchange reports about their steps, and act on reports that all ranks have received."""


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

    order = Order.CONTROLLER

    def __init__(
        self, context: DistributedJob, actions: JobActions, reports: Reports, guard: QualityGuard | None = None, *,
        plans: bool = True, per_node: int = 1,
    ) -> None:
        """`plans`: True: the controller chooses plans. `per_node`: ranks per node; the first rank of a node reports the traffic
        of the node's link."""
        self._context, self._do, self._reports, self.guard = context, actions, reports, guard
        self._plans, self._per_node = plans, per_node
        self._leads = plans and context.rank == 0
        """True: this rank decides on plans."""
        self._lead = Lead()
        self.links: LinkState | None = None
        """The links; None before they are measured."""
        self.phase, self._until = Phase.WARMING, WARM_STEPS
        self._steps = 0
        """Number of steps on averaged gradients and of exchanges of local steps."""
        self._planned_steps = 0
        """Number of these steps and exchanges that ran under automatic plans, after their warm-up."""
        self._plan = context.plan
        self.shares: ShareMover | None = None
        """Load balancing's part in the reports; None if the script does not balance the load."""
        self._thread: threading.Thread | None = None
        self._recorded_s: list[float] = []
        """Step times since recording began."""
        self._agreed: Callable[[], bool] | None = None
        """What all ranks have decided to do together. It returns whether the plan has changed."""
        self._failure: Exception | None = None
        """The error that ended this rank's decisions."""
        self._raised = False
        self.paused = False
        """True: decisions have failed on some rank, so no rank changes anything or sends reports."""
        self._results: deque[tuple[SearchRequest, Candidate | None, str]] = deque()
        """Results of searches from the planner thread: request, plan found and error. They are processed at the end of the
        next step."""
        self._last = StepEnd()
        self._busy = False
        context.on_close.append(self._close)

    def start(self) -> None:
        """Starts recording steps. Called before the first step, because the second step is sufficient if steps are slow."""
        if self._plans:
            self._record()
            if self._leads:
                self._do.prepare_search()

    def _record(self) -> None:
        self._do.record(on=True)
        self._recorded_s = []

    def report(self, loss: float | torch.Tensor) -> None:
        """See Session.log_loss."""
        if self.guard is not None:
            self.guard.report(loss)

    def reads_sums(self) -> bool:
        return self.guard is not None and not self.paused and self.guard.has_work()

    def before_commit(self) -> None:
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
        self._after(1, self._context.passed_s)

    def end_exchange(self, *, early: bool) -> None:
        """Handles the end of an exchange of local steps, or of one of their fragments: counts the local steps since the
        previous exchange. An early exchange ends no outer step, so it only restarts the clock."""
        plan, local = self._context.plan, self._context.local
        if early:
            if local is not None and not local.taken:
                self._begin(time.perf_counter())
        elif not self._busy and plan.steps_locally:
            self._after(plan.local_steps // plan.fragments, time.perf_counter())

    def _after(self, steps: int, ended: float) -> None:
        """Handles `steps` steps, the last of which ended at `ended`."""
        worker, observed_s = self._context.worker, self._context.observed_s - self._last.observed_s
        step_s = max(0.0, ended - self._last.at - observed_s) / steps if self._last.at else 0.0
        waited_s = (worker.counters.exposed_s - self._last.exposed_s) / steps
        self._busy = True  # a switch first flushes the exchanges in progress
        try:
            if not self.paused:
                self.step_over(step_s, waited_s)
        finally:
            self._busy = False
            self._begin(ended)

    def _begin(self, ended: float) -> None:
        """Marks the end of the last step as the beginning of the next one."""
        context = self._context
        self._last = StepEnd(ended, context.observed_s, context.worker.counters.exposed_s)

    def step_over(self, step_s: float, waited_s: float) -> None:
        """Handles one step of `step_s` seconds (0: unknown), of which the rank waited `waited_s` for communication."""
        try:
            self._step_over(step_s, waited_s)
        except CommError:
            raise
        except Exception:  # raised on all ranks, for what they do together fails on all of them or on none
            self._pause()
            raise
        self._raise_failure()

    def _step_over(self, step_s: float, waited_s: float) -> None:
        self._steps += 1
        rows = self._reports.read()
        self._reports.step(step_s, waited_s)
        if self._pauses(rows):
            return
        before = self._plan
        if self._context.plan is not before:  # the script has set a plan
            self._entered()
        changed = bool(rows) and self._do_agreed()
        if self._planning:
            self._count(step_s, waited_s)
        changed = (bool(rows) and not changed and self._do_requested(rows)) or changed
        if self.guard is not None and self._plan is before:
            self.guard.schedule(self._steps)
        due = self._due(rows, entered=self._plan is not before)
        if self._planning and self._plan is before:
            self._attempt(partial(self._decide_plan, step_s), None)
        if rows:
            self._attempt(partial(self._decide, rows, changed=changed or self._plan is not before), None)
        if due:
            self._send()
        if self.guard is not None:
            self._attempt(self.guard.prepare, None)

    @property
    def _planning(self) -> bool:
        """True: plans are automatic now; the same on all ranks. False during a codec's warm-up, whose step times do not
        represent the plan."""
        context = self._context
        if not self._plans or not context.terms.auto:
            return False
        return context.worker.step >= context.worker.plan.warmup

    @property
    def _watched(self) -> LinkState | None:
        """The links, while ranks watch them; None before they are measured, and while they are measured again."""
        return self.links if self._planning and self.phase is Phase.WATCHING else None

    def _attempt(self, act: Callable[[], T], otherwise: T) -> T:
        """Runs `act`, which decides by itself or acts on this rank only. After an error this rank decides nothing more."""
        if self._failure is None:
            try:
                return act()
            except CommError:
                raise
            except Exception as error:
                self._failure = error
        return otherwise

    def _raise_failure(self) -> None:
        """Raises this rank's error, once, when the rank has done what all ranks do together."""
        if self._failure is not None and not self._raised:
            self._raised = True
            raise self._failure

    def _pauses(self, rows: Sequence[Report]) -> bool:
        """Pauses automatic changes on all ranks, if decisions have failed on one of them. Returns whether they have."""
        if failed := [self._context.called(rank) for rank, row in enumerate(rows) if row.failed]:
            self._pause()
            self._say(f"automatic changes pause after an error on {', '.join(failed)}: the current plan stays", logging.WARNING)
        return bool(failed)

    def _pause(self) -> None:
        self.paused = True
        self.end()

    def _do_agreed(self) -> bool:
        agreed, self._agreed = self._agreed, None
        return agreed is not None and agreed()

    def _count(self, step_s: float, waited_s: float) -> None:
        """Counts a step, and measures after enough steps."""
        self._planned_steps += 1
        if step_s:
            self._recorded_s.append(step_s)
        if self.phase is Phase.WATCHING or self._planned_steps < self._until:
            return
        if self.phase is Phase.MEASURING or (
            self.links is None and _links_hold(*self._do.share_times(step_s, waited_s))  # the first steps were recorded
        ):
            self._measure()
        else:
            self.phase, self._until = Phase.MEASURING, self._planned_steps + MEASURED_STEPS + 1
            self._record()

    def _do_requested(self, rows: Sequence[Report]) -> bool:
        """Does what rank 0 requests. Returns whether what the reports say no longer applies."""
        if (links := self._watched) is None:
            return False
        match rows[0].request:
            case TuningRequest.SWITCH:
                self._switch()
            case TuningRequest.MEASURE:
                self.phase, self._until = Phase.WARMING, self._planned_steps + 1
            case TuningRequest.PROBE:
                self._probe(links, median(row.step_s for row in rows))
            case _:
                return False
        return True

    def _due(self, rows: Sequence[Report], *, entered: bool) -> bool:
        """Returns whether all ranks send reports after this step: every few steps while links are watched or load is balanced,
        after a comparison with exact gradients and after its reports, and after a change of plans."""
        compared = (self.guard is not None and self.guard.has_error) or any(row.compared for row in rows)
        wanted = self._watched is not None or self.shares is not None
        return entered or compared or (wanted and self._reports.due)

    def _send(self) -> None:
        """Sends this rank's report. Acts on the reports of all ranks at once if all ranks have waited for them."""
        report, decisive_s = self._attempt(self._own, (Report(), math.inf))
        rows = self._reports.send(report._replace(failed=float(self._failure is not None)), decisive_s)
        if not rows:
            return
        changed = self._do_requested(rows)
        self._attempt(partial(self._decide, rows, changed=changed), None)
        if self._reports.confirm(failed=self._failure is not None):
            self._do_agreed()

    def _own(self) -> tuple[Report, float]:
        """Returns what this rank reports, and the step time from which on a step is decisive."""
        request, decisive_s, links = TuningRequest.NOTHING, math.inf, self._watched
        if links is not None:
            decisive_s = links.watch.decisive_s
            if self._leads:
                self._lead, request = plan_policy.next_request(self._lead, links, time.monotonic())
        error = None if self.guard is None else self.guard.take_error()
        return Report(
            request=request, carried=self._reports.traffic(), compared=float(error is not None), error=error or GradientError(),
            alone=Alone(*plan_policy.over_alone(self._lead, self._active)),
            time=WorkerTime() if self.shares is None else self.shares.row()), decisive_s

    def _decide_plan(self, step_s: float) -> None:
        """Decides on plans, on rank 0."""
        self._take_results()
        if self._leads and step_s:
            self._set(*plan_policy.step_over(self._lead, step_s, self._context.exchanges, self._active))
        if self._leads and self.links is not None and self.phase is Phase.WATCHING:
            self._set(plan_policy.on_faster_links(self._lead, self.links, self._active))

    def _decide(self, rows: Sequence[Report], *, changed: bool) -> None:
        """Decides from reports that all ranks have received, so all ranks decide alike. `changed`: True: the plan or the links
        that the reports are about have changed."""
        step_s = median(row.step_s for row in rows)
        if self.shares is not None:
            self.shares.receive([row.time for row in rows], max(row.step_s for row in rows))
        if rows[0].alone.over_alone:
            self._compare_alone(rows[0].alone)
        if changed:
            return
        if rows[0].compared and self.guard is not None:
            change = self.guard.decide([row.error for row in rows], step_s)
            if change is not None:
                self._agreed = partial(self._change_codecs, self.guard, change)
                return  # what the reports say about links was about the plan that ends
        if (links := self._watched) is not None and all(row.step_s for row in rows):
            self._watch(links, rows, step_s)

    def _compare_alone(self, alone: Alone) -> None:
        """Says once on each node that one machine alone would be faster."""
        context = self._context
        if context.rank == 0:
            context.stream.over_alone(AloneEvent(**alone._asdict()))
        if max(alone.over_alone, alone.forecast) < 1 and not context.terms.said_slower:
            context.terms.said_slower = True
            self._say(plan_policy.slower_line(*alone), logging.WARNING)

    def _watch(self, state: LinkState, rows: Sequence[Report], step_s: float) -> None:
        """Starts a new search if steps show that links have changed. Faster links make no step slower, so rank 0 orders that
        search later."""
        traffic, waited_s = tuple(row.carried for row in rows[:: self._per_node]), min(row.waited_s for row in rows)
        groups = self._context.groups
        if groups.local == 0:
            own = traffic[groups.node]
            self._context.stream.rates(Rates(own.up.bps, own.down.bps), state.watch.planned[groups.node])
        watch, rates = state.watch.observe(SeenStep(step_s, waited_s, traffic))
        self.links = state = structs.replace(state, watch=watch)
        if rates is None:
            return
        links = state.with_rates(rates)
        if not slower(rates, watch.planned):
            self._say(f"links are faster than planned: {self._spelled(rates)} in steps, planned {self._spelled(watch.planned)}",
                      logging.DEBUG)  # while a link is found to be faster and faster, many such lines follow each other
            # The links may be even faster, so the probe schedule counts from the time when they were last found no faster.
            self._set_links(structs.replace(state.measured(links, 0.0), reprobe=state.reprobe))
            return
        self._say(f"links have changed from {self._spelled(watch.planned)} to {self._spelled(rates)}: steps take "
                  f"{1e3 * step_s:.1f} ms instead of {1e3 * watch.usual_s:.1f} ms")
        self._plan_for(state, links, step_s, waited_s)

    def _probe(self, state: LinkState, step_s: float) -> None:
        """Probes the links, and searches for a plan if they have become faster. Under a plan for slow links, steps send too
        little to show that."""
        begin = time.monotonic()
        links = self._do.probe(state.watch.planned)
        self._attempt(partial(self._probed, state, links, step_s, time.monotonic() - begin), None)

    def _probed(self, state: LinkState, links: Sequence[Link], step_s: float, took_s: float) -> None:
        planned = state.watch.planned
        # A short probe may measure too low a rate. Steps show whether a link has become slower.
        rates = [Rates(*map(max, zip(new, old, strict=True))) for new, old in zip(rates_of(links), planned, strict=True)]
        faster = differ(rates, planned)
        self.links = state = structs.replace(state, reprobe=state.reprobe.probed(time.monotonic(), took_s, found=faster))
        before = self._spelled(planned)
        self._say(f"probed the links in {1e3 * took_s:.0f} ms: "
                  + (f"{self._spelled(rates)} instead of {before}" if faster else f"no faster than {before}"))
        if faster:
            self._plan_for(state, state.with_rates(rates), step_s, state.watch.waited_s)
        else:
            self._reset()  # the probe's traffic belongs to no step

    def _plan_for(self, state: LinkState, links: tuple[Link, ...], step_s: float, waited_s: float) -> None:
        """Searches for a plan for links whose rates have changed. Codec and computing costs are not measured again."""
        pace_s = plan_policy.pace_since(self._lead, state.watch.slow_s)
        self._set_links(state.measured(links, time.monotonic()))
        self._search(step_s, pace_s)
        if _links_hold(step_s, waited_s):
            self._agreed = partial(self._await, WAITED_STEPS * step_s)

    def _spelled(self, rates: Sequence[Rates]) -> str:
        return spelled(rates, self._do.node_names())

    def _set_links(self, links: LinkState) -> None:
        self.links = links
        self._do.pace(links.links)
        self._reset()

    def _reset(self) -> None:
        """Drops the observations of past steps, which do not apply to the next ones."""
        self._reports.reset()

    def _measure(self) -> None:
        """Measures steps and links, which is collective; then rank 0 starts a search."""
        soon, self.phase = self.phase is Phase.WARMING, Phase.WATCHING
        measured = self._do.measure(self._recorded_s)
        self._attempt(partial(self._measured, measured), None)
        if soon:  # a slow step during the search would cost more than waiting for the search
            self._await(WAITED_STEPS * measured.step_s)

    def _measured(self, measured: Measured) -> None:
        now = time.monotonic()
        links = LinkState.of(measured.links, now) if self.links is None else self.links.measured(measured.links, now)
        self._set_links(links)
        self._say(f"links carry {self._spelled(rates_of(measured.links))}")
        if line := _uneven(measured):
            self._say(line)
        recent = self._lead.recent
        self._search(measured.step_s, median(recent) if recent else 0.0, checks=True)

    def _search(self, step_s: float, pace_s: float, *, checks: bool = False) -> None:
        if self._leads and self.links is not None:
            links = self.links.links
            self._set(plan_policy.begin_search(self._lead, self._active, links, step_s, pace_s, checks=checks))

    def _set(self, lead: Lead, lines: Sequence[Notice] = ()) -> None:
        """Sets rank 0's state, and carries out what has changed in that state."""
        before, self._lead = self._lead, lead
        terms, context = self._context.terms, self._context
        if lead.basis is not before.basis or lead.price is not before.price:
            terms.basis, terms.price = lead.basis, lead.price
        for line in lines:
            match line:
                case LogLine():
                    self._say(line.text, logging.WARNING if line.warning else logging.INFO)
                case Suggestion():
                    terms.suggested = True
                    self._say(line.text, logging.WARNING)
                case StalePlan():
                    context.events.append(line)
                    self._say(line.reason)
        if lead.order is not None and lead.order is not before.order:
            self._start_search(lead.order)

    def _start_search(self, order: SearchRequest) -> None:
        """Starts a search on a thread, while training continues."""
        if self._thread is not None:
            self._thread.join(SEARCH_S)
            if self._thread.is_alive():  # the search hangs: it is aborted before the other ranks time out
                self._do.stop_search()
                self._thread.join()
        try:
            limits = self._do.limits()
        except Exception as error:
            self._results.append((order, None, f"{type(error).__name__}: {error}"))
            return

        def search() -> None:
            try:
                self._results.append((order, self._do.search(order, limits), ""))
            except Exception as error:
                self._results.append((order, None, f"{type(error).__name__}: {error}"))

        self._thread = threading.Thread(target=search, name="commlayer-planner", daemon=True)
        self._thread.start()

    def _take_results(self) -> None:
        while self._results:
            order, candidate, why = self._results.popleft()
            self._set(*plan_policy.end_search(self._lead, order, candidate, why, self._active))

    def _await(self, most_s: float) -> bool:
        """Waits until rank 0's search has ended; collective. A search that takes longer than `most_s` continues while training
        goes on. Returns whether the plan has changed."""
        if self._do.agree(partial(self._searched, most_s)):
            self._switch()
            return True
        return False

    def _searched(self, most_s: float) -> bool:
        """Waits for this rank's search, if it runs one. Returns whether it has found a plan. Raises the error that ended this
        rank's decisions."""
        if self._failure is not None:
            raise self._failure
        if self._thread is not None:
            self._thread.join(min(most_s, SEARCH_S))
            self._take_results()
        return self._lead.proposal is not None

    def _switch(self) -> None:
        """Switches to the plan that rank 0 proposes; collective."""
        proposal, left = self._lead.proposal, self._active
        try:
            self._do.switch(None if proposal is None else proposal.candidate.runnable, by_itself=True)
        except ValueError as error:  # raised on all ranks, and nothing has changed
            self._lead = plan_policy.refused(self._lead)
            self._say(f"kept the current plan: {error}")
            return
        if proposal is not None:
            self._attempt(partial(self._switched, proposal, left), None)
        back = proposal is not None and proposal.back
        self._context.note_plan("rollback" if back else "automatic")
        self._say(f"switched {'back ' if back else ''}to plan {digest(self._active)}: {summary_of(self._active)}")
        self._entered(own=True)

    def _switched(self, proposal: Proposal, left: Plan) -> None:
        self._set(*plan_policy.switched(self._lead, proposal, self._active, left))

    def _change_codecs(self, guard: QualityGuard, change: CodecChange) -> bool:
        """Switches to finer or coarser codecs; collective. Returns whether the plan has changed."""
        if (plan := guard.lifted(change)) is None:
            return False
        try:
            self._do.switch(plan, by_itself=False)
        except ValueError as error:  # raised on all ranks, and nothing has changed
            self._say(f"{change.reason}, but the current plan stays: {error}", logging.WARNING)
            return False
        self._context.note_plan("quality")
        if self._context.rank == 0:
            self._context.stream.log.append(QualityEvent(before=change.before, after=change.after, reason=change.reason))
        self._say(f"{change.reason}: codecs are {'finer' if change.finer else 'coarser'} from now on, {change.before:.3g} -> "
                  f"{change.after:.3g} of the gradient", logging.WARNING if change.finer else logging.INFO)
        self._entered(by_guard=True)
        return True

    def _entered(self, *, own: bool = False, by_guard: bool = False) -> None:
        """Resets the statistics that depend on the plan. `own`: whether rank 0 proposed the new plan. `by_guard`: whether the
        quality guard made its codecs finer or coarser."""
        self._plan, self._agreed = self._context.plan, None
        if self.phase is not Phase.WATCHING and self._plans:  # the recorded steps ran under another plan
            self.phase, self._until = Phase.WARMING, self._planned_steps + WARM_STEPS
            self._record()
        self._attempt(partial(self._adapt, own=own, by_guard=by_guard), None)

    def _adapt(self, *, own: bool, by_guard: bool) -> None:
        if self.links is not None:
            self.links = structs.replace(self.links, watch=LinkWatch(rates_of(self.links.links)))
        self._reset()
        if not own:
            self._set(plan_policy.replaced(self._lead))
        if self.guard is not None:
            change = self.guard.entered(self._steps, by_guard=by_guard)
            if change is not None:
                self._agreed = partial(self._change_codecs, self.guard, change)

    def end(self) -> None:
        """Stops planning and recording: members may change during a step that is being recorded."""
        if self._plans:
            self._do.record(on=False)
            self._do.close()

    def _close(self) -> None:
        """Stops planning, and waits for the planner thread: a thread in native code at interpreter exit would crash the
        process."""
        self.end()
        if self._thread is not None:
            self._thread.join(SEARCH_S)

    def settle(self, deadline_s: float) -> None:
        """Waits up to `deadline_s` seconds for a search to end."""
        if self._thread is not None:
            self._thread.join(deadline_s)
        self._take_results()

    @property
    def _active(self) -> Plan:
        return self._context.plan

    def _say(self, text: str, level: int = logging.INFO) -> None:
        self._context.say(text, level)

    def shares_moved(self, part: float) -> None:
        """Records that work moves between ranks with the next step. `part`: by which fraction of a step's computing."""
        if part >= plan_policy.SHARES_WORTH:
            self._lead = structs.replace(self._lead, moved=True)


def _links_hold(step_s: float, waited_s: float) -> bool:
    """Returns whether communication makes steps slow, so that a plan can shorten them."""
    return step_s >= SOON_S and waited_s >= LINKS_HOLD * step_s


def _uneven(measured: Measured) -> str:
    """Returns a log line about a rank that computes much longer than the others, which no plan can change; "" if there is
    none."""
    computing_s = measured.computing_s
    if not computing_s or max(computing_s) < max(UNEVEN * min(computing_s), min(computing_s) + UNEVEN_S):
        return ""
    slowest = max(range(len(computing_s)), key=computing_s.__getitem__)
    times = max(computing_s) / min(computing_s)
    remedy = ": a Sampler with a LoadBalancer would give it a smaller share of the batch" if measured.shares else ""
    return f"{measured.names[slowest]} computes {times:.1f} times as long as the fastest, and all wait for it{remedy}"
