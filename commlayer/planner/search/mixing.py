"""Paths that code on several devices: found from those that code on one, op by op. Knows prices, not what else is under way.

Each coding of a path may be on another device than the rest, which makes thirteen times as many paths; on lanes alone few of
them beat each other. So a few searches begin at what is best on one device, in each respect and at a few sizes, and move one or
two codings at a time as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from commlayer.planner.model import grammar
from commlayer.planner.model.paths import CODING, Op, Path
from commlayer.planner.pricing.path_cost import Prices
from commlayer.planner.search.prune import alone_s, lane_s

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
STARTS = 3
OTHER = {"gpu": "cpu", "cpu": "gpu"}


def mixed(prices: Prices, paths: Sequence[Path], codec: str, devices: Sequence[str]) -> tuple[Path, ...]:
    """Of paths like these, with codings on several of the devices, those that are best somewhere; without servers, which take
    what is coded in one place."""
    collective = [path for path in paths if not grammar.served(path)]
    found: dict[Path, None] = {}
    for size in SIZES if len(devices) > 1 and collective else ():
        known: dict[Path, list[float]] = {}

        def respects(path: Path, size: int = size, known: dict[Path, list[float]] = known) -> list[float]:
            if path not in known:
                known[path] = _respects(prices, path, codec, size)
            return known[path]

        for respect in range(len(respects(collective[0]))):
            for best in sorted(collective, key=lambda path: respects(path)[respect])[:STARTS]:
                while respects(better := min(_moved(best), key=lambda path: respects(path)[respect]))[respect] \
                        < respects(best)[respect]:
                    best = better
                found[best] = None
    return tuple(path for path in found if not grammar.one_device(path))


def _moved(path: Path) -> Iterator[Path]:
    """One or two codings on the other device."""
    codings = [place for place, op in enumerate(path) if op.name in CODING]
    for count in (1, 2):
        for moved in combinations(codings, count):
            yield tuple(Op(op.name, OTHER[op.where]) if place in moved else op for place, op in enumerate(path))


def _respects(prices: Prices, path: Path, codec: str, size: int) -> list[float]:
    """Done soonest alone; the busiest lane; both; coding spread over devices; soonest with the GPUs left alone."""
    steps = prices.steps(path, codec)
    lanes, alone = lane_s(steps, size), alone_s(steps, size)
    busiest = max(lanes.values(), default=0.0)
    coding = [seconds for lane, seconds in lanes.items() if lane.partition(":")[0] in ("compute", "cpu")]
    gpus = max((seconds for lane, seconds in lanes.items() if lane.startswith("compute")), default=0.0)
    return [alone, busiest, alone + busiest, max(coding, default=0.0), alone + gpus]
