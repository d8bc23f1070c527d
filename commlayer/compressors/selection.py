"""Selects about k entries, or runs of neighboring entries, of largest magnitude from gradient + residual.

Small tensors are sorted. Larger ones are scanned once with a tracked threshold that aims slightly above k. If more than `room`
entries are found, only the k largest of them are kept. If fewer than ENOUGH * k are found, a second scan uses a lower
threshold. So the count is within 10 % of k, if there are as many nonzero entries.

The tracked threshold is a scalar Kalman filter in log space. It combines two measurements, each weighted by its certainty:
- The count of the last scan shows exactly how far the last threshold was off, but the tensor has changed since.
- A strided sample of magnitudes is from this step, but is noisy.

While counts predict well, the sample is small, and moves the threshold by the slope: how fast the count falls when the
threshold rises. Otherwise a quantile of the sample sets the threshold. The quantile also works if many magnitudes are equal, as
in residuals of a constant gradient. If a sample disagrees by more than its own noise, magnitudes have jumped: a larger sample
then replaces the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from commlayer.compressors import kernels
from commlayer.compressors.codec import State
from commlayer.compressors.kernels import Array

FEW_ENTRIES, FEW_RUNS = 16384, 1024
"""Numbers of entries and runs up to which comparing all is as cheap as tracking a threshold."""

ENOUGH = 0.9
SPARE = 16


class Picked(NamedTuple):
    """Result of a selection. `idx`: the increasing numbers of the selected entries or runs. `val`: values of the entries, or
    sums of the runs' magnitudes. `finite`: True if all of x + residual is finite."""

    idx: Array
    val: Array
    finite: bool


