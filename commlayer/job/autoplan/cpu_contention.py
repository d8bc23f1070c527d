"""Fits what work on processors costs to what a step took. Knows a profile and how to ask for a step; simulates nothing itself.

Workers and servers that share a machine, data loaders, other programs: what waits for a processor is in no price that was
measured beside it. The step under the plan in force tells how much it is, as far as such work can explain the step at all; what
is left over is the network's, whose rates have been measured.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from commlayer.planner.model.cluster import Profile
from commlayer.planner.pricing.lines import times

MOST = 8.0
"""Times as long as alone. What needs more is no matter of processors."""
ROUNDS = 6
"""Of halving; the last leaves a tenth."""


def factor(measured_s: float, step_s: Callable[[float], float]) -> float:
    """`step_s(f)`: of the plan in force, were work on processors f times as dear."""
    low, high = 1.0, MOST
    if step_s(low) >= measured_s or step_s(high) < measured_s:
        return 1.0
    for _ in range(ROUNDS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_s(middle) < measured_s else (low, middle)
    return low


def dearer(profile: Profile, by: float) -> Profile:
    """With codecs, servers and buckets so many times as dear. Collectives were measured with all ranks at work."""
    codecs = tuple(structs.replace(c, encode=times(c.encode, by), decode=times(c.decode, by)) for c in profile.codecs)
    return structs.replace(profile, codecs=codecs, server=times(profile.server, by), bucket_s=profile.bucket_s * by)
