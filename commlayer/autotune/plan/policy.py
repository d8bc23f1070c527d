"""Decisions of automatic planning, as a pure function: `decide(state, fact, now)` returns the next state and a list of
actions.

Every rank runs this module on step counts and rows that are the same on all ranks. All ranks therefore take the actions of
COLLECTIVE after the same steps, in the same order. Decisions that only rank 0 makes are in the second half; the other ranks
learn them from the `word` in rank 0's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from statistics import median

from msgspec import structs

from commlayer.autotune.plan.state import (
    LEAVES,
    MOST_STEPS,
    Action,
    ActivePlan,
    AutoPlanState,
    AwaitPlan,
    Candidate,
    Events,
    Fact,
    LeaderState,
    LinkState,
    LogLine,
    Measure,
    Measuring,
    MeasuringDone,
    PaceSenders,
    Planning,
    PlanningDone,
    PlanRequest,
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
    Settling,
    ShareReport,
    SharesMoved,
    ShareStepTime,
    StartPlanning,
    Steady,
    StepDone,
    StepTimes,
    SuggestSetting,
    Switch,
    SwitchDone,
    SwitchRefused,
    Trying,
    WaitDone,
    Warming,
    Watching,
)
from commlayer.observe import LinkWatch, PredictionCheck, Rates, ReprobeSchedule, SeenStep, differ, slower, spelled
from commlayer.observe.prediction_check import LIMIT
from commlayer.planner.model import Link
from commlayer.planner.plan_rules import in_words
from commlayer.records import Plan, digest

WARM_STEPS = 2
"""The first steps determine thresholds, buffers and the forward order; their times do not represent later ones."""
MEASURED_STEPS = 5
SOON_S, LINKS_HOLD = 0.75, 1 / 3
"""The first steps are measured at the end of the warm-up, without further steps, if steps are slow and limited by links: a
step takes at least SOON_S and all ranks wait for communication for at least LINKS_HOLD of it. A plan that shortens such steps
is worth more than further measurements. No plan shortens computing, which takes longest in the first steps."""
UNEVEN = 1.5
"""A rank is slow if it computes this many times as long as the fastest one: more than contention for processors explains."""
UNEVEN_S = 0.005
"""And it must compute this many seconds longer: below that, a few system calls make a rank look slow."""
WAITED_STEPS = 2
"""All ranks wait for a plan for at most this many steps."""

Decided = tuple[AutoPlanState, list[Action]]


def begin(rank: int, *, per_node: int = 1, keep: bool = False) -> AutoPlanState:
    """The state before the first step. With `keep` the planner searches for plans and never switches."""
    return AutoPlanState(Warming(WARM_STEPS), LeaderState() if rank == 0 else None, per_node, keep)


def decide(state: AutoPlanState, fact: Fact, now: float) -> Decided:
    match fact:
        case StepDone():
            return _step_over(state, fact)
        case Events():
            return _meanwhile(state, fact)
        case StepTimes():
            return (state, [Measure()]) if _links_hold(fact) else _record(state)
        case MeasuringDone():
            return _measured(state, fact, now)
        case ReportsRead():
            return _heard(state, fact, now)
        case ReportDue():
            return _due(state, now)
        case ProbeDone():
            return _probed(state, fact, now)
        case WaitDone():
            return state, [_switch(state)] if fact.found else []
        case SwitchDone():
            return _switched(state, fact)
        case SwitchRefused():
            line = LogLine(f"kept the plan in force: {fact.why}")
            return _with(state, state.lead and refused(state.lead)), [line]


# ---- steps


def _step_over(state: AutoPlanState, fact: StepDone) -> Decided:
    state, actions = _meanwhile(_later(state, fact.step), fact.meanwhile)
    if state.lead is not None and fact.seconds:
        lead, more = step_over(state.lead, fact.seconds, state.step, _in_force(state))
        state, actions = _with(state, lead), [*actions, *more]
        if isinstance(state.phase, Watching) and not state.keep:
            lead, more = on_error_multiplier(lead, fact.meanwhile.error_multiplier, _in_force(state), state.links)
            lead, again = on_faster_links(lead, _in_force(state), state.links)
            state, actions = _with(state, lead), [*actions, *more, *again]
    phase = state.phase
    if isinstance(phase, Warming) and state.step >= phase.until:
        if state.links is None:  # the job's first steps, which were recorded
            return state, [*actions, ShareStepTime(fact.seconds, fact.waited_s)]
        state, more = _record(state)
        return state, [*actions, *more]
    if isinstance(phase, Measuring) and state.step >= phase.until:
        return state, [*actions, Measure()]
    if isinstance(phase, Watching) and not state.keep:
        return state, [*actions, ReadReports()]
    return state, actions


def _record(state: AutoPlanState) -> Decided:
    return structs.replace(state, phase=Measuring(state.step + MEASURED_STEPS + 1)), [RecordSteps()]


def _later(state: AutoPlanState, step: int) -> AutoPlanState:
    """Counts a step. Steps that were not reported here (warm-up of the codec, another plan) extend the present phase."""
    phase, missed = state.phase, max(0, step - state.step - 1)
    if missed and isinstance(phase, Warming | Measuring):
        phase = structs.replace(phase, until=phase.until + missed)
    return structs.replace(state, step=step, phase=phase)


def _meanwhile(state: AutoPlanState, fact: Events) -> Decided:
    state, actions = structs.replace(state, in_force=fact.in_force), list[Action]()
    for news in fact.news if state.lead is not None else ():
        if isinstance(news, SharesMoved):
            state = _with(state, shares_moved(_lead(state), news.part))
            continue
        lead, more = planned(_lead(state), news, _in_force(state), keep=state.keep)
        state, actions = _described(_with(state, lead), more), [*actions, *more]
    return state, actions


def _measured(state: AutoPlanState, fact: MeasuringDone, now: float) -> Decided:
    """Starts planning with the measurements; rank 0 plans alone."""
    soon = isinstance(state.phase, Warming)
    state, actions = _plan_for(structs.replace(state, phase=Watching()), fact.links, now)
    actions += [LogLine(f"links carry {spelled(rates_of(fact.links))}"), *_uneven(fact)]
    recent = () if state.lead is None else state.lead.recent
    state, actions = _start_planning(state, actions, fact.step_s, median(recent) if recent else 0.0, checks=True)
    # A slow step during the search would cost more than waiting for the search.
    return state, [*actions, AwaitPlan(WAITED_STEPS * fact.step_s)] if soon and not state.keep else actions


def _links_hold(fact: StepTimes) -> bool:
    """Whether steps are slow because of communication, which a plan can shorten."""
    return fact.step_s >= SOON_S and fact.waited_s >= LINKS_HOLD * fact.step_s


def _uneven(fact: MeasuringDone) -> list[LogLine]:
    """Reports a rank that computes much longer than the others, which no plan can change."""
    computing_s = fact.computing_s
    if not computing_s or max(computing_s) < max(UNEVEN * min(computing_s), min(computing_s) + UNEVEN_S):
        return []
    slowest = max(range(len(computing_s)), key=computing_s.__getitem__)
    times = max(computing_s) / min(computing_s)
    remedy = ": a Sampler with a Controller would give it a smaller share of the batch" if fact.shares else ""
    return [LogLine(f"{fact.names[slowest]} computes {times:.1f} times as long as the fastest, and all wait for it{remedy}")]


# ---- rows of all ranks


def _heard(state: AutoPlanState, fact: ReportsRead, now: float) -> Decided:
    """Acts on rows that all ranks have received, so that all ranks act alike."""
    if not fact.rows:
        return state, []
    link_state, first = state.links, fact.rows[0]
    assert link_state is not None, "rows are told once links are known"
    step_s = median(row.step_s for row in fact.rows)
    if first.word == PlanRequest.SWITCH:
        return state, [_switch(state)]
    if first.word == PlanRequest.MEASURE:
        return structs.replace(state, phase=Warming(state.step + 1)), []
    if first.word == PlanRequest.PROBE:
        return state, [Probe(first.plan_s, step_s)]
    watch, rates = link_state.watch.observe(SeenStep(
        step_s, min(row.waited_s for row in fact.rows), tuple(row.carried for row in fact.rows[:: state.per_node])))
    state = structs.replace(state, links=structs.replace(link_state, watch=watch))
    if rates is None:
        return state, []
    if not slower(rates, watch.planned):  # faster links slow no step down; rank 0 plans later
        line = LogLine(f"links carry {spelled(rates)}, as seen in steps, and not {spelled(watch.planned)}")
        state, actions = _plan_for(state, _with_rates(state, rates), now)
        assert state.links is not None
        # The links may be even faster, so the probe schedule counts from the time when they were last found no faster.
        return structs.replace(state, links=structs.replace(state.links, reprobe=link_state.reprobe)), [line, *actions]
    line = LogLine(f"links have changed from {spelled(watch.planned)} to {spelled(rates)}, as seen in steps of "
               f"{1e3 * step_s:.1f} ms that took {1e3 * watch.usual_s:.1f} ms before")
    state, actions = _plan_anew(state, rates, first.plan_s, step_s, now)
    return state, [line, *actions]


def _due(state: AutoPlanState, now: float) -> Decided:
    if not isinstance(state.phase, Watching) or state.links is None:
        return state, []
    slow_s = state.links.watch.slow_s
    if state.lead is None:
        return state, [ShareReport(PlanRequest.NOTHING, 0.0, slow_s)]
    lead, word = next_request(state.lead, state.links, now, _in_force(state))
    return _with(state, lead), [ShareReport(word, lead.plan_s, slow_s)]


# ---- links


def _probed(state: AutoPlanState, fact: ProbeDone, now: float) -> Decided:
    """Evaluates a probe: under a plan made for a slow link the link carries little, so only a probe shows that it is faster."""
    link_state = state.links
    assert link_state is not None
    planned = link_state.watch.planned
    rates = tuple(  # a short probe may read too low; whether a link is slower is seen in steps
        Rates(max(link.up_bps, old.up_bps), max(link.down_bps, old.down_bps))
        for link, old in zip(fact.links, planned, strict=True)
    )
    faster = differ(rates, planned)
    state = structs.replace(state, links=structs.replace(
        link_state, reprobe=link_state.reprobe.probed(now, fact.took_s, found=faster)))
    line = LogLine(f"probed the links in {1e3 * fact.took_s:.0f} ms: " + (
        f"{spelled(rates)} instead of {spelled(planned)}" if faster else f"no faster than {spelled(planned)}"))
    if not faster:
        return state, [line, ResetWindow()]  # the probe's traffic belongs to no step
    state, actions = _plan_anew(state, rates, fact.plan_s, fact.step_s, now)
    return state, [line, *actions]


def _plan_anew(state: AutoPlanState, rates: Sequence[Rates], plan_s: float, step_s: float, now: float) -> Decided:
    """Plans for new rates with the known costs. All ranks wait for the plan if the last planning took less than a step."""
    assert state.links is not None
    pace_s = 0.0 if state.lead is None else pace_since(state.lead, state.links.watch.slow_s)
    state, actions = _plan_for(state, _with_rates(state, rates), now)
    state, actions = _start_planning(state, actions, step_s, pace_s)
    return state, [*actions, AwaitPlan(WAITED_STEPS * step_s)] if 0.0 < plan_s < step_s else actions


def _plan_for(state: AutoPlanState, links: tuple[Link, ...], now: float) -> Decided:
    """Sets the links that are planned for."""
    rates, link_state = rates_of(links), state.links
    if link_state is None:
        link_state = LinkState(links, LinkWatch(rates), rates, ReprobeSchedule().changed(now))
    else:
        best = tuple(Rates(*map(max, zip(*both, strict=True))) for both in zip(link_state.best, rates, strict=True))
        watch = structs.replace(link_state.watch, planned=rates)
        link_state = structs.replace(link_state, links=links, watch=watch, best=best, reprobe=link_state.reprobe.changed(now))
    return structs.replace(state, links=link_state), [PaceSenders(links), ResetWindow()]


def _with_rates(state: AutoPlanState, rates: Sequence[Rates]) -> tuple[Link, ...]:
    assert state.links is not None
    return tuple(Link(r.up_bps, r.down_bps, old.alpha_s) for r, old in zip(rates, state.links.links, strict=True))


# ---- plans


def _start_planning(
    state: AutoPlanState, actions: list[Action], step_s: float, pace_s: float = 0.0, *, checks: bool = False,
) -> Decided:
    if state.lead is None:
        return state, actions
    assert state.links is not None
    lead, more = planning(state.lead, _in_force(state).plan, state.links.links, step_s, pace_s,
                                        checks=checks)
    return _with(state, lead), [*actions, *more]


def _switch(state: AutoPlanState) -> Switch:
    proposed = None if state.lead is None else proposal(state.lead)
    return Switch(None if proposed is None else proposed.candidate)


def _switched(state: AutoPlanState, fact: SwitchDone) -> Decided:
    """Restarts the observation of links and steps, which differ by plan; resumes it on a return to the previous plan."""
    link_state = state.links
    assert link_state is not None
    watch = LinkWatch(rates_of(link_state.links))
    if link_state.before is not None and link_state.before[0] == fact.plan and link_state.before[1].planned == watch.planned:
        watch = link_state.before[1].resumed()
    links = structs.replace(link_state, watch=watch, before=(fact.left, link_state.watch))
    state = structs.replace(state, links=links, in_force=ActivePlan(fact.plan))
    actions: list[Action] = []
    back = False
    if state.lead is not None:
        proposed = proposal(state.lead)
        back = proposed is not None and proposed.back
        lead, actions = switched(state.lead, fact.plan, fact.left)
        state = _described(_with(state, lead), actions)
    line = LogLine(f"went {'back' if back else 'over'} to plan {digest(fact.plan)}: {in_words(fact.plan)}")
    return state, [*actions, ResetWindow(), line]


def _described(state: AutoPlanState, actions: Sequence[Action]) -> AutoPlanState:
    """Records the basis and price of the active plan from `SetActivePlan` actions."""
    for each in actions:
        if isinstance(each, SetActivePlan):
            state = structs.replace(state, in_force=_in_force(state)._replace(basis=each.basis, price=each.price))
    return state


def _with(state: AutoPlanState, lead: LeaderState | None) -> AutoPlanState:
    return structs.replace(state, lead=lead)


def _lead(state: AutoPlanState) -> LeaderState:
    assert state.lead is not None
    return state.lead


def _in_force(state: AutoPlanState) -> ActivePlan:
    assert state.in_force is not None, "a step has ended"
    return state.in_force


# ---- decisions that rank 0 makes alone: which plan is worth a switch, whether a trial succeeded, what to request from all
# ranks
#
# Pure functions, called by policy.py on rank 0 only.

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

LeaderDecided = tuple[LeaderState, list[Action]]


def planning(
    lead: LeaderState, current: Plan, links: tuple[Link, ...], step_s: float, pace_s: float = 0.0, *, checks: bool = False,
) -> LeaderDecided:
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


def planned(lead: LeaderState, fact: PlanningDone, in_force: ActivePlan, *, keep: bool) -> LeaderDecided:
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


def _discarded(lead: LeaderState, found: Candidate, *, keep: bool) -> LeaderDecided:
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


def on_error_multiplier(lead: LeaderState, multiplier: float, in_force: ActivePlan, links: LinkState | None) -> LeaderDecided:
    """Starts planning again if topk loses much more of this model's gradients than usual."""
    known = multiplier <= MULTIPLIER_RISE * lead.error_multiplier
    if known or links is None or not isinstance(lead.phase, Steady) or not lead.recent:
        return lead, []
    line = f"topk loses more of these gradients than usual: its extra steps count {multiplier:.2f} times"
    lead = structs.replace(lead, error_multiplier=multiplier)
    lead, actions = planning(lead, in_force.plan, links.links, median(lead.recent))
    return lead, [LogLine(line), *actions]


