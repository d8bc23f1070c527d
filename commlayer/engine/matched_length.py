"""Norm-matched averaging: scales a mean of changes to the root mean square norm of the changes it averages.

Adam divides each worker's gradient by that gradient's own size, noise included. Suppose noise dominates. Then the mean of W
workers' updates has 1 / sqrt(W) of the norm of Adam's update from the mean gradient. Its direction is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

BITS = 16
"""Precision of an entry relative to the largest one. If that is 10,000 times the typical entry, rounding changes the norm by a
thousandth."""
PIECE_NUMEL = 1 << 18
"""Squares of that many entries sum to less than 2 ** 53, and temporaries stay in the processor's cache."""
SMALLEST_UNIT = 2.0**-100
"""Down to this unit, the reciprocal is a float32."""


class Lengths(Protocol):
    """Exchanges two numbers between all ranks for each turn of an exchange, without waiting."""

    def start(self, weight: float, square: float) -> None:
        """`weight`: of this rank's change in the mean; `square`: the sum of its squares. All ranks call it together."""
        ...

    def read(self) -> Sequence[Sequence[float]]:
        """The rows of the last `start`, in rank order; empty if members have gone since."""
        ...


def largest_of(tensors: Sequence[torch.Tensor]) -> float:
    """The largest absolute value; not finite if some element is not. Takes a tenth of the time of an infinity norm."""
    ends = [end for x in tensors if x.numel() for end in torch.aminmax(x)]
    return float(torch.stack(ends).abs().max()) if ends else 0.0


def square_of(tensors: Sequence[torch.Tensor]) -> float:
    """The sum of all squares; NaN unless all are finite. The same bits on any device and with any number of threads.

    Entries are rounded to multiples of a unit, so sums are exact in any order."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    most = largest_of(flat)
    if most == 0 or not math.isfinite(most):
        return most * 0.0  # NaN if not finite
    unit = math.ldexp(1.0, max(math.frexp(most)[1] - BITS, -1000))
    sums = []
    for x in flat:
        for piece in x.split(PIECE_NUMEL):
            fast = piece.dtype == torch.float32 and unit >= SMALLEST_UNIT  # a power of two: exact in float32
            parts = (piece * (1.0 / unit)).round_().double() if fast else (piece.double() / unit).round_()
            sums.append(torch.dot(parts, parts))
    return math.fsum(torch.stack(sums).tolist()) * unit * unit


def scale_of(rows: Sequence[Sequence[float]], square: float) -> float:
    """The factor that matches the norm. `rows`: weight and square of each rank's change; `square`: of their mean. 1 if nothing
    can be matched.

    At most the factor for changes that have nothing in common: the square root of their number, with equal weights."""
    weight, weights = math.fsum(w for w, _ in rows), math.fsum(w * w for w, _ in rows)
    each = math.fsum(w * own for w, own in rows)
    if not (weight > 0 and 0 < square < math.inf and each < math.inf):
        return 1.0
    return min(max(1.0, math.sqrt(each / weight / square)), math.sqrt(weight * weight / weights))
