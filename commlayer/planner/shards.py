"""Sharded models: which elements of each tensor a rank of a site has, and plans in which each bucket belongs to one rank of
each site."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import structs

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner.plan_rules import lower
from commlayer.planner.tensors import codec_and_shape, row_size
from commlayer.records import Bucket, Job, Plan, Slice, chunk_with


class Shards(NamedTuple):
    """A model that is sharded over the ranks of a site, as torch.chunk divides the first dimension of each parameter."""

    ranks: int = 0
    """Number of ranks of a site; 0: the model is not sharded."""
    local: int = 0
    """Number of this rank in its site."""
    tensors: frozenset[int] = frozenset()
    """The sharded tensors. Each rank has all elements of the other tensors, such as buffers."""

    def __bool__(self) -> bool:
        return self.ranks > 0

    def elements(self, shape: Sequence[int], local: int) -> tuple[int, int]:
        """Returns the range of elements of a sharded tensor that a rank of the site has.

        >>> [Shards(4).elements((5, 10), local) for local in range(4)]
        [(0, 20), (20, 40), (40, 50), (50, 50)]
        """
        rows, row = -(-shape[0] // self.ranks), row_size(tuple(shape))
        return min(local * rows, shape[0]) * row, min((local + 1) * rows, shape[0]) * row

    def partly_empty(self, job: Job) -> list[int]:
        """Returns the sharded tensors that leave no elements for the last rank of a site."""
        def numel(tensor: int) -> int:
            start, end = self.elements(job.tensors[tensor].shape, self.ranks - 1)
            return end - start

        return [tensor for tensor in sorted(self.tensors) if not numel(tensor)]

    def cut(self, plan: Plan, job: Job, sizes: Collection[int] = ()) -> Plan:
        """Returns the plan with its sharded buckets cut where shards end, in sites of each of the `sizes`. The rank that has a
        shard is the owner of its buckets. A plan that is cut already stays as it is. Empty `sizes`: this site's size."""
        if not self:
            return plan
        sizes = sorted({*sizes} or {self.ranks}, reverse=True)
        buckets = [part for bucket in lower(plan).buckets for part in self._cut(bucket, job, sizes)]
        numbered = tuple(structs.replace(bucket, id=number) for number, bucket in enumerate(buckets))
        served = any(bucket.served for bucket in numbered)
        return structs.replace(plan, buckets=numbered, servers=max(1, plan.servers) if served else 0, ranks_per_node=sizes[0])

    def _cut(self, bucket: Bucket, job: Job, sizes: Sequence[int]) -> Iterator[Bucket]:
        if whole := tuple(s for s in bucket.slices if s.tensor not in self.tensors):
            yield structs.replace(_with(bucket, whole, job), owner=bucket.owner % sizes[0], rows=())
        held: dict[tuple[int, ...], list[tuple[Slice, tuple[int, int]]]] = {}
        for s in bucket.slices if whole != bucket.slices else ():
            shape = job.tensors[s.tensor].shape
            for first, end in intervals(shape[0], sizes) if s.tensor in self.tensors else ():
                start, stop = max(first * row_size(shape), s.start), min(end * row_size(shape), s.stop)
                if start < stop:
                    owners = tuple(chunk_with(first, shape[0], ranks) for ranks in sizes)
                    held.setdefault(owners, []).append((Slice(s.tensor, start, stop), (start // row_size(shape), shape[0])))
        if (held or len(sizes) > 1) and (bucket.path not in ("service", "allreduce") or bucket.stale):
            what = "results that are one step late" if bucket.stale else f"path {bucket.path!r}"
            raise InvalidInput("E-PLAN-REFUSED", f"plan: bucket {bucket.id} has {what}, but buckets of a sharded model "
                                                 "support only path 'service' in the same step")
        for owners, parts in sorted(held.items()):
            yield structs.replace(_with(bucket, tuple(part for part, _ in parts), job), path="service", owner=owners[0],
                                  rows=parts[0][1])

    def fits(self, plan: Plan, job: Job, ranks: int) -> bool:
        """Returns True if each bucket of a cut plan belongs to one rank, also in sites of this many ranks."""
        return len(self.cut(plan, job, [ranks]).buckets) == len(plan.buckets)

    def joining(self, plan: Plan, job: Job, ranks: int) -> Shards:
        """Returns how a home with this many ranks shares the model of a job that it joins. The plan of the job is already cut.
        A home of one rank may have whole tensors. Raises ValueError if the home cannot join."""
        tensors = frozenset(s.tensor for bucket in plan.buckets if bucket.rows for s in bucket.slices)
        if self.tensors != tensors and (self or ranks > 1):
            raise InvalidInput("E-SHARDED", f"this home has {ranks} ranks and shards {len(self.tensors)} tensors, but homes of "
                                            f"the running job shard {len(tensors)}: shard the same ones")
        if not self.fits(plan, job, ranks):
            raise InvalidInput("E-SHARDED", f"this home has {ranks} ranks, but the plan of the running job cannot be cut for "
                                            "homes of that size: use as many ranks as its homes have, or one")
        return self or (Shards(1, 0, tensors) if tensors else self)

    def own_bucket(self, bucket: Bucket, job: Job) -> Bucket | None:
        """Converts a bucket of a cut plan to the form in which this rank executes it: in elements of its own shards. None:
        another rank of the site has the bucket."""
        if bucket.slices[0].tensor not in self.tensors:
            return bucket
        if bucket.owner_in(range(self.ranks)) != self.local:
            return None
        starts = [self.elements(job.tensors[s.tensor].shape, self.local)[0] for s in bucket.slices]
        return structs.replace(bucket, slices=tuple(
            Slice(s.tensor, s.start - start, s.stop - start) for s, start in zip(bucket.slices, starts, strict=True)))


def intervals(rows: int, sizes: Collection[int]) -> list[tuple[int, int]]:
    """Cuts rows where a rank's rows end in a site of any of these sizes.

    >>> intervals(6, [4, 3])
    [(0, 2), (2, 4), (4, 6)]
    >>> intervals(6, [4, 2, 1])
    [(0, 2), (2, 3), (3, 4), (4, 6)]
    """
    return [*pairwise(sorted({min(rows, -(-rows // ranks) * number) for ranks in sizes for number in range(ranks + 1)}))]


def _with(bucket: Bucket, slices: tuple[Slice, ...], job: Job) -> Bucket:
    if slices == bucket.slices:
        return bucket
    spec = parse_spec(bucket.codec)
    codec, shape = codec_and_shape(str(spec.without_shapes()) if spec.core.get("shapes") else bucket.codec, job, slices)
    return structs.replace(bucket, slices=slices, codec=codec, shape=shape)
