"""Whole shares near real ones. Knows no times."""

from __future__ import annotations

from collections.abc import Sequence


def apportion(weights: Sequence[float], total: int, caps: Sequence[int | None] = ()) -> list[int]:
    """Shares proportional to the weights that sum to `total`, by largest remainder; what a cap refuses goes to others."""
    most = [total if cap is None else min(cap, total) for cap in (caps or [None] * len(weights))]
    if sum(most) < total:
        raise ValueError(f"apportion: caps add up to {sum(most)}, less than the total {total}; lower the total or raise a cap")
    open_yet, left, taken = set(range(len(weights))), total, [0] * len(weights)
    while True:
        whole = sum(weights[i] for i in open_yet) or 1.0
        # A fraction first: left / whole would be infinite for the smallest weights.
        part = {i: left * (weights[i] / whole) for i in open_yet}
        over = {i for i in open_yet if part[i] >= most[i]}
        if not over or over == open_yet:
            break
        for i in over:
            taken[i], left = most[i], left - most[i]
        open_yet -= over
    real = {i: min(part[i], most[i]) for i in open_yet}
    for i in open_yet:
        taken[i] = int(real[i])
    short = total - sum(taken)
    order = sorted(open_yet, key=lambda i: (taken[i] - real[i], i))
    while short > 0:
        for i in order:
            if short and taken[i] < most[i]:
                taken[i], short = taken[i] + 1, short - 1
    return taken
