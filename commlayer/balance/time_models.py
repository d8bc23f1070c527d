"""Time models T(B): seconds that a worker needs for a share of B samples, fitted to a profile or followed while training."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from commlayer.errors import InvalidInput
from commlayer.records import Record

Segments = Sequence[tuple[float, float, float]]
"""Line segments in rising order: a batch, its time, and the seconds per further sample up to the next segment. The first one
also holds for smaller batches."""


class TimeModel(Protocol):
    """A time model: line segments that never decrease. The caller chooses the unit of time, the same for all workers."""

    @property
    def segments(self) -> Segments: ...


class LinearTime(Record, frozen=True):
    """T(B) = intercept_s + slope_s B: launch cost and seconds per sample."""

    slope_s: float
    intercept_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.slope_s < math.inf and 0 <= self.intercept_s < math.inf and self.slope_s + self.intercept_s > 0):
            raise InvalidInput("E-TIME-MODEL",
                               f"LinearTime: got slope {self.slope_s} s and intercept {self.intercept_s} s, allowed are finite "
                               "values >= 0, not both 0; fit it to measured times")

    @property
    def segments(self) -> Segments:
        return ((0.0, self.intercept_s, self.slope_s),)

    def time_s(self, batch: float) -> float:
        return self.intercept_s + self.slope_s * batch


class Piecewise(Record, frozen=True):
    """Time model that is linear between measured points. Beyond the first and last point the nearest line is extended, unless
    that leads to negative times or to free samples; then time is proportional to the batch."""

    batches: tuple[float, ...]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if (len(self.batches) != len(self.times_s) or len(self.batches) < 2
                or not all(0 < time_s < math.inf for time_s in self.times_s)
                or any(a >= b for a, b in pairwise(self.batches)) or any(a > b for a, b in pairwise(self.times_s))):
            raise InvalidInput("E-TIME-MODEL", f"Piecewise: got batches {self.batches} and times {self.times_s}, allowed are "
                               "two or more rising batches, each with a time above 0 that does not fall; use fit_piecewise")

    @property
    def segments(self) -> Segments:
        points = list(zip(self.batches, self.times_s, strict=True))
        slopes = [(t1 - t0) / (b1 - b0) for (b0, t0), (b1, t1) in pairwise(points)]
        (first, first_s), (last, last_s) = points[0], points[-1]
        below_s = min(slopes[0], first_s / first) if first > 0 else slopes[0]
        return [(first, first_s, below_s), *((*point, slope_s) for point, slope_s in zip(points, slopes, strict=False)),
                (last, last_s, slopes[-1] or last_s / last)]

    def time_s(self, batch: float) -> float:
        return float(TimeCurves([self], [0]).batches_s(np.array([batch]))[0])


class TimeCurves:
    """Time models and caps of several workers, evaluated together."""

    def __init__(self, models: Sequence[TimeModel], caps: Sequence[int]) -> None:
        rows = [list(model.segments) for model in models]
        longest = max(map(len, rows))
        table = np.array([row + [(math.inf, 0.0, 0.0)] * (longest - len(row)) for row in rows])
        self._starts, self._start_s, self._slope_s = np.moveaxis(table, -1, 0).copy()
        self._workers, self._caps = np.arange(len(rows)), np.array(caps)
        self._full_s = self.batches_s(self._caps)

    def times_s(self, shares: np.ndarray) -> np.ndarray:
        """Returns the times of the workers' shares. A share above the cap is computed in micro-batches: as few as the cap
        allows, as equal as possible, as in a training loop. Such a share never takes less time than a smaller share in fewer,
        larger pieces."""
        if (shares <= self._caps).all():
            return self.batches_s(shares)
        pieces = -(-shares // self._caps)
        small, larger = divmod(shares, pieces)
        small_s, larger_s = self.batches_s(np.array([small, small + 1]))
        times_s: np.ndarray = np.maximum((pieces - larger) * small_s + larger * larger_s, shares // self._caps * self._full_s)
        return times_s

    def batches_s(self, batches: np.ndarray) -> np.ndarray:
        """Returns the times of one batch of each worker. The last axis of `batches` are the workers."""
        at = self._workers, (batches[..., None] >= self._starts[:, 1:]).sum(axis=-1)
        times_s: np.ndarray = self._start_s[at] + self._slope_s[at] * (batches - self._starts[at])
        return times_s


def times_of_shares(models: Sequence[TimeModel], shares: Sequence[int], caps: Sequence[int]) -> list[float]:
    """Returns the times of the workers that have a share."""
    rows = [row for row in zip(models, shares, caps, strict=True) if row[1]]
    if not rows:
        return []
    with_share, taken, most = zip(*rows, strict=True)
    times_s: list[float] = TimeCurves(with_share, most).times_s(np.array(taken)).tolist()
    return times_s


Points = Sequence[tuple[int, float]]
"""Measured points: pairs (batch, seconds)."""


def fit_line(points: Points) -> LinearTime:
    return LinearTime(*fit_relative(*checked_points(points)))


def fit_relative(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Fits a line by least squares of relative errors, so small values count as much as large ones. Returns its slope and its
    value at 0 (intercept), neither of which is negative."""
    table = np.stack([x, np.ones_like(x)], axis=1) / y[:, None]
    slope, intercept = np.linalg.lstsq(table, np.ones_like(y), rcond=None)[0]
    if slope < 0 or intercept < 0:
        # The best line with one of both at 0.
        only_slope, only_intercept = table.sum(axis=0) / (table**2).sum(axis=0)
        slope, intercept = (only_slope, 0.0) if intercept < 0 else (0.0, only_intercept)
    return float(slope), float(intercept)


