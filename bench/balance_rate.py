"""Choosing the codec's ratio while a job trains: from a linear model of the link, or by searching ratio and split together.

Runs in virtual time on an emulated cluster. The link may be slower for bytes beyond a burst, like a token bucket. The cost is
seconds per step times the convergence factor of the ratio; that factor is emulated and the same for all.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

from bench.reference.balance_cluster import PlayedCluster
from bench.reference.balance_default import Ours
from bench.reference.balance_search import split_and_rate
from commlayer.balance import Line
from commlayer.balance.balancer import Policy

WHOLE_NBYTES = 42e6
"""Size of 25 M parameters as sparse entries at ratio 1."""
DELAY_S, LINK_NBYTES_S, BURST_NBYTES = 0.03, 50e6, 1e6
LINKS = {"link as its line says": 1.0, "link 8 x slower beyond a burst": 8.0}
FIRST, RATES = 0.01, (0.002, 0.2)
GRID = [RATES[0] * (RATES[1] / RATES[0]) ** (i / 40) for i in range(41)]
STEPS_MORE = 0.004
"""Ratio r has the convergence factor 1 + STEPS_MORE / r."""
TRIED, SLOWER, GAIN = 6, 1.1, 0.02
"""The rules of a job's automatic plan: measure a new plan for TRIED steps, roll back if it is SLOWER times as slow, and try a
plan only if it promises at least the relative gain GAIN."""
MAY_TRY = 5

LINE = Line(1e3 / LINK_NBYTES_S, DELAY_S)
"""Seconds as a function of kilobytes, as measured by probes smaller than the burst."""


class _Job:
    """The steps of a cluster behind a link, and the cost of each step."""

    def __init__(self, cluster: PlayedCluster, slower: float) -> None:
        self._cluster, self._slower = cluster, slower
        self._step, self._draw = itertools.count(), random.Random(cluster.seed)
        self.costs_s: list[float] = []
        self.changes, self._ratio = 0, FIRST

    def exchange_s(self, ratio: float) -> float:
        nbytes = WHOLE_NBYTES * ratio
        beyond = max(0.0, nbytes - BURST_NBYTES)
        return (DELAY_S + (nbytes + (self._slower - 1) * beyond) / LINK_NBYTES_S) * (
            1 + self._cluster.noise * self._draw.gauss(0, 1))

    def run(self, shares: Sequence[int], ratio: float) -> tuple[list[float], float]:
        """Runs one step. Returns the compute time of each worker and the time of the exchange."""
        step, exchange_s = next(self._step), self.exchange_s(ratio)
        times_s = [self._cluster.compute_s(worker, share, step) for worker, share in enumerate(shares)]
        self.costs_s.append((max(times_s) + exchange_s) * more(ratio))
        self.changes += ratio != self._ratio
        self._ratio = ratio
        return times_s, exchange_s


def more(ratio: float) -> float:
    """Convergence factor of a ratio."""
    return 1 + STEPS_MORE / ratio


def planned(cluster: PlayedCluster, policy: Policy, slower: float, steps: int) -> _Job:
    """Default balancer, with the ratio that the link's linear model predicts as best. A slower ratio is rolled back."""
    job, ours, ratio = _Job(cluster, slower), Ours(cluster, policy), FIRST
    paces: dict[float, float] = {}
    under: list[tuple[float, float]] = []
    before = ratio
    for step in range(steps):
        times_s, exchange_s = job.run(ours.shares(step), ratio)
        ours.observe(step, times_s)
        under.append((max(times_s), exchange_s))
        if len(under) != TRIED:
            continue
        makespan_s, exchange_s = (median(one) for one in zip(*under, strict=True))
        paces[ratio] = (makespan_s + exchange_s) * more(ratio)
        if paces[ratio] > SLOWER * paces[before]:
            ratio = before
        if len(paces) <= MAY_TRY:
            untried = {r: (makespan_s + LINE.time_s(WHOLE_NBYTES * r / 1e3)) * more(r) for r in GRID}
            costs_s = {**untried, **paces}
            best = min(costs_s, key=lambda r: costs_s[r])
            if costs_s[best] < (1 - GAIN) * costs_s[ratio]:
                before, ratio, under = ratio, best, []
    return job


def searched(cluster: PlayedCluster, policy: Policy, slower: float, steps: int) -> _Job:
    """Nelder-Mead over split and ratio together, starting from the default; then the best point seen.

    Each step is a trial that takes effect at once. A plan change in a job takes longer, so this is an upper bound.
    """
    job, best = _Job(cluster, slower), (math.inf, tuple(Ours(cluster, policy).shares(0)), FIRST)

    def cost_s(shares: Sequence[int], ratio: float) -> float:
        nonlocal best
        job.run(shares, ratio)
        best = min(best, (job.costs_s[-1], tuple(shares), ratio))
        return job.costs_s[-1]

    split_and_rate(cost_s, best[1], FIRST, RATES, steps // 2)
    while len(job.costs_s) < steps:
        job.run(*best[1:])
    return job


WAYS: dict[str, Callable[[PlayedCluster, Policy, float, int], _Job]] = {
    "ours, ratio by the link's line": planned,
    "Nelder-Mead over split and ratio": searched,
}


def rows(clusters: Sequence[PlayedCluster], policy: Policy, steps: int) -> list[dict[str, Any]]:
    """`to_loss_ms`: seconds per step times the convergence factor of the ratio."""
    table = []
    for link, slower in LINKS.items():
        for name, way in WAYS.items():
            jobs = [way(cluster, policy, slower, steps) for cluster in clusters]
            table.append({
                "scenario": f"stairs, {link}", "mode": name, "to_loss_ms": 1e3 * mean(mean(job.costs_s) for job in jobs),
                "last_50_ms": 1e3 * mean(mean(job.costs_s[-50:]) for job in jobs), "moves": mean(job.changes for job in jobs),
            })
    return table


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Minimum and maximum gain of the search over the links."""
    pairs = zip(rows[::2], rows[1::2], strict=True)
    gains = [100 * (1 - searched["to_loss_ms"] / ours["to_loss_ms"]) for ours, searched in pairs]
    return {"search_gain_with_rate_pct_min": min(gains), "search_gain_with_rate_pct_max": max(gains)}
