"""The plan before anything is measured: buckets by size alone, one codec and one path for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner.model.float64 import unrounded
from commlayer.planner.model.fragments import fragments_of
from commlayer.planner.model.matrix_shapes import row_of, shaped
from commlayer.planner.model.thin import is_thin
from commlayer.records import MAX_BUCKET_NBYTES, MAX_TENSORS_PER_BUCKET, Bucket, Job, Plan, Slice

ELEMENT_NBYTES = 4
"""Codecs see float32, whatever the parameter's dtype."""
COLLECTIVE_NBYTES = 25 << 20
"""A collective has a cost per call, so its buckets are large. Both values are DistributedDataParallel's."""
FIRST_COLLECTIVE_NBYTES = 1 << 20
"""The first bucket is small, so that sending begins early."""
SPREAD_NBYTES = 256 << 10
"""Parts below this size are not worth a bucket's fixed cost of about 0.1 ms."""
FUSED_PARTS, LEAST_FUSED_NBYTES = 32, 64 << 10
"""Size limit for fused buckets if layers wait for results one by one: this fraction of the model, but at least this many
bytes."""
TURN_PARTS = 4
"""With fragments, a fused bucket is at most this fraction of a server's part of a fragment, and a cut piece at most that
part. Each fragment waits for the server that has most."""
BUFFER_CODEC = "identity()"
"""Buffers (running statistics) are few and are averaged uncompressed."""


def least_spread_nbytes(turns: int) -> int:
    """Least size of the parts when a tensor is spread over servers. Smaller with fragments, since each fragment waits for
    the server that has most."""
    return SPREAD_NBYTES if turns == 1 else LEAST_FUSED_NBYTES