def fit_piecewise(points: Points) -> Piecewise:
    """Returns the model through the median of each batch; a median is never below that of a smaller batch."""
    batches, times = checked_points(points)
    knots = np.unique(batches)
    risen = np.maximum.accumulate([np.median(times[batches == knot]) for knot in knots])
    return Piecewise(tuple(knots.tolist()), tuple(risen.tolist()))


def checked_points(points: Points) -> tuple[np.ndarray, np.ndarray]:
    """Returns the batches and the seconds. Raises InvalidInput if no time model can be fitted to them."""
    if len({batch for batch, _ in points}) < 2 or not all(batch >= 1 and 0 < time_s < math.inf for batch, time_s in points):
        raise InvalidInput("E-TIME-MODEL", f"fit of a time model: got {list(points)}, allowed are two or more distinct batches "
                           "from 1 with finite times above 0; measure at another batch")
    table = np.array(points, float)
    return table[:, 0], table[:, 1]


Seen = Literal["follows", "suspect", "jumped"]

FACTOR_SHARE = 0.1
"""Weight of the explanation that a jump is a factor on the worker's times; the remaining weight is for a constant that was
added."""
FORGET = 0.8
"""Factor by which each measurement reduces the weight of earlier ones: about five measurements count."""
FORGET_DRIFT = 0.5
"""Like FORGET, while errors have a constant sign, as when a device heats up: about two measurements count."""
DRIFT = 1.5
"""Errors count as having a constant sign if their mean exceeds this many standard deviations of the noise."""
GATE = 4.0
"""A measurement that is off by more standard deviations than this is an outlier, not noise."""
GATE_LEAST = 0.08
"""A measurement must also be off by this fraction of the expected time to be an outlier. Smaller errors are followed as
drift."""
CONFIRM = 2
"""Number of consecutive outliers in one direction that count as a jump. Fewer count as a spike and change nothing."""
NOISE = 0.02
"""Relative noise of a measured time that is assumed until the noise is measured."""
MOVED = 0.15
"""Relative change of a worker's share (and at least one sample) after which launch cost and seconds per sample can be
distinguished."""


SHORTEST_S, LONGEST_S = 1e-9, 1e9
"""Range of valid measured times. Outside of it squared errors would underflow or overflow."""


def checked_time(worker: int, time_s: float) -> float:
    """Returns the time if it is valid; otherwise raises InvalidInput, which names the worker."""
    if not SHORTEST_S <= time_s <= LONGEST_S:
        raise InvalidInput("E-TIME-MODEL",
                           f"worker {worker}: measured time {time_s} s, allowed is {SHORTEST_S} to {LONGEST_S}; it is left out")
    return time_s


