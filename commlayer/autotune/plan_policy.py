"""Rank 0's decisions about plans, as pure functions: which plan to try, whether a trial succeeded, what rank 0 requests from
all ranks.

Rank 0 is idle, searching (a thread plans while training goes on) or trying (the first steps under a new plan). It proposes a
plan to which all ranks then switch: a plan that the search found, or the previous plan if a trial failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import takewhile
from statistics import median
from typing import NamedTuple

from msgspec import structs

from commlayer.observe.link_monitor import LinkWatch, Rates, ReprobeSchedule, differ
from commlayer.observe.prediction_check import LIMIT, PredictionCheck, StalePlan
from commlayer.planner.costs import plan_excess
from commlayer.planner.model import DENSE, Basis, Link, PlanInputs
from commlayer.records import Plan, Record, digest

Price = tuple[float, float]
"""A plan's predicted communication: seconds per step, and the fraction of computing that overlaps it."""

WORTH = 0.02
"""A plan is tried only if it is predicted to reach a loss sooner by this fraction. Predictions are less accurate than that,
but a few steps show the difference."""
LEAVES = 0.95
"""Local steps replace averaged gradients only if they reduce the time to a loss to this fraction. Their convergence factors are
cautious for learning rates that decay; the margin is for errors of predicted step times. At a constant rate, 2 to 8 local steps
of 4 workers needed up to a third more steps than predicted, those of 8 workers up to 60 % more."""
MOST_STEPS = 3.0
"""Plans whose convergence factor exceeds this are never chosen: no predicted step time is accurate enough to justify them."""
TRIED = 5
"""Number of steps whose median is a new plan's step time, after one warm-up step."""
SLOWER = 0.02
"""All ranks roll back if the time to a loss is longer than under the previous plan by more than this fraction. Medians of so
few steps differ by as much under one plan, and servers drop their residuals at a roll-back."""
PLAIN = 0.18
"""The plan without compression is tried if its predicted time to a loss is longer by at most this fraction. In trials it took
up to 16 % less than predicted. Predictions are least accurate for paths (server, all-reduce) unlike the measured one. Local
steps must reach LEAVES."""
OFF = 10.0
"""If the active plan's step takes this many times its predicted time, or less than the inverse, predictions are not used."""
STALE = LIMIT
"""The active plan counts as stale if its step time differs from the predicted one by more than this fraction."""
TO_WIN = 0.05
"""Measuring, probing or another search is worthwhile only if a plan could save this fraction of the time to a loss."""
SHARES_WORTH = 0.1
"""Computing is measured again if a change of batch shares changes a step's computing by this fraction."""
WAY = ("codes", "overlap", "local_steps", "fragments")
"""Fields of a plan that define its sync mode."""


class Candidate(NamedTuple):
    """A plan that a running job could switch to, with predictions for this plan and for the active one."""

    basis: Basis
    """The plan in the planner's form, and the inputs of the search. Workers use other names for some paths, which the planner
    cannot predict."""
    runnable: Plan
    """The same plan in the form that workers run, with buckets assigned to the running servers."""
    current: Plan
    """The planner's form of the plan that was active during the search."""
    current_s: float
    """Predicted step time of the plan that was active during the search, in seconds."""
    uncontended_s: float
    """Like `current_s`, but predicted without contention for the CPU."""
    price: Price
    current_price: Price
    steps: float = 1.0
    """Convergence factor of this plan: a cautious estimate of how many times as many steps it needs to reach a loss."""
    current_steps: float = 1.0
    """Convergence factor of the plan that was active during the search."""
    leaves: str = ""
    """Why the plan gives up averaging all gradients in every step; "" if it does not, or if the active plan had done so
    before."""
    alone_s: float = 0.0
    """Seconds that one machine alone needs for the progress of one dense training step; 0 if unknown."""
    hint: str = ""
    """Text about the benefit of local steps that the script has not allowed; "" if it is small."""
    auto_times: float = 0.0
    """By how many times local steps that the script has not allowed would be faster; 0: unknown, or it has allowed them."""
    alternatives: tuple[Candidate, ...] = ()
    """Other candidates, with predictions from the same costs. They are tried in this order if this plan's step time permits."""

    @property
    def plan(self) -> Plan:
        return self.basis.plan

    @property
    def back(self) -> Candidate:
        """The plan that was active during the search, as a candidate for a roll-back."""
        return self._replace(basis=self.basis._replace(plan=self.current), price=self.current_price, steps=self.current_steps,
                             leaves="", alternatives=())

    @property
    def dense(self) -> bool:
        """True: the plan sends uncompressed gradients and averages them in every step."""
        return not self.leaves and all(b.codec == DENSE for b in self.plan.buckets)

    def as_run(self, plan: Plan) -> Candidate:
        """Returns the candidate in the form in which ranks run it as `plan`: the script or the optimizer's states may force
        another sync mode than the planned one."""
        if all(getattr(plan, way) == getattr(self.runnable, way) for way in WAY):
            return self
        buckets = self.plan.buckets
        if plan.steps_locally:
            buckets = tuple(structs.replace(b, stale=False) for b in buckets)
        actual = structs.replace(self.plan, buckets=buckets, step_s=plan.step_s, steps=plan.steps,
                                 steps_high=plan.steps_high, **{way: getattr(plan, way) for way in WAY})
        return self._replace(basis=self.basis._replace(plan=actual), runnable=plan, steps=steps_of(actual, self.basis.inputs))


