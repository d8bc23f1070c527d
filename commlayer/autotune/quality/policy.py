"""The quality guard's decisions, as pure functions of (state, rows, step): keeps codecs fine enough for the loss budget.

All ranks receive the same rows at the same step, so they decide alike and switch plans together. `now` is the number of
completed steps, the only clock that ranks share; seconds come in rows. The driver calls `due` at the end of a step's exchange
and passes the rows to `decide`. After the commit it calls `after_step`, reports the outcome of a requested change with
`change_done` or `change_refused`, and calls `next_sample` for the next step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Literal, NamedTuple

from msgspec import structs

from commlayer.codec_spec import parse_spec
from commlayer.engine.spacing import TIME_PART, steps_between, steps_until_paid
from commlayer.errors import InvalidInput
from commlayer.observe.fidelity import Dots, Fidelity, worst
from commlayer.records import Bucket, Record

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
    own_check_s: float
    """Mean seconds of a check of this rank's payloads."""
    comparison_s: float
    """Seconds of the previous comparison over all ranks; for the first one, of the present one so far."""
    step_s: float
    elapsed_s: float
    """Since the start of the job."""

    def numbers(self) -> list[float]:
        return [*self.sent, *self.summed, *self.loss, self.own_check_s, self.comparison_s, self.step_s, self.elapsed_s]

    @classmethod
    def of(cls, numbers: list[float]) -> GradientError:
        """The inverse of `numbers`."""
        return cls(Dots(*numbers[:4]), Dots(*numbers[4:8]), LossRise(*numbers[8:10]), *numbers[10:])


class PlanLevels(Record, frozen=True):
    """The attributes of the active plan that the quality guard uses."""

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
    sample_every: int = 1
    """Steps between checks of this rank's own payloads."""
    elements: int = FEWEST
    """Elements per comparison."""
    samples: int = 0
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


class Sample(NamedTuple):
    """A request to compare this piece with its gradient in the next step."""

    number: int
    elements: int


class ChangeCodecs(NamedTuple):
    """All ranks switch, before the next step, to the base plan with no codec below `change.after`."""

    change: CodecChange


class BoundPlanner(NamedTuple):
    """The planner must use no codec below this level; 0 means any."""

    level: float


class SetErrorMultiplier(NamedTuple):
    """The planner must multiply the usual excess of steps under a codec by this."""

    times: float


class LogLine(NamedTuple):
    """A line for the user."""

    text: str
    warning: bool = False


Action = ChangeCodecs | BoundPlanner | SetErrorMultiplier | LogLine


# ---- loss trend: a rise of a noisy training loss, from a fast mean and the lowest value of a slow one

FAST, SLOW = 0.1, 0.02
"""Weight of the newest loss in the two running means."""


class LossRise(NamedTuple):
    """The rise of a loss, as numbers that ranks exchange."""

    rise: float = 0.0
    """Relative to the lowest value; 0 before enough losses are known."""
    noise: float = 0.0
    """Uncertainty of the rise."""

    def exceeds(self, budget: float) -> bool:
        """Whether the rise exceeds the budget by more than its noise."""
        return self.rise > budget + self.noise


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
        return structs.replace(self, near=near, far=far, wobble=wobble, lowest=min(self.lowest, far), count=count)

    def seen(self) -> LossRise:
        if self.count < 1 / SLOW:
            return LossRise()
        lowest = max(abs(self.lowest), 1e-9)
        return LossRise((self.near - self.lowest) / lowest, 3.0 * self.wobble * math.sqrt(FAST / 2) / lowest)


# ---- usual cosines and residuals under each codec
#
# Measured for whole models in the last four fifths of each training; docs/benchmarks.md lists them. The learning table does not
# apply to a model far outside these values.

SLACK_COSINE, SLACK_RESIDUAL = 0.5, 3.0
"""Tolerance relative to the worst reference value: pieces of a few steps vary around the mean."""
TOPK = ((0.001, 0.05, 60.0, 0.08), (0.003, 0.11, 27.1, 0.17), (0.01, 0.23, 6.3, 0.35), (0.03, 0.4, 2.4, 0.65),
        (0.1, 0.67, 0.9, 0.89), (1.0, 1.0, 0.1, 1.0))
"""Ratio, lowest cosine, largest residual in gradient norms, and median cosine under optimizers like Adam."""
OTHERS = {"onebit": (0.19, 5.3), "int4": (0.98, 0.13), "int8": (0.99, 0.02), "fp16": (0.99, 0.02), "bf16": (0.99, 0.02)}
UNKNOWN = (0.05, 60.0)
"""For codecs without reference values."""
STEEPNESS = 1.5
"""With Adam, a model's excess of steps under a codec grows with this power of the lost direction, 1 - cosine squared. With SGD
it does not (docs/benchmarks.md)."""
LARGEST_RATIO = 2.0
"""Largest ratio seen between models."""

Row = tuple[float, float, float, float]


