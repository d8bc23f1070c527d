"""Rank 0's decisions about plans, as pure functions: which plan to try, whether a trial succeeded, what to request from ranks.

Rank 0 is idle, searching (a thread plans while training goes on) or trying (the first steps under a new plan). A `proposal` is
the plan that it asks all ranks to switch to: a plan that the search found, or the previous plan if a trial failed.
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
"""Seconds of communication, and the fraction of computing that overlaps it."""

WORTH = 0.02
"""A plan must reach a loss sooner by this fraction to be tried. Prices are less accurate than that, but a few steps decide."""
LEAVES = 0.85
"""Averaged gradients are given up if the time to a loss falls to this fraction or below. (With three quarters, links of 50
Mb/s reached a loss later than links of 10 Mb/s.)"""
MOST_STEPS = 3.0
"""Plans with a convergence factor above this are never chosen: no predicted step time is accurate enough to justify them."""
TRIED = 5
"""Steps that determine a plan's step time, after one warm-up step."""
SLOWER = 0.02
"""All ranks roll back if a loss comes later than under the previous plan by more than this fraction. Medians of so few
steps differ by as much under one plan, and a roll-back has a cost: servers drop their residuals."""
PLAIN = 0.18
"""The plan without compression is tried if a loss is priced to come later by at most this fraction: in trials it took up to 16
% less than its price. Prices are least accurate for paths unlike the measured ones. Local steps must reach LEAVES."""
OFF = 10.0
"""If the active plan takes this many times its price, or this small a part of it, the prices are not used."""
STALE = LIMIT
"""Relative error of the step time above which the active plan counts as stale."""
TO_WIN = 0.05
"""Minimum gain that justifies measuring, probing or another search."""
SHARES_WORTH = 0.1
"""Work is measured again if a change of shares changes a step's computing by this fraction."""
WAY = ("codes", "overlap", "local_steps", "fragments")
"""Fields of a plan that define its sync mode."""


class Candidate(NamedTuple):
    """A plan that a running job could switch to, with the active plan at the same prices."""

    basis: Basis
    """With the planner's form of the plan: workers use other names for some paths, which have no price."""
    runnable: Plan
    """The same plan with buckets assigned to the running servers."""
    current: Plan
    """The planner's form of the plan that was active during planning."""
    current_s: float
    """Its step time at the prices used for this plan."""
    uncontended_s: float
    """Its step time at prices without contention for processors."""
    price: Price
    current_price: Price
    steps: float = 1.0
    """Convergence factor of this plan, cautious estimate."""
    current_steps: float = 1.0
    """Convergence factor of the plan that was active."""
    leaves: str = ""
    """Why steps no longer use the average of all gradients; "" if they do, or did not before."""
    alone_s: float = 0.0
    """Time one machine alone needs for the progress of one dense training step; 0 if unknown."""
    hint: str = ""
    """The benefit of local steps that the script has not allowed; "" if small."""
    alternatives: tuple[Candidate, ...] = ()
    """Other candidates at the same prices, to be tried in this order if this plan's step time permits."""

    @property
    def plan(self) -> Plan:
        return self.basis.plan

    @property
    def back(self) -> Candidate:
        """The plan that was active, as a candidate for a roll-back."""
        return self._replace(basis=self.basis._replace(plan=self.current), price=self.current_price, steps=self.current_steps,
                             leaves="", alternatives=())

    @property
    def dense(self) -> bool:
        """Whether this is the plan without compression, excluding local steps that need none."""
        return not self.leaves and all(b.codec == DENSE for b in self.plan.buckets)

    def as_run(self, plan: Plan) -> Candidate:
        """The candidate as it runs: the script or optimizer states may force another sync mode than planned."""
        if all(getattr(plan, way) == getattr(self.runnable, way) for way in WAY):
            return self
        buckets = self.plan.buckets
        if plan.steps_locally:
            buckets = tuple(structs.replace(b, stale=False) for b in buckets)
        actual = structs.replace(self.plan, buckets=buckets, step_s=plan.step_s, steps=plan.steps,
                                 steps_high=plan.steps_high, **{way: getattr(plan, way) for way in WAY})
        return self._replace(basis=self.basis._replace(plan=actual), runnable=plan, steps=steps_of(actual, self.basis.inputs))


