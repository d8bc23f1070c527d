"""Nelder-Mead over the split of a batch, asked and told while training runs. Knows shares and seconds; no model of time.

A simplex of n points moves in the n - 1 dimensions of splits whose parts sum to the batch; a candidate is projected onto that
simplex and the caps, and rounded exactly. Measurements are noisy, so the best split is measured again before the others are
compared with it, and the search ends where it gains nothing: it does no harm beside a balancer that has a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from commlayer.balance.rounding import apportion

Array = npt.NDArray[np.float64]
Split = tuple[int, ...]


class Simplex:
    """`ask` for the split to run next, `tell` the seconds its step took (the slowest worker's). Ends on the best split."""

    def __init__(self, start: Sequence[int], *, caps: Sequence[int] | None = None, least: int = 1, gain: float = 0.01,
                 spread: float = 0.1) -> None:
        """`start`: shares in force; those of 0 stay 0. `gain`: relative, worth a change. `spread`: of the first moves."""
        self.batch, self._gain, self._least = sum(start), gain, least
        self._active = [i for i, share in enumerate(start) if share > 0]
        self._n = len(start)
        caps = [self.batch] * len(start) if caps is None else list(caps)
        if any(0 < share < least or share > cap for share, cap in zip(start, caps, strict=True)):
            raise ValueError(f"shares {list(start)}: allowed is 0, or {least} up to the caps {caps}")
        self._low = np.full(len(self._active), float(least))
        self._high = np.array([float(caps[i]) for i in self._active])
        base = np.array([float(start[i]) for i in self._active])
        self._points = [base]
        for i in range(len(base) - 1):
            moved = base.copy()
            moved[i] += max(1.0, spread * base[i])
            moved[-1] -= moved[i] - base[i]
            self._points.append(self._project(moved))
        self._seconds: list[float] = []
        self._times: list[int] = []
        """How often each point was measured: the mean counts."""
        self._start, self._first_s = base, 0.0
        self._asked: tuple[str, Array] = ("start", self._points[0])
        self._reflected: tuple[Array, float] | None = None
        self._idle = 0
        self.done = len(base) < 2
        self.reason = "one worker has all there is" if self.done else ""

    def ask(self) -> Split:
        """What to run next; the best known split once the search is over."""
        return self._rounded(self.best_point if self.done else self._asked[1])

    @property
    def best_point(self) -> Array:
        """Before rounding."""
        return self._points[0] if not self._seconds else self._points[int(np.argmin(self._seconds))]

    def tell(self, seconds: float) -> None:
        """The time of a step under the split that `ask` gave."""
        if self.done:
            return
        if not 0 < seconds < float("inf"):
            raise ValueError(f"seconds {seconds}: allowed is a finite number above 0")
        what, point = self._asked
        if what == "start":
            self._seconds.append(seconds)
            self._times.append(1)
            self._first_s = self._seconds[0]
        elif what == "again":
            self._remeasured(seconds)
        else:
            self._moved(what, point, seconds)
        self._asked = self._next()

    # ---- the moves

    def _next(self) -> tuple[str, Array]:
        if len(self._seconds) < len(self._points):
            return "start", self._points[len(self._seconds)]
        if self._reflected is not None:
            return self._after_reflection()
        if len({self._rounded(p) for p in self._points}) == 1:
            return self._end("all points round to one split")
        if self._idle >= 2 * len(self._points):
            return self._end(f"no gain of {self._gain:.0%} in {self._idle} moves")
        best = int(np.argmin(self._seconds))
        if self._times[best] < 2:
            return "again", self._points[best]
        worst = int(np.argmax(self._seconds))
        return "reflect", self._project(2 * self._centre(worst) - self._points[worst])

    def _after_reflection(self) -> tuple[str, Array]:
        assert self._reflected is not None
        point, seconds = self._reflected
        worst, order = int(np.argmax(self._seconds)), sorted(self._seconds)
        if seconds < order[0]:
            return "expand", self._project(3 * self._centre(worst) - 2 * self._points[worst])
        return "contract", self._project((self._centre(worst) + (point if seconds < order[-1] else self._points[worst])) / 2)

    def _moved(self, what: str, point: Array, seconds: float) -> None:
        worst = int(np.argmax(self._seconds))
        before = min(self._seconds)
        if what == "reflect":
            between = sorted(self._seconds)[0] <= seconds < sorted(self._seconds)[-2]
            if not between:
                self._reflected = (point, seconds)
                return
            self._replace(worst, point, seconds)
        else:
            assert self._reflected is not None
            reflected, self._reflected = self._reflected, None
            kept = min(((point, seconds), reflected), key=lambda pair: pair[1])
            if kept[1] < self._seconds[worst]:
                self._replace(worst, *kept)
            else:
                self._shrink()
        self._idle = 0 if min(self._seconds) < before * (1 - self._gain) else self._idle + 1

    def _shrink(self) -> None:
        """All towards the best, to be measured anew."""
        best = int(np.argmin(self._seconds))
        first = self._points[best]
        others = [self._project((first + p) / 2) for i, p in enumerate(self._points) if i != best]
        self._points, self._seconds, self._times = [first, *others], [self._seconds[best]], [self._times[best]]

    def _replace(self, i: int, point: Array, seconds: float) -> None:
        self._points[i], self._seconds[i], self._times[i] = point, seconds, 1

    def _remeasured(self, seconds: float) -> None:
        """A lucky measurement does not hold the search on a split that is none."""
        best = int(np.argmin(self._seconds))
        n = self._times[best]
        self._seconds[best] = (n * self._seconds[best] + seconds) / (n + 1)
        self._times[best] = n + 1

    def _end(self, reason: str) -> tuple[str, Array]:
        """Back to the start unless the gain is worth it."""
        if min(self._seconds) > self._first_s * (1 - self._gain):
            self._points, self._seconds, self._times = [self._start], [self._first_s], [1]
        self.done, self.reason = True, reason
        return "start", self.best_point

    # ---- splits

    def _centre(self, without: int) -> Array:
        return np.asarray(np.mean([p for i, p in enumerate(self._points) if i != without], axis=0))

    def _project(self, point: Array) -> Array:
        """The nearest split within the bounds whose parts sum to the batch, by bisection on a common shift."""
        low, high = float((self._low - point).min()), float((self._high - point).max())
        for _ in range(60):
            shift = (low + high) / 2
            total = np.clip(point + shift, self._low, self._high).sum()
            low, high = (shift, high) if total < self.batch else (low, shift)
        return np.clip(point + high, self._low, self._high)

    def _rounded(self, point: Array) -> Split:
        """Whole numbers with the same sum, within the caps."""
        whole = apportion(point.tolist(), self.batch, [int(most) for most in self._high])
        split = [0] * self._n
        for i, share in zip(self._active, whole, strict=True):
            split[i] = share
        return tuple(split)