def steps_of(plan: Plan, inputs: PlanInputs) -> float:
    """Returns a cautious estimate of a plan's convergence factor."""
    return 1.0 + plan_excess(plan, inputs.complete).high


class LogLine(NamedTuple):
    """A line for session.inspect.decisions() and for the log."""

    text: str
    warning: bool = False


class Suggestion(NamedTuple):
    """A log line about a setting that the script could allow, with its benefit. Logged once per job."""

    text: str


Notice = LogLine | Suggestion | StalePlan
"""A line for the user. A StalePlan is also an event of session.inspect."""


class TuningRequest(IntEnum):
    """Rank 0's request to all ranks, sent in its report."""

    NOTHING = 0
    SWITCH = 1
    MEASURE = 2
    PROBE = 3


class SearchRequest(NamedTuple):
    """A search that rank 0 starts on a thread."""

    current: Plan
    """The active plan."""
    known: Plan | None
    """The planner's form of the active plan, if the planner made that plan; otherwise None."""
    links: tuple[Link, ...]
    step_s: float
    """Present step time in seconds, as measured by all ranks."""
    checks: bool = False
    """True: the predicted step time of the active plan must agree with the measured one, because both are for the same
    links."""


class Proposal(NamedTuple):
    candidate: Candidate
    before_s: float = 0.0
    """Step time under the active plan, in seconds."""
    by_pace: bool = False
    """True: predictions cannot tell whether the proposed plan is faster than the active one; only its step time can."""
    back: bool = False
    """True: a roll-back to the previous plan, under which a loss was reached sooner."""


class Trial(NamedTuple):
    """A trial of a new plan in its first steps."""

    before: Candidate
    """The previous plan, for a roll-back."""
    before_s: float
    by_pace: bool


class LinkState(Record, frozen=True):
    """What all ranks know about the nodes' links. Equal on all ranks, except for the times in `reprobe`, which come from each
    rank's clock."""

    links: tuple[Link, ...]
    """The links that planning uses, one per node."""
    watch: LinkWatch
    best: tuple[Rates, ...]
    """The best rates ever measured, one entry per node."""
    reprobe: ReprobeSchedule

    @classmethod
    def of(cls, links: tuple[Link, ...], now: float) -> LinkState:
        rates = rates_of(links)
        return cls(links, LinkWatch(rates), rates, ReprobeSchedule().changed(now))

    def measured(self, links: tuple[Link, ...], now: float) -> LinkState:
        """Returns the state after a measurement or probe of the links. The usual step time under the active plan is kept."""
        rates = rates_of(links)
        best = tuple(Rates(*map(max, zip(*both, strict=True))) for both in zip(self.best, rates, strict=True))
        return LinkState(links, structs.replace(self.watch, planned=rates), best, self.reprobe.changed(now))

    def with_rates(self, rates: Sequence[Rates]) -> tuple[Link, ...]:
        return tuple(Link(*rate, old.alpha_s) for rate, old in zip(rates, self.links, strict=True))


