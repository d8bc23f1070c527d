"""Lowers a plan to the form that the runtime executes.

The runtime knows "service" (the node's sum at one rank, encoded, pushed, the result decoded and shared), "allreduce", and
staged paths as they are spelled. Variants of "service" become other fields of the bucket (where it is encoded, how results
return), or several buckets (if the node shards it).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner.model.paths import parse, spell
from commlayer.planner.model.shards import cut
from commlayer.records import Bucket, Plan

MERGED = "topk(ratio=1.0, values='int8')"
"""All entries of a merged sparse sum, without zeros."""
AS_IT_IS = "identity()"


def lower(plan: Plan) -> Plan:
    """The same sums in the runtime's terms. A plan that is already lowered is returned unchanged."""
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
                           f"bucket {bucket.id}: path {spell(path)!r} codes on {' and '.join(sorted(coders))}: what goes to a "
                           "server is coded on one of them")
    forwards = any(op.name == "forward" for op in path)
    down = (MERGED if parse_spec(bucket.codec).sparse else AS_IT_IS) if forwards else bucket.down
    served = structs.replace(bucket, path="service", down=down, coder="gpu" if coders == {"gpu"} else "")
    if ranks_per_node == 1 or not any(op.name == "reduce_scatter" for op in path):
        yield served
        return
    # Workers sum these shards in one reduce_scatter, and share their results in one allgather.
    for owner, slices in enumerate(cut(bucket.slices, ranks_per_node)):
        if slices:
            yield structs.replace(served, slices=slices, owner=owner, shape=())
