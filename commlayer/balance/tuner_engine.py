"""Proposes the next trial by Bayesian optimization with scikit-optimize's Gaussian process.

Proposals are normalized (SearchSpace.plain of tuner_space.py), so that none repeats an earlier trial. scikit-optimize loads
with the first proposal that is not random.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from commlayer.balance.tuner_space import SearchSpace, Settings

RANDOM_TRIALS = 8
CANDIDATES = 1500
LENGTHS = (0.05, 10.0)
"""Range of length scales in the unit cube, from which maximum likelihood chooses."""


class Engine:
    """A minimizing search: ask() proposes settings, tell() takes their result."""

    def __init__(self, space: SearchSpace, seed: int) -> None:
        self._space, self._seed = space, seed
        self._tried: list[Settings] = []
        self._values: list[float] = []

    def ask(self) -> Settings:
        """Settings not tried yet; the best again if none is left."""
        # Seeded by the number of trials, so that a resumed search continues like an uninterrupted one.
        candidates = self._candidates(np.random.default_rng([self._seed, len(self._tried)]))
        if not candidates:
            return self._best()
        return candidates[0] if len(self._tried) < RANDOM_TRIALS else self._most_promising(candidates)

    def tell(self, settings: Settings, value: float) -> None:
        self._tried.append(settings)
        self._values.append(value)

    def _best(self) -> Settings:
        return self._tried[int(np.argmin(self._values))]

    def _candidates(self, random: np.random.Generator) -> list[Settings]:
        """Random settings and variations of the best, without those already tried."""
        candidates = [self._space.at(list(row)) for row in random.random((CANDIDATES, len(self._space.dimensions)))]
        if self._tried:
            best = self._best()
            for other in candidates[: CANDIDATES // 3]:
                kept = random.random(len(best)) < 0.6
                candidates.append(self._space.plain({name: best[name] if keep else other[name]
                                                for keep, name in zip(kept, sorted(best), strict=True)}))
        seen = {_key(settings) for settings in self._tried}
        return [settings for settings in candidates if _key(settings) not in seen]

    def _most_promising(self, candidates: list[Settings]) -> Settings:
        """The candidate with the largest expected improvement."""
        from skopt.acquisition import gaussian_ei
        from skopt.learning import GaussianProcessRegressor
        from skopt.learning.gaussian_process.kernels import Matern

        process: Any = GaussianProcessRegressor(Matern(0.5, LENGTHS, nu=2.5), normalize_y=True, noise="gaussian")
        with warnings.catch_warnings():
            # It warns of a length or noise at the end of its range, which is normal with few or flat trials.
            warnings.simplefilter("ignore")
            process.fit(self._points(self._tried), self._values)
        promise = gaussian_ei(self._points(candidates), process, y_opt=min(self._values), xi=0.0)
        return candidates[int(np.argmax(promise))]

    def _points(self, settings: list[Settings]) -> list[list[float]]:
        return [self._space.coordinates(one) for one in settings]


def _key(settings: Settings) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(settings.items()))
