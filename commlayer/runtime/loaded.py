"""How much longer coding takes beside training than alone: recorded steps against calibrated costs. Knows no clock, no network.

Calibration has a core nearly to itself; in a step all ranks of a machine code at once, servers sum, and threads wait for one
another. What the plan in force coded in its first steps tells by how much, for codecs that it does not use, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from msgspec import structs

from commlayer.observe import Step
from commlayer.planner.costs import bare
from commlayer.planner.model import CodecCost, Line
from commlayer.records import Plan


class Load(NamedTuple):
    """Factors of 1 or more."""

    encode: float = 1.0
    decode: float = 1.0


def load_of(steps: Sequence[Step], plan: Plan, costs: Sequence[CodecCost]) -> Load:
    """From the buckets that go over servers: each is coded once, and its result decoded once, whole."""
    of = {cost.codec: cost for cost in costs if cost.device == "cpu"}
    encode, decode = {}, {}
    for bucket in plan.buckets:
        up, down = of.get(bare(bucket.codec)), of.get(bare(bucket.down or bucket.codec))
        if bucket.path == "service" and up and down and up.rounds == 1:
            encode[bucket.id], decode[bucket.id] = up.encode(bucket.numel), down.decode(bucket.numel)
    return Load(_factor(steps, "encode@cpu", encode), _factor(steps, "decode@cpu", decode))


def under(load: Load, cost: CodecCost) -> CodecCost:
    """What the codec costs under it."""
    return structs.replace(cost, encode=scaled(cost.encode, load.encode), decode=scaled(cost.decode, load.decode))


def scaled(line: Line, factor: float) -> Line:
    return structs.replace(line, floor_s=factor * line.floor_s, slope_s=factor * line.slope_s)


def _factor(steps: Sequence[Step], op: str, alone_s: dict[int, float]) -> float:
    """The median over the steps; one long step is no load."""
    found = []
    for step in steps:
        seen = [event for event in step.events if event.op == op and event.bucket in alone_s]
        if seen:
            found.append(sum(event.seconds for event in seen) / sum(alone_s[event.bucket] for event in seen))
    return max(1.0, median(found)) if found else 1.0