class Lead(Record, frozen=True):
    """State of rank 0's planning. Rank 0 is searching if there is an `order`, trying if there is a `trial`, otherwise idle."""

    order: SearchRequest | None = None
    trial: Trial | None = None
    proposal: Proposal | None = None
    basis: Basis | None = None
    """The inputs from which the active plan was made; None if unknown."""
    price: Price | None = None
    """Predicted communication of the active plan; None if unknown."""
    count: int = 0
    """Number of steps since the active plan was entered or kept."""
    recent: tuple[float, ...] = ()
    """Latest step times under the active plan, in seconds. `check` uses the median of the last three."""
    check: PredictionCheck | None = None
    steps: float = 1.0
    """Convergence factor of the active plan."""
    pace_s: float = 0.0
    """Step time of the active plan when the present search began, on rank 0's clock, which also times other plans."""
    stale: bool = False
    """True: step times under the active plan differ from the prediction."""
    moved: bool = False
    """True: batch shares have changed since computing was last measured."""
    searched: tuple[Link, ...] = ()
    """The links that the last search used, one per node."""
    discarded: bool = False
    """True: the last search was discarded because its predictions were far from the measured step time."""
    known: tuple[Plan, Plan] | None = None
    """The plan that rank 0 last made all ranks switch to, and the planner's form of that plan."""
    lateness: float = 1.0
    """Measured step time of the last tried plan, divided by the predicted one; at least 1."""
    alternatives: tuple[Candidate, ...] = ()
    """Other candidates of the last search, to be tried after the step time of the best one is known."""
    alone_s: float = 0.0
    auto_times: float = 0.0
    """`alone_s`, `auto_times`: of the last search, as in Candidate."""

    @property
    def idle(self) -> bool:
        return self.order is None and self.trial is None and self.proposal is None


Decided = tuple[Lead, list[Notice]]


def begin_search(lead: Lead, current: Plan, links: tuple[Link, ...], step_s: float, pace_s: float = 0.0, *,
                 checks: bool = False) -> Lead:
    """Returns the state with an order for a search that may replace the plan `current`. Abandons any search or trial in
    progress.

    `step_s`: step time measured by all ranks; `pace_s`: rank 0's own, from the clock that times other plans.
    """
    known = lead.known[1] if lead.known is not None and lead.known[0] == current else None
    order = SearchRequest(current, known, links, step_s, checks)
    return structs.replace(lead, order=order, trial=None, proposal=None, check=None, stale=False, pace_s=pace_s or step_s,
                           searched=links, alternatives=())


def pace_since(lead: Lead, slow_s: float) -> float:
    """Returns the step time since steps became slow; reports average over earlier steps, too. 0 if no step was slow on this
    rank."""
    slow = list(takewhile(lambda step_s: step_s > slow_s, reversed(lead.recent)))
    return median(slow) if slow else 0.0


def end_search(
    lead: Lead, order: SearchRequest, best: Candidate | None, why: str, active: Plan,
) -> Decided:
    """Proposes the plan that the search found if it is worth a switch; otherwise the active plan stays."""
    if lead.order is not order:
        return lead, []  # a newer search has replaced this one
    kept = structs.replace(lead, order=None, count=0)
    if best is None:
        return kept, [LogLine(f"no plan: {why}")]
    if active != order.current:
        return structs.replace(kept, stale=True), [LogLine("found a plan, but the active plan has changed meanwhile")]
    if order.checks and max(best.current_s, lead.pace_s) >= OFF * min(best.current_s, lead.pace_s):
        again = not lead.discarded
        line = (f"kept the current plan: priced at {_ms(best.current_s)} per step, measured at {_ms(lead.pace_s)}, so a "
                f"search by these prices is discarded{'; measuring again' if again else ''}")
        return structs.replace(kept, stale=again, discarded=True), [LogLine(line)]
    kept = structs.replace(kept, steps=best.current_steps, alternatives=best.alternatives, discarded=False,
                           price=best.current_price, alone_s=best.alone_s, auto_times=best.auto_times or lead.auto_times)
    line = (f"a plan: {_ms(best.plan.step_s)} a step{_needs(best.steps)}, now {_ms(order.step_s)}"
            f"{_needs(best.current_steps)}")
    hint: list[Notice] = [Suggestion(best.hint)] if best.hint else []
    current_s = best.current_s * best.current_steps
    later = best.plan.step_s * best.steps * lead.lateness > (1.0 - WORTH) * current_s
    if later or _hopeless(best, best.current_steps):
        line = f"kept the current plan: found {line}{_versus_alone(best, current_s)}"
        return structs.replace(kept, basis=best.back.basis), [LogLine(line), *hint]
    line = f"found {line}{_versus_alone(best, best.plan.step_s * best.steps)}"
    return structs.replace(kept, proposal=Proposal(best, lead.pace_s)), [LogLine(line), *hint]


