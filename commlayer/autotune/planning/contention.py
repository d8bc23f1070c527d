"""Fits a slowdown of CPU work to the measured step.

Workers and servers on one machine, data loaders and other programs wait for each other, and prices measured one at a time
exclude these waits. The step under the active plan shows how large they are, if CPU work can explain the step at all. The rest
is attributed to the network, whose rates have been measured.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from commlayer.planner.model import Profile

MOST_FACTOR = 8.0
"""Largest slowdown of CPU work that is assumed; anything beyond is attributed to the network."""
FIT_ROUNDS = 6
"""Number of bisection steps for the slowdown. After the last one the error is at most a tenth."""


def factor(measured_s: float, step_s: Callable[[float], float]) -> float:
    """Returns the slowdown of CPU work relative to work measured alone; 1 if a slowdown cannot explain the measured step time.

    `step_s(f)`: predicted step time under the active plan if CPU work were f times as slow.
    """
    low, high = 1.0, MOST_FACTOR
    if step_s(low) >= measured_s or step_s(high) < measured_s:
        return 1.0
    for _ in range(FIT_ROUNDS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_s(middle) < measured_s else (low, middle)
    return low


def scale_processing_costs(profile: Profile, by: float) -> Profile:
    """Returns the profile with the costs of codecs, servers and buckets multiplied by this factor. Collectives were already
    measured under load."""
    codecs = tuple(structs.replace(c, encode=c.encode * by, decode=c.decode * by) for c in profile.codecs)
    return structs.replace(profile, codecs=codecs, server=profile.server * by, bucket_s=profile.bucket_s * by)