def steps_of(plan: Plan, inputs: PlanInputs) -> float:
    """Convergence factor of a plan, cautious estimate."""
    return 1.0 + plan_excess(plan, inputs.job, inputs.cluster, *inputs.complete).high


class ReplanVerdict(NamedTuple):
    """Outcome of a search, with step times."""

    measured_s: float
    """Under the active plan, as measured by all ranks."""
    priced_s: float
    """Under the same plan, at prices that were not fitted to the measured time."""
    found_s: float
    """Under the best plan found, at prices fitted to the measured time."""
    measured_steps: float = 1.0
    found_steps: float = 1.0
    """Convergence factors of the active plan and of the plan found."""


class LogLine(NamedTuple):
    """A line for session.inspect.decisions() and for the log."""

    text: str
    warning: bool = False


class Suggestion(NamedTuple):
    """A line, once per job: a setting that the script could allow, and its benefit."""

    text: str


Notice = LogLine | Suggestion | StalePlan
"""A line for the user. A StalePlan is also an event of session.inspect."""


class TuningRequest(IntEnum):
    """Rank 0's request to all ranks, sent in its report row."""

    NOTHING = 0
    SWITCH = 1
    MEASURE = 2
    PROBE = 3


class SearchRequest(NamedTuple):
    """A search that rank 0 starts on a thread."""

    current: Plan
    """The active plan."""
    known: Plan | None
    """The planner's form of the active plan, if the planner made it."""
    links: tuple[Link, ...]
    step_s: float
    """Current time of a step, as measured by all ranks."""
    checks: bool = False
    """Whether the price of the active plan must agree with its step time: steps were just measured over these links."""


class Proposal(NamedTuple):
    candidate: Candidate
    before_s: float = 0.0
    """Step time under the active plan."""
    by_pace: bool = False
    """Prices cannot distinguish it from the active plan; only its step time can."""
    back: bool = False
    """Whether this is a roll-back to the previous plan, under which a loss came sooner."""


class Trial(NamedTuple):
    """The first steps under a new plan."""

    before: Candidate
    """The previous plan, for a roll-back."""
    before_s: float
    by_pace: bool


class LinkState(Record, frozen=True):
    """Knowledge about the nodes' links. The same on all ranks, except for the clock's part in `reprobe`."""

    links: tuple[Link, ...]
    """Links used for planning, one per node."""
    watch: LinkWatch
    best: tuple[Rates, ...]
    """Best rates ever measured, per node."""
    reprobe: ReprobeSchedule

    @classmethod
    def of(cls, links: tuple[Link, ...], now: float) -> LinkState:
        rates = rates_of(links)
        return cls(links, LinkWatch(rates), rates, ReprobeSchedule().changed(now))

    def measured(self, links: tuple[Link, ...], now: float) -> LinkState:
        """The links after a measurement or a probe. What is usual under the active plan stays known."""
        rates = rates_of(links)
        best = tuple(Rates(*map(max, zip(*both, strict=True))) for both in zip(self.best, rates, strict=True))
        return LinkState(links, structs.replace(self.watch, planned=rates), best, self.reprobe.changed(now))

    def with_rates(self, rates: Sequence[Rates]) -> tuple[Link, ...]:
        return tuple(Link(*rate, old.alpha_s) for rate, old in zip(rates, self.links, strict=True))


class Lead(Record, frozen=True):
    """State of rank 0. It is searching if there is an `order`, trying if there is a `trial`, otherwise idle."""

    order: SearchRequest | None = None
    trial: Trial | None = None
    proposal: Proposal | None = None
    basis: Basis | None = None
    """The inputs of the active plan, if known."""
    price: Price | None = None
    """The active plan's communication."""
    count: int = 0
    """Steps since the active plan was entered or kept."""
    recent: tuple[float, ...] = ()
    """Latest step times under the active plan; `check` uses the median of the last three."""
    check: PredictionCheck | None = None
    steps: float = 1.0
    """Convergence factor of the active plan."""
    pace_s: float = 0.0
    """Step time of the active plan when the present search began, by the clock that times other plans."""
    stale: bool = False
    """Whether steps under the active plan differ from the prediction."""
    moved: bool = False
    """Whether shares have changed since work was last measured."""
    searched: tuple[Link, ...] = ()
    """Links that the last search used."""
    discarded: bool = False
    """Whether the last search was discarded because its prices were far from the step time."""
    known: tuple[Plan, Plan] | None = None
    """The plan that was last activated here, and the planner's form of it."""
    lateness: float = 1.0
    """Measured step time divided by the predicted one, of the last plan that was tried; at least 1."""
    alternatives: tuple[Candidate, ...] = ()
    """Other candidates, tried after the step time of the best one is known."""
    verdicts: tuple[ReplanVerdict, ...] = ()

    @property
    def idle(self) -> bool:
        return self.order is None and self.trial is None and self.proposal is None