def _hopeless(found: Candidate, current_steps: float) -> bool:
    """Returns whether the plan's convergence factor is too large for a useful plan, and above that of the active plan."""
    return found.steps >= MOST_STEPS and found.steps > current_steps


def _versus_alone(found: Candidate, to_loss_s: float) -> str:
    """Returns text about the expected speed against one machine alone. `to_loss_s`: seconds of the plan for the progress of
    one dense training step."""
    if not found.alone_s or not to_loss_s:
        return ""
    return f"; {found.alone_s / to_loss_s:.3g} x one machine alone"


def over_alone(lead: Lead, active: Plan) -> tuple[float, float, float]:
    """Returns the job's speed to a loss relative to the fastest machine alone, by measured and by predicted step times, and by
    how many times sync="auto" would be faster. Zeros before a search, and while another plan may follow."""
    if not lead.idle or lead.stale or not lead.alone_s or lead.count <= TRIED:
        return 0.0, 0.0, 0.0
    to_loss_s, predicted_s = median(lead.recent) * lead.steps, active.step_s * lead.steps
    return lead.alone_s / to_loss_s, lead.alone_s / predicted_s if predicted_s else 0.0, lead.auto_times


def slower_line(over_alone: float, forecast: float, auto_times: float) -> str:
    """Returns a log line about a job that reaches a loss later than its fastest machine alone."""
    remedy = f"sync='auto' would be {auto_times:.1f}x as fast" if auto_times > 1 else "try larger batches, or train alone"
    return f"slower than one machine alone: {over_alone:.2f}x, forecast {forecast:.2f}x; {remedy}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _needs(steps: float) -> str:
    """Returns the convergence factor as text, for log lines that give a step time."""
    return f" (factor {steps:.2f})" if steps > 1.0 else ""


def switched(lead: Lead, proposed: Proposal, plan: Plan, left: Plan) -> Decided:
    """Handles a switch of all ranks to what rank 0 proposed. `plan`: the plan as ranks run it; `left`: the previous plan."""
    planned = proposed.candidate
    candidate = planned.as_run(plan)
    other = candidate is not planned
    # Step times recorded so far belong to the previous plan.
    lead = structs.replace(lead, proposal=None, trial=None, count=0, recent=(), stale=False, steps=candidate.steps,
                           known=(plan, candidate.plan), basis=candidate.basis, price=candidate.price, check=None)
    if proposed.back:
        return lead, []
    trial = Trial(candidate.back._replace(runnable=left), proposed.before_s, proposed.by_pace or other)
    lead = structs.replace(lead, trial=trial, check=None if other else PredictionCheck(candidate.plan.step_s, STALE))
    return lead, [LogLine(candidate.leaves, warning=True)] if candidate.leaves else []


def refused(lead: Lead) -> Lead:
    """Drops the proposal, because a rank has refused it."""
    return structs.replace(lead, proposal=None, trial=None, count=0)


def replaced(lead: Lead) -> Lead:
    """Resets the state after the quality guard has changed the plan: observations, search and trial were for another plan."""
    return structs.replace(lead, order=None, trial=None, proposal=None, basis=None, check=None, count=0, recent=(),
                           alternatives=(), stale=lead.stale or lead.order is not None)


def step_over(lead: Lead, step_s: float, step: int, active: Plan) -> Decided:
    """Records the time of a step under the active plan. Decides on a trial after TRIED steps, and compares the time with the
    prediction."""
    lines: list[Notice] = []
    lead = structs.replace(lead, recent=(*lead.recent[1 - TRIED :], step_s), count=lead.count + 1)
    if lead.count == TRIED + 1 and lead.order is None and lead.proposal is None:
        lead, lines = _judged(lead, median(lead.recent), active)
    if lead.check is not None:
        check, stale = lead.check.observe(median(lead.recent[-3:]), step)
        if stale is not None and not stale.slower:  # a plan that is faster than predicted needs no new search
            check, lines = _usual(stale.measured_s), [*lines, LogLine(stale.reason)]
        elif stale is not None:
            lead, lines = structs.replace(lead, stale=True), [*lines, stale]
        lead = structs.replace(lead, check=check)
    return lead, lines


