"""The quality policy: keeps codecs fine enough for the loss budget. Pure functions of (state, rows, step).

A row is one rank's comparison of compressed with exact gradients. All ranks receive the same rows after the same step, so all
ranks decide equally and switch plans together. `now` counts steps, the only clock that ranks share; seconds come in rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from msgspec import structs

from commlayer.autotune.quality.loss_trend import LossRise
from commlayer.engine.observers.spacing import TIME_PART, steps_between, steps_until_paid
from commlayer.observe.fidelity import Dots, Fidelity, worst
from commlayer.records import Record

SETTLE = 4
"""Minimum number of steps under a plan before the first comparison, and between two comparisons."""
DRAINING = 32
"""Maximum for the same number of steps after the guard has changed the plan. The previous plan's residual is sent in the first
1 / ratio steps or so, and does not represent their gradients."""
FEWEST, MOST = 1 << 12, 1 << 16
"""Minimum and maximum number of elements per comparison. The first comparison has the minimum, until its cost is known."""
OFTEN, SELDOM = 8, 32
"""If comparisons can repeat within OFTEN steps at their cost, they examine twice as many elements; if they must wait over
SELDOM steps, half as many."""
FADE = 0.5
"""Factor by which each comparison reduces the weight of the earlier ones."""
LONG_FADE, FEWEST_SEEN = 0.9, 6
"""The same factor without a given loss budget; and the minimum number of comparisons, because the bounds then describe whole
models."""
BACK_OFF, ALLOW = 2.0, 1.25
"""Factors on the quality floor (the lowest ratio that codecs may have): up after a complaint, which is a violated bound, and
down after CALM. A loss of accuracy costs more than a loss of speed."""
MOST_BACK_OFF = 16.0
"""Maximum factor on the floor. Consecutive complaints double the factor up to this, because a level may be wrong by a factor
of thousands."""
CALM = 5
"""Number of comparisons without complaint (a violated bound) before coarser codecs are tried."""
MOST_PATIENCE = 16 * CALM
"""Maximum number of comparisons before coarser codecs are tried. Each failed attempt doubles the number up to this."""
SMOOTH = 0.3
"""Weight of the newest residual in the running mean of residuals."""
EQUAL = 0.99
"""Levels that differ by at most this factor count as equal, because ratios have three digits (as in job/codec_floor.py)."""


class Bounds(Record, frozen=True):
    """Limits on the compression error of a plan's codecs. A cosine or residual of 0 is derived from the budget, as measured in
    training (docs/benchmarks.md)."""

    budget: float = 0.05
    """Allowed relative increase of the loss; 0.005 is half a percent."""
    lowest: float = 0.001
    """Lower limit of a codec's level (its ratio, or bytes relative to dense). The upper limit is 1: uncompressed."""
    cosine: float = 0.0
    """Lower bound of the cosine between compressed and exact gradient."""
    residual: float = 0.0
    """Upper bound of the residual's norm, in norms of the gradient."""

    @property
    def least_cosine(self) -> float:
        """
        >>> Bounds(budget=0.005).least_cosine, Bounds(budget=0.05).least_cosine
        (0.883, 0.183)
        """
        return self.cosine or min(0.95, max(0.05, round(0.57 - 0.7 * math.log10(self.budget / 0.014), 3)))

    @property
    def most_residual(self) -> float:
        """Residuals delay gradients: each gradient of residual cost about 1.25 % of the loss.

        >>> Bounds(budget=0.05).most_residual
        4.0
        """
        return self.residual or self.budget / 0.0125


class GradientError(NamedTuple):
    """One rank's comparison of compressed with exact gradients. Numbers only, because ranks exchange them as tensors."""

    sent: Dots = Dots()
    """Dot products of this rank's payloads with its gradients."""
    summed: Dots = Dots()
    """Dot products of the averaged gradient with the exact one. All ranks that have this gradient get equal values; the other
    ranks of a sharded model get zeros. Not finite if the step cannot be used."""
    loss: LossRise = LossRise()
    cost_s: float = 0.0
    """Seconds that the comparison took."""
    elapsed_s: float = 0.0
    """Seconds since the start of the job."""


