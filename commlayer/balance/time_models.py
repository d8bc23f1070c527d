"""Time models T(B): seconds that a worker needs for a share of B samples.

All of them are monotonic, because the solver inverts them: `within(t)` is the largest share that is done in t seconds.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Generic, Literal, Protocol, TypeVar

import msgspec
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


ModelLike = Line | Piecewise | Cubic | Sequence[float] | Callable[[float], float]
"""Accepted models: a record, a pair (slope, intercept), or a function of the batch."""


def as_model(given: ModelLike, most: int, name: str = "model") -> Line | Piecewise:
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
    return _with_errors(Line(float(slope), float(intercept)), batches, times)


def fit_cubic(points: Points) -> Fit[Cubic]:
    """LBB's profile model: plain least squares, as published. Fewer than four distinct batches lower the degree."""
    batches, times = _arrays(points, 2, "cubic")
    degree = min(3, len(set(batches)) - 1)
    coefficients = [0.0] * (3 - degree) + [float(c) for c in np.polyfit(batches, times, degree)]
    return _with_errors(Cubic(*coefficients), batches, times)


def fit_piecewise(points: Points) -> Fit[Piecewise]:
    """Medians per batch, made monotonic by isotonic regression."""
    from scipy.optimize import isotonic_regression  # loaded late: a training script imports this module

    batches, times = _arrays(points, 2, "piecewise")
    per_batch: dict[float, list[float]] = defaultdict(list)
    for batch, time_s in zip(batches.tolist(), times.tolist(), strict=True):
        per_batch[batch].append(time_s)
    knots = sorted(per_batch)
    medians = [float(np.median(per_batch[knot])) for knot in knots]
    weights = [float(len(per_batch[knot])) for knot in knots]
    risen = isotonic_regression(medians, weights=weights).x
    return _with_errors(Piecewise(tuple(knots), tuple(float(t) for t in risen)), batches, times)


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


def _with_errors(model: M, batches: np.ndarray, times: np.ndarray) -> Fit[M]:
    timed: TimeModel | Cubic = model
    predicted = np.array([timed.time_s(batch) for batch in batches.tolist()])
    errors = times / np.maximum(predicted, 1e-12) - 1
    return Fit(model, float(np.sqrt(np.mean(errors**2))), float(np.max(np.abs(errors))))


Seen = Literal["follows", "suspect", "jumped"]

FACTOR_SHARE = 0.1
"""Weight of the explanation that a jump is a factor; the rest is for an offset."""
FORGET = 0.8
"""Weight that a measurement keeps per later one: a memory of about five."""
FORGET_DRIFT = 0.5
"""The same while errors have a constant sign, as under a thermal ramp: a memory of two."""
DRIFT = 1.5
"""Mean error, in standard deviations of the noise, above which errors count as having a constant sign."""
GATE = 4.0
"""Standard deviations beyond which a measurement is not noise."""
GATE_LEAST = 0.08
"""Also required: this part of the expected time. Smaller errors are followed as drift."""
CONFIRM = 2
"""Outliers in one direction that make a jump; fewer are a spike and change nothing."""
NOISE = 0.02
"""Relative noise that is assumed until it is measured."""
MOVED = 0.15
"""Relative change of the share (and at least one sample) after which offset and slope can be distinguished."""


SHORTEST_S, LONGEST_S = 1e-9, 1e9
"""Plausible measured times. Beyond them squared errors would underflow or overflow."""


def checked_time(worker: int, time_s: float) -> float:
    """Returns a valid time; the error for an invalid one names the worker."""
    if not 0 < time_s < math.inf:
        raise InvalidInput("E-TIME-MODEL",
                           f"worker {worker}: measured time {time_s} s, allowed is finite and above 0; it is left out")
    if not SHORTEST_S <= time_s <= LONGEST_S:
        raise InvalidInput("E-TIME-MODEL",
                           f"worker {worker}: measured time {time_s} s, allowed is {SHORTEST_S} to {LONGEST_S}; it is left out")
    return time_s


class OnlineLine:
    """Follows one worker. `start` is its profile line; without one the first measurement is read as mostly slope."""

    def __init__(self, start: Line | None = None) -> None:
        self._a = start.intercept_s if start else 0.0
        self._s = start.slope_s if start else 0.0
        self._known = start is not None
        self._p = (0.0, 0.0, 0.0)
        self._fresh = True
        self._doubted = False
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
    def known(self) -> bool:
        return self._known

    @property
    def line(self) -> Line:
        return Line(self._s, self._a)

    @property
    def ambiguous(self) -> bool:
        """Whether the share has not changed since the last jump, so that offset and slope are a guess."""
        return self._jumped_at is not None

    def observe(self, batch: int, time_s: float) -> Seen:
        """Takes a measured time for a share above 0."""
        if not self._known:
            self._a, self._s, self._known = 0.1 * time_s, 0.9 * time_s / batch, True
            self._widen(batch, 0.5 * time_s, 0.5)
            self._fresh, self._jumped_at = False, batch
            self._noise_s2 = (NOISE * time_s) ** 2
            return "jumped"
        expected_s = self._a + self._s * batch
        if self._fresh:
            self._widen(batch, 0.05 * expected_s, FACTOR_SHARE)
            self._noise_s2, self._fresh = (NOISE * expected_s) ** 2, False
        error_s = time_s - expected_s
        if self._doubted:
            self._doubted = False
            return self._jump(error_s, [(batch, time_s)])
        spread_s = math.sqrt(self._variance(batch) + self._noise_s2)
        settles = self._jumped_at is not None and self._moved(self._jumped_at, batch)
        # The measurement that decides a guess may be far from it and is no outlier.
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

    def doubt(self) -> None:
        """Marks the line as outdated: the next measurement is accepted as it is."""
        self._doubted = True
        self._outliers.clear()

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
        self._jumped_at = None if self._moved(first, last) else last
        return "jumped"

    @staticmethod
    def _moved(before: int, batch: int) -> bool:
        return abs(batch - before) >= max(1.0, MOVED * before)

    def _widen(self, batch: int, error_s: float, factor_share: float) -> None:
        """Adds the covariance of a jump of error_s seen at `batch`: the mixture of both explanations."""
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
        # Forget only in the measured direction: no other direction has new information.
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
        """Keeps launch cost and time per sample nonnegative, and the time at the current share unchanged."""
        now_s = max(self._a + self._s * batch, 1e-9)
        least = 1e-3 * now_s / batch
        if self._a < 0:
            self._a, self._s = 0.0, now_s / batch
        elif self._s < least:
            self._s, self._a = least, now_s - least * batch
