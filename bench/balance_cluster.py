"""A simulated cluster in virtual time, to compare load balancers: linear time models, noise and slow-downs instead of GPUs.

A worker's true time at a step is its line, changed by the disturbances of that step. Noise is drawn from the seed per worker
and step, so all modes see the same noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from commlayer.balance.balancer import Balancer, Decision, Joined, Measurement, SharePolicy
from commlayer.balance.schedule import even_shares
from commlayer.balance.share_solver import FREE, Communication, solve
from commlayer.balance.time_models import LinearTime
from commlayer.records import Record


class Disturbance(Record, frozen=True):
    """A slow-down of one worker in steps [start, stop): `factor` times the time, plus `added_s` per iteration.

    With ramp > 0 the disturbance grows to its full size over `ramp` steps, as with thermal throttling.
    """

    worker: int
    start: int
    stop: int
    added_s: float = 0.0
    factor: float = 1.0
    ramp: int = 0

    def at(self, step: int) -> tuple[float, float]:
        if not self.start <= step < self.stop:
            return 0.0, 1.0
        part = min(1.0, (step - self.start + 1) / self.ramp) if self.ramp else 1.0
        return self.added_s * part, 1.0 + (self.factor - 1.0) * part


class PlayedCluster(Record, frozen=True):
    """Workers with their time models and disturbances."""

    lines: tuple[LinearTime, ...]
    total: int
    caps: tuple[int | None, ...] = ()
    disturbances: tuple[Disturbance, ...] = ()
    noise: float = 0.0
    seed: int = 0

    def truth(self, worker: int, step: int) -> LinearTime:
        line = self.lines[worker]
        for disturbance in self.disturbances:
            if disturbance.worker == worker:
                added_s, factor = disturbance.at(step)
                line = LinearTime(line.slope_s * factor, line.intercept_s * factor + added_s)
        return line

    def compute_s(self, worker: int, batch: int, step: int) -> float:
        """Seconds for the batch, split into pieces of at most the worker's cap; 0 for an empty batch."""
        if not batch:
            return 0.0
        cap = self.caps[worker] if self.caps else None
        pieces = -(-batch // cap) if cap else 1
        line = self.truth(worker, step)
        exact_s = pieces * line.intercept_s + batch * line.slope_s
        return exact_s * (1.0 + self.noise * float(_noise(self.seed, step, len(self.lines))[worker]))


@lru_cache(maxsize=4096)
def _noise(seed: int, step: int, workers: int) -> np.ndarray:
    """Standard normal, clipped to [-3, 3]."""
    return np.clip(np.random.default_rng((seed, step)).standard_normal(workers), -3.0, 3.0)


class Mode(Protocol):
    """A load balancer."""

    def shares(self, step: int) -> Sequence[int]: ...

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        """Compute seconds of the step by worker: 0 for share 0."""


class PlayedStep(Record, frozen=True):
    """One iteration under a mode."""

    step: int
    shares: tuple[int, ...]
    iteration_s: float
    oracle_s: float
    """Iteration time of the best shares for the true times, without noise."""

    @property
    def slow(self) -> bool:
        """More than 10 % above the oracle."""
        return self.iteration_s > 1.1 * self.oracle_s


def run(mode: Mode, cluster: PlayedCluster, steps: int, communication: Communication = FREE) -> list[PlayedStep]:
    """Simulates steps: an iteration ends after its slowest worker and the exposed communication."""
    done = []
    for step in range(steps):
        shares = tuple(mode.shares(step))
        times = [cluster.compute_s(worker, share, step) for worker, share in enumerate(shares)]
        iteration_s = max(times) + communication.exposed_s(max(times))
        done.append(PlayedStep(step, shares, iteration_s, oracle_s(cluster, step, communication)))
        mode.observe(step, times)
    return done


def oracle_s(cluster: PlayedCluster, step: int, communication: Communication = FREE) -> float:
    """The best iteration time of a step in which every worker takes part."""
    workers = range(len(cluster.lines))
    makespan_s = _best_s(tuple(cluster.truth(worker, step) for worker in workers), cluster.total, cluster.caps)
    return makespan_s + communication.exposed_s(makespan_s)


@lru_cache(maxsize=512)
def _best_s(lines: tuple[LinearTime, ...], total: int, caps: tuple[int | None, ...]) -> float:
    return solve(lines, total, caps).makespan_s


def slow_after(run: Sequence[PlayedStep], start: int, stop: int) -> int:
    """Number of slow iterations in [start, stop): how long a mode takes to recover from an event at `start`."""
    return sum(one.slow for one in run if start <= one.step < stop)


def moves(run: Sequence[PlayedStep]) -> int:
    """Number of steps at which the shares changed."""
    return sum(a.shares != b.shares for a, b in itertools.pairwise(run))


class Equal:
    """Synchronous SGD: equal shares for all workers."""

    def __init__(self, cluster: PlayedCluster) -> None:
        self._shares = even_shares(cluster.total, len(cluster.lines))

    def shares(self, step: int) -> Sequence[int]:
        return self._shares

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        pass


class Ours:
    """The balancer; its decisions apply from their announced step. With `profiled` it starts from the undisturbed lines."""

    def __init__(
        self, cluster: PlayedCluster, policy: SharePolicy | None = None, communication: Communication = FREE,
        profiled: bool = True,
    ) -> None:
        caps = cluster.caps or (None,) * len(cluster.lines)
        joined = [Joined(worker, cap, line if profiled else None)
                  for worker, (cap, line) in enumerate(zip(caps, cluster.lines, strict=True))]
        self.balancer = Balancer(joined, cluster.total, policy, communication)
        self._announced: list[Decision] = [self.balancer.latest]

    def shares(self, step: int) -> Sequence[int]:
        while len(self._announced) > 1 and self._announced[1].from_step <= step:
            del self._announced[0]
        return self._announced[0].shares

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        measured = zip(self.shares(step), times_s, strict=True)
        decision = self.balancer.decide(step, [Measurement(worker, *one) for worker, one in enumerate(measured)])
        if decision is not None:
            self._announced.append(decision)
