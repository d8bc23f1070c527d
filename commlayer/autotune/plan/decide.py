"""The decisions of automatic planning: `decide(state, fact, now)` gives the state after a fact, and what is to be done.

Pure: no thread, clock, torch, connection or log. Every rank makes the decisions of this module for itself, from step counts and
rows that are the same on all ranks; so all take the actions of actions.COLLECTIVE after the same steps, in the same order. What
rank 0 decides alone is in decide_rank0.py; the others learn of it by the word in rank 0's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from msgspec import structs

from commlayer.autotune.plan import decide_rank0
from commlayer.autotune.plan.actions import (
    Action,
    Afresh,
    AwaitPlan,
    Describe,
    Hear,
    Measure,
    Pace,
    Probe,
    RecordSteps,
    Say,
    Switch,
    Tell,
    TellPace,
    Word,
)
from commlayer.autotune.plan.facts import (
    Awaited,
    Due,
    Fact,
    Heard,
    InForce,
    Meanwhile,
    Measured,
    PaceTold,
    Probed,
    Refused,
    SharesMoved,
    StepOver,
    Switched,
)
from commlayer.autotune.plan.state import Lead, Links, Measuring, State, Warming, Watching
from commlayer.observe import LinkWatch, Rates, ReprobeSchedule, SeenStep, differ, slower, spelled
from commlayer.planner.model.cluster import Link
from commlayer.planner.model.plan_words import in_words
from commlayer.records import digest

WARM_STEPS = 2
"""They find thresholds, buffers and the forward order: their times are no model of later ones."""
MEASURED_STEPS = 5
SOON_S, LINKS_HOLD = 0.75, 1 / 3
"""The last of the first steps is measured, and no more of them, if it takes so many seconds and all ranks wait for
communication in this part of it: the plan that shortens such steps is worth more than what others would tell. Computing no plan
shortens, and it takes longest in the first steps."""
UNEVEN = 1.5
"""Times what the fastest rank computes: longer than busy processors make it look."""
UNEVEN_S = 0.005
"""Seconds more than the fastest rank computes: below it, a few calls of the operating system make a rank look slow."""
WAITED_STEPS = 2
"""For a plan all wait at most as long as so many steps take."""

Decided = tuple[State, list[Action]]


def begin(rank: int, *, per_node: int = 1, keep: bool = False) -> State:
    """Before the first step. `keep`: looks for plans and changes none."""
    return State(Warming(WARM_STEPS), Lead() if rank == 0 else None, per_node, keep)


def decide(state: State, fact: Fact, now: float) -> Decided:
    match fact:
        case StepOver():
            return _step_over(state, fact)
        case Meanwhile():
            return _meanwhile(state, fact)
        case PaceTold():
            return (state, [Measure()]) if _links_hold(fact) else _record(state)
        case Measured():
            return _measured(state, fact, now)
        case Heard():
            return _heard(state, fact, now)
        case Due():
            return _due(state, now)
        case Probed():
            return _probed(state, fact, now)
        case Awaited():
            return state, [_switch(state)] if fact.found else []
        case Switched():
            return _switched(state, fact)
        case Refused():
            said = Say(f"kept the plan in force: {fact.why}")
            return _with(state, state.lead and decide_rank0.refused(state.lead)), [said]


# ---- steps


def _step_over(state: State, fact: StepOver) -> Decided:
    state, actions = _meanwhile(_later(state, fact.step), fact.meanwhile)
    if state.lead is not None and fact.seconds:
        lead, more = decide_rank0.step_over(state.lead, fact.seconds, state.step, _in_force(state))
        state, actions = _with(state, lead), [*actions, *more]
        if isinstance(state.phase, Watching) and not state.keep:
            lead, more = decide_rank0.found_harder(lead, fact.meanwhile.harder, _in_force(state), state.links)
            lead, again = decide_rank0.found_faster(lead, _in_force(state), state.links)
            state, actions = _with(state, lead), [*actions, *more, *again]
    phase = state.phase
    if isinstance(phase, Warming) and state.step >= phase.until:
        if state.links is None:  # of the first steps, which are recorded, too
            return state, [*actions, TellPace(fact.seconds, fact.waited_s)]
        state, more = _record(state)
        return state, [*actions, *more]
    if isinstance(phase, Measuring) and state.step >= phase.until:
        return state, [*actions, Measure()]
    if isinstance(phase, Watching) and not state.keep:
        return state, [*actions, Hear()]
    return state, actions


def _record(state: State) -> Decided:
    return structs.replace(state, phase=Measuring(state.step + MEASURED_STEPS + 1)), [RecordSteps()]


def _later(state: State, step: int) -> State:
    """Steps that it has not heard of, of a warm-up or under somebody else's plan, are none of those that it waits for."""
    phase, missed = state.phase, max(0, step - state.step - 1)
    if missed and isinstance(phase, Warming | Measuring):
        phase = structs.replace(phase, until=phase.until + missed)
    return structs.replace(state, step=step, phase=phase)


