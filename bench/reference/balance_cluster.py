"""An emulated cluster in virtual time: lines, noise and slow-downs instead of GPUs. Exact and fast; knows no mode's inside.

The truth of a worker at a step is its line, changed by the disturbances of that step. Noise is drawn per worker and step from
the seed, so that all modes meet the same noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from commlayer.balance.share_solver import FREE, Communication, solve
from commlayer.balance.time_models import Line, ModelLike
from commlayer.records import Record


class Disturbance(Record, frozen=True):
    """A worker from `start` up to (not including) `stop`: added_s more per iteration, everything `factor` times as long.

    With ramp > 0 the disturbance grows over so many steps to its full size, as heat does.
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


class Unevenness(Record, frozen=True):
    """What keeps a worker's time from being a line: it computes whole multiples of `wave` samples, and those beyond `room` take
    `factor` times as long, as where memory spills over."""

    wave: int = 1
    room: int = 1 << 30
    factor: float = 1.0

    def worth(self, batch: int) -> float:
        """So many samples' time a batch takes."""
        padded = -(-batch // self.wave) * self.wave
        return padded + (self.factor - 1.0) * max(0, padded - self.room)


class PlayedCluster(Record, frozen=True):
    """Workers by their lines, who lives when, and what disturbs them."""

    lines: tuple[Line, ...]
    total: int
    caps: tuple[int | None, ...] = ()
    disturbances: tuple[Disturbance, ...] = ()
    lives: tuple[tuple[int, int], ...] = ()
    """Per worker the steps [from, to) in which it is there; empty: all of them always."""
    noise: float = 0.0
    seed: int = 0
    uneven: tuple[Unevenness, ...] = ()
    """Per worker; empty: lines hold for all."""

    def there(self, worker: int, step: int) -> bool:
        return not self.lives or self.lives[worker][0] <= step < self.lives[worker][1]

    def truth(self, worker: int, step: int) -> Line:
        line = self.lines[worker]
        for disturbance in self.disturbances:
            if disturbance.worker == worker:
                added_s, factor = disturbance.at(step)
                line = Line(line.slope_s * factor, line.intercept_s * factor + added_s)
        return line

    def compute_s(self, worker: int, batch: int, step: int) -> float:
        """Seconds for the batch, in as many pieces as the cap demands; 0 for none."""
        if not batch:
            return 0.0
        cap = self.caps[worker] if self.caps else None
        pieces = -(-batch // cap) if cap else 1
        line = self.truth(worker, step)
        exact_s = pieces * line.intercept_s + (self.uneven[worker].worth(batch) if self.uneven else batch) * line.slope_s
        return exact_s * (1.0 + self.noise * float(_noise(self.seed, step, len(self.lines))[worker]))


@lru_cache(maxsize=4096)
def _noise(seed: int, step: int, workers: int) -> np.ndarray:
    """Standard normal, cut at three."""
    return np.clip(np.random.default_rng((seed, step)).standard_normal(workers), -3.0, 3.0)


class Mode(Protocol):
    """A way to choose shares. Workers that are not there get 0 from modes that know of it."""

    def shares(self, step: int) -> Sequence[int]: ...

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        """Compute seconds of the step: 0 for a worker without share, infinite for one that is not there."""


class PlayedStep(Record, frozen=True):
    """One iteration under a mode."""

    step: int
    shares: tuple[int, ...]
    times_s: tuple[float, ...]
    iteration_s: float
    oracle_s: float
    """The same without noise for the best shares, by someone who knows the truth."""

    @property
    def effect(self) -> float:
        """LBB's straggler effect: (longest - shortest) / mean, over those that computed."""
        times = [t for t in self.times_s if 0 < t < math.inf]
        return (max(times) - min(times)) / (sum(times) / len(times))

    @property
    def slow(self) -> bool:
        """More than 10 % above the oracle."""
        return self.iteration_s > 1.1 * self.oracle_s


def run(mode: Mode, cluster: PlayedCluster, steps: int, communication: Communication = FREE) -> list[PlayedStep]:
    """Virtual time: an iteration ends when its slowest worker has computed and what remains of the communication is over."""
    done = []
    for step in range(steps):
        shares = tuple(mode.shares(step))
        usable = [cluster.there(worker, step) for worker in range(len(cluster.lines))]
        # A dead worker's share is waited for by nobody: its peers learn of the death in this step.
        times = [cluster.compute_s(w, share, step) if usable[w] else math.inf for w, share in enumerate(shares)]
        makespan = max(t for t in times if t < math.inf)
        active = tuple(w for w, share in enumerate(shares) if share and usable[w])
        iteration_s = makespan + communication.exposed_s(active, makespan)
        done.append(PlayedStep(step, shares, tuple(times), iteration_s, oracle_s(cluster, step, communication)))
        mode.observe(step, times)
    return done


def oracle_s(cluster: PlayedCluster, step: int, communication: Communication = FREE) -> float:
    """The best iteration of a step."""
    alive = tuple(worker for worker in range(len(cluster.lines)) if cluster.there(worker, step))
    caps = tuple(cluster.caps[worker] for worker in alive) if cluster.caps else None
    truth = tuple(cluster.truth(worker, step) for worker in alive)
    if cluster.uneven:
        return _uneven_s(truth, tuple(cluster.uneven[worker] for worker in alive), cluster.total)
    if communication is FREE:
        return _solved_s(truth, cluster.total, caps)
    named = Communication(lambda at: communication.seconds(tuple(alive[p] for p in at)), communication.overlap)
    return solve(truth, cluster.total, caps, communication=named).iteration_s


@lru_cache(maxsize=512)
def _solved_s(truth: tuple[Line, ...], total: int, caps: tuple[int | None, ...] | None) -> float:
    return solve(truth, total, caps).iteration_s


@lru_cache(maxsize=512)
def _uneven_s(truth: tuple[Line, ...], uneven: tuple[Unevenness, ...], total: int) -> float:
    curves: list[ModelLike] = [lambda batch, line=line, one=one: line.time_s(one.worth(math.ceil(batch)))  # type: ignore[misc]
                           for line, one in zip(truth, uneven, strict=True)]
    return solve(curves, total).iteration_s


def slow_after(run: Sequence[PlayedStep], start: int, stop: int) -> int:
    """Slow iterations in [start, stop): how long a mode takes to recover from what happened at `start`."""
    return sum(one.slow for one in run if start <= one.step < stop)


def moves(run: Sequence[PlayedStep]) -> int:
    """How often the shares changed."""
    return sum(a.shares != b.shares for a, b in itertools.pairwise(run))
