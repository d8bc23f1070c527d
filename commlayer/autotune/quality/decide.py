"""Decisions of the quality guard, as pure functions of (state, rows, step).

All ranks receive the same rows at the same step, so they decide alike and switch plans together. `now` is the number of
completed steps, the only clock that ranks share; seconds come in rows. The driver calls `due` at the end of a step's exchange
and passes the rows to `decide`. After the commit it calls `after_step`, reports the outcome of a requested change with
`changed` or `kept`, and calls `next_look` for the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from msgspec import structs

from commlayer.autotune.quality import codec_level
from commlayer.autotune.quality.codec_level import AccuracyLimits, LevelState
from commlayer.autotune.quality.loss_trend import LossRise
from commlayer.autotune.quality.state import (
    FEWEST,
    MOST,
    AccuracyState,
    Action,
    BoundPlanner,
    ChangeCodecs,
    CodecChange,
    GradientError,
    Harder,
    Look,
    MadeChange,
    PlanLevels,
    Tell,
)
from commlayer.autotune.quality.usual_training import harder
from commlayer.engine.spacing import TIME_PART, steps_between, steps_until_paid
from commlayer.observe.fidelity import Dots, Fidelity, worst

LOCALLY = 0.2
"""Share of the comparison time for each rank's checks of its own payloads; the rest is for comparisons over all ranks."""
OFTEN, SELDOM = 8, 32
"""Comparisons that can repeat within OFTEN steps examine more elements; those that must wait over SELDOM steps examine fewer.
"""
FADE = 0.5
"""Weight of earlier comparisons against the latest."""
LONG_FADE, FEWEST_SEEN = 0.9, 6
"""The same without a given budget, and the least number of comparisons: the bounds then describe whole models."""
EQUAL = 0.99
"""Ratios have three digits: levels within this factor count as equal (as in engine/codec_floor.py)."""


def begin(limits: AccuracyLimits, plan: PlanLevels) -> AccuracyState:
    """The state before the first step. Plans are never coarser than the first one, nor than `limits.lowest`."""
    lowest = min(limits.lowest, plan.level)
    return AccuracyState(_bounded(codec_level.begin(plan.level, structs.replace(limits, lowest=lowest)), plan), plan)


def due(state: AccuracyState, now: int) -> bool:
    """Whether all ranks compare in the present step."""
    # If all codecs were made exact there is no error to compare, but a coarser plan may be possible again.
    concerned = state.plan.compared or state.plan.finer
    return concerned and now - state.since >= state.plan.settle_steps and now >= state.compare_at


def next_look(state: AccuracyState, now: int) -> tuple[AccuracyState, Look | None]:
    """The piece that a rank compares in the next step, or None."""
    settled = now - state.since - state.plan.settle_steps
    between = settled >= 0 and settled % state.look_every == 0 and not state.plan.overlapped
    if not state.plan.compared or not (due(state, now) or between):
        return state, None
    return structs.replace(state, looks=state.looks + 1), Look(state.looks, state.elements)


def fade(state: AccuracyState) -> float:
    """Weight of earlier observations under the active plan, against new ones."""
    return LONG_FADE if state.plan.cosine else FADE


def telling(rows: Sequence[GradientError]) -> bool:
    """Whether the step can be used: not if the optimizer will skip it, nor if it sent residuals of an earlier plan."""
    return all(math.isfinite(x) for row in rows for x in row.summed)


def decide(
    state: AccuracyState, rows: Sequence[GradientError], now: int, *, acts: bool,
) -> tuple[AccuracyState, tuple[Action, ...]]:
    """Decides after a comparison. Without `acts` the plan stays, and complaints are only logged."""
    state = _scheduled(state, rows, now)
    if not telling(rows):
        return state, ()
    summed, step_s = state.summed.plus(rows[0].summed, fade(state)), median(row.step_s for row in rows)
    seen = worst([summed.fidelity(), *(row.sent.fidelity() for row in rows)])
    loss = LossRise(fmean(row.loss.rise for row in rows), fmean(row.loss.noise for row in rows))
    actions: list[Action] = []
    if state.made is not None:
        actions.append(Tell(_outcome(state.made, seen, step_s)))
    state = structs.replace(state, summed=summed, step_s=step_s, made=None, compared=state.compared + 1)
    if state.plan.cosine and state.compared < FEWEST_SEEN:
        return state, tuple(actions)
    if state.plan.typical and acts and state.compared >= FEWEST_SEEN:
        own = Dots()
        for row in rows:
            own = own.plus(row.sent)
        actions.append(Harder(round(harder(own.fidelity().cosine, state.plan.typical), 2)))
    more: tuple[Action, ...]
    state, more = _adjusted(state, seen, loss) if acts else _complained(state, seen, loss)
    return state, (*actions, *more)


