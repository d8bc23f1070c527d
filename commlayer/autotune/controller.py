"""The controller of a running job: measures steps, probes links, searches for plans, tries them, and rolls slower ones back.

Every rank runs a controller. All ranks exchange reports (report.py) and act on the same reports after the same step, so
collective actions happen in the same order on all ranks. Rank 0 decides on plans (autotune/plan_policy.py) and sends its
requests in its report; all ranks decide on codec quality (autotune/quality.py) and links.

    warming ---> measuring ---> watching
       ^                            |
       '---- rank 0 requests it ----'      because steps differ from the prediction, or work has moved between ranks
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from commlayer.autotune import plan_policy
from commlayer.autotune.plan_policy import (
    Candidate,
    Lead,
    LinkState,
    LogLine,
    Notice,
    ReplanVerdict,
    SearchRequest,
    Suggestion,
    TuningRequest,
    rates_of,
)
from commlayer.autotune.quality import CodecChange
from commlayer.autotune.report import Report, Reports
from commlayer.autotune.shares.policy import WorkerTime
from commlayer.errors import CommError
from commlayer.observe.events import QualityEvent
from commlayer.observe.link_monitor import LinkWatch, Rates, SeenStep, differ, slower, spelled
from commlayer.observe.prediction_check import StalePlan
from commlayer.planner.model import Link
from commlayer.planner.plan_rules import summary_of
from commlayer.records import Plan, digest

if TYPE_CHECKING:
    import torch

    from commlayer.autotune.guard import QualityGuard
    from commlayer.autotune.job_actions import JobActions, Measured
    from commlayer.engine.connection import DistributedJob

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
    """Functions by which load balancing takes part in the ranks' reports: see shares/driver.py."""

    row: Callable[[], WorkerTime]
    """Returns this rank's measured times for its next report."""
    receive: Callable[[list[WorkerTime], float], None]
    """Receives the measured times of all ranks, and the longest step time of any rank."""


