"""The quality policy: keeps codecs fine enough for the loss budget. Pure functions of (state, rows, step).

All ranks receive the same rows after the same step, so they decide alike and switch plans together. `now` counts steps, the
only clock that ranks share; seconds come in rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from msgspec import structs

from commlayer.codec_spec import parse_spec
from commlayer.engine.spacing import TIME_PART, steps_between, steps_until_paid
from commlayer.observe.fidelity import Dots, Fidelity, worst
from commlayer.records import Bucket, Record

SETTLE = 4
"""Least number of steps under a plan before comparing, and between comparisons."""
DRAINING = 32
"""Upper limit of these steps after the guard has changed the plan. The residual of the previous plan is sent first, within
about 1 / ratio steps, and does not represent their gradients."""
FEWEST, MOST = 1 << 12, 1 << 16
"""Elements per comparison: few until its cost is known."""
OFTEN, SELDOM = 8, 32
"""Comparisons that can repeat within OFTEN steps examine more elements; those that must wait over SELDOM steps examine fewer.
"""
FADE = 0.5
"""Weight of earlier comparisons against the latest."""
LONG_FADE, FEWEST_SEEN = 0.9, 6
"""The same without a given budget, and the least number of comparisons: the bounds then describe whole models."""
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
EQUAL = 0.99
"""Ratios have three digits: levels within this factor count as equal (as in engine/plan_choice.py)."""


# ---- loss trend: a rise of a noisy training loss, from a fast mean and the lowest value of a slow one

FAST, SLOW = 0.1, 0.02
"""Weight of the newest loss in the two running means."""


class LossRise(NamedTuple):
    """The rise of a loss, as numbers that ranks exchange."""

    rise: float = 0.0
    """Relative to the lowest value; 0 before enough losses are known."""
    noise: float = 0.0
    """Uncertainty of the rise."""


class LossTrend(Record, frozen=True):
    """Summary of the losses reported so far."""

    near: float = 0.0
    """The fast mean."""
    far: float = 0.0
    """The slow mean."""
    wobble: float = 0.0
    lowest: float = math.inf
    count: int = 0

    def add(self, loss: float) -> LossTrend:
        """Adds the loss of one step; values that are not finite are ignored."""
        if not math.isfinite(loss):
            return self
        count = self.count + 1
        fast, slow = max(FAST, 1 / count), max(SLOW, 1 / count)
        wobble = self.wobble + fast * (abs(loss - self.near) - self.wobble) if count > 1 else 0.0
        near, far = self.near + fast * (loss - self.near), self.far + slow * (loss - self.far)
        return LossTrend(near, far, wobble, min(self.lowest, far), count)

    def seen(self) -> LossRise:
        if self.count < 1 / SLOW:
            return LossRise()
        lowest = max(abs(self.lowest), 1e-9)
        return LossRise((self.near - self.lowest) / lowest, 3.0 * self.wobble * math.sqrt(FAST / 2) / lowest)


# ---- bounds: from the loss budget or, without one, from what is usual under each codec

SLACK_COSINE, SLACK_RESIDUAL = 0.5, 3.0
"""Tolerance relative to the worst reference value: pieces of a few steps vary around the mean."""
TOPK = ((0.001, 0.05, 60.0), (0.003, 0.11, 27.1), (0.01, 0.23, 6.3), (0.03, 0.4, 2.4), (0.1, 0.67, 0.9), (1.0, 1.0, 0.1))
"""Ratio, lowest cosine, and largest residual in gradient norms: of whole models in the last four fifths of each training
(docs/benchmarks.md). The table of convergence factors does not apply to a model far outside these values."""
OTHERS = {"onebit": (0.19, 5.3), "int4": (0.98, 0.13), "int8": (0.99, 0.02), "fp16": (0.99, 0.02), "bf16": (0.99, 0.02)}
UNKNOWN = (0.05, 60.0)
"""For codecs without reference values."""


def usual(codec: str) -> tuple[float, float]:
    """Lowest cosine with the gradient, and largest residual, of any reference training under that codec.

    >>> usual("topk(ratio=0.01, values='int8')"), usual("error_feedback(int4())")
    ((0.23, 6.3), (0.98, 0.13))
    """
    name = parse_spec(codec).core
    if name.ratio is None or name.family != "topk":
        return OTHERS.get(name.family, UNKNOWN)
    at = max(TOPK[0][0], min(1.0, name.ratio))
    (low, c0, r0), (high, c1, r1) = next(pair for pair in itertools.pairwise(TOPK) if at <= pair[1][0])
    part = math.log(at / low) / math.log(high / low)
    return c0 + part * (c1 - c0), r0 * (r1 / r0) ** part


def least_usual(buckets: Iterable[Bucket]) -> tuple[float, float]:
    """Bounds for pieces of all these buckets; anything worse is unusual."""
    each = [usual(codec) for b in buckets for codec in (b.codec, b.down, *b.by_node) if codec]
    return (SLACK_COSINE * min((cosine for cosine, _ in each), default=1.0),
            SLACK_RESIDUAL * max((residual for _, residual in each), default=1.0))


class Bounds(Record, frozen=True):
    """Limits on a plan's codecs. A cosine or residual of 0 is derived from the budget, as measured in training
    (docs/benchmarks.md)."""

    budget: float = 0.05
    """Relative excess of the loss: 0.005 is half a percent."""
    lowest: float = 0.001
    """Lower limit of the level. The upper limit is 1: uncompressed."""
    cosine: float = 0.0
    """Lower bound of the cosine between sent and exact gradient."""
    residual: float = 0.0
    """Upper bound of the residual's norm, in gradient norms."""

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


