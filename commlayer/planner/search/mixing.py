"""Finds paths that code on several devices, starting from paths that code on one.

Each coding step of a path may use its own device, which makes thirteen times as many paths; few of them are better on the
lanes. So a few searches start from the best one-device paths, by several criteria and sizes. They move one or two coding
steps at a time as long as that helps.
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
WORTH = 0.05
"""Paths that win less than this by every criterion are dropped: more options can also mislead a search."""
OTHER = {"gpu": "cpu", "cpu": "gpu"}


def mixed(prices: Prices, paths: Sequence[Path], codec: str, devices: Sequence[str]) -> tuple[Path, ...]:
    """Paths like these with coding on several devices, each the best by some criterion. Servers are excluded, since their
    payloads are coded on one device."""
    collective = [path for path in paths if not grammar.served(path)]
    winners: dict[Path, None] = {}
    for size in SIZES if len(devices) > 1 and collective else ():
        known: dict[Path, list[float]] = {}

        def respects(path: Path, size: int = size, known: dict[Path, list[float]] = known) -> list[float]:
            if path not in known:
                known[path] = _respects(prices, path, codec, size)
            return known[path]

        for respect in range(len(respects(collective[0]))):
            starts = sorted(collective, key=lambda path: respects(path)[respect])[:STARTS]
            least = respects(starts[0])[respect] * (1 - WORTH)
            for best in starts:
                while respects(better := min(_moved(best), key=lambda path: respects(path)[respect]))[respect] \
                        < respects(best)[respect]:
                    best = better
                if respects(best)[respect] < least:
                    winners[best] = None
    return tuple(path for path in winners if not grammar.one_device(path))


def _moved(path: Path) -> Iterator[Path]:
    """The path with one or two coding steps on the other device."""
    codings = [place for place, op in enumerate(path) if op.name in CODING]
    for count in (1, 2):
        for moved in combinations(codings, count):
            yield tuple(Op(op.name, OTHER[op.where]) if place in moved else op for place, op in enumerate(path))


def _respects(prices: Prices, path: Path, codec: str, size: int) -> list[float]:
    """Criteria: time alone; the busiest lane; both; coding spread over devices; time alone plus load on GPUs."""
    steps = prices.steps(path, codec)
    lanes, alone = lane_s(steps, size), alone_s(steps, size)
    busiest = max(lanes.values(), default=0.0)
    coding = [seconds for lane, seconds in lanes.items() if lane.partition(":")[0] in ("compute", "cpu")]
    gpus = max((seconds for lane, seconds in lanes.items() if lane.startswith("compute")), default=0.0)
    return [alone, busiest, alone + busiest, max(coding, default=0.0), alone + gpus]
