"""How hard to compress: as hard as the bandwidth asks, no harder than accuracy bears. Knows measurements; no torch, no clock.

Per observation it says which ratio shall hold and why. Accuracy goes first: what is seen of a gradient (cosine and norm of the
compressed against the exact one), of the residual and of the loss may only raise the ratio; the bandwidth moves it between that
floor and dense.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec import structs

from commlayer.records import Record

BACK_OFF, ALLOW = 2.0, 1.25
"""Quickly back, slowly on: an error in accuracy costs more than one in speed."""
MOST_BACK_OFF = 16.0
"""Each complaint after another without calm between them doubles the factor, up to this: a ratio may be wrong by thousands."""
CALM = 5
"""Observations without complaint before more is allowed."""
MOST_PATIENCE = 16 * CALM
"""Each time that less turns out to have been too little it takes twice as many, up to this."""
SMOOTH = 0.3
MAX_PRICE = 0.01
"""Part of the time that comparing with exact gradients over all workers may take."""


class Limits(Record, frozen=True):
    """What the user bears. Bounds that are 0 follow from the budget, as measured in training (docs/tuning.md)."""

    budget: float = 0.05
    """Relative excess of the loss: 0.005 is half a per cent."""
    lowest: float = 0.001
    highest: float = 1.0
    """Range of the ratio."""
    cosine: float = 0.0
    """Least cosine of what a step sends with its gradient."""
    residual: float = 0.0
    """Largest norm of the residual, in gradients."""

    @property
    def least_cosine(self) -> float:
        """
        >>> Limits(budget=0.005).least_cosine, Limits(budget=0.05).least_cosine
        (0.883, 0.183)
        """
        return self.cosine or min(0.95, max(0.05, round(0.57 - 0.7 * math.log10(self.budget / 0.014), 3)))

    @property
    def most_residual(self) -> float:
        """What is kept back lags: each gradient of it cost some 1.25 % of the loss.

        >>> Limits(budget=0.05).most_residual
        4.0
        """
        return self.residual or self.budget / 0.0125


class Fidelity(NamedTuple):
    """What a sampled bucket shows of one step: the sent against the exact."""

    cosine: float
    norm_ratio: float
    residual_ratio: float
    """Norm of the residual over that of the gradient."""


class Decision(NamedTuple):
    """The ratio to announce, and why."""

    ratio: float
    reason: str
    changed: bool


class Guard:
    """The ratio in force and how it got there. `floor` is what accuracy allows, `ratio` what holds."""

    def __init__(self, ratio: float, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        if not 0 < self.limits.lowest <= ratio <= self.limits.highest <= 1:
            raise ValueError(f"ratio {ratio:g}: allowed is {self.limits.lowest:g} to {self.limits.highest:g}, within 0 to 1")
        self.ratio = self.floor = ratio
        self.complained = False
        """Whether the floor has ever been raised: then it is what training showed, not what a job happened to begin with."""
        self._calm = self._complaints = 0
        self._patience, self._lowered = CALM, False
        self._residual, self._drained_from, self._draining = math.nan, 0.0, False

    def observe(self, fidelity: Fidelity, loss: Slope | Rise, needed: float) -> Decision:
        """`needed`: the ratio at which the links keep up. `fidelity` is the worst of the sampled buckets."""
        complaint = self.complaint(fidelity, loss)
        if complaint:
            self._calm = 0
            # From what holds, not from an old floor below it: the floor has to have an effect now.
            factor = min(MOST_BACK_OFF, BACK_OFF * 2.0**self._complaints)
            self._complaints += 1
            if self._lowered:
                self._patience, self._lowered = min(2 * self._patience, MOST_PATIENCE), False
            floor = min(self.limits.highest, max(self.floor, self.ratio) * factor)
            self.complained |= floor > self.floor
            self.floor = floor
        elif not self._drained_from:
            self._complaints = 0
            self._calm += 1
            if self._calm >= self._patience and self.floor > self.limits.lowest:
                self._calm, self._lowered = 0, True
                self.floor = max(self.limits.lowest, self.floor / ALLOW)
        target = min(self.limits.highest, max(self.floor, needed, self.ratio if self._draining else 0.0))
        # Small moves are not worth an announcement, unless accuracy asks.
        if target == self.ratio or (not complaint and abs(math.log(target / self.ratio)) < math.log(ALLOW) * 0.99):
            return Decision(self.ratio, complaint or "within the budget and the bandwidth", False)
        before, self.ratio = self.ratio, target
        return Decision(target, complaint or self._moved(before, needed), True)

    def follow(self, ratio: float) -> None:
        """Somebody else has changed it. Where nothing was complained of, nothing is known against it."""
        if not self.complained:
            self.floor = min(self.floor, ratio)
            self.limits = structs.replace(self.limits, lowest=min(self.limits.lowest, ratio))
        self.ratio = min(self.limits.highest, max(self.limits.lowest, ratio))

    def settle(self) -> None:
        """The change has been made. What waits under the new plan tells of it alone."""
        self._residual = math.nan

    def complaint(self, seen: Fidelity, loss: Slope | Rise) -> str:
        """What is wrong, or nothing. Changes no ratio: for a plan that is only to be watched."""
        if math.isfinite(seen.residual_ratio):
            # It swings by two or three times from step to step; the bound is on its mean.
            old = seen.residual_ratio if math.isnan(self._residual) else self._residual
            self._residual = old + SMOOTH * (seen.residual_ratio - old)
        least = self.limits.least_cosine
        if not all(map(math.isfinite, seen)):
            return "a comparison with the exact gradient was not finite"
        owing = self._residual > self.limits.most_residual
        said = ""
        if seen.cosine < least:
            said = f"cosine {seen.cosine:.2f} of sent and exact gradient is below {least:.2f}"
        elif seen.norm_ratio > 1.0 / least:
            said = f"what is sent has {seen.norm_ratio:.1f} times the gradient's norm"
        elif owing:
            said = f"the residual has grown to {self._residual:.1f} gradients, above {self.limits.most_residual:.3g}"
        # A large residual drains after a change, and what is sent is what was owed: that takes its time.
        self._draining = owing and seen.residual_ratio <= 0.9 * self._drained_from
        self._drained_from = seen.residual_ratio if owing else 0.0
        if said and not self._draining:
            return said
        if loss.risen(self.limits.budget):
            return f"the loss has risen by {loss.rise:.1%}, above the budget of {self.limits.budget:.1%}"
        return ""

    def _moved(self, before: float, needed: float) -> str:
        if self.ratio > before:
            return f"the links carry a ratio of {needed:.3g}"
        if needed > self.floor:
            return f"the links carry no more than a ratio of {needed:.3g}"
        return f"accuracy has borne {before:.3g} without complaint"


class Rise(NamedTuple):
    """What a loss has done, as numbers that ranks can tell each other."""

    rise: float
    """Relative to the lowest; 0 where too little is known."""
    noise: float
    """How far the rise may be off."""

    def risen(self, budget: float) -> bool:
        return self.rise > budget + self.noise


class Slope:
    """Whether a noisy loss rises: a fast mean against the lowest that a slow one has reached."""

    def __init__(self, fast: float = 0.1, slow: float = 0.02) -> None:
        self._fast, self._slow = fast, slow
        self._near = self._far = self._wobble = 0.0
        self._lowest = math.inf
        self._n = 0

    def add(self, loss: float) -> None:
        """The loss of a step; one that is not finite is left to the step's own handling."""
        if not math.isfinite(loss):
            return
        self._n += 1
        fast, slow = max(self._fast, 1 / self._n), max(self._slow, 1 / self._n)
        self._wobble += fast * (abs(loss - self._near) - self._wobble) if self._n > 1 else 0.0
        self._near += fast * (loss - self._near)
        self._far += slow * (loss - self._far)
        self._lowest = min(self._lowest, self._far)

    @property
    def rise(self) -> float:
        """Relative to the lowest."""
        return 0.0 if self._n == 0 else (self._near - self._lowest) / max(abs(self._lowest), 1e-9)

    def risen(self, budget: float) -> bool:
        """By more than the budget, and more than the mean wobbles of itself."""
        return self.seen().risen(budget)

    def seen(self) -> Rise:
        if self._n < 1 / self._slow:
            return Rise(0.0, 0.0)
        return Rise(self.rise, 3.0 * self._wobble * math.sqrt(self._fast / 2) / max(abs(self._lowest), 1e-9))


