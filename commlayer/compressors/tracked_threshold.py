"""The tracked threshold of sparse selection: estimates the cut that about k entries pass.

A scalar Kalman filter in log space joins two measurements, each weighted by its certainty:
- The count of the last pass states exactly how far the last threshold was off, but the tensor has changed since.
- A strided sample of magnitudes belongs to this step, but is noisy.
While counts predict well, the sample is small and moves the threshold by the slope. Otherwise the sample's own order sets the
threshold. That also works where magnitudes come in clumps, as in residuals of a constant gradient.
The slope is how fast the count falls when the threshold rises. It converts an error of the count to a factor of the threshold.
A sample that disagrees by more than its own noise signals a jump: a larger sample then replaces the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from commlayer.compressors import kernels
from commlayer.compressors.codec import State

if TYPE_CHECKING:
    import torch

EXPECTED = 64
"""Sampled magnitudes that should pass a right threshold. Their noise is 12 %; the next count corrects the rest."""

CALM, CALM_SHARE = 0.003, 8
"""Below this doubt counts alone predict to some 5 %: a sample of an eighth of the size only detects jumps."""

SAMPLE_FLOOR, SAMPLE_SHARE = 8192, 64
"""A sample is at most the larger of the floor and numel / share, so that it stays cheap relative to the pass."""

LIFT = 1.0
"""The aim is above k by this multiple of the sample's noise: trimming costs far less than a second scan."""

LARGER = 4
"""A sample that replaces the threshold is this many times larger than the usual one."""

SIGMAS = 4.0
TINY = 2.0**-126
"""The smallest normal float32. It passes all but zeros and denormals, which a thread may flush to zero."""

HUGE = 3.4028234663852886e38
GAIN, TREND = 0.5, 0.15
"""Shares of an error that go into the next threshold, and into the trend that follows growing residuals."""

PROBE = 1.2
"""The slope is measured between threshold / PROBE and threshold * PROBE."""

SLOPE_START, SLOPES = 4.0, (0.5, 40.0)
DOUBT_START, DOUBT_MOST = 0.04, 0.25
MEMORY = 0.3
"""Weight of the newest measurement of slope and doubt."""

TREND_MOST = 0.5
NUMBERS = {
    "threshold": (0.0, HUGE),
    "trend": (-TREND_MOST, TREND_MOST),
    "slope": SLOPES,
    "doubt": (0.0, DOUBT_MOST),
    "step": (0, 1 << 62),
}
"""Limits of the numbers in a state: every value that steps can produce."""

GOLDEN = 0x9E3779B1

Draw: TypeAlias = "Callable[[int, torch.Tensor], None]"
"""Fills the tensor with magnitudes of this step, evenly spaced from the offset on."""


class Cut(NamedTuple):
    """This step's threshold and what begin() learned. end() writes it to the state, so a failed step changes nothing."""

    threshold: float
    slope: float
    shift: float | None
    """How far the sample moved the expected log count; None if the sample replaced the threshold."""


def init() -> State:
    """No threshold yet: the first step samples one. `doubt` is the variance of the log count before sampling."""
    return {"threshold": 0.0, "trend": 0.0, "slope": SLOPE_START, "doubt": DOUBT_START, "step": 0}


def aim(n: int, k: int) -> int:
    """The number of entries to aim at: k plus the noise of a sample, since too many are cheaper than too few."""
    expected = sample_sizes(n, k)[0] * k / n
    return min(n, round(k + LIFT * k / math.sqrt(expected)))


def sample_room(n: int, k: int) -> int:
    return max(sample_sizes(n, aim(n, k)))


