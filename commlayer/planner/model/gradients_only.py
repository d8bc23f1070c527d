"""A plan of a model with buffers as one of its gradients alone, for whoever averages buffers otherwise. Decides nothing."""

from __future__ import annotations

from msgspec import structs

from commlayer.records import Job, Plan


def gradients_of(job: Job) -> Job:
    """The job without its buffers. They stand behind the gradients, whose numbers stay."""
    return Job(tuple(info for info in job.tensors if not info.buffer))


def without_buffers(plan: Plan, job: Job) -> Plan:
    """One of another job, or one that averages no buffers, comes back as it is."""
    buffers = {number for number, info in enumerate(job.tensors) if info.buffer}
    if not buffers or plan.job != job.digest():
        return plan
    kept = [bucket for bucket in plan.buckets if not buffers & {s.tensor for s in bucket.slices}]
    buckets = tuple(structs.replace(bucket, id=number) for number, bucket in enumerate(kept))
    return structs.replace(plan, job=gradients_of(job).digest(), buckets=buckets)