def after_step(
    state: AccuracyState, now: int, *, acts: bool, entered: PlanLevels | None = None,
) -> tuple[AccuracyState, tuple[ChangeCodecs, ...]]:
    """Called after a commit. `entered` is a plan that the user has set meanwhile."""
    if entered is None:
        change, state = state.pending, structs.replace(state, pending=None)
        return state, () if change is None else (ChangeCodecs(change),)
    state = structs.replace(_under(state, entered, now), pending=None, made=None)
    floor = state.level.floor
    if acts and state.level.complained and entered.level < floor * EQUAL:
        change = CodecChange(entered.level, floor, "accuracy has not borne less", None, state.step_s)
        return state, (ChangeCodecs(change),)
    return structs.replace(state, level=codec_level.follow(state.level, entered.level)), ()


def changed(
    state: AccuracyState, change: CodecChange, now: int, *, entered: PlanLevels, nbytes_factor: float,
) -> tuple[AccuracyState, tuple[Tell, ...]]:
    """Called after a change of codecs. `nbytes_factor`: expected bytes per step relative to before."""
    state = structs.replace(_under(state, entered, now), made=MadeChange(now, change))
    state = structs.replace(state, level=codec_level.settle(state.level))
    finer = change.after > change.before
    text = (f"{change.reason}: codecs are {'finer' if finer else 'coarser'} from here on, {change.before:.3g} -> "
            f"{change.after:.3g} of the gradient; expected: {nbytes_factor:.1f} times the bytes, cosine "
            f"{state.level.limits.least_cosine:.2f} or more")
    return state, (Tell(text, warning=finer),)


def kept(change: CodecChange, error: ValueError) -> Tell:
    """Called if all ranks have refused the change."""
    return Tell(f"{change.reason}, but the plan in force stays: {error}", warning=True)


def _scheduled(state: AccuracyState, rows: Sequence[GradientError], now: int) -> AccuracyState:
    """Schedules the next comparison and sets its size."""
    step_s = max(median(row.step_s for row in rows), 1e-6)
    # The last rank to arrive waits for no other; the others would have waited for it in the next step anyway.
    cost_s, elapsed_s = min(row.everywhere_s for row in rows), min(row.elapsed_s for row in rows)
    spent_s, part = state.spent_s + cost_s, TIME_PART * (1 - LOCALLY)
    wait = max(state.plan.settle_steps, steps_until_paid(spent_s, cost_s, elapsed_s, step_s, part))
    every, elements = steps_between(cost_s, step_s, part), state.elements
    if every <= OFTEN:
        elements = min(MOST, 2 * elements)
    elif every > SELDOM and not state.plan.overlapped:  # in overlapped plans the cost does not depend on the size
        elements = max(FEWEST, elements // 2)
    look_every = steps_between(max(row.here_s for row in rows), step_s, TIME_PART * LOCALLY)
    return structs.replace(state, spent_s=spent_s, compare_at=now + wait, look_every=look_every, elements=elements)


def _adjusted(state: AccuracyState, seen: Fidelity, loss: LossRise) -> tuple[AccuracyState, tuple[Action, ...]]:
    """Requests finer codecs after a complaint, or coarser ones after a long calm."""
    level, decision = codec_level.observe(state.level, seen, loss, needed=state.plan.base_level)
    # Only a floor raised by complaints limits the planner, not the level that the job happened to start with.
    bound = BoundPlanner(level.floor if level.complained else 0.0)
    pending = state.pending
    if decision.changed:
        before = state.plan.level
        reason = decision.reason if decision.level > before else f"accuracy has borne {before:.3g} without complaint"
        pending = CodecChange(before, decision.level, reason, seen, state.step_s)
    return structs.replace(state, level=level, pending=pending), (bound,)


def _complained(state: AccuracyState, seen: Fidelity, loss: LossRise) -> tuple[AccuracyState, tuple[Action, ...]]:
    """Logs each kind of complaint once per plan."""
    level, complaint = codec_level.complaint_of(state.level, seen, loss)
    state = structs.replace(state, level=level)
    if complaint is None or complaint.kind in state.warned:
        return state, ()
    text = f'{complaint.text}; the plan stays as it was asked for (guard="act" would make its codecs finer)'
    return structs.replace(state, warned=state.warned | {complaint.kind}), (Tell(text, warning=True),)


def _under(state: AccuracyState, plan: PlanLevels, now: int) -> AccuracyState:
    """The state under a new plan; observations of the previous one do not apply to it."""
    return structs.replace(state, level=_bounded(state.level, plan), plan=plan, since=now, looks=0, compared=0, summed=Dots(),
                           warned=frozenset())


def _bounded(level: LevelState, plan: PlanLevels) -> LevelState:
    """Applies the bounds of that plan."""
    if not (plan.cosine or plan.residual):
        return level
    return structs.replace(level, limits=structs.replace(level.limits, cosine=plan.cosine, residual=plan.residual))


def _outcome(made: MadeChange, seen: Fidelity, step_s: float) -> str:
    change = made.change
    cosine, residual = ("?", "?") if change.seen is None else (f"{change.seen.cosine:.2f}", f"{change.seen.residual_ratio:.2g}")
    return (f"the last change of codecs brought: cosine {cosine} -> {seen.cosine:.2f}, residual {residual} -> "
            f"{seen.residual_ratio:.2g} gradients, {1e3 * change.step_s:.1f} -> {1e3 * step_s:.1f} ms a step")