# ---- rows, state and proposals


class GradientError(NamedTuple):
    """One rank's comparison with exact gradients. Numbers only, because rows are exchanged as tensors."""

    sent: Dots = Dots()
    """Comparison of this rank's payloads."""
    summed: Dots = Dots()
    """Comparison of the received sum with the exact one. Not finite if the step cannot be used."""
    loss: LossRise = LossRise()
    cost_s: float = 0.0
    """Seconds of the comparison."""
    elapsed_s: float = 0.0
    """Since the start of the job."""

    def numbers(self) -> list[float]:
        return [*self.sent, *self.summed, *self.loss, self.cost_s, self.elapsed_s]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> GradientError:
        """The inverse of `numbers`."""
        return cls(Dots(*numbers[:4]), Dots(*numbers[4:8]), LossRise(*numbers[8:10]), *numbers[10:])


class PlanLevels(Record, frozen=True):
    """The attributes of the active plan that the policy uses. A codec's level is its ratio if it has one, otherwise the bytes
    that it sends as a fraction of the dense bytes (engine/plan_choice.py)."""

    level: float
    """Level of the coarsest codec; 1 without codecs."""
    base_level: float
    """The level of the plan that it was made finer from; its own level otherwise."""
    compared: bool
    """Whether any of its buckets can be compared with exact gradients."""
    finer: bool = False
    """Whether the guard has made it finer."""
    cosine: float = 0.0
    residual: float = 0.0
    """Bounds if no budget is given: what is usual under its codecs. 0 means the bounds of the budget."""
    overlapped: bool = False
    """Whether results arrive during the next forward pass: then a comparison makes the step wait for all of them."""

    @property
    def settle_steps(self) -> int:
        """Steps under the plan before comparing, and between comparisons."""
        return max(SETTLE, min(DRAINING, math.ceil(1 / self.level))) if self.finer else SETTLE


class QualityState(Record, frozen=True):
    """The complete state. Ranks that start equal and receive the same rows have the same state at every step."""

    bounds: Bounds
    plan: PlanLevels
    level: float
    """The requested level of the coarsest codec."""
    floor: float
    """The coarsest level that accuracy permits."""
    complained: bool = False
    """Whether a complaint has ever raised the floor. Only then does the floor limit the planner and other plans."""
    calm: int = 0
    """Observations without complaint since the floor last moved."""
    complaints: int = 0
    """Consecutive complaints."""
    patience: int = CALM
    lowered: bool = False
    """Whether the floor's latest move was downward."""
    mean_residual: float | None = None
    """In gradient norms; None before the first observation under the active plan."""
    last_residual: float = 0.0
    """The latest residual if the mean is above its bound; otherwise 0."""
    since: int = 0
    """First step of the active plan."""
    compared_at: int = 0
    """The step of the latest comparison."""
    compare_at: int = SETTLE
    """No comparison before this step."""
    elements: int = FEWEST
    """Elements per comparison."""
    samples: int = 0
    """Count under the active plan, so that comparisons rotate over the whole model."""
    compared: int = 0
    """Usable comparisons under the active plan."""
    spent_s: float = 0.0
    """Time of comparisons since the start."""
    summed: Dots = Dots()
    """Faded sum of the comparisons under the active plan."""
    warned: frozenset[str] = frozenset()
    """Kinds of complaints already logged for the active plan."""

    @property
    def fade(self) -> float:
        """Weight of earlier observations under the active plan, against new ones."""
        return LONG_FADE if self.plan.cosine else FADE

    @property
    def planner_floor(self) -> float:
        """The planner must use no codec below this level; 0 means any."""
        return self.floor if self.complained else 0.0