def capacity(n: int, k: int, few: bool) -> int:
    """Returns the maximum number of entries or runs that `pick` returns."""
    return k if few else min(n, k + max(1, k // 10))


def scratch(n: int, k: int, few: bool, run: int = 1) -> State:
    """Creates temporary memory for the selection of k of n entries or runs."""
    candidates = k if few else min(n, k + k // 2 + SPARE)
    sample = (n if run > 1 else 0) if few else max(sample_sizes(n, target_count(n, k)))
    return {
        "idx": np.empty(candidates, np.int32),
        "val": np.empty(candidates, np.float32),
        "sample": np.empty(sample, np.float32),
        "words": np.empty(n if few else max(sample, candidates), np.int32),
    }


def pick(k: int, few: bool, x: Array, residual: Array | None, state: State, run: int = 1) -> Picked:
    """Moves the selected entries out of x + residual; the residual keeps the others. With run > 1, selected runs stay in the
    residual until the codec writes rounding errors to it: a second read of few contiguous runs is cheap.

    If x + residual is not finite, the residual becomes its finite part. `few`: True compares all entries or runs.
    """
    n, memory = -(-len(x) // run), state["_scratch"]
    idx, val, start = memory["idx"], memory["val"], rotation(n, state)
    if not few:
        tracked = estimate(k, n, _draw(x, residual, run), state)
        return complete(k, x, residual, state, tracked, *_select(x, residual, run, tracked.threshold, start, idx, val), run)
    scores, rest = x, residual
    if run > 1:
        scores, rest = memory["sample"], None
        _draw(x, residual, run)(0, scores)
    cut = kth_magnitude(k, scores, rest, memory["words"]) if n else TINY
    count, _, finite = _select(x, residual, run, cut, start, idx, val)
    state["step"] += finite
    return Picked(idx[:count], val[:count], finite)


def complete(
    k: int, x: Array, residual: Array | None, state: State, tracked: Estimate, count: int, overflow: int, finite: bool,
    run: int = 1,
) -> Picked:
    """Completes `pick` after the scan of a larger tensor: scans again if too few were found, drops the smallest if too many."""
    n, memory = -(-len(x) // run), state["_scratch"]
    idx, val, start, on = memory["idx"], memory["val"], rotation(n, state), kernels.of(x)
    taken = residual if run == 1 else None
    if finite and count < ENOUGH * k and tracked.threshold > TINY:
        v = x if residual is None else residual
        if taken is not None:
            on.scatter_add(taken, idx[:count], val[:count])
        tracked = estimate_lower(k, n, _draw(v, None, run), state, tracked, count)
        count, overflow, _ = _select(v, None, run, tracked.threshold, start, idx, val)
        if taken is not None:
            on.scatter_add(taken, idx[:count], -val[:count])
    if finite:
        update(k, n, count + overflow, tracked, state)
        if count > capacity(n, k, False):
            count = on.trim(taken, n, idx, val, count, k, start, memory["words"])
    return Picked(idx[:count], val[:count], finite)


def _draw(x: Array, residual: Array | None, run: int) -> Draw:
    on = kernels.of(x)
    return partial(on.sample_abs, x, residual) if run == 1 else partial(on.score_runs, x, residual, run)


def _select(
    x: Array, residual: Array | None, run: int, threshold: float, start: int, idx: Array, val: Array
) -> tuple[int, int, bool]:
    """Returns the number selected, the number that did not fit, and True if all of x + residual is finite."""
    on = kernels.of(x)
    found: tuple[int, int, bool] = (on.select(x, residual, threshold, start, idx, val) if run == 1 else
                                    on.select_runs(x, residual, run, threshold, start, idx, val))
    return found


EXPECTED = 64
"""Number of sampled magnitudes that should exceed a correct threshold. Their noise is 12 %; the next count corrects the
rest."""

CALM, CALM_SHARE = 0.003, 8
"""Variance of the log count below which counts alone predict the threshold to about 5 %. The sample then has 1 / CALM_SHARE of
the usual size, enough to detect jumps."""

SAMPLE_FLOOR, SAMPLE_SHARE = 8192, 64
"""A sample has at most max(SAMPLE_FLOOR, numel / SAMPLE_SHARE) elements, so it is cheap compared with the scan."""

LIFT = 1.0
"""The target count exceeds k by this multiple of the sample's noise, because dropping entries costs far less than a second
scan."""

LARGER = 4
"""Factor by which a sample that replaces the threshold is larger than the usual sample."""

SIGMAS = 4.0
TINY = 2.0**-126
"""Smallest normal float32, the smallest threshold. All numbers reach it except zeros and denormals, which the CPU may flush to
zero."""

HUGE = kernels.MOST["fp32"]
GAIN, TREND = 0.5, 0.15
"""Fractions of a count's error that change the next threshold (GAIN) and the trend (TREND). The trend follows growing
residuals."""

PROBE = 1.2
"""The slope is measured between threshold / PROBE and threshold * PROBE."""

SLOPE_START, SLOPES = 4.0, (0.5, 40.0)
DOUBT_START, DOUBT_MOST = 0.04, 0.25
MEMORY = 0.3
"""Weight of the newest measurement in the averages of slope and doubt."""

TREND_MOST = 0.5
STATE_LIMITS = {
    "threshold": (0.0, HUGE),
    "trend": (-TREND_MOST, TREND_MOST),
    "slope": SLOPES,
    "doubt": (0.0, DOUBT_MOST),
    "step": (0, 1 << 62),
}
"""Allowed range of each number in a state: every value that steps can produce."""

GOLDEN = 0x9E3779B1

Draw: TypeAlias = "Callable[[int, Array], None]"
"""A function of (offset, tensor) that fills the tensor with magnitudes of this step, evenly spaced from the offset on."""


class Estimate(NamedTuple):
    """This step's threshold and the measurements of estimate(). Only update() writes the values to the state, so a failed step
    changes nothing."""

    threshold: float
    slope: float
    shift: float | None
    """By how much the sample changed the logarithm of the expected number of selected entries; None: the sample replaced the
    threshold."""


def threshold_state() -> State:
    """Creates the state before the first step, which finds the first threshold by sampling. `doubt` is the variance of the
    logarithm of the number of selected entries, before sampling."""
    return {"threshold": 0.0, "trend": 0.0, "slope": SLOPE_START, "doubt": DOUBT_START, "step": 0}


def target_count(n: int, k: int) -> int:
    """Returns the number of entries that the threshold should select: k plus the sampling error, since too many entries cost
    less than too few."""
    expected = sample_sizes(n, k)[0] * k / n
    return min(n, round(k + LIFT * k / math.sqrt(expected)))


def sample_sizes(n: int, k: int) -> tuple[int, int]:
    """Returns (usual, larger) sizes of a sample. Sizes are odd, so the stride is not a multiple of a row length that is a power
    of two."""
    usual = min(EXPECTED * n // k, max(SAMPLE_FLOOR, n // SAMPLE_SHARE)) | 1
    return min(usual, n), min(LARGER * usual | 1, n)


class Sampling(NamedTuple):
    """How the threshold is sampled in this step.

    `usual` and `larger` are sizes of samples. `rank` is the rank of the threshold in the larger one. `expected` is the number
    of magnitudes in the usual one that should exceed the threshold. `calm`: True if counts alone predict the threshold well.
    """

    usual: int
    larger: int
    rank: int
    expected: float
    calm: bool


def sampling(n: int, k: int, state: State) -> Sampling:
    k = target_count(n, k)
    usual, larger = sample_sizes(n, k)
    calm = state["doubt"] < CALM
    if calm:
        usual = min(usual, usual // CALM_SHARE | 1)
    return Sampling(usual, larger, min(max(round(larger * k / n), 1), larger), usual * k / n, calm)


def estimate(k: int, n: int, draw: Draw, state: State) -> Estimate:
    """Returns the threshold that slightly more than k of n magnitudes reach."""
    sample, words = state["_scratch"]["sample"], state["_scratch"]["words"]
    usual, larger, rank, expected, calm = sampling(n, k, state)
    cut, offset = state["threshold"], rotation(n, state)
    magnitudes = sample[:usual]
    draw(offset, magnitudes)
    passed = _passing(magnitudes, cut)
    shift: float | None = None
    if cut <= TINY or abs(passed - expected) > SIGMAS * math.sqrt(expected) + 2:
        magnitudes = sample[:larger]
        draw(offset, magnitudes)
        cut = _quantile(magnitudes, rank, words)
    else:
        trust = state["doubt"] / (state["doubt"] + 1 / expected)
        shift = trust * math.log(max(passed, 0.5) / expected)
        if calm:
            cut = clamp_threshold(cut * math.exp(shift / state["slope"]))
        else:
            least = clamp_threshold(cut / PROBE)
            near = _passing(magnitudes, least)
            cut = _quantile(magnitudes, min(round(max(passed, 0.5) * math.exp(-shift)), near), words) if near else least
    slope = state["slope"]
    above, below = _passing(magnitudes, cut * PROBE), _passing(magnitudes, cut / PROBE)
    if 0 < above < below:
        measured = math.log(below / above) / (2 * math.log(PROBE))
        slope += MEMORY * (min(max(measured, SLOPES[0]), SLOPES[1]) - slope)
    return Estimate(cut, slope, shift)


def estimate_lower(k: int, n: int, draw: Draw, state: State, estimated: Estimate, passed: int) -> Estimate:
    """Returns a lower threshold, after only `passed` magnitudes reached the first one."""
    k = target_count(n, k)
    larger = sample_sizes(n, k)[1]
    magnitudes = state["_scratch"]["sample"][:larger]
    draw(rotation(n, state), magnitudes)
    by_slope = estimated.threshold * math.exp(math.log(max(passed, 0.5) / k) / estimated.slope)
    sampled = _quantile(magnitudes, round(larger * k / n), state["_scratch"]["words"])
    return Estimate(clamp_threshold(min(by_slope, sampled)), estimated.slope, None)


def update(k: int, n: int, passed: int, estimated: Estimate, state: State) -> None:
    """Updates the state from the number of entries that reached the threshold, including those that did not fit."""
    error = min(max(math.log(max(passed, 0.5) / target_count(n, k)), -1.0), 1.0)
    gain = GAIN
    if estimated.shift is None:
        state["trend"], gain = 0.0, 1.0
    else:
        state["doubt"] += MEMORY * (min((error + estimated.shift) ** 2, DOUBT_MOST) - state["doubt"])
    state["slope"] = estimated.slope
    state["trend"] = min(max(state["trend"] + TREND * error, -TREND_MOST), TREND_MOST)
    state["threshold"] = clamp_threshold(estimated.threshold * math.exp((gain * error + state["trend"]) / estimated.slope))
    state["step"] += 1


def rotation(n: int, state: State) -> int:
    """Returns the position at which this step's scan starts. The start moves in each step, so the entries that do not fit are
    spread over the tensor."""
    return int(state["step"]) * GOLDEN % n if n else 0


def kth_magnitude(k: int, x: Array, residual: Array | None, words: Array) -> float:
    """Returns the k-th largest magnitude of x + residual, or TINY if fewer than k are above TINY."""
    value = kernels.of(x).kth_abs(x, residual, min(max(k, 1), len(x)), words)
    return clamp_threshold(value) if math.isfinite(value) else HUGE


def _quantile(magnitudes: Array, rank: int, words: Array) -> float:
    """Returns the rank-th largest magnitude, as a threshold."""
    return kth_magnitude(rank, magnitudes, None, words)


def _passing(magnitudes: Array, cut: float) -> int:
    return int(kernels.of(magnitudes).count_above(magnitudes, clamp_threshold(cut)))


def clamp_threshold(value: float) -> float:
    return min(max(value, TINY), HUGE)
