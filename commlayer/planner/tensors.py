"""Sparse gradients: estimates how much of a bucket is sent if zeros are omitted; shapes of matrices; float64 tensors.

An embedding's gradient is zero in every row that no sample of the batch used, and frames omit zeros. This shortens uncompressed
and 16-bit payloads, which are zero where gradients are. With error feedback a codec sends residuals later, so its payloads have
few zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import structs

from commlayer.codec_spec import ELEMENT_NBYTES, CodecSpec, parse_spec, spec_error
from commlayer.planner.data.codec_sizes import bytes_per_element
from commlayer.planner.model import Option
from commlayer.records import Bucket, Job, Plan, Slice

SPARSE_AT_MOST = 0.25
"""A tensor is sparse if at most this fraction of its gradient is nonzero. In 16 bits its payload is then no longer than in
int4."""
LEAST_NUMEL = 1 << 12
"""Least elements of a sparse tensor: smaller tensors are not worth a separate bucket."""
KEEP_ZEROS = ("identity", "fp16", "bf16")
"""Codecs whose payloads are zero where gradients are, in every step."""


def is_sparse(job: Job, tensor: int) -> bool:
    filled = _filled(job)
    return bool(filled) and filled[tensor] <= SPARSE_AT_MOST and job.tensors[tensor].numel >= LEAST_NUMEL


def nonzero_numel(job: Job, slices: Sequence[Slice]) -> int:
    """Number of elements of a bucket that are sent: nonzero ones only, if its tensors are sparse."""
    if not is_sparse(job, slices[0].tensor):
        return sum([s.numel for s in slices])
    filled = _filled(job)
    return max(1, round(sum([s.numel * filled[s.tensor] for s in slices])))


def keeps_zeros(option: Option | Bucket) -> bool:
    """True: frames omit zeros in both directions, which holds between workers and servers but not in collectives."""
    return option.served and all(parse_spec(codec).family in KEEP_ZEROS
                                 for codec in (option.codec, option.down, *option.by_node) if codec)


def sent_numel(plan: Plan, bucket: Bucket, job: Job) -> int:
    """Number of elements of a plan's bucket that are sent."""
    zeros = not plan.steps_locally and keeps_zeros(bucket)
    return nonzero_numel(job, bucket.slices) if zeros else bucket.numel


def with_dense_gradients(job: Job) -> Job:
    """The job with dense gradients. Weight updates are dense even where gradients are sparse, if the optimizer has momentum."""
    return structs.replace(job, timing=structs.replace(job.timing, filled=())) if job.timing and job.timing.filled else job


def _filled(job: Job) -> tuple[float, ...]:
    return job.timing.filled if job.timing else ()


Shape = tuple[int, ...]

REPORTED_ABOVE = 0.5
"""A lossy codec is reported if it leaves more than this fraction of a model's elements uncompressed."""
WHOLE = 0.9
"""A codec counts as ineffective if its payload has at least this fraction of the dense bytes."""


