"""Cuts a model into buckets, divides buckets among servers and fragments, and makes the default plan: buckets by size only, one
codec and one path, before anything is measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple, Protocol

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner.tensors import DOUBLE, all_reduce_doubles, codec_and_shape, is_buffer, is_sparse, row_size
from commlayer.records import MAX_BUCKET_NBYTES, MAX_TENSORS_PER_BUCKET, Bucket, Job, Plan, Slice

ELEMENT_NBYTES = 4
"""Bytes per element: codecs read float32, whatever the parameter's dtype."""
LEAST_FRAGMENT_NBYTES = 64 << 10
"""Least bytes in a fragment: the exchange of a smaller fragment is mostly latency."""
COLLECTIVE_NBYTES = 25 << 20
"""Bucket size for collectives, which have a cost per call. It equals DistributedDataParallel's."""
FIRST_COLLECTIVE_NBYTES = 1 << 20
"""Size of the first bucket: small, so that sending begins early. It equals DistributedDataParallel's."""
SPREAD_NBYTES = 256 << 10
"""Least bytes per part when a tensor is spread over servers: smaller parts are not worth a bucket's fixed cost of about 0.1
ms."""
FUSED_PARTS, LEAST_FUSED_NBYTES = 64, 64 << 10
"""Size limit for fused buckets if layers wait for results one by one: 1 / FUSED_PARTS of the model, but at least
LEAST_FUSED_NBYTES."""
TURN_PARTS = 4
"""With fragments (parts of the model that are exchanged one after the other), a cut piece is at most one server's share of a
fragment, and a fused bucket at most 1 / TURN_PARTS of that share."""
BUFFER_CODEC = "identity()"
"""Codec of buffers such as running statistics, which are few."""


def least_spread_nbytes(*, fine: bool) -> int:
    """Least bytes per part when a tensor is spread over servers. `fine`: something waits for a few tensors only, as an outer
    step does for a fragment and a layer for its own results."""
    return LEAST_FUSED_NBYTES if fine else SPREAD_NBYTES


