"""The tracked threshold of sparse selection: where to cut so that about k entries pass. Knows magnitudes; nothing of payloads.

Two measurements of the same thing are joined, each by its certainty (a scalar Kalman filter in log space):
- the count that the last pass found says exactly how far the last threshold was off, but the tensor has changed since;
- a strided sample of this step's magnitudes is of this step, but noisy.
While the counts predict well the sample is small and moves the threshold by the slope; else by its own order, which also holds
where magnitudes come in clumps, as residuals of a constant gradient do.
The slope, how fast the count falls when the threshold rises, turns an error of the count into a factor of the threshold. A
sample that disagrees by more than its own noise announces a jump: then a larger sample replaces the threshold.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from commlayer.compressors import kernels
from commlayer.compressors.codec import State

EXPECTED = 64
"""Sampled magnitudes that should pass a right threshold: a noise of 12 %, since what it leaves amiss is put right after."""

CALM, CALM_SHARE = 0.003, 8
"""Below this doubt the counts alone predict to some 5 %: a sample of an eighth only watches for jumps."""

SAMPLE_FLOOR, SAMPLE_SHARE = 8192, 64
"""A sample is at most the larger of the floor and numel / share, so that it stays cheap beside the pass itself."""

LIFT = 0.25
"""Of the sample's noise, by which the aim is above k."""

LARGER = 4
"""A sample that replaces the threshold is this many times the usual one."""

SIGMAS = 4.0
TINY = 2.0**-126
"""The smallest normal float32: passes all but zeros, and but denormals, which a thread may be told to flush to zero."""

HUGE = 3.4028234663852886e38
GAIN, TREND = 0.5, 0.15
"""How much of the error found goes into the next threshold, and into the trend that follows residuals which still grow."""

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
"""What the numbers of a state may be: all that steps can make of them."""

GOLDEN = 0x9E3779B1


class Cut(NamedTuple):
    """This step's threshold and what begin() learned; end() puts it into the state, so a step that fails leaves no trace."""

    threshold: float
    slope: float
    shift: float | None
    """By how much the sample moved the expected log count; None if it replaced the threshold."""


def init() -> State:
    """No threshold yet: the first step takes it from a sample. `doubt` is the variance of the log count before sampling."""
    return {"threshold": 0.0, "trend": 0.0, "slope": SLOPE_START, "doubt": DOUBT_START, "step": 0}


def aim(n: int, k: int) -> int:
    """How many entries to aim at: more than k by a quarter of the sample's noise, since too many are cheaper than too few."""
    expected = sample_sizes(n, k)[0] * k / n
    return min(n, round(k + LIFT * k / math.sqrt(expected)))


def sample_room(n: int, k: int) -> int:
    return max(sample_sizes(n, aim(n, k)))


def sample_sizes(n: int, k: int) -> tuple[int, int]:
    """(usual, larger). Odd, so that the stride does not fall in step with rows of a power of two."""
    usual = min(EXPECTED * n // k, max(SAMPLE_FLOOR, n // SAMPLE_SHARE)) | 1
    return min(usual, n), min(LARGER * usual | 1, n)


class Sampling(NamedTuple):
    """How this step samples: elements of the usual and the larger sample, the rank in the larger one that the cut should have,
    how many of the usual one should pass, and whether counts alone predict well."""

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


def begin(k: int, g: torch.Tensor, residual: torch.Tensor | None, state: State) -> Cut:
    """Where to cut |g + residual| for a little more than k entries."""
    n, sample = g.numel(), state["_scratch"]["sample"]
    usual, larger, rank, expected, calm = sampling(n, k, state)
    cut, offset = state["threshold"], rotation(n, state)
    seen = _magnitudes(g, residual, offset, sample[:usual])
    passed = _passing(seen, cut)
    shift: float | None = None
    if cut <= TINY or abs(passed - expected) > SIGMAS * math.sqrt(expected) + 2:
        seen = _magnitudes(g, residual, offset, sample[:larger])
        cut = _quantile(seen, rank)
    else:
        trust = state["doubt"] / (state["doubt"] + 1 / expected)
        shift = trust * math.log(max(passed, 0.5) / expected)
        if calm:
            cut = _within(cut * math.exp(shift / state["slope"]))
        else:
            near = seen[seen >= np.float32(_within(cut / PROBE))]
            cut = _quantile(near, round(max(passed, 0.5) * math.exp(-shift))) if near.size else _within(cut / PROBE)
    slope = state["slope"]
    above, below = _passing(seen, cut * PROBE), _passing(seen, cut / PROBE)
    if 0 < above < below:
        measured = math.log(below / above) / (2 * math.log(PROBE))
        slope += MEMORY * (min(max(measured, SLOPES[0]), SLOPES[1]) - slope)
    return Cut(cut, slope, shift)


def again(k: int, v: torch.Tensor, state: State, cut: Cut, passed: int) -> Cut:
    """A lower cut, after one that only `passed` entries of v reached."""
    n, sample = v.numel(), state["_scratch"]["sample"]
    k = aim(n, k)
    larger = sample_sizes(n, k)[1]
    seen = _magnitudes(v, None, rotation(n, state), sample[:larger])
    by_slope = cut.threshold * math.exp(math.log(max(passed, 0.5) / k) / cut.slope)
    return Cut(_within(min(by_slope, _quantile(seen, round(larger * k / n)))), cut.slope, None)


def end(k: int, n: int, passed: int, cut: Cut, state: State) -> None:
    """Learns from the number of entries that reached the cut, whether or not they fitted."""
    error = min(max(math.log(max(passed, 0.5) / aim(n, k)), -1.0), 1.0)
    gain = GAIN
    if cut.shift is None:
        state["trend"], gain = 0.0, 1.0
    else:
        state["doubt"] += MEMORY * (min((error + cut.shift) ** 2, DOUBT_MOST) - state["doubt"])
    state["slope"] = cut.slope
    state["trend"] = min(max(state["trend"] + TREND * error, -TREND_MOST), TREND_MOST)
    state["threshold"] = _within(cut.threshold * math.exp((gain * error + state["trend"]) / cut.slope))
    state["step"] += 1


def rotation(n: int, state: State) -> int:
    """Where this step's scan begins: another place each time, so that what does not fit is not always the same part."""
    return int(state["step"]) * GOLDEN % n if n else 0


def exact(k: int, g: torch.Tensor, residual: torch.Tensor | None) -> float:
    """The k-th largest magnitude of g + residual, or TINY where fewer than k are above it."""
    magnitudes = g.abs() if residual is None else (g + residual).abs_()
    if kernels.on_device(magnitudes):
        return _usable(float(torch.topk(magnitudes, k).values[-1]))
    return _quantile(magnitudes.numpy(), k)


def _magnitudes(g: torch.Tensor, residual: torch.Tensor | None, offset: int, out: torch.Tensor) -> npt.NDArray[np.float32]:
    kernels.sample_abs(g, residual, offset, out)
    return out.cpu().numpy()


def _passing(seen: npt.NDArray[np.float32], cut: float) -> int:
    return int(np.count_nonzero(seen >= np.float32(_within(cut))))


def _quantile(seen: npt.NDArray[np.float32], rank: int) -> float:
    """The rank-th largest, as a threshold."""
    rank = min(max(rank, 1), seen.size)
    return _usable(float(np.partition(seen, seen.size - rank)[seen.size - rank]))


def _usable(value: float) -> float:
    return _within(value) if math.isfinite(value) else HUGE


def _within(value: float) -> float:
    return min(max(value, TINY), HUGE)
