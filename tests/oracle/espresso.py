"""Espresso's two passes (Wang et al., EuroSys 2023, algorithms 1 and 2), as a reference for the planner.

The first pass chooses which tensors to compress on GPUs and how, the second moves some of them to CPUs. A strategy is an option
number per tensor, 0 for uncompressed; a price function returns its step time. Tensors are numbered in backward order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

Price = Callable[[Sequence[int]], float]
KEEP = 0


def gpu_pass(
    sizes: Sequence[int], options: Sequence[int], price: Price, before_bubbles: Callable[[Sequence[int]], frozenset[int]],
) -> list[int]:
    """Algorithm 1: for each tensor, the option with the shortest step while the other tensors stay unchanged.

    Large tensors come first, and among equal ones the later in backward. Uncompressed tensors before a bubble are skipped,
    because compressing them would only widen the bubble. `options[i]` is the number of options of tensor i, including KEEP.
    """
    strategy = [KEEP] * len(sizes)
    left = sorted(range(len(sizes)), key=lambda i: (-sizes[i], -i))
    best_s = price(strategy)
    while True:
        # After every decision again, because compression opens new bubbles.
        idle = before_bubbles(strategy)
        left = [i for i in left if i not in idle]
        if not left:
            return strategy
        tensor = left.pop(0)
        for option in range(1, options[tensor]):
            tried = [*strategy[:tensor], option, *strategy[tensor + 1 :]]
            if (seconds := price(tried)) < best_s:
                best_s, strategy = seconds, tried


def cpu_pass(
    sizes: Sequence[int], strategy: Sequence[int], cpu_of: Callable[[int, int], int | None], price: Price, *, most: int = 5000,
) -> list[int]:
    """Algorithm 2: moves compressed tensors to CPUs. Tensors of equal size and option form a group.

    Of a group, the earliest tensors move, because they have the most time to hide the work; only their count is searched. All
    combinations of counts are tried. If there are more than `most`, one group at a time, until no group gains.

    `cpu_of(tensor, option)` is the same option on CPUs, if there is one.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for tensor, option in enumerate(strategy):
        if option != KEEP and cpu_of(tensor, option) is not None:
            groups.setdefault((sizes[tensor], option), []).append(tensor)
    members = [groups[key] for key in sorted(groups)]

    def moved(counts: Sequence[int]) -> list[int]:
        result = list(strategy)
        for group, count in zip(members, counts, strict=True):
            for tensor in group[:count]:
                option = cpu_of(tensor, strategy[tensor])
                assert option is not None
                result[tensor] = option
        return result

    def better(counts: Sequence[int]) -> tuple[float, int]:
        return price(moved(counts)), sum(counts)

    ranges = [range(len(group) + 1) for group in members]
    if math.prod(map(len, ranges)) <= most:
        return moved(min(product(*ranges), key=better))
    counts = [0] * len(members)
    best = better(counts)
    gained = True
    while gained:
        gained = False
        for place, choices in enumerate(ranges):
            for count in choices:
                tried = [*counts[:place], count, *counts[place + 1 :]]
                if (outcome := better(tried))[0] < best[0]:
                    best, counts, gained = outcome, tried, True
    return moved(counts)
