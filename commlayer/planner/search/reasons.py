"""Adds predictions to a plan: each bucket's price, reason and runner-up."""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec import structs

from commlayer.planner.model.cluster import Cluster
from commlayer.planner.model.float64 import DOUBLE
from commlayer.planner.model.option import DENSE
from commlayer.planner.model.thin import is_thin, travels
from commlayer.planner.pricing.steps_needed import plan_excess
from commlayer.planner.search.choices import ChoiceFound
from commlayer.planner.search.layout_candidate import FINEST, LayoutCandidate
from commlayer.planner.simulation.timeline import Timeline, per_step, simulate
from commlayer.records import Bucket, Plan, Why

LOOKED_AT = 2.0
"""Steps longer by more than this factor with another option are not simulated exactly."""
SAME = 1e-6
"""Steps that differ by less than this fraction count as equal."""


def explained(plan: Plan, entry: LayoutCandidate, found: ChoiceFound, cluster: Cluster) -> Plan:
    """The plan with its predictions. `found`: the choice behind it. `cluster`: the real nodes, if the search merged
    similar ones."""
    job, _, searched, profile, policy = entry.inputs
    placed = entry.ways.placed.prices
    timeline = simulate(plan, job, cluster, profile, policy, spans=False,
                        prices=placed if placed.hosts == plan.hosts and searched == cluster else None)
    step_s = per_step(timeline, plan.local_steps)
    more = plan_excess(plan, job, cluster, profile, policy)
    free_s = min(step_s, entry.free_s() / plan.local_steps)
    verdicts: dict[int, Verdict] = {}
    origins = [part.origin for part in entry.parts(found)]
    for b in dict.fromkeys(origins):
        verdicts[b] = _verdict(b, entry, found)
    buckets = tuple(
        structs.replace(bucket, why=_why(bucket, verdicts[b], entry, timeline))
        for bucket, b in zip(plan.buckets, origins, strict=True)
    )
    steps = {"steps": 1 + more.steps, "steps_high": 1 + more.high} if profile.learning else {}
    return structs.replace(plan, buckets=buckets, step_s=step_s, free_s=free_s, **steps)


class Price(NamedTuple):
    """Price of a plan with one bucket's option replaced."""

    step_s: float
    to_loss_s: float
    """Seconds to a loss per step of dense training; the step time if all steps count equally."""


NEVER = Price(math.inf, math.inf)


class Verdict(NamedTuple):
    """A bucket's present option, its runner-up, and its best dense and compressed options; and bytes per element."""

    now: Price
    runner_up: str
    runner: Price
    dense: Price
    coded: Price | None
    nbytes: float
    barred: bool
    """Whether the loss budget excludes an option."""


def _verdict(b: int, entry: LayoutCandidate, found: ChoiceFound) -> Verdict:
    mine, place = entry.useful[b], found.choice[b]
    spare, loss = entry.inputs.policy.max_loss - found.loss, entry.space.loss[b]
    now = Price(found.step_s / entry.local_steps, found.price / entry.local_steps)
    others = [o for o in range(len(mine)) if o != place]
    dense, coded = (_best(b, [o for o in others if (entry.options[mine[o]].codec == DENSE) is such], entry, found)
                    for such in (True, False))
    runner = min((each for each in (dense, coded) if each is not None and each[0] != NEVER), default=None, key=_to_loss)
    present = now, place
    if entry.options[mine[place]].codec == DENSE:
        dense = min(present, dense or present, key=_to_loss)
    else:
        coded = min(present, coded or present, key=_to_loss)
    return Verdict(now, "" if runner is None else str(entry.options[mine[runner[1]]]), now if runner is None else runner[0],
                   now if dense is None else dense[0], None if coded is None else coded[0],
                   entry.ways.template(mine[place]).nbytes, any(loss[o] - loss[place] > spare for o in others))


def _to_loss(priced: tuple[Price, int]) -> tuple[float, int]:
    return priced[0].to_loss_s, priced[1]


def _best(b: int, among: list[int], entry: LayoutCandidate, found: ChoiceFound) -> tuple[Price, int] | None:
    """The best of these options for the bucket; None if there are none. Stops at an option as good as the chosen one;
    options far from it are not simulated exactly."""
    excess = entry.space.excess
    if not among:
        return None
    factors = None
    if excess is not None:
        rest = 1 + found.excess - excess[b][found.choice[b]]
        factors = [rest + more for more in excess[b]]
    steps = entry.space.schedule.sweep(list(found.choice), [b], LOOKED_AT * found.price, math.nan, 1, among,
                                       found.price * (1 + SAME), factors)
    each = [(Price(steps[o] / entry.local_steps, steps[o] / entry.local_steps * (factors[o] if factors else 1.0)), o)
            for o in among]
    return min(each, key=_to_loss)


