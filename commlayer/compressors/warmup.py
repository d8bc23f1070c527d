"""Warm-up of a plan's sparse codecs: the ratio falls from 25 % over the first steps."""

from __future__ import annotations

import math

FIRST = 0.25
"""The ratio of the first step."""


def stages_of(ratio: float) -> int:
    """Stages before the last one, which has the ratio itself. 0 if the ratio is not below FIRST."""
    return max(0, math.ceil(math.log2(FIRST / ratio)))


def ratio_of(ratio: float, stage: int) -> float:
    """
    >>> [round(ratio_of(0.02, stage), 3) for stage in range(stages_of(0.02) + 1)]
    [0.25, 0.133, 0.071, 0.038, 0.02]
    """
    stages = stages_of(ratio)
    return ratio if stage == stages else FIRST * (ratio / FIRST) ** (stage / stages)


def ratio_at(ratio: float, steps: int, step: int) -> float:
    """The ratio in a step of a warm-up over `steps` steps; 0 steps mean no warm-up."""
    return ratio_of(ratio, min(stages_of(ratio), step * stages_of(ratio) // steps)) if step < steps else ratio