def usual(codec: str) -> tuple[float, float]:
    """Lowest cosine with the gradient, and largest residual, of any reference training under that codec.

    >>> usual("topk(ratio=0.01, values='int8')"), usual("error_feedback(int4())")
    ((0.23, 6.3), (0.98, 0.13))
    """
    name = parse_spec(codec).core
    if name.ratio is None or name.family != "topk":
        return OTHERS.get(name.family, UNKNOWN)
    (_, c0, r0, _), (_, c1, r1, _), part = _around(name.ratio)
    return c0 + part * (c1 - c0), r0 * (r1 / r0) ** part


def least_usual(buckets: Iterable[Bucket]) -> tuple[float, float]:
    """Bounds for pieces of all these buckets; anything worse is unusual."""
    each = [usual(codec) for b in buckets for codec in (b.codec, b.down, *b.by_node) if codec]
    return (SLACK_COSINE * min((cosine for cosine, _ in each), default=1.0),
            SLACK_RESIDUAL * max((residual for _, residual in each), default=1.0))


def typical_cosine(buckets: Sequence[Bucket]) -> float:
    """Median cosine of workers' payloads for all these buckets, in trainings with Adam; 0 if none uses topk."""
    numel, squares, sparse = 0, 0.0, False
    for b in buckets:
        names = [parse_spec(codec).core for codec in (b.by_node or (b.codec,))]
        for name in names:
            cosine = 1.0
            if name.family == "topk" and name.ratio is not None:
                (_, _, _, t0), (_, _, _, t1), part = _around(name.ratio)
                cosine, sparse = t0 + part * (t1 - t0), True
            squares += b.numel * cosine**2 / len(names)
        numel += b.numel
    return (squares / numel) ** 0.5 if sparse else 0.0


def error_multiplier(cosine: float, typical: float) -> float:
    """The model's excess of steps under a codec, relative to the median model; at least 1.

    >>> harder(0.35, 0.35), round(harder(0.85, 0.89), 1), harder(0.5, 0.35)
    (1.0, 1.5, 1.0)
    """
    error, usually = 1.0 - max(0.0, cosine) ** 2, 1.0 - typical**2
    return min(LARGEST_RATIO, max(1.0, math.pow(error / max(usually, 1e-6), STEEPNESS)))


def _around(ratio: float) -> tuple[Row, Row, float]:
    """The neighboring reference rows, and the position of the ratio between them."""
    at = max(TOPK[0][0], min(1.0, ratio))
    low, high = next(pair for pair in itertools.pairwise(TOPK) if at <= pair[1][0])
    return low, high, math.log(at / low[0]) / math.log(high[0] / low[0])


# ---- compression level: the coarsest level that accuracy permits, within the needs of the plan
#
# A codec's level is its ratio if it has one, otherwise the bytes it sends as a fraction of the dense bytes
# (engine/codec_floor.py). Accuracy has priority. Observations of the gradient (cosine and norm of the compressed against the
# exact one), the residual and the loss set a floor; the plan's needs move the level between that floor and dense.

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
    """The user's accuracy limits. Limits of 0 are derived from the budget, as measured in training (docs/benchmarks.md)."""

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


def begin_level(level: float, limits: AccuracyLimits | None = None) -> LevelState:
    limits = limits or AccuracyLimits()
    if not 0 < limits.lowest <= level <= limits.highest <= 1:
        raise InvalidInput("E-ARGUMENT", f"level {level:g}: allowed is {limits.lowest:g} to {limits.highest:g}, within 0 to 1")
    return LevelState(level, level, limits)


def observe_level(state: LevelState, seen: Fidelity, loss: LossRise, needed: float) -> tuple[LevelState, LevelDecision]:
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


def follow_level(state: LevelState, level: float) -> LevelState:
    """Adapts to a plan set by the user. Without an earlier complaint its level is permitted, even below the limits."""
    limits, floor = state.limits, state.floor
    if not state.complained:
        floor = min(floor, level)
        limits = structs.replace(limits, lowest=min(limits.lowest, level))
    return structs.replace(state, limits=limits, floor=floor, level=min(limits.highest, max(limits.lowest, level)))


def settle_level(state: LevelState) -> LevelState:
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


# ---- decisions

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
    return AccuracyState(_bounded(begin_level(plan.level, structs.replace(limits, lowest=lowest)), plan), plan)


def due(state: AccuracyState, now: int) -> bool:
    """Whether all ranks compare in the present step."""
    # If all codecs were made exact there is no error to compare, but a coarser plan may be possible again.
    concerned = state.plan.compared or state.plan.finer
    return concerned and now - state.since >= state.plan.settle_steps and now >= state.compare_at


def next_sample(state: AccuracyState, now: int) -> tuple[AccuracyState, Sample | None]:
    """The piece that a rank compares in the next step, or None."""
    settled = now - state.since - state.plan.settle_steps
    between = settled >= 0 and settled % state.sample_every == 0 and not state.plan.overlapped
    if not state.plan.compared or not (due(state, now) or between):
        return state, None
    return structs.replace(state, samples=state.samples + 1), Sample(state.samples, state.elements)


