"""Verifies a plan against the model before the plan runs, and lowers its paths to those of the runtime."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec import structs

from commlayer.codec_spec import parse_spec, spec_error
from commlayer.errors import InvalidInput, append_code
from commlayer.planner import tree
from commlayer.planner.buckets import cut_slices
from commlayer.planner.convergence import LATE_RATIO, LearningRow, late_allowed
from commlayer.planner.tensors import rounding_problems
from commlayer.planner.tree import format_path, parse
from commlayer.records import MAX_BUCKET_NBYTES, MAX_TENSORS_PER_BUCKET, SCHEMA, Bucket, Job, Plan, Slice

FLOAT32_NBYTES = 4
LEAST_CUT_NUMEL = 1024
"""Elements of the smallest piece into which a tensor may be cut: those of the setting cut_nbytes's lowest value."""
FEW_BUCKETS = 64
MAX_PATH_CHARS, MAX_DIMENSIONS = 256, 64
"""Longest text of a path, and most dimensions of a tensor."""


def verify(plan: Plan, job: Job) -> list[str]:
    """Reports all problems of a plan, one line each; empty for a plan that sums every element exactly once."""
    if plan.schema == SCHEMA and plan.job != job.digest():
        return [f"this plan was made for another model: job {plan.job}, but this is {job.digest()} "
                f"({len(job.tensors)} tensors, {job.numel} elements)"]
    problems = verify_alone(plan)
    if plan.schema != SCHEMA:
        return problems
    problems += [line for bucket in plan.buckets for line in _slice_problems(job, bucket)]
    return [*problems, *rounding_problems(plan, job), *_buffer_problems(plan, job), *_coverage_problems(plan, job)]


def verify_alone(plan: Plan, world: int = 0, tensors: int = -1, elements: int = -1) -> list[str]:
    """Runs the checks that need no model, as on a server. `world`: also checks that the plan fits this number of workers.
    `tensors`, `elements`: also checks that the plan has no more of them than the job, so that it needs no more memory than the
    job."""
    if plan.schema != SCHEMA:
        return [f"plan has schema {plan.schema}, this version reads schema {SCHEMA}: create the plan again"]
    if problems := list(_too_large(plan, world, tensors, elements)):
        return problems
    if plan.ranks_per_node < 1:
        problems.append(f"ranks_per_node is {plan.ranks_per_node}, allowed: at least 1")
    elif plan.ranks_per_node > world > 0:
        problems.append(f"ranks_per_node is {plan.ranks_per_node}, but the job has {world} workers")
    least = {"local_steps": 1, "fragments": 1, "servers": 0, "warmup": 0}
    problems += [f"{name} is {getattr(plan, name)}, allowed: at least {n}" for name, n in least.items()
                 if getattr(plan, name) < n]
    if plan.ratio_over not in ("bucket", "plan"):
        problems.append(f"ratio_over is {plan.ratio_over!r}, allowed: 'bucket' or 'plan'")
    problems += [*_sync_problems(plan)]
    if not (math.isfinite(plan.step_s) and plan.step_s >= 0):
        problems.append(f"step_s is {plan.step_s}, allowed: seconds, 0 or more")
    return problems + [line for place, bucket in enumerate(plan.buckets) for line in _bucket_problems(plan, place, bucket)]


def _too_large(plan: Plan, world: int, tensors: int, elements: int) -> Iterator[str]:
    """Reports what no correct plan of the job has. The other checks take time and memory in proportion to these sizes."""
    if tensors >= 0:
        most = max_buckets(tensors, elements, min(plan.ranks_per_node, world))
        if len(plan.buckets) > most:
            yield f"{len(plan.buckets)} buckets, allowed for {tensors} tensors of {elements} elements together: {most}"
        wrong = next((s.tensor for b in plan.buckets for s in b.slices if not 0 <= s.tensor < tensors), None)
        if wrong is not None:
            yield f"tensor {wrong}, but the job has {tensors} tensors"
    numel = sum(b.numel for b in plan.buckets)
    if 0 <= elements != numel:
        yield f"its buckets have {numel} elements together, but the job's tensors have {elements}"
    for bucket in plan.buckets:
        if len(bucket.path) > MAX_PATH_CHARS or len(bucket.shape) > MAX_DIMENSIONS or (world and len(bucket.by_node) > world):
            yield (f"bucket {bucket.id}: path of {len(bucket.path)} characters, {len(bucket.shape)} dimensions, codecs for "
                   f"{len(bucket.by_node)} nodes; allowed {MAX_PATH_CHARS}, {MAX_DIMENSIONS} and {world or 'any number'}")
            break


