"""Compression level: the coarsest level that accuracy permits, within the needs of the plan. Pure functions.

A codec's level is its ratio if it has one, otherwise the bytes it sends as a fraction of the dense bytes
(engine/codec_floor.py). Accuracy has priority. Observations of the gradient (cosine and norm of the compressed against the
exact one), the residual and the loss set a floor; the plan's needs move the level between that floor and dense.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from msgspec import structs

from commlayer.autotune.quality.loss_trend import LossRise
from commlayer.errors import InvalidInput
from commlayer.observe.fidelity import Fidelity
from commlayer.records import Record

BACK_OFF, ALLOW = 2.0, 1.25
"""Factors of the floor after a complaint, and after CALM: an error in accuracy costs more than one in speed."""
MOST_BACK_OFF = 16.0
"""Consecutive complaints double the factor up to this, because a level may be wrong by a factor of thousands."""
CALM = 5
"""Observations without complaint before a coarser level is tried."""
MOST_PATIENCE = 16 * CALM
"""Each failed attempt at a coarser level doubles the number of observations before the next, up to this."""
SMOOTH = 0.3
"""Weight of the newest residual in its running mean."""


class AccuracyLimits(Record, frozen=True):
    """The user's accuracy limits. Limits of 0 are derived from the budget, as measured in training (docs/tuning.md)."""

    budget: float = 0.05
    """Relative excess of the loss: 0.005 is half a percent."""
    lowest: float = 0.001
    highest: float = 1.0
    """Range of the level."""
    cosine: float = 0.0
    """Lower bound of the cosine between sent and exact gradient."""
    residual: float = 0.0
    """Upper bound of the residual's norm, in gradient norms."""

    @property
    def least_cosine(self) -> float:
        """
        >>> AccuracyLimits(budget=0.005).least_cosine, AccuracyLimits(budget=0.05).least_cosine
        (0.883, 0.183)
        """
        return self.cosine or min(0.95, max(0.05, round(0.57 - 0.7 * math.log10(self.budget / 0.014), 3)))

    @property
    def most_residual(self) -> float:
        """Residuals delay gradients: each gradient of residual cost about 1.25 % of the loss.

        >>> AccuracyLimits(budget=0.05).most_residual
        4.0
        """
        return self.residual or self.budget / 0.0125


class Complaint(NamedTuple):
    """A limit that the active level violates."""

    kind: Literal["finite", "cosine", "norm", "residual", "loss"]
    text: str


class LevelDecision(NamedTuple):
    """The level to use, and the reason."""

    level: float
    reason: str
    changed: bool


class LevelState(Record, frozen=True):
    """The active level and its history. `floor` is the lowest level that accuracy permits."""

    level: float
    floor: float
    limits: AccuracyLimits
    complained: bool = False
    """Whether a complaint has ever raised the floor. Otherwise the floor is only the level at the start of the job."""
    calm: int = 0
    """Observations without complaint since the floor last moved."""
    complaints: int = 0
    """Consecutive complaints."""
    patience: int = CALM
    lowered: bool = False
    """Whether the floor's latest move was downward."""
    mean_residual: float | None = None
    """In gradient norms; None before the first observation under the active plan."""
    drained_from: float = 0.0
    """The latest residual if the mean is above its bound; otherwise 0."""
    draining: bool = False


def begin(level: float, limits: AccuracyLimits | None = None) -> LevelState:
    limits = limits or AccuracyLimits()
    if not 0 < limits.lowest <= level <= limits.highest <= 1:
        raise InvalidInput("E-ARGUMENT", f"level {level:g}: allowed is {limits.lowest:g} to {limits.highest:g}, within 0 to 1")
    return LevelState(level, level, limits)


def observe(state: LevelState, seen: Fidelity, loss: LossRise, needed: float) -> tuple[LevelState, LevelDecision]:
    """Returns the new state and the decision. `seen`: the worst sampled piece; `needed`: the plan's level without limits."""
    state, complaint = complaint_of(state, seen, loss)
    state = _raised(state) if complaint else _calmer(state)
    target = min(state.limits.highest, max(state.floor, needed, state.level if state.draining else 0.0))
    complaint_text = complaint.text if complaint else ""
    # Small moves do not justify a plan change, except after a complaint.
    if target == state.level or (not complaint_text and abs(math.log(target / state.level)) < math.log(ALLOW) * 0.99):
        return state, LevelDecision(state.level, complaint_text or "within the budget and what the plan needs", False)
    moved = structs.replace(state, level=target)
    return moved, LevelDecision(target, complaint_text or _why(moved, state.level, needed), True)


