"""Rounds weights to whole shares by largest remainder: the only place where shares are rounded."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from commlayer.errors import InvalidInput


def apportion(weights: Sequence[float], total: int, caps: Sequence[int | None] = ()) -> list[int]:
    """Shares proportional to the weights, with the sum `total`. Samples above a cap go to the other workers; ties go to the
    earlier one.

    Exact for any weights, so that all machines get the same shares. If all weights are 0, all count equally.

    >>> apportion([6, 2, 0], 5), apportion([1.0, 1.0], 5, [1, None])
    ([4, 1, 0], [1, 4])
    """
    most = [total if cap is None else min(cap, total) for cap in (caps or [None] * len(weights))]
    if sum(most) < total:
        raise InvalidInput("E-SHARES-ARGUMENT",
                           f"apportion: caps add up to {sum(most)}, less than the total {total}; lower the total or raise a "
                           "cap")
    exact = [Fraction(weight) for weight in weights]
    open_yet, left, taken = list(range(len(weights))), total, [0] * len(weights)
    while True:
        whole = sum(exact[i] for i in open_yet)
        part = {i: left * exact[i] / whole if whole else Fraction(left, len(open_yet)) for i in open_yet}
        over = [i for i in open_yet if part[i] >= most[i]]
        if not over or len(over) == len(open_yet):
            break
        for i in over:
            taken[i], left = most[i], left - most[i]
        open_yet = [i for i in open_yet if i not in over]
    for i in open_yet:
        taken[i] = min(int(part[i]), most[i])
    short = total - sum(taken)
    order = sorted(open_yet, key=lambda i: (taken[i] - part[i], i))
    while short > 0:
        for i in order:
            if short and taken[i] < most[i]:
                taken[i], short = taken[i] + 1, short - 1
    return taken
