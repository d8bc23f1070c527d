"""Keeps float64 tensors exact in plans. Codecs and servers use float32, so doubles are all-reduced."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from commlayer.records import Bucket, Job, Plan

DOUBLE = "float64"
EXACT = "allreduce"


def unrounded(plan: Plan, job: Job) -> Plan:
    """The plan with every bucket of doubles on an uncompressed all-reduce. Unchanged if there are no doubles."""
    buckets = tuple(
        structs.replace(b, path=EXACT, codec="identity()", server=0, owner=0, down="", by_node=(), coder="", stale=False)
        if _doubles(b, job) else b for b in plan.buckets
    )
    if buckets == plan.buckets:
        return plan
    served = any(b.served for b in buckets)
    return structs.replace(plan, buckets=buckets, servers=plan.servers if served else 0, hosts=plan.hosts if served else ())


def told(job: Job, nodes: int) -> str:
    """A notice for the user that doubles are not compressed; empty if it does not apply."""
    count = sum(t.numel for t in job.tensors if t.dtype == DOUBLE and not t.buffer)
    if not count or nodes < 2:
        return ""
    return (f"{count} of {job.numel} elements are float64, which codecs would round: they are all-reduced as they are, and not "
            "compressed; model.float() makes them float32")


def rounded(plan: Plan, job: Job) -> Iterator[str]:
    """Buckets in which the plan would round doubles to float32, a line each."""
    for bucket in plan.buckets:
        if bucket.path != EXACT and (names := _doubles(bucket, job)):
            yield (f"bucket {bucket.id}: {names[0]} is float64, which path {bucket.path!r} would round to float32, allowed for "
                   f"it: {EXACT!r}; or make the model float32 (model.float())")


def _doubles(bucket: Bucket, job: Job) -> list[str]:
    numbers = [s.tensor for s in bucket.slices if 0 <= s.tensor < len(job.tensors)]
    return [job.tensors[number].name for number in numbers if job.tensors[number].dtype == DOUBLE]