def complaint_of(state: LevelState, seen: Fidelity, loss: LossRise) -> tuple[LevelState, Complaint | None]:
    """The violated limit, if any. Does not change the level, so it also serves plans that are only monitored."""
    mean = state.mean_residual
    if math.isfinite(seen.residual_ratio):
        # A residual varies by two or three times from step to step, so the bound applies to its mean.
        mean = seen.residual_ratio if mean is None else mean + SMOOTH * (seen.residual_ratio - mean)
        state = structs.replace(state, mean_residual=mean)
    if not all(map(math.isfinite, seen)):
        return state, Complaint("finite", "a comparison with the exact gradient was not finite")
    over_limit = mean is not None and mean > state.limits.most_residual
    # After a change a large residual drains: sent values come from the old residual, and the gradient looks wrong meanwhile.
    draining = over_limit and seen.residual_ratio <= 0.9 * state.drained_from
    state = structs.replace(state, draining=draining, drained_from=seen.residual_ratio if over_limit else 0.0)
    lossy = None if draining else _too_lossy(state, seen, over_limit)
    if lossy is None and loss.exceeds(state.limits.budget):
        return state, Complaint("loss", f"the loss has risen by {loss.rise:.1%}, above the budget of {state.limits.budget:.1%}")
    return state, lossy


def follow(state: LevelState, level: float) -> LevelState:
    """Adapts to a plan set by the user. Without an earlier complaint its level is permitted, even below the limits."""
    limits, floor = state.limits, state.floor
    if not state.complained:
        floor = min(floor, level)
        limits = structs.replace(limits, lowest=min(limits.lowest, level))
    return structs.replace(state, limits=limits, floor=floor, level=min(limits.highest, max(limits.lowest, level)))


def settle(state: LevelState) -> LevelState:
    """Clears the residual mean after a change: it belongs to the previous plan."""
    return structs.replace(state, mean_residual=None)


def _too_lossy(state: LevelState, seen: Fidelity, owing: bool) -> Complaint | None:
    least = state.limits.least_cosine
    if seen.cosine < least:
        return Complaint("cosine", f"cosine {seen.cosine:.2f} of sent and exact gradient is below {least:.2f}")
    if seen.norm_ratio > 1.0 / least:
        return Complaint("norm", f"what is sent has {seen.norm_ratio:.1f} times the gradient's norm")
    if owing:
        return Complaint("residual", f"the residual has grown to {state.mean_residual:.1f} gradients, above "
                                     f"{state.limits.most_residual:.3g}")
    return None


def _raised(state: LevelState) -> LevelState:
    # Starts from the active level, not from a lower floor, so that raising the floor has an effect.
    factor = min(MOST_BACK_OFF, BACK_OFF * 2.0**state.complaints)
    floor = min(state.limits.highest, max(state.floor, state.level) * factor)
    patience = min(2 * state.patience, MOST_PATIENCE) if state.lowered else state.patience
    return structs.replace(state, calm=0, complaints=state.complaints + 1, patience=patience, lowered=False,
                           complained=state.complained or floor > state.floor, floor=floor)


def _calmer(state: LevelState) -> LevelState:
    if state.drained_from:
        return state
    calm, floor, lowest = state.calm + 1, state.floor, state.limits.lowest
    if calm < state.patience or floor <= lowest:
        return structs.replace(state, complaints=0, calm=calm)
    return structs.replace(state, complaints=0, calm=0, lowered=True, floor=max(lowest, floor / ALLOW))


def _why(state: LevelState, before: float, needed: float) -> str:
    if state.level > before:
        return f"the plan needs a level of {needed:.3g}"
    if needed > state.floor:
        return f"the plan needs no more than a level of {needed:.3g}"
    return f"accuracy has borne {before:.3g} without complaint"