def _why(bucket: Bucket, verdict: Verdict, entry: LayoutCandidate, timeline: Timeline) -> Why:
    now, runner = verdict.now, verdict.runner
    return Why(
        seconds=max(0.0, timeline.done_s[bucket.id] - timeline.ready_s[bucket.id]),
        nbytes=round(verdict.nbytes * travels(entry.inputs.job, bucket.slices)),
        reason=_reason(bucket, verdict, entry, timeline),
        runner_up=verdict.runner_up, runner_up_s=runner.step_s - now.step_s,
        runner_up_later=runner.to_loss_s / now.to_loss_s - 1 if entry.ways.steps_count else 0.0,
    )


def _reason(bucket: Bucket, verdict: Verdict, entry: LayoutCandidate, timeline: Timeline) -> str:
    now, dense, coded = verdict.now, verdict.dense, verdict.coded
    job, first = entry.inputs.job, bucket.slices[0].tensor
    if job.tensors[first].buffer:
        return "running statistics are sent as they are"
    if job.tensors[first].dtype == DOUBLE:
        return "float64 is kept by an all-reduce alone"
    if is_thin(job, first):
        return f"{100 * travels(job, bucket.slices) / bucket.numel:.2g} % of it is no zeros, and zeros do not travel"
    count = entry.ways.steps_count
    if bucket.codec != DENSE:
        if dense.to_loss_s > now.to_loss_s * (1 + SAME):
            return f"dense, {against(now, dense, count=count)}"
        return "takes load off the links at no cost to the " + ("time to a loss" if count else "step")
    if coded is None:
        return "no codec is allowed or worth trying at this size"
    if verdict.barred and coded.to_loss_s < now.to_loss_s * (1 - FINEST):
        return f"coded, {gained(now, coded, count=count)}, but max_loss would not be kept"
    if not math.isclose(coded.step_s, now.step_s, rel_tol=SAME):
        return f"coded, {against(now, coded, count=count)}"
    hidden = timeline.done_s[bucket.id] <= timeline.compute_s
    return "its transfer is hidden behind computing" if hidden else "coding it would not shorten the step: others end later"


def against(now: Price, other: Price, *, count: bool) -> str:
    """The effect of the other option, in words. `count`: whether steps count differently.

    >>> against(Price(1.0, 1.5), Price(1.2, 1.6), count=True), against(Price(1.0, 1.0), Price(1.2, 1.2), count=False)
    ('the step would be 200 ms longer, and a loss come 6.7 % later', 'the step would be 200 ms longer')
    >>> against(Price(1.0, 1.0), Price(0.9, 1.5), count=True)
    'the step would be 100 ms shorter, but a loss come 50 % later'
    >>> against(Price(1.0, 1.0), Price(0.9, 0.99), count=True)
    'a loss would come 1 % sooner, too little for a coarser codec'
    >>> against(Price(1.0, 1.0), NEVER, count=True), against(Price(1.0, 1.0), NEVER, count=False)
    ('a loss would take more than twice as long', 'the step would be more than twice as long')
    """
    if other == NEVER:
        return f"{'a loss would take' if count else 'the step would be'} more than twice as long"
    later = other.to_loss_s / now.to_loss_s - 1
    if count and later <= 0:
        return f"{gained(now, other, count=count)}, too little for a coarser codec"
    step, and_so = gained(now, other, count=False), "and" if other.step_s > now.step_s else "but"
    return f"{step}, {and_so} a loss come {100 * later:.2g} % later" if count else step


def gained(now: Price, other: Price, *, count: bool) -> str:
    """How much sooner a loss would come if `count`, else by how much the step time would differ.

    >>> gained(Price(4.0, 5.0), Price(0.902, 4.5), count=True), gained(Price(4.0, 4.0), Price(0.902, 0.902), count=False)
    ('a loss would come 10 % sooner', 'the step would be 3,098 ms shorter')
    """
    if count:
        return f"a loss would come {100 * (1 - other.to_loss_s / now.to_loss_s):.2g} % sooner"
    return f"the step would be {longer(other.step_s - now.step_s)}"


def longer(seconds: float) -> str:
    """
    >>> longer(0.01234), longer(-17.8)
    ('12.3 ms longer', '17,800 ms shorter')
    """
    how = "shorter" if seconds < 0 else "longer"
    ms = abs(seconds) * 1e3
    return f"{ms:,.0f} ms {how}" if ms >= 100 else f"{ms:.3g} ms {how}"