class TuningController:
    """Measures and tunes one job. Every rank calls `compare` before a step's commit, `after_step` after a step on averaged
    gradients, and `after_exchange` after an exchange of local steps."""

    def __init__(
        self, connection: DistributedJob, actions: JobActions, reports: Reports | None, guard: QualityGuard | None = None, *,
        plans: bool = True, per_node: int = 1, keep: bool = False,
    ) -> None:
        """`plans`: True: the controller chooses plans. `keep`: True: it searches for plans but never switches; `reports` is
        None then. `per_node`: ranks per node; the first rank of a node reports the traffic of the node's link."""
        self._connection, self._do, self._reports, self.guard = connection, actions, reports, guard
        self._plans, self._per_node, self._keep = plans, per_node, keep
        self._lead = Lead() if plans and connection.rank == 0 else None
        self._links: LinkState | None = None
        self._phase, self._until = Phase.WARMING, WARM_STEPS
        self._steps = 0
        """Number of steps on averaged gradients and of exchanges of local steps."""
        self._planned_steps = 0
        """Number of these steps and exchanges that ran under automatic plans, after their warm-up."""
        self._plan = connection.plan
        self.shares: ShareMover | None = None
        """Load balancing's part in the reports; None if the script does not balance the load."""
        self._thread: threading.Thread | None = None
        self._results: deque[tuple[SearchRequest, Candidate | None, str]] = deque()
        """Results of searches from the planner thread: request, plan found and error. They are processed at the end of the
        next step."""
        self._last = StepEnd()
        self._busy = False
        connection.on_close.append(self._close)

    @property
    def verdicts(self) -> list[ReplanVerdict]:
        """The outcome of each search. Filled on rank 0 only."""
        return [] if self._lead is None else list(self._lead.verdicts)

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def lead(self) -> Lead | None:
        return self._lead

    @property
    def links(self) -> LinkState | None:
        return self._links

    def start(self) -> None:
        """Starts recording steps. Called before the first step, because the second step is sufficient if steps are slow."""
        if self._plans:
            self._do.record(on=True)
            if self._lead is not None:
                self._do.prepare_search()

    def report(self, loss: float | torch.Tensor) -> None:
        """See Session.report."""
        if self.guard is not None:
            self.guard.report(loss)

    # ---- called after steps

    def has_work(self) -> bool:
        """Returns whether `compare` reads the sums of the present step."""
        return self.guard is not None and self.guard.has_work()

    def compare(self) -> None:
        """Compares compressed with exact gradients in this step, if the quality guard wants to. If a rank is lost meanwhile,
        the worker stores the CommError."""
        if self.guard is not None:
            try:
                self.guard.compare(self._steps)
            except CommError as error:
                self._connection.broke(error)

    def after_step(self) -> None:
        """Handles the end of a step on averaged gradients. The step ends with its backward pass, also if this call comes in
        the next step, as under sync="forward"."""
        self._after(1, self._connection.passed_s)

    def after_exchange(self) -> None:
        """Handles the end of an exchange of local steps, or of one of their fragments: counts the local steps since the
        previous exchange."""
        plan = self._connection.plan
        if not self._busy and plan.steps_locally:
            self._after(plan.local_steps // plan.fragments, time.perf_counter())

    def after_drain(self) -> None:
        """Restarts the clock after an early exchange of local steps, which ends no outer step."""
        local = self._connection.local
        if local is not None and not local.taken:
            self._begin(time.perf_counter())

    def _after(self, steps: int, ended: float) -> None:
        """Handles `steps` steps, the last of which ended at `ended`. If a rank is lost meanwhile, the worker stores the
        CommError."""
        worker, observed_s = self._connection.worker, self._connection.observed_s - self._last.observed_s
        step_s = max(0.0, ended - self._last.at - observed_s) / steps if self._last.at else 0.0
        waited_s = (worker.counters.exposed_s - self._last.exposed_s) / steps
        self._busy = True  # a switch first flushes the exchanges in progress
        try:
            self.step_over(step_s, waited_s)
        except CommError as error:
            self._connection.broke(error)
        finally:
            self._busy = False
        self._begin(ended)

    def _begin(self, ended: float) -> None:
        """Marks the end of the last step as the beginning of the next one."""
        connection = self._connection
        self._last = StepEnd(ended, connection.observed_s, connection.worker.counters.exposed_s)

    def step_over(self, step_s: float, waited_s: float) -> None:
        """Handles one step of `step_s` seconds (0: unknown), of which the rank waited `waited_s` for communication."""
        self._steps += 1
        rows: list[Report] = []
        if self._reports is not None:
            rows = self._reports.read()
            self._reports.step(step_s, waited_s)
        if self._connection.plan is not self._plan:  # the script has set a plan
            self._entered()
        if planning := self._planning:
            self._plan_step(step_s, waited_s)
        if rows:
            self._act_on(rows)
        self._send(watching=planning and self._phase is Phase.WATCHING)
        if self.guard is not None:
            self.guard.prepare(self._steps)

    @property
    def _planning(self) -> bool:
        """True: plans are automatic now; the same on all ranks. False during a codec's warm-up, whose step times do not
        represent the plan."""
        connection = self._connection
        if not self._plans or not (connection.terms.auto or self._keep):
            return False
        return connection.worker.step >= connection.worker.plan.warmup

    def _plan_step(self, step_s: float, waited_s: float) -> None:
        self._planned_steps += 1
        self._take_results()
        if self._lead is not None and step_s:
            self._set(*plan_policy.step_over(self._lead, step_s, self._connection.exchanges, self._active))
        if self._phase is Phase.WATCHING:
            if self._lead is not None and self._links is not None and not self._keep:
                self._set(plan_policy.on_faster_links(self._lead, self._links, self._active))
        elif self._planned_steps >= self._until and self._phase is Phase.MEASURING:
            self._measure()
        elif self._planned_steps >= self._until:
            # The job's first steps were recorded.
            if self._links is None and _links_hold(*self._do.share_times(step_s, waited_s)):
                self._measure()
            else:
                self._phase, self._until = Phase.MEASURING, self._planned_steps + MEASURED_STEPS + 1
                self.start()

    # ---- rows of all ranks

    def _send(self, *, watching: bool) -> None:
        """Sends this rank's report if it is due: after a comparison with exact gradients, and every few steps while links are
        watched or load is balanced."""
        error = None if self.guard is None else self.guard.take_error()
        links = self._links if watching and self._phase is Phase.WATCHING else None
        wanted = links is not None or self.shares is not None
        if self._reports is None or not (error is not None or (wanted and self._reports.due)):
            return
        request, decisive_s = TuningRequest.NOTHING, math.inf
        if links is not None:
            decisive_s = links.watch.decisive_s
            if self._lead is not None:
                self._lead, request = plan_policy.next_request(self._lead, links, time.monotonic())
        own_time = WorkerTime() if self.shares is None else self.shares.row()
        if rows := self._reports.send(request, decisive_s, error, own_time):
            self._act_on(rows)

    def _act_on(self, rows: Sequence[Report]) -> None:
        """Acts on reports that all ranks have received, so all ranks act alike."""
        step_s = median(row.step_s for row in rows)
        if self.shares is not None:
            self.shares.receive([row.time for row in rows], max(row.step_s for row in rows))
        if rows[0].compared and self.guard is not None:
            change = self.guard.decide([row.error for row in rows], step_s)
            if change is not None and self._change_codecs(self.guard, change):
                return  # rank 0's request, and what the reports say about links, were about the previous plan
        if self._links is None or self._phase is not Phase.WATCHING or not self._planning:
            return
        match rows[0].request:
            case TuningRequest.SWITCH:
                self._switch()
            case TuningRequest.MEASURE:
                self._phase, self._until = Phase.WARMING, self._planned_steps + 1
            case TuningRequest.PROBE:
                self._probe(self._links, step_s)
            case _:
                self._watch(self._links, rows, step_s)

    # ---- links

    def _watch(self, state: LinkState, rows: Sequence[Report], step_s: float) -> None:
        """Starts a new search if steps show that links have changed. Faster links make no step slower, so rank 0 orders that
        search later."""
        traffic, waited_s = tuple(row.carried for row in rows[:: self._per_node]), min(row.waited_s for row in rows)
        groups = self._connection.groups
        if groups.local == 0:
            own = traffic[groups.node]
            self._connection.stream.rates(Rates(own.up.bps, own.down.bps), state.watch.planned[groups.node])
        watch, rates = state.watch.observe(SeenStep(step_s, waited_s, traffic))
        self._links = state = structs.replace(state, watch=watch)
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
        begin, planned = time.monotonic(), state.watch.planned
        links = self._do.probe(planned)
        took_s = time.monotonic() - begin
        # A short probe may measure too low a rate. Steps show whether a link has become slower.
        rates = [Rates(*map(max, zip(new, old, strict=True))) for new, old in zip(rates_of(links), planned, strict=True)]
        faster = differ(rates, planned)
        self._links = state = structs.replace(state, reprobe=state.reprobe.probed(time.monotonic(), took_s, found=faster))
        before = self._spelled(planned)
        self._say(f"probed the links in {1e3 * took_s:.0f} ms: "
                  + (f"{self._spelled(rates)} instead of {before}" if faster else f"no faster than {before}"))
        if faster:
            self._plan_for(state, state.with_rates(rates), step_s, state.watch.waited_s)
        else:
            self._reset()  # the probe's traffic belongs to no step

    def _plan_for(self, state: LinkState, links: tuple[Link, ...], step_s: float, waited_s: float) -> None:
        """Searches for a plan for links whose rates have changed. Codec and computing costs are not measured again."""
        pace_s = 0.0 if self._lead is None else plan_policy.pace_since(self._lead, state.watch.slow_s)
        self._set_links(state.measured(links, time.monotonic()))
        self._search(step_s, pace_s)
        if _links_hold(step_s, waited_s):
            self._await(WAITED_STEPS * step_s)

    def _spelled(self, rates: Sequence[Rates]) -> str:
        return spelled(rates, self._do.node_names())

    def _set_links(self, links: LinkState) -> None:
        self._links = links
        self._do.pace(links.links)
        self._reset()

    def _reset(self) -> None:
        """Drops the observations of past steps, which do not apply to the next ones."""
        if self._reports is not None:
            self._reports.reset()

    # ---- measuring and searching

    def _measure(self) -> None:
        """Measures steps and links, which is collective; then rank 0 starts a search."""
        soon, self._phase = self._phase is Phase.WARMING, Phase.WATCHING
        measured, now = self._do.measure(), time.monotonic()
        links = LinkState.of(measured.links, now) if self._links is None else self._links.measured(measured.links, now)
        self._set_links(links)
        self._say(f"links carry {self._spelled(rates_of(measured.links))}")
        if line := _uneven(measured):
            self._say(line)
        recent = () if self._lead is None else self._lead.recent
        self._search(measured.step_s, median(recent) if recent else 0.0, checks=True)
        if soon and not self._keep:  # a slow step during the search would cost more than waiting for the search
            self._await(WAITED_STEPS * measured.step_s)

    def _search(self, step_s: float, pace_s: float, *, checks: bool = False) -> None:
        if self._lead is not None and self._links is not None:
            links = self._links.links
            self._set(plan_policy.begin_search(self._lead, self._active, links, step_s, pace_s, checks=checks))

    def _set(self, lead: Lead, lines: Sequence[Notice] = ()) -> None:
        """Sets rank 0's state, and carries out what has changed in that state."""
        before, self._lead = self._lead or Lead(), lead
        terms, connection = self._connection.terms, self._connection
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
                    connection.events.append(line)
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
        while self._results and self._lead is not None:
            order, candidate, why = self._results.popleft()
            self._set(*plan_policy.end_search(self._lead, order, candidate, why, self._active, keep=self._keep))

    def _await(self, most_s: float) -> None:
        """Waits until rank 0's search has ended; collective. A search that takes longer than `most_s` continues while training
        goes on."""
        if self._thread is not None:
            self._thread.join(min(most_s, SEARCH_S))
            self._take_results()
        if self._do.any_on_rank_0(self._lead is not None and self._lead.proposal is not None):
            self._switch()

    # ---- switching

    def _switch(self) -> None:
        """Switches to the plan that rank 0 proposes; collective."""
        proposal, left = None if self._lead is None else self._lead.proposal, self._active
        try:
            self._do.switch(None if proposal is None else proposal.candidate.runnable, by_itself=True)
        except ValueError as error:  # raised on all ranks, and nothing has changed
            if self._lead is not None:
                self._lead = plan_policy.refused(self._lead)
            self._say(f"kept the current plan: {error}")
            return
        if self._lead is not None and proposal is not None:
            self._set(*plan_policy.switched(self._lead, proposal, self._active, left))
        back = proposal is not None and proposal.back
        self._connection.note_plan("rollback" if back else "automatic")
        self._say(f"switched {'back ' if back else ''}to plan {digest(self._active)}: {summary_of(self._active)}")
        self._entered(own=True)

    def _change_codecs(self, guard: QualityGuard, change: CodecChange) -> bool:
        """Switches to finer or coarser codecs; collective. Returns whether the plan has changed."""
        if (plan := guard.lifted(change)) is None:
            return False
        try:
            self._do.switch(plan, by_itself=False)
        except ValueError as error:  # raised on all ranks, and nothing has changed
            self._say(f"{change.reason}, but the current plan stays: {error}", logging.WARNING)
            return False
        self._connection.note_plan("quality")
        if self._connection.rank == 0:
            self._connection.stream.log.append(QualityEvent(before=change.before, after=change.after, reason=change.reason))
        self._say(f"{change.reason}: codecs are {'finer' if change.finer else 'coarser'} from now on, {change.before:.3g} -> "
                  f"{change.after:.3g} of the gradient", logging.WARNING if change.finer else logging.INFO)
        self._entered(by_guard=True)
        return True

    def _entered(self, *, own: bool = False, by_guard: bool = False) -> None:
        """Adapts to another active plan, whose steps and traffic differ. `own`: True: rank 0 proposed that plan. `by_guard`:
        True: the quality guard made its codecs finer or coarser."""
        self._plan = self._connection.plan
        if self._links is not None:
            self._links = structs.replace(self._links, watch=LinkWatch(rates_of(self._links.links)))
        self._reset()
        if self._lead is not None and not own:
            self._set(plan_policy.replaced(self._lead))
        if self.guard is not None:
            change = self.guard.entered(self._steps, by_guard=by_guard)
            if change is not None:
                self._change_codecs(self.guard, change)

    # ---- the end

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

    def settle(self, deadline_s: float) -> list[ReplanVerdict]:
        """Waits up to `deadline_s` seconds for a search to end. Returns the outcomes of all searches."""
        if self._thread is not None:
            self._thread.join(deadline_s)
        self._take_results()
        return self.verdicts

    @property
    def _active(self) -> Plan:
        return self._connection.plan

    def _say(self, text: str, level: int = logging.INFO) -> None:
        self._connection.say(text, level)

    def shares_moved(self, part: float) -> None:
        """Records that work moves between ranks with the next step. `part`: by which fraction of a step's computing."""
        if self._lead is not None and part >= plan_policy.SHARES_WORTH:
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
