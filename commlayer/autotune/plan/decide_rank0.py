"""Decisions that rank 0 makes alone: which plan is worth a switch, whether a trial succeeded, what to request from all
ranks.

Pure functions, called by decide.py on rank 0 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from statistics import median

from msgspec import structs

from commlayer.autotune.plan.actions import Action, LogLine, ReportStale, Request, SetActivePlan, StartPlanning, SuggestSetting
from commlayer.autotune.plan.candidate import LEAVES, MOST_STEPS, Candidate, ReplanVerdict
from commlayer.autotune.plan.facts import ActivePlan, PlanningDone
from commlayer.autotune.plan.state import LeaderState, LinkState, Planning, Proposing, Settling, Steady, Trying
from commlayer.observe import LinkWatch, PredictionCheck, Rates, differ
from commlayer.observe.prediction_check import LIMIT
from commlayer.planner.model import Link
from commlayer.records import Plan, digest

WORTH = 0.02
"""A plan must reach a loss sooner by this fraction to be tried. Prices are less accurate than that, but a few steps decide."""
FINER, AS_SOON = 0.01, 0.03
"""A plan that needs fewer steps by FINER is tried even if it reaches a loss later by at most AS_SOON: a codec's cost in
steps is known less accurately than the time of a step."""
TO_WIN = 0.05
"""Minimum gain that justifies measuring, probing or another search."""
SHARES_WORTH = 0.1
"""Work is measured again if a change of shares changes a step's computing by this fraction."""
MULTIPLIER_RISE = 1.25
"""A new search starts if the model's observed excess of steps is this many times the value used for the last plan."""
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

Decided = tuple[LeaderState, list[Action]]


def planning(
    lead: LeaderState, current: Plan, links: tuple[Link, ...], step_s: float, pace_s: float = 0.0, *, checks: bool = False,
) -> Decided:
    """Starts a search for a replacement of the current plan, and abandons anything else in progress.

    `step_s` is the step time measured by all ranks; `pace_s` is rank 0's own, from the clock that times other plans.
    `checks`: see Planning.
    """
    known = lead.known[1] if lead.known is not None and lead.known[0] == current else None
    order = StartPlanning(current, known, links, step_s)
    lead = structs.replace(lead, phase=Planning(order, checks), check=None, stale=False, pace_s=pace_s or step_s,
                           searched=links, beside=())
    return lead, [order]


def pace_since(lead: LeaderState, slow_s: float) -> float:
    """Step time since steps became slow, because rows average over earlier steps, too. 0 if no step was slow on this rank."""
    slow = list(takewhile(lambda step_s: step_s > slow_s, reversed(lead.recent)))
    return median(slow) if slow else 0.0


def planned(lead: LeaderState, fact: PlanningDone, in_force: ActivePlan, *, keep: bool) -> Decided:
    """Proposes the plan found if it is worth a switch. Otherwise the active plan stays, and its step time is measured."""
    if not isinstance(lead.phase, Planning) or lead.phase.order != fact.order:
        return lead, []  # a newer planning has replaced this one
    best, measured_s = fact.found, fact.order.step_s
    if best is None:
        return structs.replace(lead, phase=Settling()), [LogLine(f"no plan: {fact.why}")]
    if in_force.plan != fact.order.current:
        line = "found a plan, but meanwhile somebody has changed the one in force"
        return structs.replace(lead, phase=Steady(), stale=True), [LogLine(line)]
    if lead.phase.checks and max(best.current_s, lead.pace_s) >= OFF * min(best.current_s, lead.pace_s):
        return _discarded(lead, best, keep=keep)
    verdict = ReplanVerdict(measured_s, best.uncontended_s, best.plan.step_s, best.current_steps, best.steps)
    lead = structs.replace(lead, plan_s=best.took_s, steps=best.current_steps, beside=() if keep else best.beside,
                           verdicts=(*lead.verdicts, verdict), discarded=False)
    line = (f"a plan of {len(best.plan.buckets)} buckets for steps of {_ms(best.plan.step_s)}{_needs(best.steps)}; the one "
            f"in force takes {_ms(measured_s)}, {_ms(best.current_s)} by the same prices{_needs(best.current_steps)}")
    hint = [SuggestSetting(best.hint)] if best.hint else []
    enough = 1.0 + AS_SOON if best.steps <= best.current_steps - FINER else 1.0 - WORTH
    later = best.plan.step_s * best.steps * lead.lateness > enough * best.current_s * best.current_steps
    if keep or later or _hopeless(best, best.current_steps):
        alone = _beside_alone(best, best.current_s * best.current_steps)
        return structs.replace(lead, phase=Settling()), [
            SetActivePlan(best.back.basis, best.current_price), LogLine(f"kept the plan in force{alone}: found {line}"), *hint]
    return structs.replace(lead, phase=Proposing(best, lead.pace_s)), [
        SetActivePlan(in_force.basis, best.current_price),
        LogLine(f"found {line}{_beside_alone(best, best.plan.step_s * best.steps)}"), *hint]


