"""Rank 0's decisions about plans, as pure functions: which plan to try, whether a trial succeeded, what rank 0 requests from
all ranks.

Rank 0 is idle, searching (a thread plans while training goes on) or trying (the first steps under a new plan). It proposes a
plan to which all ranks then switch: a plan that the search found, or the previous plan if a trial failed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile
from statistics import median

from msgspec import structs

from commlayer.autotune.planning.candidate import LEAVES, MOST_STEPS, Candidate
from commlayer.autotune.state import (
    WARM_STEPS,
    Decided,
    LogLine,
    Phase,
    PlanProposal,
    Reason,
    SearchRequest,
    TuningRequest,
    TuningState,
    extract_rates,
)
from commlayer.observe.link_monitor import LinkWatch, differ
from commlayer.observe.prediction_check import LIMIT, PredictionCheck
from commlayer.records import Plan, digest

WORTH = 0.02
"""A plan is tried only if it is predicted to reach a loss sooner by this fraction. Predictions are less accurate than that,
but a few steps show the difference."""
TRIED = 5
"""Number of steps whose median is a new plan's step time, after one warm-up step."""
SLOWER = 0.02
"""All ranks roll back if the time to a loss is longer than under the previous plan by more than this fraction. Medians of so
few steps differ by as much under one plan, and servers drop their residuals at a roll-back."""
CLEARLY = 0.25
"""A trial ends after the two steps that follow its first one if both lengthen the time to a loss by more than this fraction."""
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
CAPS_WORTH = 1.25
"""Steps and links are measured again if the rate that a home may send has changed by this factor."""
SHARES_WORTH = 0.1
"""Computing is measured again if a change of batch shares changes a step's computing by this fraction."""


def begin_search(state: TuningState, step_s: float, pace_s: float = 0.0, *, checks: bool = False) -> TuningState:
    """Returns the state with an order for a search that may replace the active plan. Abandons any search or trial in progress.
    Does nothing on ranks that do not lead, and before links are measured.

    `step_s`: step time measured by all ranks; `pace_s`: rank 0's own, from the clock that times other plans.
    """
    if not state.leads or state.links is None:
        return state
    known = state.known[1] if state.known is not None and state.known[0] == state.plan else None
    links = state.links.links
    # The current cap may be new. Steps before it do not show how long the active plan takes under the cap.
    order = SearchRequest(state.plan, known, links, step_s, pace_s or step_s, checks and not state.uncapped, state.uncapped)
    return structs.replace(state, order=order, trial=None, proposal=None, check=None, stale=False, searched=links,
                           alternatives=())


def pace_since(state: TuningState, slow_s: float) -> float:
    """Returns the step time since steps became slow; reports average over earlier steps, too. 0 if no step was slow on this
    rank."""
    slow = list(takewhile(lambda step_s: step_s > slow_s, reversed(state.recent)))
    return median(slow) if slow else 0.0


def end_search(state: TuningState, order: SearchRequest, best: Candidate | None, why: str) -> Decided:
    """Proposes the plan that the search found if it is worth a switch; otherwise the active plan stays."""
    if state.order is not order:
        return state, []  # a newer search has replaced this one, or another plan has become active
    kept = structs.replace(state, order=None, count=0)
    if best is None:
        return kept, [LogLine(f"no plan: {why}")]
    if order.checks and max(best.current_s, order.pace_s) >= OFF * min(best.current_s, order.pace_s):
        again = not state.discarded
        line = (f"kept the current plan: priced at {_ms(best.current_s)} per step, measured at {_ms(order.pace_s)}, so a "
                f"search by these prices is discarded{'; measuring again' if again else ''}")
        return structs.replace(kept, stale=again, discarded=True), [LogLine(line)]
    found_s, current_s = best.plan.step_s * best.steps, best.current_s * best.current_steps
    kept = structs.replace(kept, steps=best.current_steps, alternatives=best.alternatives, discarded=False,
                           price=best.current_price, alone_s=best.alone_s, auto_times=best.auto_times or state.auto_times,
                           suggested=state.suggested or bool(best.hint))
    line = (f"a plan: {_ms(best.plan.step_s)} a step{_format_factor(best.steps)}, now {_ms(order.step_s)}"
            f"{_format_factor(best.current_steps)}")
    hint: list[Reason] = [LogLine(best.hint, logging.WARNING)] if best.hint else []
    if best.uncapped_s:
        times = min(found_s, current_s) / best.uncapped_s
        hint.append(LogLine(f"the caps of homes hold: training takes {times:.2f} x as long as without them", logging.WARNING))
    if found_s * state.lateness > (1.0 - WORTH) * current_s or _factor_too_large(best, best.current_steps):
        line = f"kept the current plan: found {line}{_describe_versus_alone(best, current_s)}"
        return structs.replace(kept, basis=best.back.basis), [LogLine(line), *hint]
    line = f"found {line}{_describe_versus_alone(best, found_s)}"
    before_s = max(order.pace_s, best.current_s) if order.uncapped else order.pace_s
    return structs.replace(kept, proposal=PlanProposal(best, before_s)), [LogLine(line), *hint]