class CodecChange(NamedTuple):
    """Proposal: all ranks switch, before the next step, to the base plan with no codec below `after`."""

    before: float
    after: float
    """Levels of the coarsest codec."""
    reason: str

    @property
    def finer(self) -> bool:
        return self.after > self.before


class Complaint(NamedTuple):
    """A bound that the active level violates."""

    kind: str
    text: str


def begin(bounds: Bounds, plan: PlanLevels) -> QualityState:
    """The state before the first step. Plans are never coarser than the first one, nor than `bounds.lowest`."""
    bounds = structs.replace(bounds, lowest=min(bounds.lowest, plan.level))
    return QualityState(_bounded(bounds, plan), plan, plan.level, plan.level)


def due(state: QualityState, now: int) -> bool:
    """Whether all ranks compare in step `now`."""
    # If all codecs were made exact there is no error to compare, but a coarser plan may be possible again.
    concerned = state.plan.compared or state.plan.finer
    return concerned and now - state.since >= state.plan.settle_steps and now >= state.compare_at


def compared(state: QualityState, now: int) -> QualityState:
    """All ranks have compared in step `now` and send their rows."""
    return structs.replace(state, samples=state.samples + 1, compared_at=now, compare_at=now + state.plan.settle_steps)


def is_usable(rows: Sequence[GradientError]) -> bool:
    """Whether the step can be used: not if the optimizer will skip it, nor if it sent residuals of an earlier plan."""
    return all(math.isfinite(x) for row in rows for x in row.summed)


def decide(
    state: QualityState, rows: Sequence[GradientError], step_s: float, *, acts: bool,
) -> tuple[QualityState, CodecChange | None, Complaint | None]:
    """Decides on the rows of a comparison: a change of codecs, or without `acts` a complaint that is new for this plan."""
    state = _scheduled(state, rows, max(step_s, 1e-6))
    if not is_usable(rows):
        return state, None, None
    summed = state.summed.plus(rows[0].summed, state.fade)
    state = structs.replace(state, summed=summed, compared=state.compared + 1)
    if state.plan.cosine and state.compared < FEWEST_SEEN:
        return state, None, None
    seen = worst([summed.fidelity(), *(row.sent.fidelity() for row in rows)])
    loss = LossRise(fmean(row.loss.rise for row in rows), fmean(row.loss.noise for row in rows))
    state, complaint, draining = complaint_of(state, seen, loss)
    if acts:
        return *_moved(state, complaint, draining=draining), None
    if complaint is None or complaint.kind in state.warned:
        return state, None, None
    return structs.replace(state, warned=state.warned | {complaint.kind}), None, complaint


def entered(
    state: QualityState, plan: PlanLevels, now: int, *, by_guard: bool = False, acts: bool = False,
) -> tuple[QualityState, CodecChange | None]:
    """Another plan is active: observations of the previous one do not apply. A plan that the guard did not choose (`by_guard`)
    is made finer if earlier complaints require it."""
    state = structs.replace(
        state, bounds=_bounded(state.bounds, plan), plan=plan, since=now, samples=0, compared=0, summed=Dots(),
        warned=frozenset(), mean_residual=None if by_guard else state.mean_residual,
        level=state.level if by_guard else plan.level)
    if by_guard:
        return state, None
    if acts and state.complained and plan.level < state.floor * EQUAL:
        return state, CodecChange(plan.level, state.floor, "accuracy has not borne less")
    if not state.complained:  # without an earlier complaint the plan's level is permitted
        state = structs.replace(state, floor=min(state.floor, plan.level),
                                bounds=structs.replace(state.bounds, lowest=min(state.bounds.lowest, plan.level)))
    return state, None


