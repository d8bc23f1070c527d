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
from commlayer.compressors import Codec, codec_of, parse, wrap
from commlayer.compressors.feedback import Momentum
from commlayer.engine.plan_check import unsuited
from commlayer.records import Bucket, Plan, Spec

DENSE = "identity()"
STEPS = ((0.3, "int8()"), (0.6, "fp16()"), (1.0, DENSE))
"""(floor, codec): replaces a codec without ratio up to that floor, and a sparse codec that would send as much."""
TYPICAL = Spec((1 << 16,))
"""The size at which codecs outside any bucket are measured."""
SMALL = 1 << 12
"""Elements up to which headers would dominate the level."""
EQUAL = 0.99
"""Tolerance, because ratios are written with three digits."""


def level(codec: Codec, spec: Spec = TYPICAL) -> float:
    """
    >>> level(parse("error_feedback(topk(ratio=0.01))")), level(parse("fp16()"))
    (0.01, 0.5)
    """
    if (ratio := parse_spec(str(codec)).ratio) is not None:
        return ratio
    if hasattr(codec, "bits"):
        return float(codec.bits / 32)  # a sum of such codes takes more bits
    spec = spec if spec.numel > SMALL else TYPICAL
    return round(min(1.0, codec.bound(spec) / (4 * spec.numel)), 3)


def at_least(floor: float, texts: list[str]) -> list[str]:
    """The codecs of `texts` at or above the floor, plus topk with the floor as ratio, so that one codec is just above it."""
    fine_enough = [text for text in texts if level(parse(text)) >= floor * EQUAL]
    finest = STEPS[0][0]
    return [*fine_enough, f"topk(ratio={floor:.3g})"] if 0 < floor < finest else fine_enough


def lossy(bucket: Bucket) -> bool:
    """Whether any codec of the bucket loses information."""
    return bucket.path != "allreduce" and any(level(codec, bucket.spec) < 1 for codec in _codecs(bucket))


def lowest(plan: Plan) -> float:
    """The level of the coarsest codec in use; 1 for a plan without any."""
    return min((level(codec, b.spec) for b in plan.buckets if lossy(b) for codec in _codecs(b)), default=1.0)


def carries_gradients(codec: Any) -> bool:
    """Whether the codec sends gradients and not a velocity."""
    if isinstance(codec, Momentum):
        return False
    return all(carries_gradients(part) for part in structs.astuple(codec) if isinstance(part, msgspec.Struct))


def exchanges_gradients(bucket: Bucket) -> bool:
    """Whether every node's codec sends gradients. The result is the same on all ranks, whatever codec their own node has."""
    return all(carries_gradients(codec) for codec in _codecs(bucket))


def lift(plan: Plan, floor: float, nodes: int, *, cuda: bool = False) -> Plan:
    """The plan with no codec below the floor. A bucket is sent uncompressed if none of the finer codecs fits its path."""
    buckets = tuple(_lifted(plan, b, floor, nodes, cuda) if lossy(b) else b for b in plan.buckets)
    return structs.replace(plan, buckets=buckets)


def nbytes(plan: Plan) -> float:
    """Upper bound of bytes sent and received by a worker in a step, for comparing two plans of a job."""
    return sum(codec_of(b).bound(b.spec) + (wrap(parse(b.down or b.codec)).bound(b.spec)) if lossy(b) else 8 * b.numel
               for b in plan.buckets)


def _codecs(bucket: Bucket) -> list[Codec]:
    return [parse(text) for text in (bucket.codec, bucket.down, *bucket.by_node) if text]


def _lifted(plan: Plan, bucket: Bucket, floor: float, nodes: int, cuda: bool) -> Bucket:
    if all(level(codec, bucket.spec) >= floor * EQUAL for codec in _codecs(bucket)):
        return bucket
    for candidate in _candidates(bucket, floor):
        alone = structs.replace(plan, buckets=(candidate,), fragments=1)
        if not unsuited(alone, nodes, plan.ranks_per_node, cuda=cuda):
            return candidate
    return bucket


def _candidates(bucket: Bucket, floor: float) -> Iterator[Bucket]:
    """First the same codec with a higher ratio, then others from coarse to exact."""
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
    """Raises every ratio inside the codec to at least the floor."""
    changed = {}
    for name in codec.__struct_fields__:
        value = getattr(codec, name)
        if name == "ratio":
            changed[name] = max(value, float(f"{floor:.3g}"))
        elif isinstance(value, msgspec.Struct):
            changed[name] = _with_ratio(value, floor)
    return structs.replace(codec, **changed) if changed else codec