def _judged(lead: Lead, step_s: float, active: Plan) -> Decided:
    """Decides, from its step time, whether the active plan stays or is rolled back."""
    trial = lead.trial
    if trial is None:
        return _another(structs.replace(lead, check=_usual(step_s)), step_s, active)
    worse = step_s * lead.steps > (1 + SLOWER) * trial.before_s * trial.before.steps
    line = LogLine(
        f"under plan {digest(active)[:8]}: {_ms(step_s)} a step{_needs(lead.steps)}, predicted {_ms(active.step_s)}, "
        f"before {_ms(trial.before_s)}{_needs(trial.before.steps)}{': rolling back' if worse else ''}")
    lead = structs.replace(lead, trial=None, lateness=max(1.0, step_s / active.step_s) if active.step_s else 1.0)
    if worse:
        return structs.replace(lead, proposal=Proposal(trial.before, back=True), check=None), [line]
    if trial.by_pace:  # tried regardless of its prediction
        lead = structs.replace(lead, check=_usual(step_s))
    lead, lines = _another(lead, step_s, active)
    return lead, [line, *lines]


def _another(lead: Lead, step_s: float, active: Plan) -> Decided:
    """Proposes another candidate whose prediction is close, because a few steps show which one is faster. `step_s`: measured
    step time of the active plan."""
    others, lead = lead.alternatives, structs.replace(lead, alternatives=())
    for place, other in enumerate(others):
        most = 1 + PLAIN if other.dense else LEAVES
        if other.runnable == active or (active.steps_locally and not other.plan.steps_locally):
            continue  # a plan priced for averaged gradients would run with local optimizer states
        if lead.basis is None or _hopeless(other, lead.steps):
            continue
        if other.plan.step_s * other.steps <= most * step_s * lead.steps:
            candidate: Candidate = other._replace(current=lead.basis.plan, current_price=lead.price or other.current_price,
                                                  current_steps=lead.steps)
            what = "the plan without compression" if other.dense else "local steps, too"
            line = f"tries {what}, predicted {_ms(other.plan.step_s)}{_needs(other.steps)}"
            return structs.replace(lead, proposal=Proposal(candidate, step_s, by_pace=other.dense),
                                   alternatives=others[place + 1 :]), [LogLine(line)]
    return lead, []


def _usual(step_s: float) -> PredictionCheck:
    return PredictionCheck(step_s, STALE, usual=True)


def next_request(lead: Lead, links: LinkState, now: float) -> tuple[Lead, TuningRequest]:
    """Returns the request that rank 0 puts in its next report to all ranks, and the changed state."""
    if lead.order is not None:
        return lead, TuningRequest.NOTHING
    if lead.proposal is not None:
        return lead, TuningRequest.SWITCH
    win = to_win(lead, links.watch)
    if lead.moved or (lead.stale and (win is None or win >= TO_WIN)):
        return structs.replace(lead, stale=False, moved=False, check=None), TuningRequest.MEASURE
    if lead.stale:  # no gain is possible
        check = _usual(median(lead.recent)) if lead.recent else None
        return structs.replace(lead, stale=False, check=check), TuningRequest.NOTHING
    if win is None or win < TO_WIN:  # a probe could not lead to enough gain
        return lead, TuningRequest.NOTHING
    lost = differ(links.best, links.watch.planned)
    if links.watch.confirmed and not lost and not links.watch.faster:
        return lead, TuningRequest.NOTHING
    round_trip_s = 4 * max(link.alpha_s for link in links.links)
    due = links.reprobe.due(now, hinted=links.watch.faster, lost=lost, to_win=win, round_trip_s=round_trip_s)
    return lead, TuningRequest.PROBE if due else TuningRequest.NOTHING


def on_faster_links(lead: Lead, links: LinkState, active: Plan) -> Lead:
    """Orders a search if steps have shown that links are faster than those of the last search, so another plan may be
    better."""
    win = to_win(lead, links.watch)
    if not lead.idle or not lead.searched or lead.count <= TRIED or win is None or win < TO_WIN:
        return lead
    if not differ(rates_of(lead.searched), rates_of(links.links)):
        return lead
    return begin_search(lead, active, links.links, median(lead.recent))


def to_win(lead: Lead, watch: LinkWatch) -> float | None:
    """Returns the largest fraction of the time to a loss that any plan could save, if links were infinitely fast and
    compression had no cost. None before the step time is known."""
    return 1.0 - (1.0 - watch.waited_s / watch.usual_s) / lead.steps if watch.settled and watch.usual_s > 0 else None


def rates_of(links: Sequence[Link]) -> tuple[Rates, ...]:
    return tuple(Rates(link.up_bps, link.down_bps) for link in links)