def _meanwhile(state: State, fact: Meanwhile) -> Decided:
    state, actions = structs.replace(state, in_force=fact.in_force), list[Action]()
    for news in fact.news if state.lead is not None else ():
        if isinstance(news, SharesMoved):
            state = _with(state, decide_rank0.shares_moved(_lead(state), news.part))
            continue
        lead, more = decide_rank0.planned(_lead(state), news, _in_force(state), keep=state.keep)
        state, actions = _described(_with(state, lead), more), [*actions, *more]
    return state, actions


def _measured(state: State, fact: Measured, now: float) -> Decided:
    """What was measured is planned for. Rank 0 goes on alone."""
    soon = isinstance(state.phase, Warming)
    state, actions = _plan_for(structs.replace(state, phase=Watching()), fact.links, now)
    actions += [Say(f"links carry {spelled(decide_rank0.rates_of(fact.links))}"), *_uneven(fact)]
    recent = () if state.lead is None else state.lead.recent
    state, actions = _start_planning(state, actions, fact.step_s, median(recent) if recent else 0.0, checks=True)
    # A slow step that goes on beside the search costs more than the wait.
    return state, [*actions, AwaitPlan(WAITED_STEPS * fact.step_s)] if soon and not state.keep else actions


def _links_hold(fact: PaceTold) -> bool:
    """Whether steps are slow, and by what plans can mend."""
    return fact.step_s >= SOON_S and fact.waited_s >= LINKS_HOLD * fact.step_s


def _uneven(fact: Measured) -> list[Say]:
    """What no plan mends."""
    computing_s = fact.computing_s
    if not computing_s or max(computing_s) < max(UNEVEN * min(computing_s), min(computing_s) + UNEVEN_S):
        return []
    slowest = max(range(len(computing_s)), key=computing_s.__getitem__)
    times = max(computing_s) / min(computing_s)
    remedy = ": a Sampler with a Controller would give it a smaller share of the batch" if fact.shares else ""
    return [Say(f"{fact.names[slowest]} computes {times:.1f} times as long as the fastest, and all wait for it{remedy}")]


# ---- rows that all ranks hear


def _heard(state: State, fact: Heard, now: float) -> Decided:
    """All ranks act alike upon what all have seen."""
    if not fact.rows:
        return state, []
    known, first = state.links, fact.rows[0]
    assert known is not None, "rows are told once links are known"
    step_s = median(row.step_s for row in fact.rows)
    if first.word == Word.SWITCH:
        return state, [_switch(state)]
    if first.word == Word.MEASURE:
        return structs.replace(state, phase=Warming(state.step + 1)), []
    if first.word == Word.PROBE:
        return state, [Probe(first.plan_s, step_s)]
    watch, found = known.watch.observe(SeenStep(
        step_s, min(row.waited_s for row in fact.rows), tuple(row.carried for row in fact.rows[:: state.per_node])))
    state = structs.replace(state, links=structs.replace(known, watch=watch))
    if found is None:
        return state, []
    if not slower(found, watch.planned):  # nobody loses anything by it: rank 0 looks for a plan when it is time to
        said = Say(f"links carry {spelled(found)}, as seen in steps, and not {spelled(watch.planned)}")
        state, actions = _plan_for(state, _with_rates(state, found), now)
        assert state.links is not None
        # They may be faster still: when that is probed is counted from when they were last known to be no faster.
        return structs.replace(state, links=structs.replace(state.links, reprobe=known.reprobe)), [said, *actions]
    said = Say(f"links have changed from {spelled(watch.planned)} to {spelled(found)}, as seen in steps of "
               f"{1e3 * step_s:.1f} ms that took {1e3 * watch.usual_s:.1f} ms before")
    state, actions = _plan_anew(state, found, first.plan_s, step_s, now)
    return state, [said, *actions]


def _due(state: State, now: float) -> Decided:
    if not isinstance(state.phase, Watching) or state.links is None:
        return state, []
    slow_s = state.links.watch.slow_s
    if state.lead is None:
        return state, [Tell(Word.NOTHING, 0.0, slow_s)]
    lead, word = decide_rank0.word(state.lead, state.links, now, _in_force(state))
    return _with(state, lead), [Tell(word, lead.plan_s, slow_s)]


# ---- links


