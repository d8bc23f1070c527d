"""Rank 0's part of automatic planning: which plan is worth a change, what came of it, what it asks of all ranks.

Pure functions of what rank 0 knows, called by decide.py on rank 0 alone. No thread, clock, torch, connection or log here.
"""

from __future__ import annotations

from statistics import median

from msgspec import structs

from commlayer.job.autoplan.actions import Action, Describe, Report, Say, StartPlanning, Word
from commlayer.job.autoplan.candidate import Candidate, ReplanVerdict
from commlayer.job.autoplan.facts import InForce, Planned
from commlayer.job.autoplan.state import Lead, Links, Planning, Proposing, Settling, Steady, Trial
from commlayer.observe import PredictionCheck, differ
from commlayer.observe.prediction_check import LIMIT
from commlayer.planner.model.cluster import Link
from commlayer.records import Plan, digest

WORTH = 0.05
"""A plan must shorten the step by this fraction to replace another: it is made from measurements that err."""
SHARES_WORTH = 0.1
"""Work is measured again where a change of shares changes a step's computing by this fraction."""
TRIED = 5
"""Steps under a plan that tell its pace, after one that warms up."""
WORSE = 0.1
"""Where steps take longer than before by more than this fraction, all go back."""
PLAIN = 0.5
"""The plan without compression is tried where it would be slower by at most this fraction, for prices err by as much."""
STALE = LIMIT
"""Relative error from which steps are not what was expected of the plan in force."""

Decided = tuple[Lead, list[Action]]


def planning(lead: Lead, current: Plan, links: tuple[Link, ...], step_s: float) -> Decided:
    """Looks for a plan in place of the current one. Whatever else was under way is given up."""
    known = lead.known[1] if lead.known is not None and lead.known[0] == current else None
    order = StartPlanning(current, known, links, step_s)
    return structs.replace(lead, phase=Planning(order), check=None, stale=False), [order]


def planned(lead: Lead, fact: Planned, in_force: InForce, *, keep: bool) -> Decided:
    """Proposes what was found if it is worth a change; else the plan in force is kept, and its pace taken."""
    if lead.phase != Planning(fact.order):
        return lead, []  # another planning has begun since
    found, measured_s = fact.found, fact.order.step_s
    if found is None:
        return structs.replace(lead, phase=Settling()), [Say(f"no plan: {fact.why}")]
    if in_force.plan != fact.order.current:
        said = "found a plan, but meanwhile somebody has changed the one in force"
        return structs.replace(lead, phase=Steady(), stale=True), [Say(said)]
    verdict = ReplanVerdict(measured_s, found.uncontended_s, found.plan.step_s)
    lead = structs.replace(lead, plan_s=found.took_s, plain=None if keep else found.plain, verdicts=(*lead.verdicts, verdict))
    said = (f"a plan of {len(found.plan.buckets)} buckets for {1e3 * found.plan.step_s:.1f} ms a step; the one in force "
            f"takes {1e3 * measured_s:.1f} ms, {1e3 * found.current_s:.1f} ms by the same prices")
    if keep or found.plan.step_s * lead.lateness > (1.0 - WORTH) * found.current_s:
        basis = found.basis._replace(plan=found.current)
        return structs.replace(lead, phase=Settling()), [
            Describe(basis, found.current_price), Say(f"kept the plan in force: found {said}")]
    return structs.replace(lead, phase=Proposing(found, measured_s)), [
        Describe(in_force.basis, found.current_price), Say(f"found {said}")]


def shares_moved(lead: Lead, part: float) -> Lead:
    """Work is measured again where that matters."""
    return structs.replace(lead, moved=True) if part >= SHARES_WORTH else lead


def step_over(lead: Lead, step_s: float, step: int, in_force: InForce) -> Decided:
    """Takes the pace of a plan that is tried or kept; compares what steps take with what was expected."""
    actions: list[Action] = []
    lead = structs.replace(lead, recent=(*lead.recent[-2:], step_s))
    if isinstance(lead.phase, Trial | Settling):
        lead = structs.replace(lead, phase=structs.replace(lead.phase, times=(*lead.phase.times, step_s)))
        lead, actions = _judged(lead, in_force)
    if lead.check is not None:
        check, stale = lead.check.observe(median(lead.recent), step)
        lead = structs.replace(lead, check=check, stale=lead.stale or stale is not None)
        actions += [Report(stale), Say(stale.reason)] if stale is not None else []
    return lead, actions


