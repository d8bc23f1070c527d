"""BytePS's split of a model among servers where all links are equal, written down to compare with. Knows no planner."""

from __future__ import annotations


def closed_form(n: int, k: int) -> tuple[float, float, float]:
    """(share of one of k other nodes, of one of n training nodes, seconds per M/B), where all links are equal."""
    if not 0 <= k <= n or n < 2:
        raise ValueError(f"closed form: got n={n}, k={k}, allowed: n of 2 or more, k from 0 to n")
    d = n * n + k * n - 2 * k
    return 2 * (n - 1) / d, (n - k) / d, 2 * n * (n - 1) / d
