"""Measures how exact a plan's codecs are, and replaces codecs below a floor.

A codec's level is its ratio if it has one, otherwise the fraction of dense bytes that it sends: 1 for identity, 1/2 for fp16,
about 1/4 for int8, 1/32 for onebit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import structs

from commlayer.codec_spec import parse_spec
from commlayer.compressors import Codec, make_codec, parse, wrap
from commlayer.compressors.feedback import Momentum
from commlayer.engine.job.plan_checks import node_problems
from commlayer.records import Bucket, Plan, Spec

DENSE = "identity()"
STEPS = ((0.3, "int8()"), (0.6, "fp16()"), (1.0, DENSE))
"""Pairs (floor, codec) in ascending order of the floor. To raise a bucket's precision level to a floor, the codec of the first
pair with at least this floor is used, if a sparse codec is not possible or would send as much."""
TYPICAL = Spec((1 << 16,))
"""Shape for which the precision level of codecs is measured without a bucket."""
SMALL = 1 << 12
"""Number of elements up to which a codec's headers dominate its measured precision level."""
EQUAL = 0.99
"""Tolerance for comparing precision levels, because ratios are written with three digits."""


def level(codec: Codec, spec: Spec = TYPICAL) -> float:
    """Returns the precision level of a codec: its ratio, or else the fraction of float32 bytes that it sends.

    >>> level(parse("error_feedback(topk(ratio=0.01))")), level(parse("fp16()"))
    (0.01, 0.5)
    """
    if (ratio := parse_spec(str(codec)).ratio) is not None:
        return ratio
    if hasattr(codec, "bits"):
        return float(codec.bits / 32)  # a sum of such codes takes more bits
    spec = spec if spec.numel > SMALL else TYPICAL
    return round(min(1.0, codec.bound(spec) / (4 * spec.numel)), 3)


def codecs_above_floor(floor: float, texts: list[str]) -> list[str]:
    """Returns the codecs in `texts` whose precision level is at least `floor`, and a topk codec with the floor as its ratio."""
    fine_enough = [text for text in texts if level(parse(text)) >= floor * EQUAL]
    finest = STEPS[0][0]
    return [*fine_enough, f"topk(ratio={floor:.3g})"] if 0 < floor < finest else fine_enough


def is_lossy(bucket: Bucket) -> bool:
    """Returns True if any of the bucket's codecs loses information."""
    return bucket.path != "allreduce" and any(level(codec, bucket.spec) < 1 for codec in _codecs(bucket))


def lowest(plan: Plan) -> float:
    """Returns the precision level of the coarsest codec in the plan; 1 if all buckets are sent without loss."""
    return min((level(codec, b.spec) for b in plan.buckets if is_lossy(b) for codec in _codecs(b)), default=1.0)


def carries_gradients(codec: Any) -> bool:
    """Returns True if the codec sends gradients, and not a momentum (velocity)."""
    if isinstance(codec, Momentum):
        return False
    return all(carries_gradients(part) for part in structs.astuple(codec) if isinstance(part, msgspec.Struct))


def exchanges_gradients(bucket: Bucket) -> bool:
    """Returns True if every node's codec of this bucket sends gradients. The result is the same on all ranks, whatever codec
    their own node has."""
    return all(carries_gradients(codec) for codec in _codecs(bucket))


def raise_precision(plan: Plan, floor: float, nodes: int, *, cuda: bool = False) -> Plan:
    """Returns the plan with all codecs at precision level `floor` or above. A bucket is sent uncompressed if none of the finer
    codecs supports its path."""
    buckets = tuple(_raise_bucket_precision(plan, b, floor, nodes, cuda) if is_lossy(b) else b for b in plan.buckets)
    return structs.replace(plan, buckets=buckets)


def nbytes(plan: Plan) -> float:
    """Returns an upper bound for the bytes that a worker sends and receives in a step, for comparing two plans of the same job.
    """
    return sum(make_codec(b).bound(b.spec) + (wrap(parse(b.down or b.codec)).bound(b.spec)) if is_lossy(b) else 8 * b.numel
               for b in plan.buckets)


def _codecs(bucket: Bucket) -> list[Codec]:
    return [parse(text) for text in (bucket.codec, bucket.down, *bucket.by_node) if text]


def _raise_bucket_precision(plan: Plan, bucket: Bucket, floor: float, nodes: int, cuda: bool) -> Bucket:
    if all(level(codec, bucket.spec) >= floor * EQUAL for codec in _codecs(bucket)):
        return bucket
    for candidate in _candidates(bucket, floor):
        alone = structs.replace(plan, buckets=(candidate,), fragments=1)
        if not node_problems(alone, nodes, plan.ranks_per_node, cuda=cuda):
            return candidate
    return bucket


def _candidates(bucket: Bucket, floor: float) -> Iterator[Bucket]:
    """Yields finer versions of a bucket in the order in which to try them: first the same codec with a higher ratio, then other
    codecs from coarse to exact."""
    floor = min(floor, 1.0)
    if floor <= STEPS[0][0]:
        texts = (bucket.codec, bucket.down, *bucket.by_node)
        lifted = [str(_with_ratio(parse(text), floor)) if text else "" for text in texts]
        up, down, *by_node = lifted
        if all(not text or level(parse(text), bucket.spec) >= floor * EQUAL for text in lifted):
            yield structs.replace(bucket, codec=up, down=down, by_node=tuple(by_node), why=None)
    plain = structs.replace(bucket, down="", by_node=(), why=None)
    if not bucket.by_node and level(parse(bucket.codec), bucket.spec) >= floor * EQUAL:
        yield plain  # only the codec of results was too coarse
    for text in (text for limit, text in STEPS if floor <= limit):
        yield structs.replace(plain, codec=text)


def _with_ratio(codec: Any, floor: float) -> Any:
    """Returns the codec with every ratio inside it raised to at least `floor`."""
    changed = {}
    for name in codec.__struct_fields__:
        value = getattr(codec, name)
        if name == "ratio":
            changed[name] = max(value, float(f"{floor:.3g}"))
        elif isinstance(value, msgspec.Struct):
            changed[name] = _with_ratio(value, floor)
    return structs.replace(codec, **changed) if changed else codec