def complaint_of(state: QualityState, seen: Fidelity, loss: LossRise) -> tuple[QualityState, Complaint | None, bool]:
    """The violated bound, if any, and whether a residual above its bound drains."""
    mean, bounds = state.mean_residual, state.bounds
    if math.isfinite(seen.residual_ratio):
        # A residual varies by two or three times from step to step, so the bound applies to its mean.
        mean = seen.residual_ratio if mean is None else mean + SMOOTH * (seen.residual_ratio - mean)
        state = structs.replace(state, mean_residual=mean)
    if not all(map(math.isfinite, seen)):
        return state, Complaint("finite", "a comparison with the exact gradient was not finite"), False
    over = mean is not None and mean > bounds.most_residual
    # After a change a large residual drains: sent values come from the old residual, and the gradient looks wrong meanwhile.
    draining = over and seen.residual_ratio <= 0.9 * state.last_residual
    state = structs.replace(state, last_residual=seen.residual_ratio if over else 0.0)
    complaint = None
    if not draining and seen.cosine < bounds.least_cosine:
        complaint = Complaint("cosine",
                              f"cosine {seen.cosine:.2f} of sent and exact gradient is below {bounds.least_cosine:.2f}")
    elif not draining and seen.norm_ratio > 1.0 / bounds.least_cosine:
        complaint = Complaint("norm", f"what is sent has {seen.norm_ratio:.1f} times the gradient's norm")
    elif not draining and over:
        complaint = Complaint("residual",
                              f"the residual has grown to {mean:.1f} gradients, above {bounds.most_residual:.3g}")
    elif loss.rise > bounds.budget + loss.noise:
        complaint = Complaint("loss", f"the loss has risen by {loss.rise:.1%}, above the budget of {bounds.budget:.1%}")
    return state, complaint, draining


def _moved(state: QualityState, complaint: Complaint | None, *, draining: bool) -> tuple[QualityState, CodecChange | None]:
    """Raises the floor after a complaint, lowers it after a long calm; the level is the floor or the plan's own level."""
    state = _raised(state) if complaint else _calmer(state)
    target = min(1.0, max(state.floor, state.plan.base_level, state.level if draining else 0.0))
    # Small moves do not justify a plan change, except after a complaint.
    if target == state.level or (complaint is None and abs(math.log(target / state.level)) < math.log(ALLOW) * 0.99):
        return state, None
    before = state.plan.level
    reason = complaint.text if complaint else f"accuracy has borne {before:.3g} without complaint"
    return structs.replace(state, level=target), CodecChange(before, target, reason)


def _raised(state: QualityState) -> QualityState:
    # Starts from the active level, not from a lower floor, so that raising the floor has an effect.
    floor = min(1.0, max(state.floor, state.level) * min(MOST_BACK_OFF, BACK_OFF * 2.0**state.complaints))
    patience = min(2 * state.patience, MOST_PATIENCE) if state.lowered else state.patience
    return structs.replace(state, calm=0, complaints=state.complaints + 1, patience=patience, lowered=False,
                           complained=state.complained or floor > state.floor, floor=floor)


def _calmer(state: QualityState) -> QualityState:
    if state.last_residual:
        return state
    if state.calm + 1 < state.patience or state.floor <= state.bounds.lowest:
        return structs.replace(state, complaints=0, calm=state.calm + 1)
    return structs.replace(state, complaints=0, calm=0, lowered=True, floor=max(state.bounds.lowest, state.floor / ALLOW))


def _scheduled(state: QualityState, rows: Sequence[GradientError], step_s: float) -> QualityState:
    """Schedules the next comparison and sets its size."""
    # The last rank to arrive waits for no other; the others would have waited for it in the next step anyway.
    cost_s, elapsed_s = min(row.cost_s for row in rows), min(row.elapsed_s for row in rows)
    spent_s, elements, every = state.spent_s + cost_s, state.elements, steps_between(cost_s, step_s, TIME_PART)
    wait = max(state.plan.settle_steps, steps_until_paid(spent_s, cost_s, elapsed_s, step_s, TIME_PART))
    if every <= OFTEN:
        elements = min(MOST, 2 * elements)
    elif every > SELDOM and not state.plan.overlapped:  # in overlapped plans the cost does not depend on the size
        elements = max(FEWEST, elements // 2)
    return structs.replace(state, spent_s=spent_s, compare_at=state.compared_at + wait, elements=elements)


def _bounded(bounds: Bounds, plan: PlanLevels) -> Bounds:
    """Applies the bounds of that plan."""
    return structs.replace(bounds, cosine=plan.cosine, residual=plan.residual) if plan.cosine or plan.residual else bounds
