"""What to try next: Bayesian optimisation by scikit-optimize, or by a small Gaussian process. Knows spaces; no proxies.

Both are told and asked, and minimise. scikit-optimize loads when first asked for.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from commlayer.balance.tuner_space import Settings, Space

RANDOM_TRIALS = 8
CANDIDATES = 1500
ENGINES = ("auto", "skopt", "gp")

Array = npt.NDArray[np.float64]


class Engine(Protocol):
    """A search under way."""

    def ask(self) -> Settings: ...

    def tell(self, settings: Settings, value: float) -> None: ...


def engine(name: str, space: Space, seed: int) -> Engine:
    """By name; "auto": scikit-optimize where it is installed."""
    if name not in ENGINES:
        raise ValueError(f"search {name!r}: allowed are {', '.join(ENGINES)}")
    there = importlib.util.find_spec("skopt") is not None
    if name == "skopt" and not there:
        raise ValueError("search 'skopt': scikit-optimize is missing: pip install scikit-optimize, or take 'gp'")
    return Skopt(space, seed) if there and name != "gp" else Process(space, seed)


class Skopt:
    """skopt.Optimizer: Gaussian process, expected improvement."""

    def __init__(self, space: Space, seed: int) -> None:
        import skopt

        self._space = space
        dimensions: list[Any] = [
            skopt.space.Categorical(list(d.choices)) if d.choices else skopt.space.Real(d.low, d.high, prior="log-uniform")
            for d in space.dimensions
        ]
        self._optimizer = skopt.Optimizer(dimensions, base_estimator="GP", n_initial_points=RANDOM_TRIALS, acq_func="EI",
                                          random_state=seed)

    def ask(self) -> Settings:
        names = [d.name for d in self._space.dimensions]
        values = [v.item() if isinstance(v, np.generic) else v for v in self._optimizer.ask()]
        return self._space.plain(dict(zip(names, values, strict=True)))

    def tell(self, settings: Settings, value: float) -> None:
        self._optimizer.tell([settings[d.name] for d in self._space.dimensions], value)


class Process:
    """A Gaussian process (Matern 5/2, length and noise by likelihood) and expected improvement over random candidates."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space, self._seed = space, seed
        self._tried: list[Settings] = []
        self._values: list[float] = []

    def ask(self) -> Settings:
        # Drawn from the number of trials, so that a resumed search goes the way of one that never stopped.
        random = np.random.default_rng([self._seed, len(self._tried)])
        candidates = self._candidates(random)
        if len(self._tried) < RANDOM_TRIALS or not candidates:
            return candidates[0] if candidates else self._tried[int(np.argmin(self._values))]
        mean, deviation = self._posterior(np.array([self._space.coordinates(c) for c in candidates]))
        return candidates[int(np.argmax(expected_improvement(mean, deviation, self._scaled().min())))]

    def tell(self, settings: Settings, value: float) -> None:
        self._tried.append(settings)
        self._values.append(value)

    def _candidates(self, random: np.random.Generator) -> list[Settings]:
        """At random, and around the best, without what was tried."""
        units = [list(row) for row in random.random((CANDIDATES, len(self._space.dimensions)))]
        found = [self._space.at(u) for u in units]
        if self._tried:
            best = self._tried[int(np.argmin(self._values))]
            for near in found[: CANDIDATES // 3]:
                kept = random.random(len(best)) < 0.6
                found.append(self._space.plain({name: best[name] if keep else near[name]
                                                for keep, name in zip(kept, sorted(best), strict=True)}))
        seen = {tuple(sorted(t.items())) for t in self._tried}
        return [c for c in found if tuple(sorted(c.items())) not in seen]

    def _scaled(self) -> Array:
        values = np.array(self._values)
        return np.asarray((values - values.mean()) / (values.std() or 1.0))

    def _posterior(self, at: Array) -> tuple[Array, Array]:
        x, y = np.array([self._space.coordinates(t) for t in self._tried]), self._scaled()
        length, noise = max(((le, no) for le in (0.15, 0.3, 0.5, 0.8, 1.3) for no in (1e-4, 1e-2, 1e-1)),
                            key=lambda pair: likelihood(x, y, *pair))
        root = np.linalg.cholesky(matern(x, x, length) + noise * np.eye(len(x)))
        across = np.linalg.solve(root, matern(x, at, length))
        mean = across.T @ np.linalg.solve(root, y)
        return mean, np.sqrt(np.maximum(1e-12, 1.0 - (across**2).sum(0)))


def matern(a: Array, b: Array, length: float) -> Array:
    far = math.sqrt(5.0) / length * np.sqrt(((a[:, None, :] - b[None, :, :]) ** 2).sum(-1))
    return np.asarray((1 + far + far**2 / 3) * np.exp(-far))


def likelihood(x: Array, y: Array, length: float, noise: float) -> float:
    """Logarithm of the marginal likelihood, up to a constant."""
    root = np.linalg.cholesky(matern(x, x, length) + noise * np.eye(len(x)))
    white = np.linalg.solve(root, y)
    return float(-0.5 * white @ white - np.log(np.diag(root)).sum())


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    z = (best - mean) / deviation
    below = 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in z]))
    return np.asarray((best - mean) * below + deviation * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
