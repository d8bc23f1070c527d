"""How long a mean of changes is made, so that it is as long as what is averaged. Knows tensors and rows of numbers; no network.

Adam divides each worker's gradient by that gradient's own size, noise and all. So where noise is most of it, the mean of W
workers' updates is 1 / sqrt(W) as long as the update that Adam makes of the mean gradient. It goes the right way, too short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

BITS = 16
"""Of an entry beside the largest: what is left out is a thousandth of the length if that is 10,000 times the typical entry."""
PIECE_NUMEL = 1 << 18
"""Squares of so many entries add up to less than 2 ** 53, and what is made of them stays in a processor's cache."""
SMALLEST_UNIT = 2.0**-100
"""From here on the reciprocal is a float32."""


class Lengths(Protocol):
    """What a rank tells all others of each turn of an exchange, without waiting."""

    def start(self, weight: float, square: float) -> None:
        """This rank's change counts for so much in the mean, and the sum of its squares is that. All ranks call it together."""
        ...

    def read(self) -> Sequence[Sequence[float]]:
        """What was started last, in rank order; nothing where ranks have gone meanwhile."""
        ...


def largest_of(tensors: Sequence[torch.Tensor]) -> float:
    """The largest absolute value; not finite if some element is not. A tenth of the time of an infinity norm."""
    ends = [end for x in tensors if x.numel() for end in torch.aminmax(x)]
    return float(torch.stack(ends).abs().max()) if ends else 0.0


def square_of(tensors: Sequence[torch.Tensor]) -> float:
    """The sum of all squares; NaN unless all is finite. The same bits on any device and by any number of threads.

    Entries are rounded to whole parts of the largest one, so that sums are exact in whatever order they are made.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    most = largest_of(flat)
    if most == 0 or not math.isfinite(most):
        return most * 0.0  # NaN of what is not finite
    unit = math.ldexp(1.0, max(math.frexp(most)[1] - BITS, -1000))
    sums = []
    for x in flat:
        for piece in x.split(PIECE_NUMEL):
            fast = piece.dtype == torch.float32 and unit >= SMALLEST_UNIT  # a power of two: float32 rounds nothing
            parts = (piece * (1.0 / unit)).round_().double() if fast else (piece.double() / unit).round_()
            sums.append(torch.dot(parts, parts))
    return math.fsum(torch.stack(sums).tolist()) * unit * unit


def scale_of(rows: Sequence[Sequence[float]], square: float) -> float:
    """`rows`: of each rank the weight and the square of its change; `square`: of their mean. 1 where there is nothing to match.

    At most what changes need that have nothing in common: the square root of how many there are, if all weigh the same.
    """
    weight, weights = math.fsum(w for w, _ in rows), math.fsum(w * w for w, _ in rows)
    each = math.fsum(w * own for w, own in rows)
    if not (weight > 0 and 0 < square < math.inf and each < math.inf):
        return 1.0
    return min(max(1.0, math.sqrt(each / weight / square)), math.sqrt(weight * weight / weights))