class PlanLevels(Record, frozen=True):
    """The attributes of the active plan that the policy uses. The level of a codec is its ratio if it has one. Otherwise the
    level is the fraction of the dense bytes that the codec sends (job/codec_floor.py)."""

    level: float
    """Level of the plan's coarsest codec: its ratio, or its bytes as a fraction of the dense bytes. 1 without codecs."""
    base_level: float
    """Level (ratio, or fraction of the dense bytes) of the plan before the guard made it finer; equal to `level` if the guard
    did not change the plan."""
    compared: bool
    """True: at least one of the plan's buckets can be compared with exact gradients."""
    finer: bool = False
    """True: the guard has made the plan's codecs finer."""
    cosine: float = 0.0
    residual: float = 0.0
    """`cosine` and `residual` are the bounds if no loss budget is given: usual values under the plan's codecs. 0: the bounds
    of the budget apply."""
    overlapped: bool = False
    """True: results arrive during the next forward pass, so a comparison makes the step wait for all of them."""

    @property
    def settle_steps(self) -> int:
        """Number of steps under the plan before the first comparison, and between two comparisons."""
        return max(SETTLE, min(DRAINING, math.ceil(1 / self.level))) if self.finer else SETTLE


class QualityState(Record, frozen=True):
    """The guard's complete state. Ranks that start equal and receive the same rows have the same state at every step."""

    bounds: Bounds
    plan: PlanLevels
    level: float
    """The level (ratio, or fraction of the dense bytes) that the guard requests for the coarsest codec."""
    floor: float
    """The quality floor: the lowest level (ratio, or fraction of the dense bytes) that the comparisons so far permit."""
    complained: bool = False
    """True: a complaint (a violated bound) has raised the quality floor at least once. Only then does the floor limit the
    planner and the user's plans."""
    calm: int = 0
    """Number of comparisons without complaint (a violated bound) since the quality floor last moved."""
    complaints: int = 0
    """Number of consecutive comparisons that violated a bound."""
    patience: int = CALM
    lowered: bool = False
    """True: the latest move of the quality floor was downward, to coarser codecs."""
    mean_residual: float | None = None
    """Running mean of the residual, in norms of the gradient; None before the first comparison under the active plan."""
    last_residual: float = 0.0
    """The latest residual if the mean is above its bound; otherwise 0."""
    since: int = 0
    """Number of the first step under the active plan."""
    compared_at: int = 0
    """Number of the step with the latest comparison."""
    compare_at: int = SETTLE
    """Number of the step before which there is no comparison."""
    elements: int = FEWEST
    """Number of elements per comparison."""
    samples: int = 0
    """Number of comparisons prepared under the active plan. This number selects the next piece, so the comparisons visit the
    whole model in turn."""
    compared: int = 0
    """Number of usable comparisons under the active plan."""
    spent_s: float = 0.0
    """Seconds that all comparisons have taken since the start."""
    summed: Dots = Dots()
    """Sum of the dot products of all comparisons under the active plan, in which earlier ones have less weight."""
    warned: frozenset[str] = frozenset()
    """Kinds of complaints that were already logged for the active plan."""

    @property
    def fade(self) -> float:
        """Factor by which a comparison reduces the weight of the earlier ones under the active plan."""
        return LONG_FADE if self.plan.cosine else FADE

    @property
    def planner_floor(self) -> float:
        """Lowest precision level (1: float32) of a codec that the planner may use; 0: any codec."""
        return self.floor if self.complained else 0.0


class CodecChange(NamedTuple):
    """A request that all ranks switch, before the next step, to the base plan with no codec below the level `after`."""

    before: float
    after: float
    """`before` and `after`: level of the coarsest codec before and after the switch."""
    reason: str

    @property
    def finer(self) -> bool:
        return self.after > self.before


class Complaint(NamedTuple):
    """A bound that the active codecs violate: its kind, and the text for the log."""

    kind: str
    text: str


def begin(bounds: Bounds, plan: PlanLevels) -> QualityState:
    """Returns the guard's state before the first step. Plans are never coarser than the first one, nor than `bounds.lowest`."""
    bounds = structs.replace(bounds, lowest=min(bounds.lowest, plan.level))
    return QualityState(_with_plan_bounds(bounds, plan), plan, plan.level, plan.level)


