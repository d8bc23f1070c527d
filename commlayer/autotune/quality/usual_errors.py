"""Usual compression errors of each codec, as measured in reference trainings. They are the bounds without a loss budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from commlayer.codec_spec import parse_spec
from commlayer.records import Bucket

SLACK_COSINE, SLACK_RESIDUAL = 0.5, 3.0
"""Factors on the worst reference values, which are then the bounds: comparisons of small pieces over few steps vary around the
mean."""
TOPK = ((0.001, 0.05, 60.0), (0.003, 0.11, 27.1), (0.01, 0.23, 6.3), (0.03, 0.4, 2.4), (0.1, 0.67, 0.9), (1.0, 1.0, 0.1))
"""Reference values of topk: ratio, lowest cosine, and largest residual in gradient norms, of whole models in the last four
fifths of each training (docs/benchmarks.md). The table of convergence factors does not apply to a model far outside these
values."""
OTHERS = {"onebit": (0.19, 5.3), "int4": (0.98, 0.13), "int8": (0.99, 0.02), "fp16": (0.99, 0.02), "bf16": (0.99, 0.02)}
UNKNOWN = (0.05, 60.0)
"""Lowest cosine and largest residual for codecs without reference values."""


def reference_errors(codec: str) -> tuple[float, float]:
    """Returns the lowest cosine with the gradient, and the largest residual, of any reference training under that codec.

    >>> reference_errors("topk(ratio=0.01, values='int8')"), reference_errors("error_feedback(int4())")
    ((0.23, 6.3), (0.98, 0.13))
    """
    name = parse_spec(codec).core
    if name.ratio is None or name.family != "topk":
        return OTHERS.get(name.family, UNKNOWN)
    at = max(TOPK[0][0], min(1.0, name.ratio))
    (low, c0, r0), (high, c1, r1) = next(pair for pair in itertools.pairwise(TOPK) if at <= pair[1][0])
    part = math.log(at / low) / math.log(high / low)
    return c0 + part * (c1 - c0), r0 * (r1 / r0) ** part


def usual_bounds(buckets: Iterable[Bucket]) -> tuple[float, float]:
    """Returns the bounds (lowest cosine, largest residual) for pieces of all these buckets. Worse values are unusual."""
    each = [reference_errors(codec) for b in buckets for codec in (b.codec, b.down, *b.by_node) if codec]
    return (SLACK_COSINE * min((cosine for cosine, _ in each), default=1.0),
            SLACK_RESIDUAL * max((residual for _, residual in each), default=1.0))
