"""How fine codecs must be: as coarse as the plan has them, no coarser than accuracy bears. Pure; knows measurements, no plans.

A codec's level is its ratio where it has one, else the part of the dense bytes that it sends (engine/codec_floor.py). Per
observation this module says which level shall hold and why. Accuracy goes first: what is seen of a gradient (cosine and norm
of the compressed against the exact one), of the residual and of the loss may only raise the level; what the plan needs moves it
between that floor and dense.
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
"""Quickly finer, slowly coarser: an error in accuracy costs more than one in speed."""
MOST_BACK_OFF = 16.0
"""Each complaint after another without calm between them doubles the factor, up to this: a level may be wrong by thousands."""
CALM = 5
"""Observations without complaint before a coarser level is allowed."""
MOST_PATIENCE = 16 * CALM
"""Each time that a coarser level turns out to have been too coarse, the next takes twice as many observations, up to this."""
SMOOTH = 0.3
"""Weight of the newest residual in its running mean."""


class AccuracyLimits(Record, frozen=True):
    """What the user bears. Bounds that are 0 follow from the budget, as measured in training (docs/tuning.md)."""

    budget: float = 0.05
    """Relative excess of the loss: 0.005 is half a per cent."""
    lowest: float = 0.001
    highest: float = 1.0
    """Range of the level."""
    cosine: float = 0.0
    """Least cosine of what a step sends with its gradient."""
    residual: float = 0.0
    """Largest norm of the residual, in gradients."""

    @property
    def least_cosine(self) -> float:
        """
        >>> AccuracyLimits(budget=0.005).least_cosine, AccuracyLimits(budget=0.05).least_cosine
        (0.883, 0.183)
        """
        return self.cosine or min(0.95, max(0.05, round(0.57 - 0.7 * math.log10(self.budget / 0.014), 3)))

    @property
    def most_residual(self) -> float:
        """What is kept back lags: each gradient of it cost some 1.25 % of the loss.

        >>> AccuracyLimits(budget=0.05).most_residual
        4.0
        """
        return self.residual or self.budget / 0.0125


class Complaint(NamedTuple):
    """What is wrong with the level in force."""

    kind: Literal["finite", "cosine", "norm", "residual", "loss"]
    text: str


class LevelDecision(NamedTuple):
    """The level to hold, and why."""

    level: float
    reason: str
    changed: bool


class LevelState(Record, frozen=True):
    """The level in force and how it got there. `floor` is what accuracy allows, `level` what holds."""

    level: float
    floor: float
    limits: AccuracyLimits
    complained: bool = False
    """Whether the floor has ever been raised: then it is what training showed, not what a job happened to begin with."""
    calm: int = 0
    """Observations without complaint since the floor last moved."""
    complaints: int = 0
    """One after another, without calm between them."""
    patience: int = CALM
    lowered: bool = False
    """Whether the floor's latest move was downwards."""
    mean_residual: float | None = None
    """In gradients; None before any was seen under the plan in force."""
    drained_from: float = 0.0
    """The latest residual, where the mean is above its bound; else 0."""
    draining: bool = False


def begin(level: float, limits: AccuracyLimits | None = None) -> LevelState:
    limits = limits or AccuracyLimits()
    if not 0 < limits.lowest <= level <= limits.highest <= 1:
        raise InvalidInput("E-ARGUMENT", f"level {level:g}: allowed is {limits.lowest:g} to {limits.highest:g}, within 0 to 1")
    return LevelState(level, level, limits)


def observe(state: LevelState, seen: Fidelity, loss: LossRise, needed: float) -> tuple[LevelState, LevelDecision]:
    """`seen`: the worst of the sampled pieces. `needed`: the level that the plan has when accuracy asks for nothing."""
    state, complaint = complaint_of(state, seen, loss)
    state = _raised(state) if complaint else _calmer(state)
    target = min(state.limits.highest, max(state.floor, needed, state.level if state.draining else 0.0))
    said = complaint.text if complaint else ""
    # Small moves are not worth a change of plan, unless accuracy asks.
    if target == state.level or (not said and abs(math.log(target / state.level)) < math.log(ALLOW) * 0.99):
        return state, LevelDecision(state.level, said or "within the budget and what the plan needs", False)
    moved = structs.replace(state, level=target)
    return moved, LevelDecision(target, said or _why(moved, state.level, needed), True)


def complaint_of(state: LevelState, seen: Fidelity, loss: LossRise) -> tuple[LevelState, Complaint | None]:
    """What is wrong, if anything. Changes no level: alone it is for a plan that is only to be watched."""
    mean = state.mean_residual
    if math.isfinite(seen.residual_ratio):
        # A residual swings by two or three times from step to step; the bound is on its mean.
        mean = seen.residual_ratio if mean is None else mean + SMOOTH * (seen.residual_ratio - mean)
        state = structs.replace(state, mean_residual=mean)
    if not all(map(math.isfinite, seen)):
        return state, Complaint("finite", "a comparison with the exact gradient was not finite")
    owing = mean is not None and mean > state.limits.most_residual
    # A large residual drains after a change, and what is sent is what was owed: that takes its time.
    draining = owing and seen.residual_ratio <= 0.9 * state.drained_from
    state = structs.replace(state, draining=draining, drained_from=seen.residual_ratio if owing else 0.0)
    lossy = None if draining else _too_lossy(state, seen, owing)
    if lossy is None and loss.exceeds(state.limits.budget):
        return state, Complaint("loss", f"the loss has risen by {loss.rise:.1%}, above the budget of {state.limits.budget:.1%}")
    return state, lossy


def follow(state: LevelState, level: float) -> LevelState:
    """Somebody else has changed the plan. Where nothing was complained of, nothing is known against its level."""
    limits, floor = state.limits, state.floor
    if not state.complained:
        floor = min(floor, level)
        limits = structs.replace(limits, lowest=min(limits.lowest, level))
    return structs.replace(state, limits=limits, floor=floor, level=min(limits.highest, max(limits.lowest, level)))


def settle(state: LevelState) -> LevelState:
    """The change has been made. What waits under the new plan tells of that plan alone."""
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
    # From what holds, not from an old floor below it: the floor has to have an effect now.
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
