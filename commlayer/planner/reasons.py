"""Writes into a plan what was expected of it: per bucket the price, the reason in words and the runner-up. Decides nothing."""

from __future__ import annotations

from msgspec import structs

from commlayer.planner.entry import Entry
from commlayer.planner.simulate import Timeline, per_step, simulate
from commlayer.planner.ways import DENSE
from commlayer.records import Bucket, Plan, Why

SAME = 1e-6
"""Steps closer than this fraction are called equal."""


def explained(plan: Plan, entry: Entry) -> Plan:
    """The same plan with its predictions."""
    job, _, cluster, profile, policy = entry.inputs
    timeline = simulate(plan, job, cluster, profile, policy)
    step_s = per_step(timeline, plan.local_steps)
    bound_s = min(step_s, entry.bound_s() / plan.local_steps)
    buckets = tuple(structs.replace(bucket, why=_why(bucket, entry, timeline)) for bucket in plan.buckets)
    return structs.replace(plan, buckets=buckets, step_s=step_s, bound_s=bound_s)


def _why(bucket: Bucket, entry: Entry, timeline: Timeline) -> Why:
    b = bucket.id
    mine = entry.useful[b]
    steps = entry.space.schedule.sweep(list(entry.found.choice), [b], float("inf"))
    now_s = steps[entry.found.choice[b]]
    others = [(s, o) for o, s in enumerate(steps) if o != entry.found.choice[b]]
    runner_s, runner = min(others, default=(now_s, -1))
    dense_s = min((steps[i] for i, o in enumerate(mine) if entry.options[o].codec == DENSE), default=now_s)
    coded_s = min((steps[i] for i, o in enumerate(mine) if entry.options[o].codec != DENSE), default=None)
    nbytes = round(entry.ways.template(mine[entry.found.choice[b]]).nbytes * bucket.numel)
    return Why(
        seconds=max(0.0, timeline.done_s[b] - timeline.ready_s[b]), nbytes=nbytes,
        reason=_reason(bucket, entry, timeline, now_s, dense_s, coded_s),
        runner_up=str(entry.options[mine[runner]]) if runner >= 0 else "", runner_up_s=runner_s - now_s,
    )


def _reason(
    bucket: Bucket, entry: Entry, timeline: Timeline, now_s: float, dense_s: float, coded_s: float | None,
) -> str:
    if entry.inputs.job.tensors[bucket.slices[0].tensor].buffer:
        return "running statistics are sent as they are"
    if bucket.codec != DENSE:
        if dense_s > now_s * (1 + SAME):
            return f"dense, the step would be {ms(dense_s - now_s)} longer"
        return "takes load off the links at no cost to the step"
    if coded_s is None:
        return "no codec is allowed or worth trying at this size"
    if coded_s > now_s * (1 + SAME):
        return f"coding it would make the step {ms(coded_s - now_s)} longer"
    hidden = timeline.done_s[bucket.id] <= timeline.compute_s
    return "its transfer is hidden behind computing" if hidden else "coding it would not shorten the step: others end later"


def ms(seconds: float) -> str:
    """
    >>> ms(0.01234)
    '12.3 ms'
    """
    return f"{seconds * 1e3:.3g} ms"