def word(lead: Lead, links: Links, now: float) -> tuple[Lead, Word]:
    """What all ranks are to do once they have heard it."""
    if isinstance(lead.phase, Planning):
        return lead, Word.NOTHING
    if isinstance(lead.phase, Proposing):
        return lead, Word.SWITCH
    if lead.stale or lead.moved:
        return structs.replace(lead, stale=False, moved=False, check=None), Word.MEASURE
    lost = differ(links.best, links.watch.planned)
    return lead, Word.PROBE if links.reprobe.due(now, hinted=links.watch.faster, lost=lost) else Word.NOTHING


def proposal(lead: Lead) -> Proposing | None:
    return lead.phase if isinstance(lead.phase, Proposing) else None


def switched(lead: Lead, plan: Plan, left: Plan) -> Decided:
    """All ranks run under the plan that was proposed. `plan`: as they run it."""
    proposed = proposal(lead)
    assert proposed is not None, "rank 0 has no plan that others could go over to"
    candidate = proposed.candidate
    lead = structs.replace(lead, recent=(), known=(plan, candidate.plan))
    actions: list[Action] = [Describe(candidate.basis, candidate.price)]
    if proposed.back:
        return structs.replace(lead, phase=Settling()), actions
    before = candidate._replace(
        basis=candidate.basis._replace(plan=candidate.current), runnable=left, price=candidate.current_price)
    trial = Trial(before, proposed.before_s, proposed.for_pace)
    return structs.replace(lead, phase=trial, check=_expects(candidate.plan.step_s)), actions


def refused(lead: Lead) -> Lead:
    return structs.replace(lead, phase=Settling())


def _judged(lead: Lead, in_force: InForce) -> Decided:
    """What a plan's first steps say of it, once there are enough."""
    phase, plan = lead.phase, in_force.plan
    if not isinstance(phase, Trial | Settling) or len(phase.times) <= TRIED:
        return lead, []
    step_s = median(phase.times[1:])
    if isinstance(phase, Settling):
        return _plain_tried(structs.replace(lead, check=_expects(step_s, usual=True)), step_s, in_force)
    worse = step_s > (1 + (0.0 if phase.for_pace else WORSE)) * phase.before_s
    said = (f"under plan {digest(plan)} steps take {1e3 * step_s:.1f} ms: {1e3 * plan.step_s:.1f} ms were predicted, "
            f"{1e3 * phase.before_s:.1f} ms were taken before{': back to that' if worse else ''}")
    lead = structs.replace(lead, lateness=max(1.0, step_s / plan.step_s) if plan.step_s else 1.0)
    if worse:
        return structs.replace(lead, phase=Proposing(phase.before, back=True), check=None), [Say(said)]
    if phase.for_pace:  # it was tried whatever was predicted of it
        lead = structs.replace(lead, check=_expects(step_s, usual=True))
    lead, actions = _plain_tried(lead, step_s, in_force)
    return lead, [Say(said), *actions]


def _plain_tried(lead: Lead, step_s: float, in_force: InForce) -> Decided:
    """Where prices cannot tell two plans apart, a few steps can. `step_s`: under the plan in force."""
    plain, basis, lead = lead.plain, in_force.basis, structs.replace(lead, phase=Steady(), plain=None)
    if plain is None or basis is None or plain.plan.step_s > (1 + PLAIN) * step_s:
        return lead, []
    candidate: Candidate = plain._replace(current=basis.plan, current_price=in_force.price or plain.current_price)
    said = f"tries the plan without compression, {1e3 * plain.plan.step_s:.1f} ms by the same prices"
    return structs.replace(lead, phase=Proposing(candidate, step_s, for_pace=True)), [Say(said)]


def _expects(step_s: float, *, usual: bool = False) -> PredictionCheck:
    return PredictionCheck(step_s, limit=STALE, usual=usual)
