"""Reduces a plan for a model with buffers to its gradients, for callers that average buffers themselves."""

from __future__ import annotations

from msgspec import structs

from commlayer.records import Job, Plan


def gradients_of(job: Job) -> Job:
    """The job without its buffers. Buffers come after the gradients, so the gradients keep their numbers."""
    return Job(tuple(info for info in job.tensors if not info.buffer))


def without_buffers(plan: Plan, job: Job) -> Plan:
    """The plan without buckets of buffers. Unchanged if it is for another job or has none."""
    buffers = {number for number, info in enumerate(job.tensors) if info.buffer}
    if not buffers or plan.job != job.digest():
        return plan
    kept = [bucket for bucket in plan.buckets if not buffers & {s.tensor for s in bucket.slices}]
    buckets = tuple(structs.replace(bucket, id=number) for number, bucket in enumerate(kept))
    return structs.replace(plan, job=gradients_of(job).digest(), buckets=buckets)
