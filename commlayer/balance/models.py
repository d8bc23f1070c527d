"""Time models T(B): seconds that a worker needs for a share of B samples.

All of them are monotonic, because the solver inverts them: `within(t)` is the largest share that is done in t seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from commlayer.errors import InvalidInput
from commlayer.records import Record

EXACT_TABLE = 4096
"""Up to this share a curve is tabulated at every sample; beyond it at this many points with linear interpolation."""


class TimeModel(Protocol):
    """Any monotonic T(B). The unit of time is the caller's, the same for all workers of a problem."""

    def time_s(self, batch: float) -> float: ...

    def within(self, time_s: float) -> float: ...


class Line(Record, frozen=True):
    """T(B) = intercept_s + slope_s B: launch cost and seconds per sample."""

    slope_s: float
    intercept_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.slope_s < math.inf and 0 <= self.intercept_s < math.inf and self.slope_s + self.intercept_s > 0):
            raise InvalidInput("E-TIME-MODEL",
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
    """Linear between knots. Beyond the first and last knot the nearest line is extended, unless that leads to negative
    times or to free samples: then time is proportional to the batch."""

    batches: tuple[float, ...]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.batches) != len(self.times_s) or len(self.batches) < 2:
            raise InvalidInput("E-TIME-MODEL",
                f"Piecewise: got {len(self.batches)} batches and {len(self.times_s)} times, "
                "allowed is the same number, at least 2"
            )
        if not all(0 < time_s < math.inf for time_s in self.times_s):
            raise InvalidInput("E-TIME-MODEL", "Piecewise: got a time that is not finite and above 0; drop that measurement")
        if not all(a < b for a, b in zip(self.batches, self.batches[1:], strict=False)):
            raise InvalidInput("E-TIME-MODEL", "Piecewise: batches must rise strictly; sort them and merge equal ones")
        if any(b < a for a, b in zip(self.times_s, self.times_s[1:], strict=False)):
            raise InvalidInput("E-TIME-MODEL", "Piecewise: times must not fall with the batch; fit them with fit_piecewise")

    def time_s(self, batch: float) -> float:
        b0, t0, slope_s = self._piece(bisect_right(self.batches, batch))
        return max(t0 + slope_s * (batch - b0), 0.0)

    def within(self, time_s: float) -> float:
        b0, t0, slope_s = self._piece(bisect_right(self.times_s, time_s))
        # Only the first piece can be flat at this point: below it nothing fits.
        return max(b0 + (time_s - t0) / slope_s, 0.0) if slope_s else 0.0

    def _piece(self, at: int) -> tuple[float, float, float]:
        """A point and the slope of the piece between knot at - 1 and knot at."""
        knots = len(self.batches)
        right = min(max(at, 1), knots - 1)
        b0, b1, t0, t1 = self.batches[right - 1], self.batches[right], self.times_s[right - 1], self.times_s[right]
        slope_s = (t1 - t0) / (b1 - b0)
        if at == 0 and b0 > 0:
            slope_s = min(slope_s, t0 / b0)
        if at >= knots:
            return b1, t1, slope_s or t1 / b1
        return b0, t0, slope_s


class Cubic(Record, frozen=True):
    """LBB's profile model a3 B^3 + a2 B^2 + a1 B + a0. It need not be monotonic; rising() makes it invertible."""

    a3_s: float
    a2_s: float
    a1_s: float
    a0_s: float

    def time_s(self, batch: float) -> float:
        return ((self.a3_s * batch + self.a2_s) * batch + self.a1_s) * batch + self.a0_s


class Accumulated(Record, frozen=True):
    """A share computed in micro-batches of at most `cap` samples; each pays the launch cost again."""

    inner: Line
    cap: int

    def time_s(self, batch: float) -> float:
        full, rest = divmod(batch, self.cap)
        return full * self.inner.time_s(self.cap) + (self.inner.time_s(rest) if rest else 0.0)

    def within(self, time_s: float) -> float:
        full, rest_s = divmod(time_s, self.inner.time_s(self.cap))
        return full * self.cap + min(self.inner.within(rest_s), self.cap)


def in_pieces_s(model: TimeModel, batch: int, cap: int) -> float:
    """Time of a share in as few micro-batches as the cap allows, as equal as possible: the micro-batches of a real loop."""
    pieces = -(-batch // cap)
    small, larger = divmod(batch, pieces)
    return (pieces - larger) * model.time_s(small) + (larger * model.time_s(small + 1) if larger else 0.0)


class InPieces(Record, frozen=True):
    """Like Accumulated for a piecewise curve, whose equal parts and full parts differ in time. A share that is faster than
    a smaller one in fewer, larger pieces counts as taking as long."""

    inner: Piecewise
    cap: int

    def time_s(self, batch: float) -> float:
        return max(in_pieces_s(self.inner, int(batch), self.cap), batch // self.cap * self.inner.time_s(self.cap))

    def within(self, time_s: float) -> float:
        full = int(time_s // self.inner.time_s(self.cap))
        pieces = full + 1
        small = int(self.inner.within(time_s / pieces))
        rest_s, more_s = time_s - pieces * self.inner.time_s(small), self.inner.time_s(small + 1) - self.inner.time_s(small)
        larger = min(int(max(rest_s, 0.0) / more_s), full) if more_s else full
        return min(max(pieces * small + larger, full * self.cap), pieces * self.cap)


def accumulated(model: Line | Piecewise, cap: int) -> Accumulated | InPieces:
    """The model of a worker whose share may exceed its cap and is then computed in micro-batches."""
    return Accumulated(model, cap) if isinstance(model, Line) else InPieces(model, cap)


Given = Line | Piecewise | Cubic | Sequence[float] | Callable[[float], float]
"""Accepted models: a record, a pair (slope, intercept), or a function of the batch."""


def as_model(given: Given, most: int, name: str = "model") -> Line | Piecewise:
    """The invertible form of a given model, valid for shares up to `most`."""
    if isinstance(given, Line | Piecewise):
        return given
    if isinstance(given, Cubic):
        return rising(given.time_s, most, name)
    if callable(given):
        return rising(given, most, name)
    if isinstance(given, Sequence) and len(given) == 2:
        return Line(float(given[0]), float(given[1]))
    raise InvalidInput("E-TIME-MODEL",
        f"{name}: got {given!r}, allowed are Line, Piecewise, Cubic, a pair (slope, intercept) or a function of the batch"
    )


def rising(curve: Callable[[float], float], most: int, name: str = "model") -> Piecewise:
    """The smallest monotonic function above the curve at 1 ... most: a smaller batch never takes longer than a larger one."""
    most = max(most, 2)
    places = range(1, most + 1) if most <= EXACT_TABLE else np.unique(np.linspace(1, most, EXACT_TABLE).astype(int)).tolist()
    times = [curve(batch) for batch in places]
    for batch, time_s in zip(places, times, strict=True):
        if not 0 < time_s < math.inf:
            raise InvalidInput("E-TIME-MODEL",
                               f"{name}: got {time_s} s for {batch} sample{'s' * (batch > 1)}, allowed are finite times above "
                               "0")
    return Piecewise(tuple(float(batch) for batch in places), tuple(np.maximum.accumulate(times).tolist()))
