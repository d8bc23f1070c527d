"""Gives the reasons of a chosen plan: for each bucket, what another option would have cost."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import NamedTuple

from msgspec import structs

from commlayer.planner.costs import plan_excess
from commlayer.planner.model import DENSE
from commlayer.planner.search.scenario import PricedPlan
from commlayer.planner.simulation import Timeline, simulate
from commlayer.planner.tensors import DOUBLE, is_sparse, nonzero_numel
from commlayer.records import Bucket, BucketReason, Job, Plan

LOOKED_AT = 2.0
"""Cutoff: an option that lengthens the step by more than this factor is not simulated to its end."""
SAME = 1e-6
"""Relative tolerance: step times that differ by less than this fraction count as equal."""


class Price(NamedTuple):
    """Step time and time to a loss of a plan in which one bucket has another option."""

    step_s: float
    to_loss_s: float
    """Step time in seconds times the convergence factor; the step time itself if convergence is ignored."""
    option: str = ""
    in_budget: bool = True


NEVER = Price(math.inf, math.inf)


class Alternatives(NamedTuple):
    """A bucket's present option, the best other uncompressed option, and the best other compressed option."""

    now: Price
    dense: Price
    coded: Price
    nbytes: float
    """Bytes that the present option sends per element."""


def with_explanation(priced: PricedPlan) -> Plan:
    """The plan with its predicted times and each bucket's reason filled in."""
    plan, question = priced.plan, priced.scenario.question
    timeline, more = simulate(plan, *question, spans=False), plan_excess(plan, question)
    others = {b: _alternatives(b, priced) for b in dict.fromkeys(priced.origins)}
    buckets = tuple(structs.replace(bucket, why=_why(bucket, others[b], priced, timeline))
                    for bucket, b in zip(plan.buckets, priced.origins, strict=True))
    steps = {"steps": 1 + more.steps, "steps_high": 1 + more.high} if question.profile.learning else {}
    return structs.replace(plan, buckets=buckets, step_s=timeline.step_s / plan.local_steps, **steps)


def _alternatives(b: int, priced: PricedPlan) -> Alternatives:
    scenario, choice = priced.scenario, priced.choice
    space, mine, place, every = scenario.space, scenario.useful[b], choice.options[b], scenario.recipe.every
    rest, lost = 1 + choice.excess - space.excess[b][place], choice.loss - space.loss[b][place]
    factors = [rest + more for more in space.excess[b]]
    options = [scenario.catalog.options[o] for o in mine]
    best = []
    for dense in (True, False):
        only = [o for o, option in enumerate(options) if o != place and (option.codec == DENSE) is dense]
        limit = LOOKED_AT * choice.price
        if not only:
            best.append(NEVER)
            continue
        seconds = space.steps.sweep(list(choice.options), [b], limit, math.nan, 1, only, factors)
        to_loss_s, o = min((seconds[o] / every * factors[o], o) for o in only)
        best.append(Price(seconds[o] / every, to_loss_s, str(options[o]), lost + space.loss[b][o] <= space.max_loss))
    return Alternatives(Price(choice.step_s / every, choice.price / every), best[0], best[1],
                        scenario.catalog.template(mine[place]).nbytes)


def _why(bucket: Bucket, others: Alternatives, priced: PricedPlan, timeline: Timeline) -> BucketReason:
    now, runner = others.now, min(others.dense, others.coded, key=attrgetter("to_loss_s"))
    runner = now if runner.to_loss_s == math.inf else runner
    question = priced.scenario.question
    return BucketReason(
        seconds=max(0.0, timeline.done_s[bucket.id] - timeline.ready_s[bucket.id]),
        nbytes=round(others.nbytes * nonzero_numel(question.job, bucket.slices)),
        reason=_reason(bucket, others, question.job, timeline, count=question.steps_count),
        runner_up=runner.option, runner_up_s=runner.step_s - now.step_s,
        runner_up_later=runner.to_loss_s / now.to_loss_s - 1 if question.steps_count and now.to_loss_s else 0.0,
    )


def _reason(bucket: Bucket, others: Alternatives, job: Job, timeline: Timeline, *, count: bool) -> str:
    now, dense, coded, _ = others
    first = bucket.slices[0].tensor
    if job.tensors[first].buffer:
        return "running statistics are sent uncompressed"
    if job.tensors[first].dtype == DOUBLE:
        return "only an all-reduce keeps float64"
    if is_sparse(job, first):
        return f"{100 * nonzero_numel(job, bucket.slices) / bucket.numel:.2g} % of the gradient is nonzero; zeros are not sent"
    if bucket.codec != DENSE:
        if dense.to_loss_s > now.to_loss_s * (1 + SAME):
            return f"uncompressed, {trade_off(now, dense, count=count)}"
        return "compression takes load off the links at no cost to the " + ("time to a loss" if count else "step")
    if coded == NEVER:
        return "no codec is allowed or worth trying at this size"
    if not coded.in_budget and coded.to_loss_s < now.to_loss_s:
        return f"compressed, {trade_off(now, coded, count=count)}, but max_loss would be exceeded"
    if not math.isclose(coded.step_s, now.step_s, rel_tol=SAME):
        little = ", too little for a coarser codec" if count and coded.to_loss_s <= now.to_loss_s else ""
        return f"compressed, {trade_off(now, coded, count=count)}{little}"
    hidden = timeline.done_s[bucket.id] <= timeline.compute_s
    return "its transfer is hidden by computing" if hidden else "compression does not shorten the step: other buckets end later"


def trade_off(now: Price, other: Price, *, count: bool) -> str:
    """Describes how the other option would change the step time and the time to a loss. `count`: True if options differ in
    their convergence factors.

    >>> trade_off(Price(1.0, 1.5), Price(1.2, 1.6), count=True), trade_off(Price(1.0, 1.0), Price(1.01234, 1.2), count=False)
    ('the step would be 200 ms longer, and the same loss 6.7 % later', 'the step would be 12.3 ms longer')
    >>> trade_off(Price(1.0, 1.0), Price(0.9, 1.5), count=True), trade_off(Price(1.0, 1.0), NEVER, count=True)
    ('the step would be 100 ms shorter, but the same loss 50 % later', 'the time to a loss would be more than twice as long')
    """
    if other.to_loss_s == math.inf:
        return f"{'the time to a loss' if count else 'the step'} would be more than twice as long"
    longer, later = other.step_s - now.step_s, other.to_loss_s / now.to_loss_s - 1
    ms = abs(longer) * 1e3
    step = f"the step would be {f'{ms:,.0f}' if ms >= 100 else f'{ms:.3g}'} ms {'shorter' if longer < 0 else 'longer'}"
    joint = "and" if (longer > 0) == (later > 0) else "but"
    return f"{step}, {joint} the same loss {100 * abs(later):.2g} % {'later' if later > 0 else 'sooner'}" if count else step