def _probed(state: State, fact: Probed, now: float) -> Decided:
    """A link carries little under a plan for a slow one, so nothing but a probe tells that it is faster by now."""
    known = state.links
    assert known is not None
    planned = known.watch.planned
    rates = tuple(  # whether a link is slower is told by steps: a short probe may be
        Rates(max(link.up_bps, old.up_bps), max(link.down_bps, old.down_bps))
        for link, old in zip(fact.links, planned, strict=True)
    )
    faster = differ(rates, planned)
    state = structs.replace(state, links=structs.replace(known, reprobe=known.reprobe.probed(now, fact.took_s, found=faster)))
    said = Say(f"probed the links in {1e3 * fact.took_s:.0f} ms: " + (
        f"{spelled(rates)} instead of {spelled(planned)}" if faster else f"no faster than {spelled(planned)}"))
    if not faster:
        return state, [said, Afresh()]  # a probe's bytes are no step's
    state, actions = _plan_anew(state, rates, fact.plan_s, fact.step_s, now)
    return state, [said, *actions]


def _plan_anew(state: State, rates: Sequence[Rates], plan_s: float, step_s: float, now: float) -> Decided:
    """With the costs that are known, for other rates. All wait for it where that took less than a step before."""
    assert state.links is not None
    pace_s = 0.0 if state.lead is None else decide_rank0.pace_since(state.lead, state.links.watch.slow_s)
    state, actions = _plan_for(state, _with_rates(state, rates), now)
    state, actions = _start_planning(state, actions, step_s, pace_s)
    return state, [*actions, AwaitPlan(WAITED_STEPS * step_s)] if 0.0 < plan_s < step_s else actions


def _plan_for(state: State, links: tuple[Link, ...], now: float) -> Decided:
    """From now on these links are what is planned for."""
    rates, known = decide_rank0.rates_of(links), state.links
    if known is None:
        known = Links(links, LinkWatch(rates), rates, ReprobeSchedule().changed(now))
    else:
        best = tuple(Rates(*map(max, zip(*both, strict=True))) for both in zip(known.best, rates, strict=True))
        watch = structs.replace(known.watch, planned=rates)
        known = structs.replace(known, links=links, watch=watch, best=best, reprobe=known.reprobe.changed(now))
    return structs.replace(state, links=known), [Pace(links), Afresh()]


def _with_rates(state: State, rates: Sequence[Rates]) -> tuple[Link, ...]:
    assert state.links is not None
    return tuple(Link(r.up_bps, r.down_bps, old.alpha_s) for r, old in zip(rates, state.links.links, strict=True))


# ---- plans


def _start_planning(
    state: State, actions: list[Action], step_s: float, pace_s: float = 0.0, *, checks: bool = False,
) -> Decided:
    if state.lead is None:
        return state, actions
    assert state.links is not None
    lead, more = decide_rank0.planning(state.lead, _in_force(state).plan, state.links.links, step_s, pace_s,
                                        checks=checks)
    return _with(state, lead), [*actions, *more]


def _switch(state: State) -> Switch:
    proposed = None if state.lead is None else decide_rank0.proposal(state.lead)
    return Switch(None if proposed is None else proposed.candidate)


def _switched(state: State, fact: Switched) -> Decided:
    """Under another plan links carry other amounts, and steps take other times; under the plan before, those of then."""
    known = state.links
    assert known is not None
    watch = LinkWatch(decide_rank0.rates_of(known.links))
    if known.before is not None and known.before[0] == fact.plan and known.before[1].planned == watch.planned:
        watch = known.before[1].resumed()
    links = structs.replace(known, watch=watch, before=(fact.left, known.watch))
    state = structs.replace(state, links=links, in_force=InForce(fact.plan))
    actions: list[Action] = []
    back = False
    if state.lead is not None:
        proposed = decide_rank0.proposal(state.lead)
        back = proposed is not None and proposed.back
        lead, actions = decide_rank0.switched(state.lead, fact.plan, fact.left)
        state = _described(_with(state, lead), actions)
    said = Say(f"went {'back' if back else 'over'} to plan {digest(fact.plan)}: {in_words(fact.plan)}")
    return state, [*actions, Afresh(), said]


def _described(state: State, actions: Sequence[Action]) -> State:
    """With what is said of the plan in force."""
    for each in actions:
        if isinstance(each, Describe):
            state = structs.replace(state, in_force=_in_force(state)._replace(basis=each.basis, price=each.price))
    return state


def _with(state: State, lead: Lead | None) -> State:
    return structs.replace(state, lead=lead)


def _lead(state: State) -> Lead:
    assert state.lead is not None
    return state.lead


def _in_force(state: State) -> InForce:
    assert state.in_force is not None, "a step has ended"
    return state.in_force
