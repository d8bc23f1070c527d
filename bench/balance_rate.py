"""The codec's ratio, chosen while a job trains: by a line of the link, or with the split by search.

In virtual time, over a played cluster and a link that may be slower for what exceeds a burst, as behind a token bucket. What
counts is the seconds of a step times the steps that a ratio needs, and that factor is emulated, the same for all.
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
"""What 25 M parameters would be as sparse entries at ratio 1."""
DELAY_S, LINK_NBYTES_S, BURST_NBYTES = 0.03, 50e6, 1e6
LINKS = {"link as its line says": 1.0, "link 8 x slower beyond a burst": 8.0}
FIRST, RATES = 0.01, (0.002, 0.2)
GRID = [RATES[0] * (RATES[1] / RATES[0]) ** (i / 40) for i in range(41)]
STEPS_MORE = 0.004
"""A ratio r takes 1 + this / r as many steps."""
TRIED, SLOWER, GAIN = 6, 1.1, 0.02
"""As a job's automatic plan has it: so many steps under a new plan tell its pace; a tenth slower, and all go back; a plan must
promise to win so much."""
MAY_TRY = 5

LINE = Line(1e3 / LINK_NBYTES_S, DELAY_S)
"""Seconds of kilobytes: what probes smaller than the burst have found."""


class _Job:
    """Steps of a cluster behind a link, and what each cost."""

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
        """A step: what each worker took, and the exchange."""
        step, exchange_s = next(self._step), self.exchange_s(ratio)
        times_s = [self._cluster.compute_s(worker, share, step) for worker, share in enumerate(shares)]
        self.costs_s.append((max(times_s) + exchange_s) * more(ratio))
        self.changes += ratio != self._ratio
        self._ratio = ratio
        return times_s, exchange_s


def more(ratio: float) -> float:
    """As many times the steps."""
    return 1 + STEPS_MORE / ratio


def planned(cluster: PlayedCluster, policy: Policy, slower: float, steps: int) -> _Job:
    """The default balancer, and the ratio that the link's line finds best: tried, left if it is slower, not tried again."""
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
    """Nelder-Mead over split and ratio together, from where the default begins; then the best it has seen.

    Each step is a trial, in force at once: a change of plan in a job takes longer, so this is more than a job could have.
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
    """`to_loss_ms`: seconds of a step times the steps that its ratio needs."""
    made = []
    for link, slower in LINKS.items():
        for name, way in WAYS.items():
            jobs = [way(cluster, policy, slower, steps) for cluster in clusters]
            made.append({
                "scenario": f"stairs, {link}", "mode": name, "to_loss_ms": 1e3 * mean(mean(job.costs_s) for job in jobs),
                "last_50_ms": 1e3 * mean(mean(job.costs_s[-50:]) for job in jobs), "moves": mean(job.changes for job in jobs),
            })
    return made


def summary(made: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the search gains, link by link: the least and the most."""
    pairs = zip(made[::2], made[1::2], strict=True)
    gains = [100 * (1 - searched["to_loss_ms"] / ours["to_loss_ms"]) for ours, searched in pairs]
    return {"search_gain_with_rate_pct_min": min(gains), "search_gain_with_rate_pct_max": max(gains)}
