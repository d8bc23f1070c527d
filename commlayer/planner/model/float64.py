"""float64 in plans: codecs and servers know float32, so only an all-reduce keeps what a double has. Knows no prices."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from commlayer.records import Bucket, Job, Plan

DOUBLE = "float64"
EXACT = "allreduce"


def unrounded(plan: Plan, job: Job) -> Plan:
    """The same, with buckets that hold doubles all-reduced as they are. A plan without any comes back as it is."""
    buckets = tuple(
        structs.replace(b, path=EXACT, codec="identity()", server=0, owner=0, down="", by_node=(), coder="", stale=False)
        if _doubles(b, job) else b for b in plan.buckets
    )
    if buckets == plan.buckets:
        return plan
    served = any(b.served for b in buckets)
    return structs.replace(plan, buckets=buckets, servers=plan.servers if served else 0, hosts=plan.hosts if served else ())


def told(job: Job, nodes: int) -> str:
    """What a user may not expect of it, if there is anything."""
    count = sum(t.numel for t in job.tensors if t.dtype == DOUBLE and not t.buffer)
    if not count or nodes < 2:
        return ""
    return (f"{count} of {job.numel} elements are float64, which codecs would round: they are all-reduced as they are, and not "
            "compressed; model.float() makes them float32")


def rounded(plan: Plan, job: Job) -> Iterator[str]:
    """Where a plan would make float32 of them, a line each."""
    for bucket in plan.buckets:
        if bucket.path != EXACT and (names := _doubles(bucket, job)):
            yield (f"bucket {bucket.id}: {names[0]} is float64, which path {bucket.path!r} would round to float32, allowed for "
                   f"it: {EXACT!r}; or make the model float32 (model.float())")


def _doubles(bucket: Bucket, job: Job) -> list[str]:
    numbers = [s.tensor for s in bucket.slices if 0 <= s.tensor < len(job.tensors)]
    return [job.tensors[number].name for number in numbers if job.tensors[number].dtype == DOUBLE]