def sample_sizes(n: int, k: int) -> tuple[int, int]:
    """(usual, larger). Odd, so that the stride does not align with rows of a power of two."""
    usual = min(EXPECTED * n // k, max(SAMPLE_FLOOR, n // SAMPLE_SHARE)) | 1
    return min(usual, n), min(LARGER * usual | 1, n)


class Sampling(NamedTuple):
    """How this step samples.

    `usual` and `larger` are sizes of samples. `rank` is the rank of the cut in the larger one, and `expected` the number of the
    usual one that should pass. `calm` means that counts alone predict well.
    """

    usual: int
    larger: int
    rank: int
    expected: float
    calm: bool


def sampling(n: int, k: int, state: State) -> Sampling:
    k = aim(n, k)
    usual, larger = sample_sizes(n, k)
    calm = state["doubt"] < CALM
    if calm:
        usual = min(usual, usual // CALM_SHARE | 1)
    return Sampling(usual, larger, min(max(round(larger * k / n), 1), larger), usual * k / n, calm)


def begin(k: int, n: int, draw: Draw, state: State) -> Cut:
    """The cut that slightly more than k of n magnitudes pass."""
    sample, words = state["_scratch"]["sample"], state["_scratch"]["words"]
    usual, larger, rank, expected, calm = sampling(n, k, state)
    cut, offset = state["threshold"], rotation(n, state)
    seen = sample[:usual]
    draw(offset, seen)
    passed = _passing(seen, cut)
    shift: float | None = None
    if cut <= TINY or abs(passed - expected) > SIGMAS * math.sqrt(expected) + 2:
        seen = sample[:larger]
        draw(offset, seen)
        cut = _quantile(seen, rank, words)
    else:
        trust = state["doubt"] / (state["doubt"] + 1 / expected)
        shift = trust * math.log(max(passed, 0.5) / expected)
        if calm:
            cut = within(cut * math.exp(shift / state["slope"]))
        else:
            least = within(cut / PROBE)
            near = _passing(seen, least)
            cut = _quantile(seen, min(round(max(passed, 0.5) * math.exp(-shift)), near), words) if near else least
    slope = state["slope"]
    above, below = _passing(seen, cut * PROBE), _passing(seen, cut / PROBE)
    if 0 < above < below:
        measured = math.log(below / above) / (2 * math.log(PROBE))
        slope += MEMORY * (min(max(measured, SLOPES[0]), SLOPES[1]) - slope)
    return Cut(cut, slope, shift)


def again(k: int, n: int, draw: Draw, state: State, cut: Cut, passed: int) -> Cut:
    """A lower cut, after one that only `passed` magnitudes reached."""
    k = aim(n, k)
    larger = sample_sizes(n, k)[1]
    seen = state["_scratch"]["sample"][:larger]
    draw(rotation(n, state), seen)
    by_slope = cut.threshold * math.exp(math.log(max(passed, 0.5) / k) / cut.slope)
    sampled = _quantile(seen, round(larger * k / n), state["_scratch"]["words"])
    return Cut(within(min(by_slope, sampled)), cut.slope, None)


def end(k: int, n: int, passed: int, cut: Cut, state: State) -> None:
    """Learns from the number of entries that reached the cut, including those that did not fit."""
    error = min(max(math.log(max(passed, 0.5) / aim(n, k)), -1.0), 1.0)
    gain = GAIN
    if cut.shift is None:
        state["trend"], gain = 0.0, 1.0
    else:
        state["doubt"] += MEMORY * (min((error + cut.shift) ** 2, DOUBT_MOST) - state["doubt"])
    state["slope"] = cut.slope
    state["trend"] = min(max(state["trend"] + TREND * error, -TREND_MOST), TREND_MOST)
    state["threshold"] = within(cut.threshold * math.exp((gain * error + state["trend"]) / cut.slope))
    state["step"] += 1


def rotation(n: int, state: State) -> int:
    """Where this step's scan begins: it moves each step, so that entries without room are not always the same part."""
    return int(state["step"]) * GOLDEN % n if n else 0


def exact(k: int, x: torch.Tensor, residual: torch.Tensor | None, words: torch.Tensor) -> float:
    """The k-th largest magnitude of x + residual, or TINY if fewer than k are above TINY."""
    value = kernels.kth_abs(x, residual, min(max(k, 1), x.numel()), words)
    return within(value) if math.isfinite(value) else HUGE


def _quantile(seen: torch.Tensor, rank: int, words: torch.Tensor) -> float:
    """The rank-th largest magnitude, as a threshold."""
    return exact(rank, seen, None, words)


def _passing(seen: torch.Tensor, cut: float) -> int:
    return kernels.count_above(seen, within(cut))


def within(value: float) -> float:
    return min(max(value, TINY), HUGE)