Decided = tuple[Lead, list[Notice]]


# ---- searches


def begin_search(lead: Lead, current: Plan, links: tuple[Link, ...], step_s: float, pace_s: float = 0.0, *,
                 checks: bool = False) -> Lead:
    """Orders a search for a replacement of the current plan, and abandons anything else in progress.

    `step_s` is the step time measured by all ranks; `pace_s` is rank 0's own, from the clock that times other plans."""
    known = lead.known[1] if lead.known is not None and lead.known[0] == current else None
    order = SearchRequest(current, known, links, step_s, checks)
    return structs.replace(lead, order=order, trial=None, proposal=None, check=None, stale=False, pace_s=pace_s or step_s,
                           searched=links, alternatives=())


def pace_since(lead: Lead, slow_s: float) -> float:
    """Step time since steps became slow, because rows average over earlier steps, too. 0 if no step was slow on this rank."""
    slow = list(takewhile(lambda step_s: step_s > slow_s, reversed(lead.recent)))
    return median(slow) if slow else 0.0


def end_search(
    lead: Lead, order: SearchRequest, best: Candidate | None, why: str, active: Plan, *, keep: bool = False,
) -> Decided:
    """Proposes the plan found if it is worth a switch. Otherwise the active plan stays. With `keep` it always stays."""
    if lead.order is not order:
        return lead, []  # a newer search has replaced this one
    kept = structs.replace(lead, order=None, count=0)
    if best is None:
        return kept, [LogLine(f"no plan: {why}")]
    if active != order.current:
        return structs.replace(kept, stale=True), [LogLine("found a plan, but the active plan has changed meanwhile")]
    if order.checks and max(best.current_s, lead.pace_s) >= OFF * min(best.current_s, lead.pace_s):
        again = not (lead.discarded or keep)
        line = (f"kept the current plan: priced at {_ms(best.current_s)} per step, measured at {_ms(lead.pace_s)}, so a "
                f"search by these prices is discarded{'; measuring again' if again else ''}")
        return structs.replace(kept, stale=again, discarded=True), [LogLine(line)]
    verdict = ReplanVerdict(order.step_s, best.uncontended_s, best.plan.step_s, best.current_steps, best.steps)
    kept = structs.replace(kept, steps=best.current_steps, alternatives=() if keep else best.alternatives, discarded=False,
                           price=best.current_price, verdicts=(*lead.verdicts, verdict))
    line = (f"a plan of {len(best.plan.buckets)} buckets for steps of {_ms(best.plan.step_s)}{_needs(best.steps)}; the "
            f"current plan takes {_ms(order.step_s)}, {_ms(best.current_s)} by the same prices{_needs(best.current_steps)}")
    hint: list[Notice] = [Suggestion(best.hint)] if best.hint else []
    current_s = best.current_s * best.current_steps
    later = best.plan.step_s * best.steps * lead.lateness > (1.0 - WORTH) * current_s
    if keep or later or _hopeless(best, best.current_steps):
        line = f"kept the current plan{_versus_alone(best, current_s)}: found {line}"
        return structs.replace(kept, basis=best.back.basis), [LogLine(line), *hint]
    line = f"found {line}{_versus_alone(best, best.plan.step_s * best.steps)}"
    return structs.replace(kept, proposal=Proposal(best, lead.pace_s)), [LogLine(line), *hint]


def _hopeless(found: Candidate, current_steps: float) -> bool:
    """Whether the plan needs too many steps to be useful, and more than the active plan."""
    return found.steps >= MOST_STEPS and found.steps > current_steps


