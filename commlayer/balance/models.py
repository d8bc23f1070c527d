"""Time models T(B): seconds that a worker needs for a share of B samples. Knows no workers, no clocks and nothing of shares.

All of them rise with B, because the solver inverts them: `within(t)` is the largest share that is done in t seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from commlayer.records import Record

EXACT_TABLE = 4096
"""Up to this share a curve is tabled at every sample; beyond it at this many places, with straight lines between them."""


class TimeModel(Protocol):
    """Any rising T(B); the unit of time is the caller's, the same for all workers of a problem."""

    def time_s(self, batch: float) -> float: ...

    def within(self, time_s: float) -> float: ...


class Line(Record, frozen=True):
    """T(B) = intercept_s + slope_s B: the launch cost and the seconds per sample."""

    slope_s: float
    intercept_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.slope_s < math.inf and 0 <= self.intercept_s < math.inf and self.slope_s + self.intercept_s > 0):
            raise ValueError(
                f"Line: got slope {self.slope_s} s and intercept {self.intercept_s} s, allowed are finite values >= 0, "
                "not both 0; fit it to measured times"
            )

    def time_s(self, batch: float) -> float:
        return self.intercept_s + self.slope_s * batch

    def within(self, time_s: float) -> float:
        left_s = time_s - self.intercept_s
        if left_s < 0:
            return 0.0
        return left_s / self.slope_s if self.slope_s else math.inf


class Piecewise(Record, frozen=True):
    """Straight lines between knots; before the first and beyond the last knot the nearest line goes on."""

    batches: tuple[float, ...]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.batches) != len(self.times_s) or len(self.batches) < 2:
            raise ValueError(
                f"Piecewise: got {len(self.batches)} batches and {len(self.times_s)} times, "
                "allowed is the same number, at least 2"
            )
        if not all(0 < time_s < math.inf for time_s in self.times_s):
            raise ValueError("Piecewise: got a time that is not finite and above 0; drop that measurement")
        if any(b <= a for a, b in zip(self.batches, self.batches[1:], strict=False)):
            raise ValueError("Piecewise: batches must rise strictly; sort them and merge equal ones")
        if any(b < a for a, b in zip(self.times_s, self.times_s[1:], strict=False)):
            raise ValueError("Piecewise: times must not fall with the batch; fit them with fit_piecewise")

    def time_s(self, batch: float) -> float:
        at = min(max(bisect_right(self.batches, batch), 1), len(self.batches) - 1)
        b0, b1, t0, t1 = self.batches[at - 1], self.batches[at], self.times_s[at - 1], self.times_s[at]
        return max(t0 + (t1 - t0) * (batch - b0) / (b1 - b0), 0.0)

    def within(self, time_s: float) -> float:
        at = min(max(bisect_right(self.times_s, time_s), 1), len(self.times_s) - 1)
        b0, b1, t0, t1 = self.batches[at - 1], self.batches[at], self.times_s[at - 1], self.times_s[at]
        if t1 == t0:
            # Only the first and the last piece get here flat: at or above it nothing more is known, below it nothing fits.
            return math.inf if time_s >= t1 else 0.0
        return max(b0 + (b1 - b0) * (time_s - t0) / (t1 - t0), 0.0)


class Cubic(Record, frozen=True):
    """LBB's profile model a3 B^3 + a2 B^2 + a1 B + a0. Need not rise: rising() makes of it what the solver can invert."""

    a3_s: float
    a2_s: float
    a1_s: float
    a0_s: float

    def time_s(self, batch: float) -> float:
        return ((self.a3_s * batch + self.a2_s) * batch + self.a1_s) * batch + self.a0_s


class Accumulated(Record, frozen=True):
    """A worker that takes its share in micro-batches of at most `cap` samples, each of which pays the launch cost again."""

    inner: Line | Piecewise
    cap: int

    def time_s(self, batch: float) -> float:
        full, rest = divmod(batch, self.cap)
        return full * self.inner.time_s(self.cap) + (self.inner.time_s(rest) if rest else 0.0)

    def within(self, time_s: float) -> float:
        full, rest_s = divmod(time_s, self.inner.time_s(self.cap))
        return full * self.cap + min(self.inner.within(rest_s), self.cap)


Given = Line | Piecewise | Cubic | Sequence[float] | Callable[[float], float]
"""What a caller may hand in as a model: a record, a pair (slope, intercept), or a function of the batch."""


def as_model(given: Given, most: int, name: str = "model") -> Line | Piecewise:
    """The invertible model of what was given, good for shares up to `most`."""
    if isinstance(given, Line | Piecewise):
        return given
    if isinstance(given, Cubic):
        return rising(given.time_s, most)
    if callable(given):
        return rising(given, most)
    if isinstance(given, Sequence) and len(given) == 2:
        return Line(float(given[0]), float(given[1]))
    raise ValueError(
        f"{name}: got {given!r}, allowed are Line, Piecewise, Cubic, a pair (slope, intercept) or a function of the batch"
    )


def rising(curve: Callable[[float], float], most: int) -> Piecewise:
    """The smallest rising function above the curve at 1 ... most: a dip promises nothing that smaller batches do not keep."""
    most = max(most, 2)
    places = range(1, most + 1) if most <= EXACT_TABLE else np.unique(np.linspace(1, most, EXACT_TABLE).astype(int)).tolist()
    times = np.maximum.accumulate([curve(batch) for batch in places])
    return Piecewise(tuple(float(batch) for batch in places), tuple(times.tolist()))
