"""State and actions of the quality guard: plain values that are the same on all ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

from commlayer.autotune.quality.codec_level import LevelState
from commlayer.autotune.quality.loss_trend import LossRise
from commlayer.observe.fidelity import Dots, Fidelity
from commlayer.records import Record

SETTLE = 4
"""Least number of steps under a plan before comparing, and between comparisons over all ranks."""
DRAINING = 32
"""Upper limit of these steps after the guard has changed the plan. The residual of the previous plan is sent first, within
about 1 / ratio steps, and does not represent their gradients."""
FEWEST, MOST = 1 << 12, 1 << 16
"""Elements per comparison: few until its cost is known."""


class GradientError(NamedTuple):
    """One rank's row for a comparison. Numbers only, because rows are exchanged as tensors."""

    sent: Dots
    """Comparison of this rank's payloads."""
    summed: Dots
    """Comparison of the received sum with the exact one. Not finite if the step cannot be used."""
    loss: LossRise
    here_s: float
    """Mean seconds of a check of this rank's payloads."""
    everywhere_s: float
    """Seconds of the previous comparison over all ranks; for the first one, of the present one so far."""
    step_s: float
    elapsed_s: float
    """Since the start of the job."""

    def numbers(self) -> list[float]:
        return [*self.sent, *self.summed, *self.loss, self.here_s, self.everywhere_s, self.step_s, self.elapsed_s]

    @classmethod
    def of(cls, numbers: list[float]) -> GradientError:
        """The inverse of `numbers`."""
        return cls(Dots(*numbers[:4]), Dots(*numbers[4:8]), LossRise(*numbers[8:10]), *numbers[10:])


class PlanLevels(Record, frozen=True):
    """The active plan, as far as the guard needs it."""

    level: float
    """Level of the coarsest codec; 1 without codecs."""
    base_level: float
    """The level of the user's plan that it was made finer from; its own level otherwise."""
    compared: bool
    """Whether any of its buckets can be compared with exact gradients."""
    finer: bool = False
    """Whether the guard has made it finer."""
    cosine: float = 0.0
    residual: float = 0.0
    """Bounds if no budget is given: what is usual under its codecs. 0 means the bounds of the budget."""
    typical: float = 0.0
    """Median cosine of workers' payloads under its codecs in trainings; 0 if unknown."""
    overlapped: bool = False
    """Whether results arrive during the next forward pass: then a check makes the step wait for all of them."""

    @property
    def settle_steps(self) -> int:
        """Steps under the plan before comparing, and between comparisons."""
        return max(SETTLE, min(DRAINING, math.ceil(1 / self.level))) if self.finer else SETTLE


class CodecChange(NamedTuple):
    """A change to finer or coarser codecs, with its reason and the observation behind it."""

    before: float
    after: float
    """Levels of the coarsest codec."""
    reason: str
    seen: Fidelity | None
    """None if the previous plan was never compared."""
    step_s: float


class MadeChange(NamedTuple):
    """A change that was carried out and whose effect is not yet known."""

    step: int
    """The first step under it."""
    change: CodecChange


class AccuracyState(Record, frozen=True):
    """The complete state. Ranks that start equal and receive the same rows have the same state at every step."""

    level: LevelState
    plan: PlanLevels
    since: int = 0
    """First step of the active plan."""
    compare_at: int = SETTLE
    """No comparison over all ranks before this step."""
    look_every: int = 1
    """Steps between checks of this rank's own payloads."""
    elements: int = FEWEST
    """Elements per comparison."""
    looks: int = 0
    """Count under the active plan, so that checks rotate over the whole model."""
    compared: int = 0
    """Usable comparisons under the active plan."""
    spent_s: float = 0.0
    """Time of comparisons over all ranks, since the start."""
    summed: Dots = Dots()
    """Faded sum of the comparisons under the active plan."""
    step_s: float = 0.0
    """The median rank's, in the latest rows."""
    pending: CodecChange | None = None
    """To be carried out after the commit of the step."""
    made: MadeChange | None = None
    warned: frozenset[str] = frozenset()
    """Kinds of complaints already logged for the active plan."""


class Look(NamedTuple):
    """A request to compare this piece with its gradient in the next step."""

    number: int
    elements: int


class ChangeCodecs(NamedTuple):
    """All ranks switch, before the next step, to the base plan with no codec below `change.after`."""

    change: CodecChange


class BoundPlanner(NamedTuple):
    """The planner must use no codec below this level; 0 means any."""

    level: float


class Harder(NamedTuple):
    """The planner must multiply the usual excess of steps under a codec by this."""

    times: float


class Tell(NamedTuple):
    """A line for the user."""

    text: str
    warning: bool = False


Action = ChangeCodecs | BoundPlanner | Harder | Tell