def max_buckets(tensors: int, elements: int, ranks_per_node: int) -> int:
    """Returns the largest number of buckets of a plan: each tensor in pieces of LEAST_CUT_NUMEL elements, and each piece in one
    shard for each rank of a node. A plan that cuts a small model finer may have FEW_BUCKETS in addition."""
    return max(1, ranks_per_node) * (tensors + elements // LEAST_CUT_NUMEL) + FEW_BUCKETS


def _sync_problems(plan: Plan) -> Iterator[str]:
    """Reports sync settings that exclude each other."""
    late = any(b.stale for b in plan.buckets)
    if plan.codes not in ("gradients", "updates"):
        yield f"codes is {plan.codes!r}, allowed: 'gradients' or 'updates'"
    if plan.overlap not in ("", "round", "forward"):
        yield f"overlap is {plan.overlap!r}, allowed: 'round', 'forward', or nothing"
    if plan.overlap == "round" and not plan.steps_locally:
        yield ("overlap is 'round' with local_steps 1: a step on averaged gradients cannot start before the average arrives; "
               "allowed: local_steps of 2 or more, or codes 'updates'")
    if plan.overlap == "forward" and (plan.steps_locally or late):
        what = "stale buckets (applied one step late)" if not plan.steps_locally else \
            f"{plan.local_steps} local steps" if plan.local_steps > 1 else "compressed updates"
        yield f"has {what}, which excludes overlap='forward' (each average is applied before the next step): choose one"
    if late and plan.steps_locally:
        what = f"{plan.local_steps} local steps" if plan.local_steps > 1 else "compressed updates"
        yield f"has {what}, which excludes stale buckets (applied one step late): choose one"
    if plan.local_steps > 0 < plan.fragments and plan.local_steps % plan.fragments:
        yield (f"local_steps is {plan.local_steps}, and fragments={plan.fragments} does not divide it: one fragment is "
               "exchanged every H / fragments steps; choose a divisor")


def bucket_codecs(bucket: Bucket) -> list[str]:
    """The codecs of a bucket: for uploads, for downloads, and for uploads of single nodes."""
    return [*dict.fromkeys([bucket.codec, *([bucket.down] if bucket.down else []), *bucket.by_node])]


def late_and_sparse(plan: Plan, rows: Sequence[LearningRow], optimizer: str = "") -> list[str]:
    """Describes the buckets whose results are one step late and whose codec is too sparse for that; see `late_allowed`."""
    wrong = [(bucket.id, codec) for bucket in plan.buckets if bucket.stale for codec in bucket_codecs(bucket)
             if not spec_error(codec) and not late_allowed(rows, codec, optimizer)]
    ids = list(dict.fromkeys(number for number, _ in wrong))
    return [append_code("E-PLAN-LATE",
                        f"{len(ids)} buckets, the first {ids[0]}: no training was measured with {wrong[0][1]} and results one "
                        f"step late, and both errors multiply; send more than {LATE_RATIO:.0%} of the entries, or make the "
                        "plan without staleness")] if wrong else []


def _buffer_problems(plan: Plan, job: Job) -> Iterator[str]:
    """Reports buffers before gradients, because buffers are ready only when backward ends, and buckets that mix both, because
    buffers have no loss scale."""
    begun = False
    for bucket in plan.buckets:
        kinds = {job.tensors[s.tensor].buffer for s in bucket.slices if 0 <= s.tensor < len(job.tensors)}
        if len(kinds) > 1:
            yield f"bucket {bucket.id}: mixes gradients and buffers"
        if begun and False in kinds:
            yield f"bucket {bucket.id}: gradients come after buffers, but buffers are ready last and must be the last buckets"
        begun = begun or True in kinds


def _bucket_problems(plan: Plan, place: int, bucket: Bucket) -> Iterator[str]:
    name = f"bucket {bucket.id}"
    if bucket.id != place:
        yield f"{name} is bucket number {place} of the plan: ids must count from 0 in the order of the buckets"
    try:
        yield from (f"{name}: path {bucket.path!r}: {line}" for line in tree.path_problems(tree.parse(bucket.path)))
    except ValueError as error:
        yield f"{name}: {error}"
    if bucket.coder not in ("", "gpu"):
        yield f"{name}: coder {bucket.coder!r}, allowed: 'gpu', or nothing for the host"
    if not bucket.codec.strip():
        yield f"{name}: no codec"
    if bucket.served and not 0 <= bucket.server < plan.servers:
        yield f"{name}: server {bucket.server}, but the plan has {plan.servers} servers"
    if bucket.path != "allreduce" and not 0 <= bucket.owner < plan.ranks_per_node:
        yield f"{name}: owner {bucket.owner}, but the plan has {plan.ranks_per_node} ranks per node"
    if bucket.rows and not (len(bucket.rows) == 2 and 0 <= bucket.rows[0] < bucket.rows[1]):
        yield f"{name}: rows {bucket.rows}, allowed: a row and the number of rows, which is larger"
    if not 0 < len(bucket.slices) <= MAX_TENSORS_PER_BUCKET:
        yield f"{name}: {len(bucket.slices)} slices, allowed: 1 to {MAX_TENSORS_PER_BUCKET}"
    if bucket.shape and (min(bucket.shape) < 1 or math.prod(bucket.shape) != bucket.numel):
        yield f"{name}: shape {bucket.shape} for {bucket.numel} elements"
    backward = [part for part in bucket.slices if not 0 <= part.start < part.stop]
    for part in backward:
        yield f"{name}: elements {part.start}..{part.stop} of tensor {part.tensor}, which is not a valid range"
    if not backward and bucket.served and bucket.numel * FLOAT32_NBYTES > MAX_BUCKET_NBYTES:
        yield (f"{name}: {bucket.numel} elements, allowed on path service: {MAX_BUCKET_NBYTES // FLOAT32_NBYTES}; "
               "cut it into several")


def _slice_problems(job: Job, bucket: Bucket) -> Iterator[str]:
    name = f"bucket {bucket.id}"
    for part in bucket.slices:
        if not 0 <= part.tensor < len(job.tensors):
            yield f"{name}: tensor {part.tensor}, but the model has {len(job.tensors)} tensors"
        elif part.stop > job.tensors[part.tensor].numel:
            info = job.tensors[part.tensor]
            yield f"{name}: elements {part.start}..{part.stop} of {info.name}, which has only {info.numel}"


def _coverage_problems(plan: Plan, job: Job) -> Iterator[str]:
    parts: list[list[tuple[int, int, int]]] = [[] for _ in job.tensors]
    for bucket in plan.buckets:
        for part in bucket.slices:
            if 0 <= part.tensor < len(parts):
                parts[part.tensor].append((part.start, part.stop, bucket.id))
    for info, entries in zip(job.tensors, parts, strict=True):
        reached, last = 0, -1
        for start, stop, bucket_id in sorted(entries):
            if start > reached:
                yield f"{info.name}: elements {reached}..{start} are in no bucket"
            elif start < reached:
                yield f"{info.name}: elements {start}..{min(reached, stop)} are in buckets {last} and {bucket_id}"
            if stop >= reached:
                reached, last = stop, bucket_id
        if reached < info.numel:
            yield f"{info.name}: elements {reached}..{info.numel} are in no bucket"


MERGED = "topk(ratio=1.0, values='int8')"
"""Codec for a merged sparse sum: sends all of its nonzero entries."""
AS_IT_IS = "identity()"


def lower(plan: Plan) -> Plan:
    """Replaces the plan's paths by equivalent paths of the runtime. A plan that is already lowered is returned unchanged."""
    lowered = [bucket for old in plan.buckets for bucket in _lowered(old, plan.ranks_per_node)]
    buckets = tuple(structs.replace(bucket, id=number) for number, bucket in enumerate(lowered))
    return plan if buckets == plan.buckets else structs.replace(plan, buckets=buckets)


def _lowered(bucket: Bucket, ranks_per_node: int) -> Iterator[Bucket]:
    path = parse(bucket.path, ranks_per_node)
    if path == parse("allreduce"):
        yield structs.replace(bucket, path="allreduce")
        return
    if bucket.path == "service" or not bucket.served:
        yield bucket
        return
    coders = {op.where for op in path if op.name in ("encode", "decode")}
    if len(coders) > 1:
        raise InvalidInput("E-PLAN-PATH",
                           f"bucket {bucket.id}: path {format_path(path)!r} encodes and decodes on "
                           f"{' and '.join(sorted(coders))}: a path over a server must use one device")
    forwards = any(op.name == "forward" for op in path)
    down = (MERGED if parse_spec(bucket.codec).sparse else AS_IT_IS) if forwards else bucket.down
    served = structs.replace(bucket, path="service", down=down, coder="gpu" if coders == {"gpu"} else "")
    if ranks_per_node == 1 or not any(op.name == "reduce_scatter" for op in path):
        yield served
        return
    # Workers sum these shards in one reduce_scatter, and exchange the averaged shards in one allgather.
    ends = [bucket.numel * rank // ranks_per_node for rank in range(1, ranks_per_node)]
    for owner, slices in enumerate(cut_slices(bucket.slices, ends)):
        if slices:
            yield structs.replace(served, slices=slices, owner=owner, shape=())


def shard_groups(buckets: Sequence[Bucket], ranks_per_node: int) -> list[range]:
    """Ranges of bucket indices that a node handles together, in order: the shards of one bucket of the unlowered plan, or a
    single bucket.

    Shards are neighbours of equal size, owned by local ranks 0, 1, ... Each shard begins in the tensor in which the previous
    one ends, so one gradient makes all of them ready, or nearly so.
    """
    runs: list[range] = []
    place = 0
    while place < len(buckets):
        run = range(place, place + ranks_per_node)
        alike = ranks_per_node > 1 and run.stop <= len(buckets) and _shards([buckets[i] for i in run])
        runs.append(run if alike else range(place, place + 1))
        place = runs[-1].stop
    return runs


def _shards(buckets: Sequence[Bucket]) -> bool:
    sizes = [bucket.numel for bucket in buckets]
    return (
        [bucket.owner_in(range(len(buckets))) for bucket in buckets] == [*range(len(buckets))]
        and max(sizes) - min(sizes) <= 1
        and all(_adjacent(before.slices[-1], after.slices[0]) for before, after in pairwise(buckets))
    )


def _adjacent(before: Slice, after: Slice) -> bool:
    return before.tensor == after.tensor and before.stop == after.start


def sync_mode(plan: Plan) -> str:
    """The plan's sync mode in a few words; empty for a blocking exchange of gradients in every step.

    >>> sync_mode(Plan("job", (), local_steps=64, overlap="round", fragments=16))
    '64 local steps, exchange overlapped in 16 parts'
    >>> sync_mode(Plan("job", (), codes="updates")), sync_mode(Plan("job", (), overlap="forward"))
    ('weight changes in every step', 'results during the next forward pass')
    """
    parts = [f"{plan.local_steps} local steps"] if plan.local_steps > 1 else \
        ["weight changes in every step"] if plan.codes == "updates" else []
    pieces = f" in {plan.fragments} parts" if plan.fragments > 1 else ""
    overlap = {"round": "exchange overlapped", "forward": "results during the next forward pass", "": pieces and "exchange"}
    parts += [overlap[plan.overlap] + pieces] if overlap[plan.overlap] else []
    late = sum(b.numel for b in plan.buckets if b.stale) / max(1, sum(b.numel for b in plan.buckets))
    return ", ".join([*parts, *([f"{late:.0%} one step late"] if late else [])])


def main_codec(plan: Plan) -> str:
    by: dict[str, int] = {}
    for bucket in plan.buckets:
        name = bucket.codec + (f" down {bucket.down}" if bucket.down else "")
        by[name] = by.get(name, 0) + bucket.numel
    return max(by, key=by.__getitem__, default="")


def summarize_plan(plan: Plan) -> str:
    """
    >>> summarize_plan(Plan("job", (), local_steps=4, step_s=0.02))
    '0 buckets, 4 local steps, 20.0 ms a step predicted'
    """
    codec = f", mostly {main_codec(plan)}" if plan.buckets else ""
    predicted = f"{1e3 * plan.step_s:.1f} ms a step predicted" if plan.step_s else ""
    return ", ".join(part for part in (f"{len(plan.buckets)} buckets{codec}", sync_mode(plan), predicted) if part)