def default_plan(
    job: Job, *, codec: str, path: str, servers: int, ranks_per_node: int, fuse_nbytes: int, cut_nbytes: int,
    forward: bool = False, fragments: int = 1, down: str = "",
) -> Plan:
    """A plan with one path for every bucket: "service" (balanced by bytes over `servers` and local ranks) or "allreduce".

    `down`: the codec of servers' results, if it is not `codec`. `fragments`: all servers get about the same part of each
    fragment.

    `forward`: layers wait for their results one by one. Fused buckets are then a small part of the model: the first layers'
    gradients are ready last and needed first, and would wait for the rest of a large bucket.

    Small neighbours of one dtype are fused up to fuse_nbytes and large tensors are cut to at most cut_nbytes; "allreduce"
    uses its own sizes. Equal arguments give equal plans.

    >>> from commlayer.records import TensorInfo
    >>> job = Job((TensorInfo("weight", (1000, 1000)), TensorInfo("bias", (1000,))))
    >>> plan = default_plan(job, codec="fp16()", path="service", servers=1, ranks_per_node=1,
    ...                     fuse_nbytes=1 << 20, cut_nbytes=1 << 21)
    >>> [(b.id, b.slices[0].tensor, b.numel) for b in plan.buckets]
    [(0, 1, 1000), (1, 0, 500000), (2, 0, 500000)]
    """
    _check(path, servers, ranks_per_node, cut_nbytes)
    name = parse_spec(codec)
    matrices = path == "service" and name.needs_shape
    if forward:
        fuse_nbytes = min(fuse_nbytes, max(LEAST_FUSED_NBYTES, job.numel * ELEMENT_NBYTES // FUSED_PARTS))
    if fragments > 1:
        turn_nbytes = job.numel * ELEMENT_NBYTES // (fragments * max(1, servers))
        fuse_nbytes = min(fuse_nbytes, max(LEAST_FUSED_NBYTES, turn_nbytes // TURN_PARTS))
        cut_nbytes = min(cut_nbytes, max(LEAST_FUSED_NBYTES, turn_nbytes))
    fuse_nbytes, cut_nbytes = min(fuse_nbytes, MAX_BUCKET_NBYTES), min(cut_nbytes, MAX_BUCKET_NBYTES)
    first_nbytes = fuse_nbytes
    if path == "allreduce":
        # At most one fragment's part of the model; without fragments that is the whole model.
        cut_nbytes = fuse_nbytes = min(COLLECTIVE_NBYTES, max(LEAST_FUSED_NBYTES, job.numel * ELEMENT_NBYTES // fragments))
        first_nbytes = min(FIRST_COLLECTIVE_NBYTES, fuse_nbytes)
    collective = path == "allreduce"
    spread_nbytes = least_spread_nbytes(fragments)
    groups = list(fused(job, first_nbytes, fuse_nbytes, cut_nbytes, 1 if collective else servers, collective,
                        MAX_BUCKET_NBYTES if matrices else 0, spread_nbytes))
    # A bucket is ready when its last tensor is; buckets of buffers are ready when backward ends.
    groups.sort(key=lambda group: (_buffer(job, group), -min(part.tensor for part in group)))
    sizes = [sum(s.numel for s in group) for group in groups]
    service = path == "service"
    hosts = _in_turns(groups, sizes, servers, fragments) if service else [0] * len(sizes)
    owners = spread(sizes, ranks_per_node) if service else [0] * len(sizes)
    buckets = []
    for i, group in enumerate(groups):
        buffer = _buffer(job, group)
        mine, shape = shaped(BUFFER_CODEC if buffer else codec, job, group)
        buckets.append(Bucket(i, group, path, mine, hosts[i], owners[i], shape, down="" if buffer else down))
    return unrounded(Plan(job.digest(), tuple(buckets), servers if service else 0, ranks_per_node), job)


def _buffer(job: Job, group: Sequence[Slice]) -> bool:
    return job.tensors[group[0].tensor].buffer


def _in_turns(groups: Sequence[tuple[Slice, ...]], sizes: Sequence[int], hosts: int, fragments: int) -> list[int]:
    """Like `shared`, for each fragment separately; ties within a fragment go to the host with the least so far."""
    pieces = [_Piece(group, size) for group, size in zip(groups, sizes, strict=True)]
    chosen, loads = [0] * len(sizes), [0] * hosts
    # Callers check whether the plan has enough buckets for its fragments.
    for places in fragments_of(pieces, min(fragments, len(pieces))):
        order = sorted(range(hosts), key=loads.__getitem__)
        for place, number in zip(places, shared([sizes[i] for i in places], hosts), strict=True):
            chosen[place] = order[number]
            loads[order[number]] += sizes[place]
    return chosen


class _Piece(NamedTuple):
    slices: tuple[Slice, ...]
    numel: int


def shared(sizes: Sequence[int], hosts: int) -> list[int]:
    """A host for each size: the largest size first, each to the host with the least so far. This balances hosts well: a step
    waits for the host that has most.

    >>> shared([5, 1, 1, 5, 5], 3), spread([4, 4, 4, 4, 14, 4], 2), shared([4, 4, 4, 4, 14, 4], 2)
    ([0, 0, 1, 1, 2], [0, 1, 0, 1, 0, 1], [1, 1, 1, 1, 0, 0])
    """
    chosen = [0] * len(sizes)
    ordered = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    for place, host in zip(ordered, spread([sizes[place] for place in ordered], hosts), strict=True):
        chosen[place] = host
    return chosen


def spread(sizes: Sequence[int], hosts: int) -> list[int]:
    """A host for each size, in order: the one with the least so far, ties to the lowest number."""
    loads = [0] * hosts
    chosen = []
    for size in sizes:
        host = min(range(hosts), key=loads.__getitem__)
        loads[host] += size
        chosen.append(host)
    return chosen


def cut(tensor: int, numel: int, parts: int, row: int = 1) -> tuple[Slice, ...]:
    """Cuts a tensor into `parts` slices whose sizes differ by at most one element (or one row, with `row`)."""
    edges = [numel // row * i // parts * row for i in range(parts + 1)]
    return tuple(Slice(tensor, start, stop) for start, stop in pairwise(edges))


def fused(
    job: Job, first_nbytes: int, fuse_nbytes: int, cut_nbytes: int, servers: int, collective: bool,
    matrix_nbytes: int = 0, spread_nbytes: int = SPREAD_NBYTES,
) -> Iterator[tuple[Slice, ...]]:
    """Slices by bucket. Backward makes gradients ready in about the reverse order of registration; buffers follow.

    A collective's bucket takes tensors until it has reached the limit, so that the first starts as early as DDP's does. With
    `matrix_nbytes`, matrices up to that size stay whole, and larger ones are cut between rows.
    """
    limit = first_nbytes
    held: list[Slice] = []
    held_nbytes, held_kind = 0, ("", False, False)
    numbered = list(enumerate(job.tensors))
    gradients = [pair for pair in numbered if not pair[1].buffer]
    buffers = [pair for pair in numbered if pair[1].buffer]
    for tensor, info in [*reversed(gradients), *buffers]:
        kind = (info.dtype, info.buffer, not collective and is_thin(job, tensor))
        nbytes = info.numel * ELEMENT_NBYTES
        # A whole tensor uses one server's links; a cut one uses several servers' links in parallel.
        parts, row = max(-(-info.numel // (cut_nbytes // ELEMENT_NBYTES)), min(servers, nbytes // spread_nbytes)), 1
        if matrix_nbytes and len(info.shape) > 1 and not info.buffer and row_of(info.shape) * ELEMENT_NBYTES <= matrix_nbytes:
            row = max(row_of(info.shape), 1)
            parts = -(-info.numel // (matrix_nbytes // ELEMENT_NBYTES // row * row))
        if parts > 1:
            for part in cut(tensor, info.numel, parts, row):
                yield (part,)
            limit = fuse_nbytes
        elif nbytes:
            room = held_nbytes < limit if collective else held_nbytes + nbytes <= limit
            fits = room and len(held) < MAX_TENSORS_PER_BUCKET and kind == held_kind
            if held and not fits:
                yield tuple(held)
                held, held_nbytes, limit = [], 0, fuse_nbytes
            held.append(Slice(tensor, 0, info.numel))
            held_nbytes += nbytes
            held_kind = kind
    # Small tensors wait here for others while large tensors pass.
    if held:
        yield tuple(held)


def _check(path: str, servers: int, ranks_per_node: int, cut_nbytes: int) -> None:
    if path not in ("service", "allreduce"):
        raise InvalidInput("E-PLAN-INPUT", f'path: got {path!r}, allowed: "service" or "allreduce"')
    if path == "service" and servers < 1:
        raise InvalidInput("E-PLAN-INPUT", f'servers: got {servers}, path "service" needs at least 1')
    if ranks_per_node < 1:
        raise InvalidInput("E-PLAN-INPUT", f"ranks_per_node: got {ranks_per_node}, allowed: at least 1")
    if cut_nbytes < ELEMENT_NBYTES:
        raise InvalidInput("E-PLAN-INPUT", f"cut_nbytes: got {cut_nbytes}, allowed: at least {ELEMENT_NBYTES}, one element")