def _factor_too_large(found: Candidate, current_steps: float) -> bool:
    """Returns whether the plan's convergence factor is too large for a useful plan, and above that of the active plan."""
    return found.steps >= MOST_STEPS and found.steps > current_steps


def _describe_versus_alone(found: Candidate, to_loss_s: float) -> str:
    """Returns text about the expected speed against one machine alone. `to_loss_s`: seconds of the plan for the progress of
    one dense training step."""
    if not found.alone_s or not to_loss_s:
        return ""
    return f"; {found.alone_s / to_loss_s:.3g} x one machine alone"


def over_alone(state: TuningState) -> tuple[float, float, float]:
    """Returns the job's speed to a loss relative to the fastest machine alone, by measured and by predicted step times, and by
    how many times sync="auto" would be faster. Zeros before a search, and while another plan may follow."""
    if not state.idle or state.stale or not state.alone_s or state.count <= TRIED:
        return 0.0, 0.0, 0.0
    to_loss_s, predicted_s = median(state.recent) * state.steps, state.plan.step_s * state.steps
    return state.alone_s / to_loss_s, state.alone_s / predicted_s if predicted_s else 0.0, state.auto_times


def slower_line(over_alone: float, forecast: float, auto_times: float) -> str:
    """Returns a log line about a job that reaches a loss later than its fastest machine alone."""
    remedy = f"sync='auto' would be {auto_times:.1f}x as fast" if auto_times > 1 else "try larger batches, or train alone"
    return f"slower than one machine alone: {over_alone:.2f}x, forecast {forecast:.2f}x; {remedy}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _format_factor(steps: float) -> str:
    """Returns the convergence factor as text, for log lines that give a step time."""
    return f" (factor {steps:.2f})" if steps > 1.0 else ""


def finish_switch(state: TuningState, plan: Plan) -> Decided:
    """Returns the state after all ranks have switched to the plan that rank 0 proposed. `plan`: what they run now, which may
    lack parts of the proposal."""
    proposal, left = state.proposal, state.plan
    if proposal is None:  # on another rank
        return state, []
    candidate = proposal.candidate.in_executed_form(plan)
    other = candidate is not proposal.candidate
    # Step times recorded so far belong to the previous plan.
    state = structs.replace(state, proposal=None, trial=None, count=0, recent=(), stale=False, steps=candidate.steps,
                            known=(plan, candidate.plan), basis=candidate.basis, price=candidate.price, check=None)
    if proposal.back:
        return state, []
    trial = PlanProposal(candidate.back._replace(runnable=left), proposal.before_s, proposal.by_pace or other, back=True)
    state = structs.replace(state, trial=trial, check=None if other else PredictionCheck(candidate.plan.step_s, STALE))
    return state, [LogLine(candidate.leaves, logging.WARNING)] if candidate.leaves else []


def drop_refused(state: TuningState) -> TuningState:
    """Drops the proposal, because a rank has refused it."""
    return structs.replace(state, proposal=None, trial=None, count=0)


def adapt_to_plan(state: TuningState, plan: Plan, *, own: bool = False) -> TuningState:
    """Adapts to another active plan: what has been observed and agreed was about the previous plan. `own`: True: rank 0 has
    proposed the plan (see `finish_switch`). False: the script or the quality guard has set it."""
    state = structs.replace(state, plan=plan, agreed=None)
    if state.links is not None:
        watch = LinkWatch(extract_rates(state.links.links), plan.step_s or state.links.watch.usual_s,
                          plan.exchange_steps)
        state = structs.replace(state, links=structs.replace(state.links, watch=watch))
    if state.phase is not Phase.WATCHING:  # the recorded steps ran under another plan
        state = structs.replace(state, phase=Phase.WARMING, until=state.step + WARM_STEPS)
    if own:
        return state
    return structs.replace(state, order=None, trial=None, proposal=None, basis=None, check=None, count=0, recent=(),
                           alternatives=(), stale=state.stale or state.order is not None)


def record_step_time(state: TuningState, step_s: float, step: int) -> Decided:
    """Records the time of a step under the active plan. Decides on a trial after TRIED steps, or after two that are clearly
    slower, and compares the time with the prediction."""
    lines: list[Reason] = []
    state = structs.replace(state, recent=(*state.recent[1 - TRIED :], step_s), count=state.count + 1)
    if (state.count == TRIED + 1 or _clearly_slower(state)) and state.order is None and state.proposal is None:
        state, lines = _decide_trial(state, median(state.recent[1 - state.count :]))
    if state.check is not None:
        check, stale = state.check.observe(median(state.recent[-3:]), step)
        if stale is not None and not stale.slower:  # a plan that is faster than predicted needs no new search
            check, lines = _usual(stale.measured_s), [*lines, LogLine(stale.reason)]
        elif stale is not None:
            state, lines = structs.replace(state, stale=True), [*lines, stale]
        state = structs.replace(state, check=check)
    return state, lines


