"""Writes into a plan what was expected of it: per bucket the price, the reason in words and the runner-up. Decides nothing."""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec import structs

from commlayer.planner.model.cluster import Cluster
from commlayer.planner.model.float64 import DOUBLE
from commlayer.planner.model.option import DENSE
from commlayer.planner.pricing.steps_needed import plan_excess
from commlayer.planner.search.layout_candidate import LayoutCandidate
from commlayer.planner.simulation.timeline import Timeline, per_step, simulate
from commlayer.records import Bucket, Plan, Why

LOOKED_AT = 2.0
"""How much longer a step may be with another option for that to be told exactly."""
SAME = 1e-6
"""Steps closer than this fraction are called equal."""


def explained(plan: Plan, entry: LayoutCandidate, cluster: Cluster) -> Plan:
    """The same plan with its predictions. `cluster`: every node as it is, where the search knew kinds of nodes."""
    job, _, searched, profile, policy = entry.inputs
    placed = entry.ways.placed.prices
    timeline = simulate(plan, job, cluster, profile, policy, spans=False,
                        prices=placed if placed.hosts == plan.hosts and searched == cluster else None)
    step_s = per_step(timeline, plan.local_steps)
    more = plan_excess(plan, job, cluster, profile, policy)
    free_s = min(step_s, entry.free_s() / plan.local_steps)
    told: dict[int, Verdict] = {}
    origins = [part.origin for part in entry.parts(entry.found)]
    for b in origins:
        told.setdefault(b, _verdict(b, entry))
    buckets = tuple(
        structs.replace(bucket, why=_why(bucket, told[b], entry, timeline))
        for bucket, b in zip(plan.buckets, origins, strict=True)
    )
    steps = {"steps": 1 + more.steps, "steps_high": 1 + more.high} if profile.learning else {}
    return structs.replace(plan, buckets=buckets, step_s=step_s, free_s=free_s, **steps)


class Verdict(NamedTuple):
    """The step with a bucket as it is, with its runner-up, dense and coded as well as each can be; and bytes an element."""

    now_s: float
    runner_up: str
    runner_up_s: float
    dense_s: float
    coded_s: float | None
    nbytes: float


def _verdict(b: int, entry: LayoutCandidate) -> Verdict:
    mine, now = entry.useful[b], entry.found.choice[b]
    found = entry.found
    others = [o for o in range(len(mine)) if o != now]
    dense, coded = ([o for o in others if (entry.options[mine[o]].codec == DENSE) is such] for such in (True, False))
    dense_s, coded_s = _shortest(b, dense, entry), _shortest(b, coded, entry)
    runner_s, runner = min([each for each in (dense_s, coded_s) if each[0] < math.inf], default=(found.step_s, -1))
    if entry.chosen(b).codec == DENSE:
        dense_s = min(dense_s, (found.step_s, now))
    else:
        coded_s = min(coded_s, (found.step_s, now))
    steps, now_s = entry.local_steps, found.step_s / entry.local_steps
    return Verdict(now_s, str(entry.options[mine[runner]]) if runner >= 0 else "", runner_s / steps - now_s,
                   dense_s[0] / steps if dense_s[1] >= 0 else now_s, coded_s[0] / steps if coded_s[1] >= 0 else None,
                   entry.ways.template(mine[now]).nbytes)


def _shortest(b: int, among: list[int], entry: LayoutCandidate) -> tuple[float, int]:
    """The step with one of these options for the bucket; -1 where there are none. As short as what was chosen is enough."""
    limit_s, enough_s = LOOKED_AT * entry.found.step_s, entry.found.step_s * (1 + SAME)
    steps = entry.space.schedule.sweep(list(entry.found.choice), [b], limit_s, math.nan, 1, among, enough_s)
    return min([(steps[o], o) for o in among], default=(math.inf, -1))


def _why(bucket: Bucket, verdict: Verdict, entry: LayoutCandidate, timeline: Timeline) -> Why:
    return Why(
        seconds=max(0.0, timeline.done_s[bucket.id] - timeline.ready_s[bucket.id]),
        nbytes=round(verdict.nbytes * bucket.numel), reason=_reason(bucket, verdict, entry, timeline),
        runner_up=verdict.runner_up, runner_up_s=verdict.runner_up_s,
    )


def _reason(bucket: Bucket, verdict: Verdict, entry: LayoutCandidate, timeline: Timeline) -> str:
    now_s, dense_s, coded_s = verdict.now_s, verdict.dense_s, verdict.coded_s
    if entry.inputs.job.tensors[bucket.slices[0].tensor].buffer:
        return "running statistics are sent as they are"
    if entry.inputs.job.tensors[bucket.slices[0].tensor].dtype == DOUBLE:
        return "float64 is kept by an all-reduce alone"
    if bucket.codec != DENSE:
        if dense_s > now_s * (1 + SAME):
            return f"dense, the step would be {longer(dense_s - now_s)}"
        return "takes load off the links at no cost to the step"
    if coded_s is None:
        return "no codec is allowed or worth trying at this size"
    if coded_s > now_s * (1 + SAME):
        return f"coded, the step would be {longer(coded_s - now_s)}"
    hidden = timeline.done_s[bucket.id] <= timeline.compute_s
    return "its transfer is hidden behind computing" if hidden else "coding it would not shorten the step: others end later"


def longer(seconds: float) -> str:
    """
    >>> longer(0.01234), longer(math.inf)
    ('12.3 ms longer', 'more than twice as long')
    >>> longer(17.8)
    '17,800 ms longer'
    """
    if not seconds < math.inf:
        return "more than twice as long"
    return f"{seconds * 1e3:,.0f} ms longer" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms longer"