def _discarded(lead: LeaderState, found: Candidate, *, keep: bool) -> Decided:
    """Discards the search and measures again, once: the measurement or the prices may be wrong."""
    again = not (lead.discarded or keep)
    line = (f"kept the plan in force: priced at {_ms(found.current_s)} per step, measured at {_ms(lead.pace_s)}, so a search "
            f"by these prices is discarded{'; measuring again' if again else ''}")
    return structs.replace(lead, phase=Settling(), stale=again, discarded=True), [LogLine(line)]


def _hopeless(found: Candidate, current_steps: float) -> bool:
    """Whether the plan needs too many steps to be useful, and more than the active plan."""
    return found.steps >= MOST_STEPS and found.steps > current_steps


def _beside_alone(found: Candidate, to_loss_s: float) -> str:
    """The expected speed against one machine alone. `to_loss_s` is the time that replaces one step of dense training."""
    if not found.alone_s or not to_loss_s:
        return ""
    return f", expected to reach a loss {found.alone_s / to_loss_s:.2f} times as fast as one machine alone"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _needs(steps: float) -> str:
    """The convergence factor, for log lines that give a step time."""
    return f" ({steps:.2f} times as many to the loss)" if steps > 1.0 else ""


def on_error_multiplier(lead: LeaderState, multiplier: float, in_force: ActivePlan, links: LinkState | None) -> Decided:
    """Starts planning again if topk loses much more of this model's gradients than usual."""
    known = multiplier <= MULTIPLIER_RISE * lead.error_multiplier
    if known or links is None or not isinstance(lead.phase, Steady) or not lead.recent:
        return lead, []
    line = f"topk loses more of these gradients than usual: its extra steps count {multiplier:.2f} times"
    lead = structs.replace(lead, error_multiplier=multiplier)
    lead, actions = planning(lead, in_force.plan, links.links, median(lead.recent))
    return lead, [LogLine(line), *actions]


def on_faster_links(lead: LeaderState, in_force: ActivePlan, links: LinkState | None) -> Decided:
    """Starts planning again if links have become so much faster than planned that another plan may be better."""
    if links is None or not isinstance(lead.phase, Steady) or not lead.searched or not lead.recent:
        return lead, []
    win = to_win(lead, links.watch)
    if win is None or win < TO_WIN or not differ(rates_of(lead.searched), rates_of(links.links)):
        return lead, []
    return planning(lead, in_force.plan, links.links, median(lead.recent))


def rates_of(links: Sequence[Link]) -> tuple[Rates, ...]:
    return tuple(Rates(link.up_bps, link.down_bps) for link in links)


def shares_moved(lead: LeaderState, part: float) -> LeaderState:
    """Requests new measurements if the change of shares is large enough."""
    return structs.replace(lead, moved=True) if part >= SHARES_WORTH else lead


def step_over(lead: LeaderState, step_s: float, step: int, in_force: ActivePlan) -> Decided:
    """Records the step time of a plan in trial or kept, and compares it with the prediction."""
    actions: list[Action] = []
    lead = structs.replace(lead, recent=(*lead.recent[1 - TRIED :], step_s))
    if isinstance(lead.phase, Trying | Settling):
        lead = structs.replace(lead, phase=structs.replace(lead.phase, times=(*lead.phase.times, step_s)))
        lead, actions = _judged(lead, in_force)
    if lead.check is not None:
        check, stale = lead.check.observe(median(lead.recent[-3:]), step)
        slower = stale is not None and stale.slower
        if stale is not None and not slower:  # a plan that is faster than predicted needs no new planning
            check = _expects(stale.measured_s, usual=True)
        lead = structs.replace(lead, check=check, stale=lead.stale or slower)
        actions += [ReportStale(stale)] if stale is not None and slower else []
        actions += [LogLine(stale.reason)] if stale is not None else []
    return lead, actions


def word(lead: LeaderState, links: LinkState, now: float, in_force: ActivePlan) -> tuple[LeaderState, Request]:
    """The request that rank 0 puts in its next row to all ranks."""
    if isinstance(lead.phase, Planning):
        return lead, Request.NOTHING
    if isinstance(lead.phase, Proposing):
        return lead, Request.SWITCH
    win = to_win(lead, links.watch)
    if lead.stale and not lead.moved and win is not None and win < TO_WIN:  # no gain is possible
        check = _expects(median(lead.recent), usual=True) if lead.recent else None
        lead = structs.replace(lead, stale=False, moved=False, check=check)
    elif lead.stale or lead.moved:
        return structs.replace(lead, stale=False, moved=False, check=None), Request.MEASURE
    lost = differ(links.best, links.watch.planned)
    if win is None or win < TO_WIN:  # a probe could not lead to enough gain
        return lead, Request.NOTHING
    due = links.reprobe.due(now, hinted=links.watch.faster, lost=lost, to_win=win)
    return lead, Request.PROBE if due else Request.NOTHING