def _clearly_slower(state: TuningState) -> bool:
    trial = state.trial
    return (trial is not None and state.count == 3 and
            min(state.recent[-2:]) * state.steps > (1 + CLEARLY) * trial.before_s * trial.candidate.steps)


def _decide_trial(state: TuningState, step_s: float) -> Decided:
    """Decides, from its step time, whether the active plan stays or is rolled back."""
    trial, active, lines = state.trial, state.plan, list[Reason]()
    if trial is not None:
        before = trial.candidate
        worse = step_s * state.steps > (1 + SLOWER) * trial.before_s * before.steps
        lines = [LogLine(
            f"under plan {digest(active)[:8]}: {_ms(step_s)} a step{_format_factor(state.steps)}, predicted "
            f"{_ms(active.step_s)}, "
            f"before {_ms(trial.before_s)}{_format_factor(before.steps)}{': rolling back' if worse else ''}")]
        state = structs.replace(state, trial=None, lateness=max(1.0, step_s / active.step_s) if active.step_s else 1.0)
        if worse:
            return structs.replace(state, proposal=trial, check=None), lines
    if trial is None or trial.by_pace:  # kept or tried regardless of its prediction
        state = structs.replace(state, check=_usual(step_s))
    state, more = _another(state, step_s)
    return state, lines + more


def _another(state: TuningState, step_s: float) -> Decided:
    """Proposes another candidate whose prediction is close, because a few steps show which one is faster. `step_s`: measured
    step time of the active plan."""
    others, state = state.alternatives, structs.replace(state, alternatives=())
    for place, other in enumerate(others):
        most = 1 + PLAIN if other.dense else LEAVES
        if other.runnable == state.plan or (state.plan.steps_locally and not other.plan.steps_locally):
            continue  # a plan priced for averaged gradients might run with local optimizer states
        if state.basis is None or _factor_too_large(other, state.steps):
            continue
        if other.plan.step_s * other.steps <= most * step_s * state.steps:
            candidate: Candidate = other._replace(current=state.basis.plan, current_price=state.price or other.current_price,
                                                  current_steps=state.steps)
            what = "the plan without compression" if other.dense else "local steps, too"
            line = f"tries {what}, predicted {_ms(other.plan.step_s)}{_format_factor(other.steps)}"
            return structs.replace(state, proposal=PlanProposal(candidate, step_s, by_pace=other.dense),
                                   alternatives=others[place + 1 :]), [LogLine(line)]
    return state, []


def _usual(step_s: float) -> PredictionCheck:
    return PredictionCheck(step_s, STALE, usual=True)


def next_request(state: TuningState, now: float) -> tuple[TuningState, TuningRequest]:
    """Returns the request that rank 0 puts in its next report to all ranks, and the changed state."""
    win, links = largest_gain(state), state.links
    if state.order is not None or links is None:
        return state, TuningRequest.NOTHING
    if state.proposal is not None:
        return state, TuningRequest.SWITCH
    if state.moved or (state.stale and (win is None or win >= TO_WIN)):
        return structs.replace(state, stale=False, moved=False, check=None), TuningRequest.MEASURE
    if state.stale:  # no gain is possible
        check = _usual(median(state.recent)) if state.recent else None
        return structs.replace(state, stale=False, check=check), TuningRequest.NOTHING
    if win is None or win < TO_WIN:  # a probe could not lead to enough gain
        return state, TuningRequest.NOTHING
    lost = differ(links.best, links.watch.planned)
    if links.watch.confirmed and not lost and not links.watch.faster:
        return state, TuningRequest.NOTHING
    round_trip_s = 4 * max(link.alpha_s for link in links.links)
    due = links.reprobe.due(now, hinted=links.watch.faster, lost=lost, largest_gain=win, round_trip_s=round_trip_s)
    return state, TuningRequest.PROBE if due else TuningRequest.NOTHING


def on_faster_links(state: TuningState) -> TuningState:
    """Orders a search if steps have shown that links are faster than those of the last search, so another plan may be
    better."""
    links = state.links
    if links is None or not state.searched or not state.idle or state.count <= TRIED or state.phase is not Phase.WATCHING:
        return state
    win = largest_gain(state)
    if win is None or win < TO_WIN or not differ(extract_rates(state.searched), extract_rates(links.links)):
        return state
    return begin_search(state, median(state.recent))


def caps_changed(planned: Sequence[float], now: Sequence[float]) -> bool:
    """Returns whether the rates that homes may send differ from those of the last measurement. 0: a home has no cap."""
    return any(max(one, other) > CAPS_WORTH * min(one, other) for one, other in zip(planned, now, strict=True))


def largest_gain(state: TuningState) -> float | None:
    """Returns the largest fraction of the time to a loss that any plan could save, if links were infinitely fast and
    compression had no cost. None before the step time is known."""
    if state.links is None or not state.links.watch.settled or not state.links.watch.usual_s > 0:
        return None
    return 1.0 - (1.0 - state.links.watch.waited_s / state.links.watch.usual_s) / state.steps