def default_plan(
    job: Job, *, codec: str, path: str, servers: int, ranks_per_node: int, fuse_nbytes: int, cut_nbytes: int,
    forward: bool = False, fragments: int = 1, down: str = "",
) -> Plan:
    """A plan with one path for every bucket: "service" (balanced by bytes over `servers` and local ranks) or "allreduce".

    `down`: the download codec, if it is not `codec`. `fragments`: number of parts of the model that are exchanged one after the
    other; all servers get about the same number of elements of each.

    `forward`: divides the model for `sync="forward"`, in which each layer's forward waits only for its own results. Fused
    buckets are then small: the first layers' gradients are ready last and needed first, and would wait for the rest of a large
    bucket.

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
        # With fragments, a bucket holds at most one fragment's part of the model.
        cut_nbytes = fuse_nbytes = min(COLLECTIVE_NBYTES, max(LEAST_FUSED_NBYTES, job.numel * ELEMENT_NBYTES // fragments))
        first_nbytes = min(FIRST_COLLECTIVE_NBYTES, fuse_nbytes)
    collective = path == "allreduce"
    spread_nbytes = least_spread_nbytes(fine=forward or fragments > 1)
    groups = list(fuse(job, first_nbytes, fuse_nbytes, cut_nbytes, 1 if collective else servers, collective,
                       MAX_BUCKET_NBYTES if matrices else 0, spread_nbytes))
    # A bucket is ready when its last tensor is; buckets of buffers are ready when backward ends.
    groups.sort(key=lambda group: (is_buffer(job, group), -min(part.tensor for part in group)))
    sizes = [sum(s.numel for s in group) for group in groups]
    service = path == "service"
    hosts = [0] * len(sizes)
    if service:
        hosts = _by_urgency(sizes, servers) if forward and fragments == 1 else _by_fragment(groups, sizes, servers, fragments)
    owners = spread(sizes, ranks_per_node) if service else [0] * len(sizes)
    buckets = []
    for i, group in enumerate(groups):
        buffer = is_buffer(job, group)
        mine, shape = codec_and_shape(BUFFER_CODEC if buffer else codec, job, group)
        buckets.append(Bucket(i, group, path, mine, hosts[i], owners[i], shape, down="" if buffer else down))
    return all_reduce_doubles(Plan(job.digest(), tuple(buckets), servers if service else 0, ranks_per_node), job)


def _by_urgency(sizes: Sequence[int], hosts: int) -> list[int]:
    """Chooses a host for each size, if the next forward pass waits for the last sizes first: whatever part of the last half it
    waits for, all hosts have about equal parts of it. The others follow by size, like `largest_first`, for nearly equal sums.

    >>> _by_urgency([9, 3, 3, 5, 5], 2), largest_first([9, 3, 3, 5, 5], 2)
    ([0, 1, 1, 1, 0], [0, 0, 1, 1, 1])
    """
    last = sum(1 for done in accumulate(reversed(sizes)) if 2 * done <= sum(sizes))
    return _spread_in_order([*range(len(sizes))[::-1][:last], *_by_size(sizes[: len(sizes) - last])], sizes, hosts)


def _by_fragment(groups: Sequence[tuple[Slice, ...]], sizes: Sequence[int], hosts: int, fragments: int) -> list[int]:
    """Chooses a host for each group, like `largest_first`, but for each fragment separately. Ties go to the host with the
    fewest elements so far."""
    pieces = [_SizedSlices(group, size) for group, size in zip(groups, sizes, strict=True)]
    chosen, loads = [0] * len(sizes), [0] * hosts
    # Callers check that the plan has enough buckets for its fragments.
    for places in divide_into_fragments(pieces, min(fragments, len(pieces))):
        order = sorted(range(hosts), key=loads.__getitem__)
        for place, number in zip(places, largest_first([sizes[i] for i in places], hosts), strict=True):
            chosen[place] = order[number]
            loads[order[number]] += sizes[place]
    return chosen


class _SizedSlices(NamedTuple):
    slices: tuple[Slice, ...]
    numel: int


def largest_first(sizes: Sequence[int], hosts: int) -> list[int]:
    """Chooses a host for each size: the largest size first, each to the host with the smallest sum so far. Balance matters
    because a step waits for the host with the largest sum.

    >>> largest_first([5, 1, 1, 5, 5], 3), spread([4, 4, 4, 4, 14, 4], 2), largest_first([4, 4, 4, 4, 14, 4], 2)
    ([0, 0, 1, 1, 2], [0, 1, 0, 1, 0, 1], [1, 1, 1, 1, 0, 0])
    """
    return _spread_in_order(_by_size(sizes), sizes, hosts)


def _by_size(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


def _spread_in_order(order: Sequence[int], sizes: Sequence[int], hosts: int) -> list[int]:
    """Chooses a host for each size, like `spread`, but in this order of their indices."""
    host_of = dict(zip(order, spread([sizes[place] for place in order], hosts), strict=True))
    return [host_of[place] for place in range(len(sizes))]


def spread(sizes: Sequence[int], hosts: int) -> list[int]:
    """Chooses a host for each size in the given order: the host with the smallest sum so far, ties to the lowest number."""
    return assign(sizes, [1.0] * hosts)


def assign(sizes: Sequence[float], weights: Sequence[float], loads: list[float] | None = None) -> list[int]:
    """Chooses a host for each size in the given order: the host with the least sum relative to its weight. Hosts of weight 0
    get none. `loads`: earlier sums, to which sizes are added.

    Ties go to the lower number. Every prefix of the sizes is balanced: with n hosts, a host exceeds its part by at most (n - 1)
    times that part of its last size.
    """
    if not any(w > 0 for w in weights) or any(not w >= 0 or math.isinf(w) for w in weights):
        raise InvalidInput("E-PLAN-INPUT", f"weights of servers: got {list(weights)}, allowed: 0 or more, at least one above 0")
    loads = [0.0] * len(weights) if loads is None else loads
    able = [host for host, weight in enumerate(weights) if weight > 0]
    chosen = []
    for size in sizes:
        chosen.append(min(able, key=lambda host: ((loads[host] + size) / weights[host], host)))
        loads[chosen[-1]] += size
    return chosen


def cut_tensor(tensor: int, numel: int, parts: int, row: int = 1) -> tuple[Slice, ...]:
    """Cuts a tensor into `parts` slices whose sizes differ by at most one element (or `row` elements)."""
    edges = [numel // row * i // parts * row for i in range(parts + 1)]
    return tuple(Slice(tensor, start, stop) for start, stop in pairwise(edges))


def fuse(
    job: Job, first_nbytes: int, fuse_nbytes: int, cut_nbytes: int, servers: int, collective: bool,
    matrix_nbytes: int = 0, spread_nbytes: int = SPREAD_NBYTES,
) -> Iterator[tuple[Slice, ...]]:
    """Yields the slices of each bucket, in about the order in which backward finishes gradients: the reverse of registration.
    Buffers follow.

    A collective's bucket takes tensors until it has reached the limit, so the first bucket starts as early as DDP's. With
    `matrix_nbytes`, matrices up to that size are not cut, and larger ones are cut between rows.
    """
    limit = first_nbytes
    held: list[Slice] = []
    held_nbytes, held_kind = 0, ("", False, False)
    numbered = list(enumerate(job.tensors))
    gradients = [pair for pair in numbered if not pair[1].buffer]
    buffers = [pair for pair in numbered if pair[1].buffer]
    for tensor, info in [*reversed(gradients), *buffers]:
        kind = (info.dtype, info.buffer, not collective and is_sparse(job, tensor))
        nbytes = info.numel * ELEMENT_NBYTES
        # A whole tensor uses one server's links; a cut one uses several servers' links in parallel.
        parts, row = max(-(-info.numel // (cut_nbytes // ELEMENT_NBYTES)), min(servers, nbytes // spread_nbytes)), 1
        if matrix_nbytes and len(info.shape) > 1 and not info.buffer and row_size(info.shape) * ELEMENT_NBYTES <= matrix_nbytes:
            row = max(row_size(info.shape), 1)
            parts = -(-info.numel // (matrix_nbytes // ELEMENT_NBYTES // row * row))
        if parts > 1:
            for part in cut_tensor(tensor, info.numel, parts, row):
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
    # Small tensors wait in `held` for more small ones, while large tensors are yielded at once.
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


class BucketLimits(NamedTuple):
    """Size limits for turning tensors into buckets."""

    fuse_nbytes: int
    cut_nbytes: int
    matrix_nbytes: int = 0
    """For codecs that need matrices: matrices up to this many bytes are not cut."""


class Contents(IntEnum):
    """Kind of a bucket's contents. Only gradients are compressed. Every path except all-reduce rounds doubles to float32.
    SPARSE: mostly zero gradients, whose zeros are not sent unless a sparse codec selects entries."""

    GRADIENTS = 0
    BUFFERS = 1
    DOUBLES = 2
    SPARSE = 3


KIB, MIB = 1 << 10, 1 << 20
MOST_BUCKETS = 100
"""Approximate limit for the number of buckets, since each costs planning time and run time. Size limits grow with the model to
keep it."""
TRIED = (BucketLimits(256 * KIB, 2 * MIB), BucketLimits(MIB, 4 * MIB), BucketLimits(4 * MIB, 16 * MIB),
         BucketLimits(25 * MIB, 100 * MIB))
"""The size limits that the planner tries: from small buckets, which start early, to large ones, which pay latency and fixed
costs less often."""


def limits(
    job: Job, most: int = MAX_BUCKET_NBYTES, *, matrices: bool = False, small: bool = True,
) -> tuple[BucketLimits, ...]:
    """Distinct size limits worth trying for a model of this size. `most`: largest bucket in bytes.

    `small`: True also tries one bucket per tensor, as in Espresso. For dozens of biases these buckets cost more than the model
    predicts.
    """
    floor = job.numel * ELEMENT_NBYTES // MOST_BUCKETS
    tried = (BucketLimits(min(max(a, floor), most), min(max(b, floor), most)) for a, b, _ in TRIED)
    alone = [BucketLimits(0, most)] if small and len(job.tensors) <= MOST_BUCKETS * 2 else []
    kept = most if matrices else 0
    return tuple(dict.fromkeys([limit._replace(matrix_nbytes=kept) for limit in (*tried, *alone)]))


def groups(job: Job, limit: BucketLimits) -> list[tuple[Slice, ...]]:
    """The slices of each bucket, in the order in which backward finishes them; buffers last."""
    unsorted = list(fuse(job, limit.fuse_nbytes, limit.fuse_nbytes, limit.cut_nbytes, 1, False, limit.matrix_nbytes))
    return sorted(unsorted, key=lambda group: (is_buffer(job, group), readiness(job, group), -min(s.tensor for s in group),
                                               group[0].start))


def cut_slices(slices: Sequence[Slice], ends: Sequence[int]) -> list[tuple[Slice, ...]]:
    """Cuts the slices of a bucket into parts. `ends`: the bucket's element at which each part ends, except for the last one. A
    part may be empty.

    >>> cut_slices((Slice(3, 0, 10), Slice(4, 5, 9)), [8])
    [(Slice(tensor=3, start=0, stop=8),), (Slice(tensor=3, start=8, stop=10), Slice(tensor=4, start=5, stop=9))]
    """
    parts: list[list[Slice]] = [[]]
    left, before = list(reversed(ends)), 0
    for s in slices:
        start = s.start
        while left and before + s.stop - s.start >= left[-1]:
            stop = s.start + left.pop() - before
            parts[-1] += [Slice(s.tensor, start, stop)] if start < stop else []
            parts.append([])
            start = stop
        parts[-1] += [Slice(s.tensor, start, s.stop)] if start < s.stop else []
        before += s.stop - s.start
    return [tuple(part) for part in parts]


def classify_contents(job: Job, group: tuple[Slice, ...]) -> Contents:
    if job.tensors[group[0].tensor].dtype == DOUBLE:
        return Contents.DOUBLES
    if is_buffer(job, group):
        return Contents.BUFFERS
    return Contents.SPARSE if is_sparse(job, group[0].tensor) else Contents.GRADIENTS


def readiness(job: Job, group: tuple[Slice, ...]) -> float:
    """Seconds from the start of backward until all gradients of the bucket are final. Buffers are ready when backward ends."""
    if job.timing is None:
        return 0.0
    ready_s = job.timing.ready_s
    return job.timing.backward_s if is_buffer(job, group) else max([ready_s[s.tensor] for s in group])


class CutBucket(Protocol):
    """A bucket, or a group of slices that becomes a bucket."""

    @property
    def slices(self) -> tuple[Slice, ...]: ...
    @property
    def numel(self) -> int: ...


def divide_into_fragments(buckets: Sequence[CutBucket], count: int) -> list[list[int]]:
    """Divides the plan's buckets into `count` contiguous fragments, balanced by elements: a list of bucket indices for each.
    ValueError if there are too few buckets.

    Fragments are contiguous because collectives run in the plan's order. The buckets of a cut tensor may be in several
    fragments.
    """
    if count == 1:
        return [list(range(len(buckets)))]
    if len(buckets) < count:
        raise InvalidInput("E-SYNC-FRAGMENTS",
                           f"fragments={count}: allowed: 1 to {len(buckets)}, the number of the plan's buckets")
    done = list(accumulate([b.numel for b in buckets], initial=0))
    cuts = [0]
    for part in range(1, count):
        free = range(cuts[-1] + 1, len(buckets) + 1 - (count - part))
        end = done[-1] * part / count
        after = bisect_left(done, end, free.start, free.stop)
        before = max(free.start, after - 1)
        cuts.append(before if after == free.stop or end - done[before] <= done[after] - end else after)
    return [list(range(low, high)) for low, high in pairwise([*cuts, len(buckets)])]


def most_fragments(count: int, every: int, buckets: int) -> int:
    """The largest number of fragments that divides `every` and exceeds neither `count` nor `buckets`.

    >>> most_fragments(4, 12, 3), most_fragments(4, 8, 3), most_fragments(4, 8, 9)
    (3, 2, 4)
    """
    return max(number for number in range(1, max(1, min(count, buckets)) + 1) if every % number == 0)


def tensor_ranges(buckets: Iterable[CutBucket]) -> dict[int, list[tuple[int, int]]]:
    """Maps each tensor's index to the element ranges that these buckets hold; adjacent ranges are joined."""
    by_tensor: dict[int, list[tuple[int, int]]] = {}
    for s in sorted((s for bucket in buckets for s in bucket.slices), key=attrgetter("tensor", "start")):
        ranges = by_tensor.setdefault(s.tensor, [])
        if ranges and ranges[-1][1] == s.start:
            ranges[-1] = ranges[-1][0], s.stop
        else:
            ranges.append((s.start, s.stop))
    return by_tensor
