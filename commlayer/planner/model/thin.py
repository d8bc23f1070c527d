"""How much of a bucket travels where gradients are mostly zeros. Knows jobs and codecs by name; no prices and no frames.

An embedding's gradient is zero in every row that no sample of the batch named, and frames leave zeros out (docs/wire.md).
That shortens what is sent as it is, or rounded: their payloads are zeros where gradients are. A codec that keeps something
back sends that later, wherever it is, so its payloads fill up.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from commlayer.codec_name import named
from commlayer.planner.model.option import Option
from commlayer.records import Bucket, Job, Plan, Slice

MOST = 0.25
"""A tensor is thin if no more of it travels. Then rounded to 16 bits it is no longer than in int4."""
LEAST_NUMEL = 1 << 12
"""Less is not worth a bucket of its own."""
KEEP_ZEROS = ("identity", "fp16", "bf16")
"""Codecs whose payloads are zeros where gradients are, in every step."""


def is_thin(job: Job, tensor: int) -> bool:
    filled = _filled(job)
    return bool(filled) and filled[tensor] <= MOST and job.tensors[tensor].numel >= LEAST_NUMEL


def travels(job: Job, slices: Sequence[Slice]) -> int:
    """Elements of a bucket that are sent, where it is thin, and no more than what is no zeros then."""
    if not is_thin(job, slices[0].tensor):
        return sum([s.numel for s in slices])
    filled = _filled(job)
    return max(1, round(sum([s.numel * filled[s.tensor] for s in slices])))


def keeps_zeros(option: Option | Bucket) -> bool:
    """Whether zeros that are sent and answered so stay out of frames: between workers and servers, not in collectives."""
    return option.served and all(named(codec).family in KEEP_ZEROS
                                 for codec in (option.codec, option.down, *option.by_node) if codec)


def sent_numel(plan: Plan, bucket: Bucket, job: Job) -> int:
    """Elements that a bucket of a plan sends."""
    zeros = not plan.steps_locally and keeps_zeros(bucket)
    return travels(job, bucket.slices) if zeros else bucket.numel


def full(job: Job) -> Job:
    """The same where all of each tensor travels: changes of weights are no zeros, once an optimizer has momentum."""
    return structs.replace(job, timing=structs.replace(job.timing, filled=())) if job.timing and job.timing.filled else job


def _filled(job: Job) -> tuple[float, ...]:
    return job.timing.filled if job.timing else ()