def fade(state: AccuracyState) -> float:
    """Weight of earlier observations under the active plan, against new ones."""
    return LONG_FADE if state.plan.cosine else FADE


def is_usable(rows: Sequence[GradientError]) -> bool:
    """Whether the step can be used: not if the optimizer will skip it, nor if it sent residuals of an earlier plan."""
    return all(math.isfinite(x) for row in rows for x in row.summed)


def decide(
    state: AccuracyState, rows: Sequence[GradientError], now: int, *, acts: bool,
) -> tuple[AccuracyState, tuple[Action, ...]]:
    """Decides after a comparison. Without `acts` the plan stays, and complaints are only logged."""
    state = _scheduled(state, rows, now)
    if not is_usable(rows):
        return state, ()
    summed, step_s = state.summed.plus(rows[0].summed, fade(state)), median(row.step_s for row in rows)
    fidelity = worst([summed.fidelity(), *(row.sent.fidelity() for row in rows)])
    loss = LossRise(fmean(row.loss.rise for row in rows), fmean(row.loss.noise for row in rows))
    actions: list[Action] = []
    if state.made is not None:
        actions.append(LogLine(_outcome(state.made, fidelity, step_s)))
    state = structs.replace(state, summed=summed, step_s=step_s, made=None, compared=state.compared + 1)
    if state.plan.cosine and state.compared < FEWEST_SEEN:
        return state, tuple(actions)
    if state.plan.typical and acts and state.compared >= FEWEST_SEEN:
        own = Dots()
        for row in rows:
            own = own.plus(row.sent)
        actions.append(SetErrorMultiplier(round(error_multiplier(own.fidelity().cosine, state.plan.typical), 2)))
    more: tuple[Action, ...]
    state, more = _adjusted(state, fidelity, loss) if acts else _complained(state, fidelity, loss)
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
    return structs.replace(state, level=follow_level(state.level, entered.level)), ()


def change_done(
    state: AccuracyState, change: CodecChange, now: int, *, entered: PlanLevels, nbytes_factor: float,
) -> tuple[AccuracyState, tuple[LogLine, ...]]:
    """Called after a change of codecs. `nbytes_factor`: expected bytes per step relative to before."""
    state = structs.replace(_under(state, entered, now), made=MadeChange(now, change))
    state = structs.replace(state, level=settle_level(state.level))
    finer = change.after > change.before
    text = (f"{change.reason}: codecs are {'finer' if finer else 'coarser'} from here on, {change.before:.3g} -> "
            f"{change.after:.3g} of the gradient; expected: {nbytes_factor:.1f} times the bytes, cosine "
            f"{state.level.limits.least_cosine:.2f} or more")
    return state, (LogLine(text, warning=finer),)


def change_refused(change: CodecChange, error: ValueError) -> LogLine:
    """Called if all ranks have refused the change."""
    return LogLine(f"{change.reason}, but the plan in force stays: {error}", warning=True)


def _scheduled(state: AccuracyState, rows: Sequence[GradientError], now: int) -> AccuracyState:
    """Schedules the next comparison and sets its size."""
    step_s = max(median(row.step_s for row in rows), 1e-6)
    # The last rank to arrive waits for no other; the others would have waited for it in the next step anyway.
    cost_s, elapsed_s = min(row.comparison_s for row in rows), min(row.elapsed_s for row in rows)
    spent_s, part = state.spent_s + cost_s, TIME_PART * (1 - LOCALLY)
    wait = max(state.plan.settle_steps, steps_until_paid(spent_s, cost_s, elapsed_s, step_s, part))
    every, elements = steps_between(cost_s, step_s, part), state.elements
    if every <= OFTEN:
        elements = min(MOST, 2 * elements)
    elif every > SELDOM and not state.plan.overlapped:  # in overlapped plans the cost does not depend on the size
        elements = max(FEWEST, elements // 2)
    sample_every = steps_between(max(row.own_check_s for row in rows), step_s, TIME_PART * LOCALLY)
    return structs.replace(state, spent_s=spent_s, compare_at=now + wait, sample_every=sample_every, elements=elements)


def _adjusted(state: AccuracyState, seen: Fidelity, loss: LossRise) -> tuple[AccuracyState, tuple[Action, ...]]:
    """Requests finer codecs after a complaint, or coarser ones after a long calm."""
    level, decision = observe_level(state.level, seen, loss, needed=state.plan.base_level)
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
    level, complaint = complaint_of(state.level, seen, loss)
    state = structs.replace(state, level=level)
    if complaint is None or complaint.kind in state.warned:
        return state, ()
    text = f'{complaint.text}; the plan stays as it was asked for (guard="act" would make its codecs finer)'
    return structs.replace(state, warned=state.warned | {complaint.kind}), (LogLine(text, warning=True),)


def _under(state: AccuracyState, plan: PlanLevels, now: int) -> AccuracyState:
    """The state under a new plan; observations of the previous one do not apply to it."""
    return structs.replace(state, level=_bounded(state.level, plan), plan=plan, since=now, samples=0, compared=0, summed=Dots(),
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