class OnlineLine:
    """Fits a line to one worker's times, measurement by measurement. `start`: the line from profiling; None: the first
    measurement is assumed to be mostly seconds per sample."""

    def __init__(self, start: LinearTime | None = None) -> None:
        self._a = start.intercept_s if start else 0.0
        self._s = start.slope_s if start else 0.0
        self.known = start is not None
        self._p = (0.0, 0.0, 0.0)
        self._fresh = True
        self._noise_s2 = 0.0
        self._error_s = 0.0
        self._bias = 0.0
        self._outliers: list[tuple[int, float]] = []
        self._jumped_at: int | None = None

    def copy(self) -> OnlineLine:
        clone = copy.copy(self)
        clone._outliers = list(self._outliers)
        return clone

    @property
    def line(self) -> LinearTime:
        return LinearTime(self._s, self._a)

    def observe(self, batch: int, time_s: float) -> Seen:
        """Processes the measured time of a share above 0."""
        if not self.known:
            self._a, self._s, self.known = 0.1 * time_s, 0.9 * time_s / batch, True
            self._widen(batch, 0.5 * time_s, 0.5)
            self._fresh, self._jumped_at = False, batch
            self._noise_s2 = (NOISE * time_s) ** 2
            return "jumped"
        expected_s = self._a + self._s * batch
        if self._fresh:
            self._widen(batch, 0.05 * expected_s, FACTOR_SHARE)
            self._noise_s2, self._fresh = (NOISE * expected_s) ** 2, False
        error_s = time_s - expected_s
        spread_s = math.sqrt(self._variance(batch) + self._noise_s2)
        settles = self._jumped_at is not None and self._batch_changed(self._jumped_at, batch)
        # After a jump, the first measurement with another batch shows whether a factor or a constant has changed. Even a large
        # error of this measurement does not make it an outlier.
        if not settles and abs(error_s) > max(GATE * spread_s, GATE_LEAST * expected_s):
            return self._outlier(batch, time_s, error_s)
        self._outliers.clear()
        if settles:
            self._jumped_at = None
        self._bias = 0.7 * self._bias + 0.3 * error_s / math.sqrt(self._noise_s2)
        self._update(batch, time_s, forget=FORGET_DRIFT if abs(self._bias) > DRIFT else FORGET)
        # Estimated from the difference of two errors, which cancels drift, and limited, so that a jump's remainder is not
        # taken for noise.
        noise_s2 = min((error_s - self._error_s) ** 2 / 2, 4 * self._noise_s2)
        self._noise_s2 = max(0.9 * self._noise_s2 + 0.1 * noise_s2, (0.002 * expected_s) ** 2)
        self._error_s = error_s
        return "follows"

    def _outlier(self, batch: int, time_s: float, error_s: float) -> Seen:
        if self._outliers and (self._outliers[-1][1] > self._a + self._s * self._outliers[-1][0]) != (error_s > 0):
            self._outliers.clear()
        self._outliers.append((batch, time_s))
        if len(self._outliers) < CONFIRM:
            return "suspect"
        points, self._outliers = self._outliers, []
        return self._jump(error_s, points)

    def _jump(self, error_s: float, points: list[tuple[int, float]]) -> Seen:
        first, last = points[0][0], points[-1][0]
        self._bias = self._error_s = 0.0
        self._widen(last, error_s, FACTOR_SHARE)
        for batch, time_s in points:
            self._update(batch, time_s, forget=1.0)
        self._jumped_at = None if self._batch_changed(first, last) else last
        return "jumped"

    @staticmethod
    def _batch_changed(before: int, batch: int) -> bool:
        return abs(batch - before) >= max(1.0, MOVED * before)

    def _widen(self, batch: int, error_s: float, factor_share: float) -> None:
        """Adds the uncertainty after a jump by `error_s` at `batch`: a mixture of a factor and an added constant."""
        expected_s = max(self._a + self._s * batch, 1e-12)
        rate = error_s / expected_s
        q = factor_share
        self._p = (
            self._p[0] + (1 - q) * error_s**2 + q * (rate * self._a) ** 2,
            self._p[1] + q * rate**2 * self._a * self._s,
            self._p[2] + q * (rate * self._s) ** 2,
        )

    def _variance(self, batch: int) -> float:
        return max(0.0, self._p[0] + 2 * batch * self._p[1] + batch**2 * self._p[2])

    def _update(self, batch: int, time_s: float, forget: float) -> None:
        aa, ab, bb = self._p
        va, vb = aa + ab * batch, ab + bb * batch
        spread = va + vb * batch
        if spread <= 0:
            return
        # Reduce old weight only in the measured direction: no other direction has new information.
        more = (1 / forget - 1) / spread
        aa, ab, bb = aa + more * va * va, ab + more * va * vb, bb + more * vb * vb
        va, vb, spread = va / forget, vb / forget, spread / forget
        gain = 1 / (spread + self._noise_s2)
        error_s = time_s - self._a - self._s * batch
        self._a += va * gain * error_s
        self._s += vb * gain * error_s
        aa, bb = max(aa - gain * va * va, 0.0), max(bb - gain * vb * vb, 0.0)
        # Rounding may leave a covariance larger than the two variances allow, which would make a variance elsewhere negative.
        most = math.sqrt(aa * bb)
        self._p = (aa, min(max(ab - gain * va * vb, -most), most), bb)
        self._bound(batch)

    def _bound(self, batch: int) -> None:
        """Keeps launch cost and seconds per sample nonnegative, and the time at `batch` unchanged."""
        now_s = max(self._a + self._s * batch, 1e-9)
        least = 1e-3 * now_s / batch
        if self._a < 0:
            self._a, self._s = 0.0, now_s / batch
        elif self._s < least:
            self._s, self._a = least, now_s - least * batch