def slice_shape(job: Job, part: Slice) -> Shape:
    """The shape of a slice that is a complete matrix, or was cut between rows; else an empty shape."""
    shape = job.tensors[part.tensor].shape
    row = row_size(shape)
    if len(shape) < 2 or row == 0 or part.start % row or part.stop % row:
        return ()
    return (part.numel // row, *shape[1:])


def row_size(shape: Shape) -> int:
    """Number of elements in a matrix's row. A matrix may be cut only between rows."""
    return math.prod(shape[1:])


def codec_and_shape(codec: str, job: Job, group: Sequence[Slice]) -> tuple[str, Shape]:
    """The codec and shape of a bucket with these slices. In a bucket of several slices, a codec that needs matrices
    gets the shape of each slice.

    >>> from commlayer.records import TensorInfo
    >>> job = Job((TensorInfo("weight", (64, 32)), TensorInfo("bias", (64,))))
    >>> codec_and_shape("error_feedback(powersgd())", job, [Slice(0, 0, 2048), Slice(1, 0, 64)])
    ('error_feedback(powersgd(shapes=((64, 32), (64,))))', ())
    >>> codec_and_shape("powersgd()", job, [Slice(0, 0, 2048)])
    ('powersgd()', (64, 32))
    """
    shape = slice_shape(job, group[0]) if len(group) == 1 else ()
    name = parse_spec(codec)
    if not name.needs_shape:
        return codec, shape if shape == job.tensors[group[0].tensor].shape else ()
    if shape:
        return codec, shape
    shapes = tuple([slice_shape(job, part) or (part.numel,) for part in group])
    if all(len(each) < 2 for each in shapes):
        return codec, ()
    return str(name.with_core(lambda core: CodecSpec("powersgd", (("rank", core.get("rank")), ("shapes", shapes))))), ()


def uncompressed_notices(plan: Plan, job: Job | None = None) -> Iterator[str]:
    """Reports a codec that should compress but leaves most of the model uncompressed, in one line."""
    gradients = [b for b in plan.buckets if not spec_error(b.codec) and not (job is not None and is_buffer(job, b.slices))]
    total = sum(b.numel for b in gradients)
    numels: dict[str, int] = {}
    for bucket in gradients:
        codec = str(parse_spec(bucket.codec).core)
        numels[codec] = numels.get(codec, 0) + _uncompressed_numel(bucket, parse_spec(bucket.codec))
    codec = max(numels, key=numels.__getitem__, default="")
    if codec and numels[codec] > REPORTED_ABOVE * total:
        yield (f"{numels[codec] / total:.0%} of the model's elements are sent uncompressed by {codec}: "
               + ("it compresses only complete matrices, or those in powersgd(shapes=...), that are larger than their factors"
                  if parse_spec(codec).needs_shape else "its payloads are as large as uncompressed ones, or larger"))


def _uncompressed_numel(bucket: Bucket, name: CodecSpec) -> int:
    """Number of elements of the bucket that the codec leaves uncompressed."""
    if bucket.path == "allreduce" or name.core.family == "identity":
        return 0
    if name.core.family == "powersgd":
        shapes = name.core.get("shapes") or (bucket.spec.shape,)
        return sum(math.prod(shape) for shape in shapes if not _factors_are_smaller(shape, name.core.get("rank")))
    try:
        return bucket.numel if bytes_per_element(name).sent >= WHOLE * ELEMENT_NBYTES else 0
    except ValueError:
        return 0


def _factors_are_smaller(shape: Shape, rank: int) -> bool:
    """True: the matrix's low-rank factors have fewer elements than the matrix."""
    if len(shape) < 2 or 0 in shape:
        return False
    rows, row = shape[0], row_size(shape)
    return min(rank, rows, row) * (rows + row) < rows * row


def is_buffer(job: Job, slices: Sequence[Slice]) -> bool:
    """True: these are slices of buffers, such as running statistics, not of gradients."""
    return any(job.tensors[s.tensor].buffer for s in slices if 0 <= s.tensor < len(job.tensors))


DOUBLE = "float64"
EXACT = "allreduce"


def all_reduce_doubles(plan: Plan, job: Job) -> Plan:
    """The plan with every bucket of doubles on an uncompressed all-reduce. Unchanged if there are no doubles."""
    buckets = tuple(
        structs.replace(b, path=EXACT, codec="identity()", server=0, owner=0, down="", by_node=(), coder="", stale=False)
        if _doubles(b, job) else b for b in plan.buckets
    )
    if buckets == plan.buckets:
        return plan
    served = any(b.served for b in buckets)
    return structs.replace(plan, buckets=buckets, servers=plan.servers if served else 0, hosts=plan.hosts if served else ())


def doubles_notice(job: Job, nodes: int) -> str:
    """A notice for the user that doubles are not compressed; empty if no gradient is double."""
    count = sum(t.numel for t in job.tensors if t.dtype == DOUBLE and not t.buffer)
    if not count or nodes < 2:
        return ""
    return (f"{count} of {job.numel} elements are float64, which codecs would round: they are all-reduced without "
            "compression; model.float() makes them float32")


def rounding_problems(plan: Plan, job: Job) -> Iterator[str]:
    """Reports buckets in which the plan would round doubles to float32, one line each."""
    for bucket in plan.buckets:
        if bucket.path != EXACT and (names := _doubles(bucket, job)):
            yield (f"bucket {bucket.id}: {names[0]} is float64, and path {bucket.path!r} would round it to float32; allowed "
                   f"path: {EXACT!r}; or make the model float32 (model.float())")


def _doubles(bucket: Bucket, job: Job) -> list[str]:
    numbers = [s.tensor for s in bucket.slices if 0 <= s.tensor < len(job.tensors)]
    return [job.tensors[number].name for number in numbers if job.tensors[number].dtype == DOUBLE]
