"""Contention for processors: fits a slowdown of CPU work to the measured step.

Workers and servers on one machine, data loaders and other programs wait for each other, and prices measured one at a time
exclude these waits. The step under the active plan shows how large they are, if CPU work can explain the step at all. The
rest is attributed to the network, whose rates have been measured.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from commlayer.planner.costs import times
from commlayer.planner.model import Profile

MOST = 8.0
"""Largest slowdown; anything beyond is attributed to the network."""
ROUNDS = 6
"""Bisection steps; the last leaves an error of at most a tenth."""


def factor(measured_s: float, step_s: Callable[[float], float]) -> float:
    """Slowdown of CPU work relative to work measured alone; 1 if a slowdown cannot explain the measured step.

    `step_s(f)`: step time under the active plan if CPU work were f times as slow.
    """
    low, high = 1.0, MOST
    if step_s(low) >= measured_s or step_s(high) < measured_s:
        return 1.0
    for _ in range(ROUNDS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_s(middle) < measured_s else (low, middle)
    return low


def dearer(profile: Profile, by: float) -> Profile:
    """The profile with codecs, servers and buckets slowed down by this factor. Collectives were measured under load already."""
    codecs = tuple(structs.replace(c, encode=times(c.encode, by), decode=times(c.decode, by)) for c in profile.codecs)
    return structs.replace(profile, codecs=codecs, server=times(profile.server, by), bucket_s=profile.bucket_s * by)
