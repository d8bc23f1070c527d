"""What the accuracy guard knows and may ask for, as values that are the same on all ranks. No torch, clock or connection."""

from __future__ import annotations

import math
from typing import NamedTuple

from commlayer.autotune.quality.codec_level import LevelState
from commlayer.autotune.quality.loss_trend import LossRise
from commlayer.observe.fidelity import Dots, Fidelity
from commlayer.records import Record

SETTLE = 4
"""Steps under a plan before looking, and between comparisons over all ranks, at least."""
DRAINING = 32
"""At most so many where the guard has changed the plan: what the one before owed is sent first, within some 1 / ratio steps,
and tells nothing of the gradients of these steps."""
FEWEST, MOST = 1 << 12, 1 << 16
"""Elements compared at a time: few while nobody knows what comparing costs here."""


class GradientError(NamedTuple):
    """What a rank says at a comparison. Numbers only: the exchange carries nothing else."""

    sent: Dots
    """Of what this rank sends itself."""
    summed: Dots
    """Of the sum that came back, against the exact one. Not finite: the step tells nothing."""
    loss: LossRise
    here_s: float
    """Of a look at what it sends itself, on average."""
    everywhere_s: float
    """Of the comparison over all ranks before this one; of the first, as far as it has come."""
    step_s: float
    elapsed_s: float
    """Since the start."""

    def numbers(self) -> list[float]:
        return [*self.sent, *self.summed, *self.loss, self.here_s, self.everywhere_s, self.step_s, self.elapsed_s]

    @classmethod
    def of(cls, numbers: list[float]) -> GradientError:
        """The inverse of `numbers`."""
        return cls(Dots(*numbers[:4]), Dots(*numbers[4:8]), LossRise(*numbers[8:10]), *numbers[10:])


class PlanLevels(Record, frozen=True):
    """What the guard needs to know of the plan in force."""

    level: float
    """Of its coarsest codec; 1 for a plan without any."""
    base_level: float
    """The same of the plan that it was made finer from, which somebody asked for; its own where that has not happened."""
    compared: bool
    """Whether any of its buckets can be compared with exact gradients."""
    finer: bool = False
    """Whether the guard has made it finer."""
    cosine: float = 0.0
    residual: float = 0.0
    """Bounds that hold under it, where no budget is named: what is usual under its codecs. 0: those of the budget."""
    typical: float = 0.0
    """The cosine that workers' own parts have under its codecs in the median of trainings; 0 where that tells nothing."""
    overlapped: bool = False
    """Whether results come in during the next forward pass: then a look has its step wait for all of them."""

    @property
    def settle_steps(self) -> int:
        """Steps under it before looking, and between comparisons."""
        return max(SETTLE, min(DRAINING, math.ceil(1 / self.level))) if self.finer else SETTLE


class CodecChange(NamedTuple):
    """A finer, or again a coarser, plan: why, and what was seen when it was decided."""

    before: float
    after: float
    """Levels of the coarsest codec."""
    reason: str
    seen: Fidelity | None
    """None where the plan that is changed was never compared."""
    step_s: float


class MadeChange(NamedTuple):
    """A change that has been carried out and whose outcome is not known yet."""

    step: int
    """The first that runs under it."""
    change: CodecChange


class AccuracyState(Record, frozen=True):
    """All that decisions depend on. Ranks that begin alike and hear the same rows have the same state at every step."""

    level: LevelState
    plan: PlanLevels
    since: int = 0
    """The step at which the plan in force began."""
    compare_at: int = SETTLE
    """No comparison over all ranks before this step."""
    look_every: int = 1
    """Steps from one look at what a rank sends itself to the next."""
    elements: int = FEWEST
    """How many are compared at a time."""
    looks: int = 0
    """Under the plan in force, so that they take turns over the whole model."""
    compared: int = 0
    """Comparisons that told something, under the plan in force."""
    spent_s: float = 0.0
    """On comparisons over all ranks, since the start."""
    summed: Dots = Dots()
    """What comparisons under the plan in force have seen, earlier ones fading."""
    step_s: float = 0.0
    """The median rank's, when last heard."""
    pending: CodecChange | None = None
    """Decided, to be carried out when the step has been committed."""
    made: MadeChange | None = None
    warned: frozenset[str] = frozenset()
    """Kinds of complaints that the user has heard of the plan in force."""


class Look(NamedTuple):
    """In the next step, compare this piece of what is sent with its gradient."""

    number: int
    elements: int


class ChangeCodecs(NamedTuple):
    """Go over to the base plan with no codec below `change.after`; all ranks do, before the next step."""

    change: CodecChange


class BoundPlanner(NamedTuple):
    """The planner shall use no codec below this level; 0 for any."""

    level: float


class Harder(NamedTuple):
    """The planner shall count so many times the excess of steps that is usual under a codec."""

    times: float


class Tell(NamedTuple):
    """A line for the user."""

    text: str
    warning: bool = False


Action = ChangeCodecs | BoundPlanner | Harder | Tell
