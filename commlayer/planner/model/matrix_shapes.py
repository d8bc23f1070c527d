"""Keeps the shapes of matrices for codecs that need them, in single and in fused buckets.

Also reports how much of a model a plan sends uncompressed although its codec should compress it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from commlayer.codec_spec import ELEMENT_NBYTES, CodecSpec, parse_spec, spec_error
from commlayer.planner.model.codec_sizes import touch
from commlayer.records import Bucket, Job, Plan, Slice

Shape = tuple[int, ...]

MOST = 0.5
"""A lossy codec that leaves more than this part of a model's elements uncompressed is reported."""
WHOLE = 0.9
"""A payload of this part of the dense bytes saves nothing."""


def shape_of(job: Job, part: Slice) -> Shape:
    """The shape of a matrix, whole or cut between rows; else an empty shape."""
    shape = job.tensors[part.tensor].shape
    row = row_of(shape)
    if len(shape) < 2 or row == 0 or part.start % row or part.stop % row:
        return ()
    return (part.numel // row, *shape[1:])


def row_of(shape: Shape) -> int:
    """Elements of a matrix's row. A matrix may be cut only between rows."""
    return math.prod(shape[1:])


def shaped(codec: str, job: Job, group: Sequence[Slice]) -> tuple[str, Shape]:
    """The codec and shape of a bucket with these slices. In a bucket of several slices, a codec that needs matrices
    gets the shape of each slice.

    >>> from commlayer.records import TensorInfo
    >>> job = Job((TensorInfo("weight", (64, 32)), TensorInfo("bias", (64,))))
    >>> shaped("error_feedback(powersgd())", job, [Slice(0, 0, 2048), Slice(1, 0, 64)])
    ('error_feedback(powersgd(shapes=((64, 32), (64,))))', ())
    >>> shaped("powersgd()", job, [Slice(0, 0, 2048)])
    ('powersgd()', (64, 32))
    """
    shape = shape_of(job, group[0]) if len(group) == 1 else ()
    name = parse_spec(codec)
    if not name.needs_shape:
        return codec, shape if shape == job.tensors[group[0].tensor].shape else ()
    if shape:
        return codec, shape
    shapes = tuple([shape_of(job, part) or (part.numel,) for part in group])
    if all(len(each) < 2 for each in shapes):
        return codec, ()
    return str(name.with_core(lambda core: CodecSpec("powersgd", (("rank", core.get("rank")), ("shapes", shapes))))), ()


def untouched(plan: Plan, job: Job | None = None) -> Iterator[str]:
    """A line for a codec that leaves most of the model uncompressed although it should compress it."""
    gradients = [b for b in plan.buckets if not spec_error(b.codec) and not (job is not None and _buffer(job, b))]
    total = sum(b.numel for b in gradients)
    whole: dict[str, int] = {}
    for bucket in gradients:
        core = parse_spec(bucket.codec).core
        whole[str(core)] = whole.get(str(core), 0) + _as_it_is(bucket, parse_spec(bucket.codec))
    codec = max(whole, key=lambda name: whole[name], default="")
    if codec and whole[codec] > MOST * total:
        yield (f"{whole[codec] / total:.0%} of the model's elements are sent uncompressed by {codec}: "
               + ("it compresses matrices that are whole, or named in powersgd(shapes=...), and larger than their factors"
                  if parse_spec(codec).needs_shape else "its payloads are as large as uncompressed ones, or larger"))


def _as_it_is(bucket: Bucket, name: CodecSpec) -> int:
    """Elements of the bucket that the codec leaves uncompressed."""
    if bucket.path == "allreduce" or name.core.family == "identity":
        return 0
    if name.core.family == "powersgd":
        shapes = name.core.get("shapes") or (bucket.spec.shape,)
        return sum(math.prod(shape) for shape in shapes if not _gains(shape, name.core.get("rank")))
    try:
        return bucket.numel if touch(name).sent >= WHOLE * ELEMENT_NBYTES else 0
    except ValueError:
        return 0


def _gains(shape: Shape, rank: int) -> bool:
    """Whether the matrix's factors have fewer elements."""
    if len(shape) < 2 or 0 in shape:
        return False
    rows, row = shape[0], row_of(shape)
    return min(rank, rows, row) * (rows + row) < rows * row


def _buffer(job: Job, bucket: Bucket) -> bool:
    return any(job.tensors[s.tensor].buffer for s in bucket.slices if 0 <= s.tensor < len(job.tensors))