def on_faster_links(lead: LeaderState, in_force: ActivePlan, links: LinkState | None) -> LeaderDecided:
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


def step_over(lead: LeaderState, step_s: float, step: int, in_force: ActivePlan) -> LeaderDecided:
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


def next_request(lead: LeaderState, links: LinkState, now: float, in_force: ActivePlan) -> tuple[LeaderState, PlanRequest]:
    """The request that rank 0 puts in its next row to all ranks."""
    if isinstance(lead.phase, Planning):
        return lead, PlanRequest.NOTHING
    if isinstance(lead.phase, Proposing):
        return lead, PlanRequest.SWITCH
    win = to_win(lead, links.watch)
    if lead.stale and not lead.moved and win is not None and win < TO_WIN:  # no gain is possible
        check = _expects(median(lead.recent), usual=True) if lead.recent else None
        lead = structs.replace(lead, stale=False, moved=False, check=check)
    elif lead.stale or lead.moved:
        return structs.replace(lead, stale=False, moved=False, check=None), PlanRequest.MEASURE
    lost = differ(links.best, links.watch.planned)
    if win is None or win < TO_WIN:  # a probe could not lead to enough gain
        return lead, PlanRequest.NOTHING
    due = links.reprobe.due(now, hinted=links.watch.faster, lost=lost, to_win=win)
    return lead, PlanRequest.PROBE if due else PlanRequest.NOTHING


def to_win(lead: LeaderState, watch: LinkWatch) -> float | None:
    """Largest fraction of the time to a loss that any plan could save, with infinitely fast links and no loss by compression.
    None before the step time is known."""
    return 1.0 - (1.0 - watch.waited_s / watch.usual_s) / lead.steps if watch.settled and watch.usual_s > 0 else None


def proposal(lead: LeaderState) -> Proposing | None:
    return lead.phase if isinstance(lead.phase, Proposing) else None


def switched(lead: LeaderState, plan: Plan, left: Plan) -> LeaderDecided:
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


def _judged(lead: LeaderState, in_force: ActivePlan) -> LeaderDecided:
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


def _another_tried(lead: LeaderState, step_s: float, in_force: ActivePlan) -> LeaderDecided:
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