def steps_until_paid(spent_s: float, cost_s: float, elapsed_s: float, step_s: float, part: float = MAX_PRICE) -> int:
    """Steps until another comparison, too, keeps all of them within that part of the time since the start.

    >>> steps_until_paid(spent_s=0.05, cost_s=0.05, elapsed_s=1.0, step_s=0.2), steps_until_paid(0.0, 0.05, 10.0, 0.2)
    (45, 1)
    """
    if min(spent_s, cost_s, elapsed_s) < 0 or step_s <= 0:
        raise ValueError(f"spent {spent_s:g} s, comparing takes {cost_s:g} s, {elapsed_s:g} s have passed, a step takes "
                         f"{step_s:g} s: allowed are 0 or more, and more than 0")
    return max(1, math.ceil(((spent_s + cost_s) / part - elapsed_s) / step_s - 1e-9))


def comparisons_every(compare_s: float, step_s: float, part: float = MAX_PRICE) -> int:
    """Steps from one comparison over all workers to the next, so that they take at most that part of the time.

    >>> comparisons_every(0.05, 0.2)
    25
    """
    if compare_s < 0 or step_s <= 0:
        raise ValueError(f"comparing takes {compare_s:g} s, a step {step_s:g} s: allowed are 0 or more, and more than 0")
    return max(1, math.ceil(compare_s / (part * step_s) - 1e-9))
