"""Decisions of automatic planning, as a pure function: `decide(state, fact, now)` returns the next state and a list of
actions.

Every rank runs this module on step counts and rows that are the same on all ranks. All ranks therefore take the actions of
actions.COLLECTIVE after the same steps, in the same order. Decisions that only rank 0 makes are in decide_rank0.py; the
other ranks learn them from the `word` in rank 0's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from msgspec import structs

from commlayer.autotune.plan import decide_rank0
from commlayer.autotune.plan.actions import (
    Action,
    AwaitPlan,
    LogLine,
    Measure,
    PaceSenders,
    Probe,
    ReadReports,
    RecordSteps,
    Request,
    ResetWindow,
    SetActivePlan,
    ShareReport,
    ShareStepTime,
    Switch,
)
from commlayer.autotune.plan.facts import (
    ActivePlan,
    Events,
    Fact,
    MeasuringDone,
    ProbeDone,
    ReportDue,
    ReportsRead,
    SharesMoved,
    StepDone,
    StepTimes,
    SwitchDone,
    SwitchRefused,
    WaitDone,
)
from commlayer.autotune.plan.state import AutoPlanState, LeaderState, LinkState, Measuring, Warming, Watching
from commlayer.observe import LinkWatch, Rates, ReprobeSchedule, SeenStep, differ, slower, spelled
from commlayer.planner.model import Link
from commlayer.planner.plan_rules import in_words
from commlayer.records import digest

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
            return _with(state, state.lead and decide_rank0.refused(state.lead)), [line]


# ---- steps


def _step_over(state: AutoPlanState, fact: StepDone) -> Decided:
    state, actions = _meanwhile(_later(state, fact.step), fact.meanwhile)
    if state.lead is not None and fact.seconds:
        lead, more = decide_rank0.step_over(state.lead, fact.seconds, state.step, _in_force(state))
        state, actions = _with(state, lead), [*actions, *more]
        if isinstance(state.phase, Watching) and not state.keep:
            lead, more = decide_rank0.on_error_multiplier(lead, fact.meanwhile.error_multiplier, _in_force(state), state.links)
            lead, again = decide_rank0.on_faster_links(lead, _in_force(state), state.links)
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
            state = _with(state, decide_rank0.shares_moved(_lead(state), news.part))
            continue
        lead, more = decide_rank0.planned(_lead(state), news, _in_force(state), keep=state.keep)
        state, actions = _described(_with(state, lead), more), [*actions, *more]
    return state, actions


def _measured(state: AutoPlanState, fact: MeasuringDone, now: float) -> Decided:
    """Starts planning with the measurements; rank 0 plans alone."""
    soon = isinstance(state.phase, Warming)
    state, actions = _plan_for(structs.replace(state, phase=Watching()), fact.links, now)
    actions += [LogLine(f"links carry {spelled(decide_rank0.rates_of(fact.links))}"), *_uneven(fact)]
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
    known, first = state.links, fact.rows[0]
    assert known is not None, "rows are told once links are known"
    step_s = median(row.step_s for row in fact.rows)
    if first.word == Request.SWITCH:
        return state, [_switch(state)]
    if first.word == Request.MEASURE:
        return structs.replace(state, phase=Warming(state.step + 1)), []
    if first.word == Request.PROBE:
        return state, [Probe(first.plan_s, step_s)]
    watch, rates = known.watch.observe(SeenStep(
        step_s, min(row.waited_s for row in fact.rows), tuple(row.carried for row in fact.rows[:: state.per_node])))
    state = structs.replace(state, links=structs.replace(known, watch=watch))
    if rates is None:
        return state, []
    if not slower(rates, watch.planned):  # faster links slow no step down; rank 0 plans later
        line = LogLine(f"links carry {spelled(rates)}, as seen in steps, and not {spelled(watch.planned)}")
        state, actions = _plan_for(state, _with_rates(state, rates), now)
        assert state.links is not None
        # The links may be even faster, so the probe schedule counts from the time when they were last found no faster.
        return structs.replace(state, links=structs.replace(state.links, reprobe=known.reprobe)), [line, *actions]
    line = LogLine(f"links have changed from {spelled(watch.planned)} to {spelled(rates)}, as seen in steps of "
               f"{1e3 * step_s:.1f} ms that took {1e3 * watch.usual_s:.1f} ms before")
    state, actions = _plan_anew(state, rates, first.plan_s, step_s, now)
    return state, [line, *actions]


def _due(state: AutoPlanState, now: float) -> Decided:
    if not isinstance(state.phase, Watching) or state.links is None:
        return state, []
    slow_s = state.links.watch.slow_s
    if state.lead is None:
        return state, [ShareReport(Request.NOTHING, 0.0, slow_s)]
    lead, word = decide_rank0.word(state.lead, state.links, now, _in_force(state))
    return _with(state, lead), [ShareReport(word, lead.plan_s, slow_s)]


# ---- links


def _probed(state: AutoPlanState, fact: ProbeDone, now: float) -> Decided:
    """Evaluates a probe: under a plan made for a slow link the link carries little, so only a probe shows that it is faster."""
    known = state.links
    assert known is not None
    planned = known.watch.planned
    rates = tuple(  # a short probe may read too low; whether a link is slower is seen in steps
        Rates(max(link.up_bps, old.up_bps), max(link.down_bps, old.down_bps))
        for link, old in zip(fact.links, planned, strict=True)
    )
    faster = differ(rates, planned)
    state = structs.replace(state, links=structs.replace(known, reprobe=known.reprobe.probed(now, fact.took_s, found=faster)))
    line = LogLine(f"probed the links in {1e3 * fact.took_s:.0f} ms: " + (
        f"{spelled(rates)} instead of {spelled(planned)}" if faster else f"no faster than {spelled(planned)}"))
    if not faster:
        return state, [line, ResetWindow()]  # the probe's traffic belongs to no step
    state, actions = _plan_anew(state, rates, fact.plan_s, fact.step_s, now)
    return state, [line, *actions]


def _plan_anew(state: AutoPlanState, rates: Sequence[Rates], plan_s: float, step_s: float, now: float) -> Decided:
    """Plans for new rates with the known costs. All ranks wait for the plan if the last planning took less than a step."""
    assert state.links is not None
    pace_s = 0.0 if state.lead is None else decide_rank0.pace_since(state.lead, state.links.watch.slow_s)
    state, actions = _plan_for(state, _with_rates(state, rates), now)
    state, actions = _start_planning(state, actions, step_s, pace_s)
    return state, [*actions, AwaitPlan(WAITED_STEPS * step_s)] if 0.0 < plan_s < step_s else actions


def _plan_for(state: AutoPlanState, links: tuple[Link, ...], now: float) -> Decided:
    """Sets the links that are planned for."""
    rates, known = decide_rank0.rates_of(links), state.links
    if known is None:
        known = LinkState(links, LinkWatch(rates), rates, ReprobeSchedule().changed(now))
    else:
        best = tuple(Rates(*map(max, zip(*both, strict=True))) for both in zip(known.best, rates, strict=True))
        watch = structs.replace(known.watch, planned=rates)
        known = structs.replace(known, links=links, watch=watch, best=best, reprobe=known.reprobe.changed(now))
    return structs.replace(state, links=known), [PaceSenders(links), ResetWindow()]


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
    lead, more = decide_rank0.planning(state.lead, _in_force(state).plan, state.links.links, step_s, pace_s,
                                        checks=checks)
    return _with(state, lead), [*actions, *more]


def _switch(state: AutoPlanState) -> Switch:
    proposed = None if state.lead is None else decide_rank0.proposal(state.lead)
    return Switch(None if proposed is None else proposed.candidate)


def _switched(state: AutoPlanState, fact: SwitchDone) -> Decided:
    """Restarts the observation of links and steps, which differ by plan; resumes it on a return to the previous plan."""
    known = state.links
    assert known is not None
    watch = LinkWatch(decide_rank0.rates_of(known.links))
    if known.before is not None and known.before[0] == fact.plan and known.before[1].planned == watch.planned:
        watch = known.before[1].resumed()
    links = structs.replace(known, watch=watch, before=(fact.left, known.watch))
    state = structs.replace(state, links=links, in_force=ActivePlan(fact.plan))
    actions: list[Action] = []
    back = False
    if state.lead is not None:
        proposed = decide_rank0.proposal(state.lead)
        back = proposed is not None and proposed.back
        lead, actions = decide_rank0.switched(state.lead, fact.plan, fact.left)
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
