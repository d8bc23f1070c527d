"""The paper's four GPUs as lines, and the exhaustive search that proves the solver."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from commlayer.balance.time_models import Line, TimeModel

PAPER_MS = [(0.5931, 5.90), (0.5808, 7.15), (0.6023, 8.29), (2.6714, 50.98)]
"""(ms per sample, ms of launch) of M40, GTX 1070, GTX 1070, GTX 750, from the paper's two tables."""
PAPER = [Line(slope / 1e3, launch / 1e3) for slope, launch in PAPER_MS]


def vectors(total: int, bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """All whole vectors of that sum whose entries are 0 or within their bounds."""
    for head in itertools.product(*([0, *range(least, most + 1)] for least, most in bounds[:-1])):
        last = total - sum(head)
        least, most = bounds[-1]
        if last == 0 or least <= last <= most:
            yield (*head, last)


def best_by_search(
    models: Sequence[TimeModel],
    total: int,
    bounds: Sequence[tuple[int, int]],
    cost: Callable[[tuple[int, ...], float], float] = lambda _active, makespan: makespan,
) -> float:
    """The smallest cost over all vectors; a worker without share takes no part."""

    def price(vector: tuple[int, ...]) -> float:
        active = tuple(i for i, share in enumerate(vector) if share)
        return cost(active, max(models[i].time_s(vector[i]) for i in active))

    return min(price(vector) for vector in vectors(total, bounds))