def is_comparison_due(state: QualityState, now: int) -> bool:
    """Returns whether all ranks compare compressed with exact gradients in step `now`."""
    # If all codecs were made exact there is no error to compare, but a coarser plan may be possible again.
    concerned = state.plan.compared or state.plan.finer
    return concerned and now - state.since >= state.plan.settle_steps and now >= state.compare_at


def record_comparison(state: QualityState, now: int) -> QualityState:
    """Records that all ranks have compared in step `now` and will send their rows."""
    return structs.replace(state, samples=state.samples + 1, compared_at=now, compare_at=now + state.plan.settle_steps)


def is_usable(rows: Sequence[GradientError]) -> bool:
    """Returns whether the comparisons of this step count. They do not if the optimizer skips the step, or if residuals of an
    earlier plan were sent."""
    return all(math.isfinite(x) for row in rows for x in row.summed)


def decide(
    state: QualityState, rows: Sequence[GradientError], step_s: float, *, acts: bool,
) -> tuple[QualityState, CodecChange | None, Complaint | None]:
    """Decides after a comparison, from the rows of all ranks: a change of codecs, or without `acts` a complaint that is new
    for this plan."""
    state = _scheduled(state, rows, max(step_s, 1e-6))
    if not is_usable(rows):
        return state, None, None
    summed = state.summed.plus(next((row.summed for row in rows if row.summed.xx), rows[0].summed), state.fade)
    state = structs.replace(state, summed=summed, compared=state.compared + 1)
    if state.plan.cosine and state.compared < FEWEST_SEEN:
        return state, None, None
    seen = worst([summed.fidelity(), *(row.sent.fidelity() for row in rows)])
    loss = LossRise(fmean(row.loss.rise for row in rows), fmean(row.loss.noise for row in rows))
    state, complaint, draining = find_complaint(state, seen, loss)
    if acts:
        return *_move_floor(state, complaint, draining=draining), None
    if complaint is None or complaint.kind in state.warned:
        return state, None, None
    return structs.replace(state, warned=state.warned | {complaint.kind}), None, complaint


def adapt_to_plan(
    state: QualityState, plan: PlanLevels, now: int, *, by_guard: bool = False, acts: bool = False,
) -> tuple[QualityState, CodecChange | None]:
    """Adapts to another active plan, for which earlier comparisons do not count. A plan that the guard did not choose
    (`by_guard` is False) is replaced by one with more precise codecs if earlier complaints require that."""
    state = structs.replace(
        state, bounds=_with_plan_bounds(state.bounds, plan), plan=plan, since=now, samples=0, compared=0, summed=Dots(),
        warned=frozenset(), mean_residual=None if by_guard else state.mean_residual,
        level=state.level if by_guard else plan.level)
    if by_guard:
        return state, None
    if acts and state.complained and plan.level < state.floor * EQUAL:
        return state, CodecChange(plan.level, state.floor, "earlier comparisons do not permit a coarser level")
    if not state.complained:  # without an earlier complaint the plan's own level is permitted
        state = structs.replace(state, floor=min(state.floor, plan.level),
                                bounds=structs.replace(state.bounds, lowest=min(state.bounds.lowest, plan.level)))
    return state, None


