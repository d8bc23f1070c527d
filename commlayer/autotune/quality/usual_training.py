"""Reference values of compressed training: usual cosines and residuals under each codec.

Measured for whole models in the last four fifths of each training; docs/tuning.md lists them. The learning table does not
apply to a model far outside these values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from commlayer.codec_name import named
from commlayer.records import Bucket

SLACK_COSINE, SLACK_RESIDUAL = 0.5, 3.0
"""Tolerance relative to the worst reference value: pieces of a few steps vary around the mean."""
TOPK = ((0.001, 0.05, 60.0, 0.08), (0.003, 0.11, 27.1, 0.17), (0.01, 0.23, 6.3, 0.35), (0.03, 0.4, 2.4, 0.65),
        (0.1, 0.67, 0.9, 0.89), (1.0, 1.0, 0.1, 1.0))
"""Ratio, lowest cosine, largest residual in gradient norms, and median cosine under optimizers like Adam."""
OTHERS = {"onebit": (0.19, 5.3), "int4": (0.98, 0.13), "int8": (0.99, 0.02), "fp16": (0.99, 0.02), "bf16": (0.99, 0.02)}
UNKNOWN = (0.05, 60.0)
"""For codecs without reference values."""
STEEPNESS = 1.5
"""With Adam, a model's excess of steps under a codec grows with this power of the lost direction, 1 - cosine squared. With SGD
it does not (docs/tuning.md)."""
MOST = 2.0
"""Largest ratio seen between models."""

Row = tuple[float, float, float, float]


def usual(codec: str) -> tuple[float, float]:
    """Lowest cosine with the gradient, and largest residual, of any reference training under that codec.

    >>> usual("topk(ratio=0.01, values='int8')"), usual("error_feedback(int4())")
    ((0.23, 6.3), (0.98, 0.13))
    """
    name = named(codec).core
    if name.ratio is None or name.family != "topk":
        return OTHERS.get(name.family, UNKNOWN)
    (_, c0, r0, _), (_, c1, r1, _), part = _around(name.ratio)
    return c0 + part * (c1 - c0), r0 * (r1 / r0) ** part


def least_usual(buckets: Iterable[Bucket]) -> tuple[float, float]:
    """Bounds for pieces of all these buckets; anything worse is unusual."""
    each = [usual(codec) for b in buckets for codec in (b.codec, b.down, *b.by_node) if codec]
    return (SLACK_COSINE * min((cosine for cosine, _ in each), default=1.0),
            SLACK_RESIDUAL * max((residual for _, residual in each), default=1.0))


def typical_cosine(buckets: Sequence[Bucket]) -> float:
    """Median cosine of workers' payloads for all these buckets, in trainings with Adam; 0 if none uses topk."""
    numel, squares, sparse = 0, 0.0, False
    for b in buckets:
        names = [named(codec).core for codec in (b.by_node or (b.codec,))]
        for name in names:
            cosine = 1.0
            if name.family == "topk" and name.ratio is not None:
                (_, _, _, t0), (_, _, _, t1), part = _around(name.ratio)
                cosine, sparse = t0 + part * (t1 - t0), True
            squares += b.numel * cosine**2 / len(names)
        numel += b.numel
    return (squares / numel) ** 0.5 if sparse else 0.0


def harder(cosine: float, typical: float) -> float:
    """The model's excess of steps under a codec, relative to the median model; at least 1.

    >>> harder(0.35, 0.35), round(harder(0.85, 0.89), 1), harder(0.5, 0.35)
    (1.0, 1.5, 1.0)
    """
    lost, usually = 1.0 - max(0.0, cosine) ** 2, 1.0 - typical**2
    return min(MOST, max(1.0, math.pow(lost / max(usually, 1e-6), STEEPNESS)))


def _around(ratio: float) -> tuple[Row, Row, float]:
    """The neighboring reference rows, and the position of the ratio between them."""
    at = max(TOPK[0][0], min(1.0, ratio))
    low, high = next(pair for pair in itertools.pairwise(TOPK) if at <= pair[1][0])
    return low, high, math.log(at / low[0]) / math.log(high[0] / low[0])
