"""Fits time models to measured points (batch, seconds), each with its error."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np
from scipy.optimize import isotonic_regression

from commlayer.balance.models import Cubic, Line, Piecewise, TimeModel
from commlayer.errors import InvalidInput

M = TypeVar("M", Line, Cubic, Piecewise)
Points = Sequence[tuple[int, float]]


class Fit(msgspec.Struct, Generic[M], frozen=True):
    """A model and the error of the points relative to its prediction."""

    model: M
    rms: float
    worst: float


def fit_line(points: Points) -> Fit[Line]:
    """Least squares of relative errors, so that small batches count as much as large ones."""
    batches, times = _arrays(points, 2, "line")
    slope, intercept = np.polyfit(batches, times, 1, w=1 / times)
    if intercept < 0:
        slope, intercept = np.sum(batches / times) / np.sum((batches / times) ** 2), 0.0
    elif slope < 0:
        slope, intercept = 0.0, 1 / np.mean(1 / times)
    return _judged(Line(float(slope), float(intercept)), batches, times)


def fit_cubic(points: Points) -> Fit[Cubic]:
    """LBB's profile model: plain least squares, as published. Fewer than four distinct batches lower the degree."""
    batches, times = _arrays(points, 2, "cubic")
    degree = min(3, len(set(batches)) - 1)
    coefficients = [0.0] * (3 - degree) + [float(c) for c in np.polyfit(batches, times, degree)]
    return _judged(Cubic(*coefficients), batches, times)


def fit_piecewise(points: Points) -> Fit[Piecewise]:
    """Medians per batch, made monotonic by isotonic regression."""
    batches, times = _arrays(points, 2, "piecewise")
    per_batch: dict[float, list[float]] = defaultdict(list)
    for batch, time_s in zip(batches.tolist(), times.tolist(), strict=True):
        per_batch[batch].append(time_s)
    knots = sorted(per_batch)
    medians = [float(np.median(per_batch[knot])) for knot in knots]
    weights = [float(len(per_batch[knot])) for knot in knots]
    risen = isotonic_regression(medians, weights=weights).x
    return _judged(Piecewise(tuple(knots), tuple(float(t) for t in risen)), batches, times)


def _arrays(points: Points, distinct: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    for batch, time_s in points:
        if batch < 1 or not 0 < time_s < math.inf:
            raise InvalidInput("E-TIME-MODEL",
                f"fit of a {what}: got the point ({batch}, {time_s} s), allowed are batches from 1 and finite times above 0"
            )
    if len({batch for batch, _ in points}) < distinct:
        raise InvalidInput("E-TIME-MODEL",
            f"fit of a {what}: got {len(points)} points, needed are {distinct} distinct batches; measure at another batch"
        )
    table = np.array(points, float)
    return table[:, 0], table[:, 1]


def _judged(model: M, batches: np.ndarray, times: np.ndarray) -> Fit[M]:
    timed: TimeModel | Cubic = model
    predicted = np.array([timed.time_s(batch) for batch in batches.tolist()])
    errors = times / np.maximum(predicted, 1e-12) - 1
    return Fit(model, float(np.sqrt(np.mean(errors**2))), float(np.max(np.abs(errors))))
