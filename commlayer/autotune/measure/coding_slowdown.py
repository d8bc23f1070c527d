"""Slowdown of codecs during training: compares recorded steps with calibrated costs.

Calibration codes the same warm memory repeatedly with an almost idle core. In a step memory is cold, all ranks of a machine
code at once, and threads wait for each other. The first steps of the active plan show the difference. It is added per
element, also for codecs outside the plan: cold memory costs a fast codec as much as a slow one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from msgspec import structs

from commlayer.observe import RecordedStep
from commlayer.planner.model.cluster import CodecCost
from commlayer.planner.pricing.path_cost import bare
from commlayer.records import Plan


class Load(NamedTuple):
    """Additional seconds per element."""

    encode_s: float = 0.0
    decode_s: float = 0.0


def load_of(steps: Sequence[RecordedStep], plan: Plan, costs: Sequence[CodecCost]) -> Load:
    """Derived from buckets on the server path: each is encoded once, and its result is decoded once, whole."""
    of = {bare(cost.codec): cost for cost in costs if cost.device == "cpu"}
    numel, encode, decode = {}, {}, {}
    for bucket in plan.buckets:
        up, down = of.get(bare(bucket.codec)), of.get(bare(bucket.down or bucket.codec))
        if bucket.served and up and down and up.rounds == 1:
            numel[bucket.id] = bucket.numel
            encode[bucket.id], decode[bucket.id] = up.encode(bucket.numel), down.decode(bucket.numel)
    return Load(_more(steps, "encode@cpu", encode, numel), _more(steps, "decode@cpu", decode, numel))


def under(load: Load, cost: CodecCost) -> CodecCost:
    """The codec's cost under this load."""
    encode = structs.replace(cost.encode, slope_s=cost.encode.slope_s + load.encode_s)
    decode = structs.replace(cost.decode, slope_s=cost.decode.slope_s + load.decode_s)
    return structs.replace(cost, encode=encode, decode=decode)


def _more(steps: Sequence[RecordedStep], op: str, alone_s: dict[int, float], numel: dict[int, int]) -> float:
    """The median over steps, so that one long step does not count."""
    loads = []
    for step in steps:
        seen = [event for event in step.events if event.op == op and event.bucket in alone_s]
        if seen:
            loads.append(sum(e.seconds - alone_s[e.bucket] for e in seen) / sum(numel[e.bucket] for e in seen))
    return max(0.0, median(loads)) if loads else 0.0