def to_win(lead: LeaderState, watch: LinkWatch) -> float | None:
    """Largest fraction of the time to a loss that any plan could save, with infinitely fast links and no loss by compression.
    None before the step time is known."""
    return 1.0 - (1.0 - watch.waited_s / watch.usual_s) / lead.steps if watch.settled and watch.usual_s > 0 else None


def proposal(lead: LeaderState) -> Proposing | None:
    return lead.phase if isinstance(lead.phase, Proposing) else None


def switched(lead: LeaderState, plan: Plan, left: Plan) -> Decided:
    """Starts the trial of the proposed plan after all ranks have switched. `plan` is the plan as the ranks run it."""
    proposed = proposal(lead)
    assert proposed is not None, "rank 0 has no plan that others could go over to"
    candidate = proposed.candidate.as_run(plan)
    substituted = candidate is not proposed.candidate
    # Step times recorded so far belong to the previous plan.
    lead = structs.replace(lead, recent=(), stale=False, known=(plan, candidate.plan), steps=candidate.steps)
    actions: list[Action] = [SetActivePlan(candidate.basis, candidate.price)]
    if proposed.back:
        return structs.replace(lead, phase=Settling()), actions
    if candidate.leaves:
        actions.append(LogLine(candidate.leaves, warning=True))
    trial = Trying(candidate.back._replace(runnable=left), proposed.before_s, proposed.for_pace or substituted)
    return structs.replace(lead, phase=trial, check=None if substituted else _expects(candidate.plan.step_s)), actions


def refused(lead: LeaderState) -> LeaderState:
    return structs.replace(lead, phase=Settling())


def _judged(lead: LeaderState, in_force: ActivePlan) -> Decided:
    """Judges a plan by its first steps, once there are enough."""
    phase, plan = lead.phase, in_force.plan
    if not isinstance(phase, Trying | Settling) or len(phase.times) <= TRIED:
        return lead, []
    step_s = median(phase.times[1:])
    if isinstance(phase, Settling):
        return _another_tried(structs.replace(lead, check=_expects(step_s, usual=True)), step_s, in_force)
    before = phase.before
    worse = step_s * lead.steps > (1 + SLOWER) * phase.before_s * before.steps
    line = (f"under plan {digest(plan)} steps take {_ms(step_s)}{_needs(lead.steps)}: {_ms(plan.step_s)} were predicted, "
            f"{_ms(phase.before_s)}{_needs(before.steps)} were taken before{': back to that' if worse else ''}")
    lead = structs.replace(lead, lateness=max(1.0, step_s / plan.step_s) if plan.step_s else 1.0)
    if worse:
        return structs.replace(lead, phase=Proposing(before, back=True), check=None), [LogLine(line)]
    if phase.for_pace:  # tried regardless of its prediction
        lead = structs.replace(lead, check=_expects(step_s, usual=True))
    lead, actions = _another_tried(lead, step_s, in_force)
    return lead, [LogLine(line), *actions]


def _another_tried(lead: LeaderState, step_s: float, in_force: ActivePlan) -> Decided:
    """Proposes another candidate with a similar price, since a few steps decide better. `step_s` is the active plan's."""
    basis, beside, lead = in_force.basis, lead.beside, structs.replace(lead, phase=Steady(), beside=())
    for place, other in enumerate(beside):
        most = 1 + PLAIN if other.dense else LEAVES
        if other.runnable == in_force.plan or (in_force.plan.steps_locally and not other.plan.steps_locally):
            continue  # a plan priced for averaged gradients would run with local optimizer states
        if _hopeless(other, lead.steps):
            continue
        if basis is not None and other.plan.step_s * other.steps <= most * step_s * lead.steps:
            price = in_force.price or other.current_price
            candidate: Candidate = other._replace(current=basis.plan, current_price=price, current_steps=lead.steps)
            phase = Proposing(candidate, step_s, for_pace=other.dense)
            what = "the plan without compression" if other.dense else "local steps, too"
            line = f"tries {what}, {_ms(other.plan.step_s)}{_needs(other.steps)} by the same prices"
            return structs.replace(lead, phase=phase, beside=beside[place + 1 :]), [LogLine(line)]
    return lead, []


def _expects(step_s: float, *, usual: bool = False) -> PredictionCheck:
    return PredictionCheck(step_s, limit=STALE, usual=usual)
