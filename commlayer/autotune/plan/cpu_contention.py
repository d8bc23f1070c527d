"""Fits the cost of work on processors to the measured step. Knows a profile and how to ask for a step; no simulator.

Workers and servers that share a machine, data loaders and other programs wait for each other, and prices that were measured
one at a time do not contain this waiting. The step under the plan in force tells how large it is, as far as work on processors
can explain the step at all. The rest is the network's, whose rates have been measured.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from commlayer.planner.model.cluster import Profile
from commlayer.planner.pricing.lines import times

MOST = 8.0
"""Times as long as alone. A larger slowdown is attributed to the network."""
ROUNDS = 6
"""Of bisection; the last leaves an error of at most a tenth."""


def factor(measured_s: float, step_s: Callable[[float], float]) -> float:
    """How much dearer work on processors is than measured alone; 1 where that cannot explain the measured step.

    `step_s(f)`: seconds of a step under the plan in force if such work were f times as dear.
    """
    low, high = 1.0, MOST
    if step_s(low) >= measured_s or step_s(high) < measured_s:
        return 1.0
    for _ in range(ROUNDS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_s(middle) < measured_s else (low, middle)
    return low


def dearer(profile: Profile, by: float) -> Profile:
    """The profile with codecs, servers and buckets so many times as dear. Collectives were measured with all ranks at work."""
    codecs = tuple(structs.replace(c, encode=times(c.encode, by), decode=times(c.decode, by)) for c in profile.codecs)
    return structs.replace(profile, codecs=codecs, server=times(profile.server, by), bucket_s=profile.bucket_s * by)
