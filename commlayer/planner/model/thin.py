"""Sparse gradients ("thin" tensors): how much of a bucket is sent if zeros are left out.

An embedding's gradient is zero in every row that no sample of the batch used, and frames leave zeros out. This
shortens uncompressed and rounded payloads, which are zero where gradients are. With error feedback a codec sends residuals
later, so its payloads fill up.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from commlayer.codec_spec import parse_spec
from commlayer.planner.model.option import Option
from commlayer.records import Bucket, Job, Plan, Slice

MOST = 0.25
"""A tensor is thin if at most this part of it is nonzero. Rounded to 16 bits it is then no longer than in int4."""
LEAST_NUMEL = 1 << 12
"""Smaller tensors are not worth a bucket of their own."""
KEEP_ZEROS = ("identity", "fp16", "bf16")
"""Codecs whose payloads are zero where gradients are, in every step."""


def is_thin(job: Job, tensor: int) -> bool:
    filled = _filled(job)
    return bool(filled) and filled[tensor] <= MOST and job.tensors[tensor].numel >= LEAST_NUMEL


def travels(job: Job, slices: Sequence[Slice]) -> int:
    """Elements of a bucket that are sent: nonzero ones only, if its tensors are thin."""
    if not is_thin(job, slices[0].tensor):
        return sum([s.numel for s in slices])
    filled = _filled(job)
    return max(1, round(sum([s.numel * filled[s.tensor] for s in slices])))


def keeps_zeros(option: Option | Bucket) -> bool:
    """Whether zeros stay out of frames in both directions. This holds between workers and servers, not in collectives."""
    return option.served and all(parse_spec(codec).family in KEEP_ZEROS
                                 for codec in (option.codec, option.down, *option.by_node) if codec)


def sent_numel(plan: Plan, bucket: Bucket, job: Job) -> int:
    """Elements of a plan's bucket that are sent."""
    zeros = not plan.steps_locally and keeps_zeros(bucket)
    return travels(job, bucket.slices) if zeros else bucket.numel


def full(job: Job) -> Job:
    """The job with dense gradients. Weight updates are dense even where gradients are sparse, once an optimizer has
    momentum."""
    return structs.replace(job, timing=structs.replace(job.timing, filled=())) if job.timing and job.timing.filled else job


def _filled(job: Job) -> tuple[float, ...]:
    return job.timing.filled if job.timing else ()