def find_complaint(state: QualityState, seen: Fidelity, loss: LossRise) -> tuple[QualityState, Complaint | None, bool]:
    """Returns the violated bound, if any, and whether a residual above its bound is shrinking."""
    mean, bounds = state.mean_residual, state.bounds
    if math.isfinite(seen.residual_ratio):
        # A residual varies by two or three times from step to step, so the bound applies to its mean.
        mean = seen.residual_ratio if mean is None else mean + SMOOTH * (seen.residual_ratio - mean)
        state = structs.replace(state, mean_residual=mean)
    if not all(map(math.isfinite, seen)):
        return state, Complaint("finite", "a comparison with the exact gradient was not finite"), False
    over = mean is not None and mean > bounds.most_residual
    # After a change of codecs a large residual shrinks. Until then sent values contain the old residual, so they differ from
    # the gradient.
    draining = over and seen.residual_ratio <= 0.9 * state.last_residual
    state = structs.replace(state, last_residual=seen.residual_ratio if over else 0.0)
    complaint = None
    if not draining and seen.cosine < bounds.least_cosine:
        complaint = Complaint("cosine",
                              f"cosine {seen.cosine:.2f} between sent and exact gradient is below {bounds.least_cosine:.2f}")
    elif not draining and seen.norm_ratio > 1.0 / bounds.least_cosine:
        complaint = Complaint("norm", f"the sent gradient has {seen.norm_ratio:.1f} times the norm of the exact one")
    elif not draining and over:
        complaint = Complaint("residual",
                              f"the residual's norm is {mean:.1f} times the gradient's, above {bounds.most_residual:.3g}")
    elif loss.rise > bounds.budget + loss.noise:
        complaint = Complaint("loss", f"the loss has risen by {loss.rise:.1%}, above the budget of {bounds.budget:.1%}")
    return state, complaint, draining


def _move_floor(state: QualityState, complaint: Complaint | None, *, draining: bool) -> tuple[QualityState, CodecChange | None]:
    """Raises the floor after a complaint, and lowers it after many comparisons without one. Afterwards requests the floor as
    the level, or the plan's own level if the plan is finer than the floor."""
    state = _raise_floor(state) if complaint else _after_quiet_comparison(state)
    target = min(1.0, max(state.floor, state.plan.base_level, state.level if draining else 0.0))
    # Small moves do not justify a plan change, except after a complaint.
    if target == state.level or (complaint is None and abs(math.log(target / state.level)) < math.log(ALLOW) * 0.99):
        return state, None
    before = state.plan.level
    reason = complaint.text if complaint else f"level {before:.3g} has had no complaint"
    return structs.replace(state, level=target), CodecChange(before, target, reason)


def _raise_floor(state: QualityState) -> QualityState:
    # Starts from the active level, not from a lower floor, so that raising the floor has an effect.
    floor = min(1.0, max(state.floor, state.level) * min(MOST_BACK_OFF, BACK_OFF * 2.0**state.complaints))
    patience = min(2 * state.patience, MOST_PATIENCE) if state.lowered else state.patience
    return structs.replace(state, calm=0, complaints=state.complaints + 1, patience=patience, lowered=False,
                           complained=state.complained or floor > state.floor, floor=floor)


def _after_quiet_comparison(state: QualityState) -> QualityState:
    if state.last_residual:
        return state
    if state.calm + 1 < state.patience or state.floor <= state.bounds.lowest:
        return structs.replace(state, complaints=0, calm=state.calm + 1)
    return structs.replace(state, complaints=0, calm=0, lowered=True, floor=max(state.bounds.lowest, state.floor / ALLOW))


def _scheduled(state: QualityState, rows: Sequence[GradientError], step_s: float) -> QualityState:
    """Sets the step and the number of elements of the next comparison."""
    # The rank that arrives last does not wait. The other ranks would have waited for it in the next step anyway.
    cost_s, elapsed_s = min(row.cost_s for row in rows), min(row.elapsed_s for row in rows)
    spent_s, elements, every = state.spent_s + cost_s, state.elements, steps_between(cost_s, step_s, TIME_PART)
    wait = max(state.plan.settle_steps, steps_until_paid(spent_s, cost_s, elapsed_s, step_s, TIME_PART))
    if every <= OFTEN:
        elements = min(MOST, 2 * elements)
    elif every > SELDOM and not state.plan.overlapped:  # in overlapped plans the cost does not depend on the size
        elements = max(FEWEST, elements // 2)
    return structs.replace(state, spent_s=spent_s, compare_at=state.compared_at + wait, elements=elements)


def _with_plan_bounds(bounds: Bounds, plan: PlanLevels) -> Bounds:
    """Returns `bounds` with the plan's own bounds on cosine and residual, if the plan has any."""
    return structs.replace(bounds, cosine=plan.cosine, residual=plan.residual) if plan.cosine or plan.residual else bounds