def _versus_alone(found: Candidate, to_loss_s: float) -> str:
    """The expected speed against one machine alone. `to_loss_s` is the time that replaces one step of dense training."""
    if not found.alone_s or not to_loss_s:
        return ""
    return f", expected to reach a loss {found.alone_s / to_loss_s:.2f} times as fast as one machine alone"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _needs(steps: float) -> str:
    """The convergence factor, for log lines that give a step time."""
    return f" ({steps:.2f} times as many to the loss)" if steps > 1.0 else ""


# ---- trials


def switched(lead: Lead, plan: Plan, left: Plan) -> Decided:
    """All ranks have switched to the proposal. `plan` is the plan as they run it, `left` the plan before."""
    assert lead.proposal is not None, "rank 0 has proposed no plan"
    proposed, planned = lead.proposal, lead.proposal.candidate
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
    """A rank has refused the proposal."""
    return structs.replace(lead, proposal=None, trial=None, count=0)


def replaced(lead: Lead) -> Lead:
    """The quality guard has changed the plan: what was seen, found or tried before does not apply to the new plan."""
    return structs.replace(lead, order=None, trial=None, proposal=None, basis=None, check=None, count=0, recent=(),
                           alternatives=(), stale=lead.stale or lead.order is not None)


def step_over(lead: Lead, step_s: float, step: int, active: Plan) -> Decided:
    """Records a step under the active plan: judges a trial after TRIED steps, and compares with the prediction."""
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
    """Judges the active plan by its step time."""
    trial = lead.trial
    if trial is None:
        return _another(structs.replace(lead, check=_usual(step_s)), step_s, active)
    worse = step_s * lead.steps > (1 + SLOWER) * trial.before_s * trial.before.steps
    line = LogLine(
        f"under plan {digest(active)} steps take {_ms(step_s)}{_needs(lead.steps)}: {_ms(active.step_s)} were predicted, "
        f"{_ms(trial.before_s)}{_needs(trial.before.steps)} were taken before{': back to that' if worse else ''}")
    lead = structs.replace(lead, trial=None, lateness=max(1.0, step_s / active.step_s) if active.step_s else 1.0)
    if worse:
        return structs.replace(lead, proposal=Proposal(trial.before, back=True), check=None), [line]
    if trial.by_pace:  # tried regardless of its prediction
        lead = structs.replace(lead, check=_usual(step_s))
    lead, lines = _another(lead, step_s, active)
    return lead, [line, *lines]


def _another(lead: Lead, step_s: float, active: Plan) -> Decided:
    """Proposes another candidate with a similar price, since a few steps decide better. `step_s` is the active plan's."""
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
            line = f"tries {what}, {_ms(other.plan.step_s)}{_needs(other.steps)} by the same prices"
            return structs.replace(lead, proposal=Proposal(candidate, step_s, by_pace=other.dense),
                                   alternatives=others[place + 1 :]), [LogLine(line)]
    return lead, []


def _usual(step_s: float) -> PredictionCheck:
    return PredictionCheck(step_s, STALE, usual=True)


# ---- requests


def next_request(lead: Lead, links: LinkState, now: float) -> tuple[Lead, TuningRequest]:
    """The request that rank 0 puts in its next row to all ranks."""
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
    due = links.reprobe.due(now, hinted=links.watch.faster, lost=lost, to_win=win)
    return lead, TuningRequest.PROBE if due else TuningRequest.NOTHING


def on_faster_links(lead: Lead, links: LinkState, active: Plan) -> Lead:
    """Orders a search if steps have shown links to be so much faster than planned that another plan may be better."""
    win = to_win(lead, links.watch)
    if not lead.idle or not lead.searched or lead.count <= TRIED or win is None or win < TO_WIN:
        return lead
    if not differ(rates_of(lead.searched), rates_of(links.links)):
        return lead
    return begin_search(lead, active, links.links, median(lead.recent))


def to_win(lead: Lead, watch: LinkWatch) -> float | None:
    """Largest fraction of the time to a loss that any plan could save, with infinitely fast links and no loss by compression.
    None before the step time is known."""
    return 1.0 - (1.0 - watch.waited_s / watch.usual_s) / lead.steps if watch.settled and watch.usual_s > 0 else None


def rates_of(links: Sequence[Link]) -> tuple[Rates, ...]:
    return tuple(Rates(link.up_bps, link.down_bps) for link in links)
