"""Predictions and reasons that a plan carries: for each bucket what its option saves, and the runner-up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from commlayer.planner.costs import plan_excess
from commlayer.planner.model import DENSE
from commlayer.planner.simulation import Timeline, per_step, simulate
from commlayer.planner.tensors import DOUBLE, is_sparse, nonzero_numel
from commlayer.records import Bucket, Plan, Why

if TYPE_CHECKING:
    from commlayer.planner.search import Found

LOOKED_AT = 2.0
"""Steps longer by more than this factor with another option are not simulated to their end."""
SAME = 1e-6
"""Steps that differ by less than this fraction count as equal."""


class Price(NamedTuple):
    """Price of a plan with one bucket's option replaced."""

    step_s: float
    to_loss_s: float
    """Seconds to a loss per step of dense training; the step time if all steps count equally."""
    option: str = ""
    in_budget: bool = True


NEVER = Price(math.inf, math.inf)


class Verdict(NamedTuple):
    """A bucket's present option, and the best other dense and compressed ones."""

    now: Price
    dense: Price
    coded: Price
    nbytes: float
    """Sent per element."""

    @property
    def runner_up(self) -> Price:
        return min(self.dense, self.coded, key=lambda price: price.to_loss_s)


def explained(found: Found) -> Plan:
    """The plan with its predictions and reasons."""
    plan, (job, _, cluster, _, profile, policy, _) = found.plan, found.candidate.inputs
    timeline = simulate(plan, job, cluster, profile, policy, spans=False)
    more = plan_excess(plan, job, cluster, profile, policy)
    verdicts = {b: _verdict(b, found) for b in dict.fromkeys(found.origins)}
    buckets = tuple(structs.replace(bucket, why=_why(bucket, verdicts[b], found, timeline))
                    for bucket, b in zip(plan.buckets, found.origins, strict=True))
    steps = {"steps": 1 + more.steps, "steps_high": 1 + more.high} if profile.learning else {}
    return structs.replace(plan, buckets=buckets, step_s=per_step(timeline, plan.local_steps), **steps)


def _verdict(b: int, found: Found) -> Verdict:
    candidate, choice = found.candidate, found.choice
    space, mine, place, every = candidate.space, candidate.useful[b], choice.options[b], candidate.recipe.every
    rest, lost = 1 + choice.excess - space.excess[b][place], choice.loss - space.loss[b][place]
    factors = [rest + more for more in space.excess[b]]
    best = {True: NEVER, False: NEVER}
    for dense in (True, False):
        only = [o for o in range(len(mine)) if o != place and (candidate.catalog.options[mine[o]].codec == DENSE) is dense]
        steps = space.schedule.sweep(list(choice.options), [b], LOOKED_AT * choice.price, math.nan, 1, only, -math.inf,
                                     factors) if only else []
        best[dense] = min((Price(steps[o] / every, steps[o] / every * factors[o], str(candidate.catalog.options[mine[o]]),
                                 lost + space.loss[b][o] <= space.max_loss) for o in only),
                          key=lambda price: price.to_loss_s, default=NEVER)
    return Verdict(Price(choice.step_s / every, choice.price / every), best[True], best[False],
                   candidate.catalog.template(mine[place]).nbytes)


def _why(bucket: Bucket, verdict: Verdict, found: Found, timeline: Timeline) -> Why:
    now, runner = verdict.now, verdict.runner_up
    runner = now if runner.to_loss_s == math.inf else runner
    inputs = found.candidate.inputs
    return Why(
        seconds=max(0.0, timeline.done_s[bucket.id] - timeline.ready_s[bucket.id]),
        nbytes=round(verdict.nbytes * nonzero_numel(inputs.job, bucket.slices)),
        reason=_reason(bucket, verdict, found, timeline),
        runner_up=runner.option, runner_up_s=runner.step_s - now.step_s,
        runner_up_later=runner.to_loss_s / now.to_loss_s - 1 if inputs.steps_count and now.to_loss_s else 0.0,
    )


def _reason(bucket: Bucket, verdict: Verdict, found: Found, timeline: Timeline) -> str:
    now, dense, coded, _ = verdict
    job, count = found.candidate.inputs.job, found.candidate.inputs.steps_count
    first = bucket.slices[0].tensor
    if job.tensors[first].buffer:
        return "running statistics are sent uncompressed"
    if job.tensors[first].dtype == DOUBLE:
        return "only an all-reduce keeps float64"
    if is_sparse(job, first):
        return f"{100 * nonzero_numel(job, bucket.slices) / bucket.numel:.2g} % of it is nonzero, and zeros are not sent"
    if bucket.codec != DENSE:
        if dense.to_loss_s > now.to_loss_s * (1 + SAME):
            return f"uncompressed, {against(now, dense, count=count)}"
        return "takes load off the links at no cost to the " + ("time to a loss" if count else "step")
    if coded == NEVER:
        return "no codec is allowed or worth trying at this size"
    if not coded.in_budget and coded.to_loss_s < now.to_loss_s:
        return f"compressed, {gained(now, coded, count=count)}, but max_loss would be exceeded"
    if not math.isclose(coded.step_s, now.step_s, rel_tol=SAME):
        return f"compressed, {against(now, coded, count=count)}"
    hidden = timeline.done_s[bucket.id] <= timeline.compute_s
    return "its transfer is hidden by computing" if hidden else "compression would not shorten the step: others end later"


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
    if other.to_loss_s == math.inf:
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
