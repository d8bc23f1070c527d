"""Selects about k entries, or runs of neighbouring entries, of largest magnitude from gradient + residual.

Small tensors are sorted. Larger ones are scanned once at a tracked threshold that aims slightly above k. More than `room`
entries are trimmed to the k largest of them; fewer than ENOUGH * k cost a second scan at a lower threshold. So the count is
within 10 % of k, if there are as many non-zero entries.

The tracked threshold is a scalar Kalman filter in log space. It joins two measurements, each weighted by its certainty:
- The count of the last scan states exactly how far the last threshold was off, but the tensor has changed since.
- A strided sample of magnitudes belongs to this step, but is noisy.
While counts predict well, the sample is small and moves the threshold by the slope: how fast the count falls when the
threshold rises. Otherwise a quantile of the sample sets the threshold. That also works where magnitudes come in clumps, as in
residuals of a constant gradient. A sample that disagrees by more than its own noise signals a jump: a larger sample then
replaces the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from commlayer.compressors import kernels
from commlayer.compressors.codec import State

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

EXACT_NUMEL = 16384
"""Up to this size sorting is as cheap as tracking."""

ENOUGH = 0.9
SPARE = 16


class Picked(NamedTuple):
    """Positions, increasing, and values of the entries taken from the residual, and whether all of x + residual is finite."""

    idx: torch.Tensor
    val: torch.Tensor
    finite: bool


def sorts(n: int, exact: bool) -> bool:
    return exact or n <= EXACT_NUMEL


def room(n: int, k: int, exact: bool) -> int:
    """The most entries that `pick` returns."""
    return k if sorts(n, exact) else min(n, k + max(1, k // 10))


def scratch(n: int, k: int, exact: bool) -> State:
    """Memory of one step. The caller may use `error` after `pick`."""
    sorting = sorts(n, exact)
    candidates = k if sorting else min(n, k + k // 2 + SPARE)
    sample = 0 if sorting else sample_room(n, k)
    return {
        "idx": torch.empty(candidates, dtype=torch.int32),
        "val": torch.empty(candidates),
        "error": torch.empty(room(n, k, exact)),
        "sample": torch.empty(sample),
        "words": torch.empty(n if sorting else max(sample, candidates), dtype=torch.int32),
    }


def pick(k: int, exact: bool, x: torch.Tensor, residual: torch.Tensor | None, state: State) -> Picked:
    """Takes entries out of x + residual; the residual keeps the others. If not finite, it holds the finite part of x."""
    n, memory = x.numel(), state["_scratch"]
    idx, val = memory["idx"], memory["val"]
    start = rotation(n, state)
    if sorts(n, exact):
        cut = kth_magnitude(k, x, residual, memory["words"]) if n else TINY
        count, _, finite = kernels.select(x, residual, cut, start, idx, val)
        state["step"] += finite
        return Picked(idx[:count], val[:count], finite)
    tracked = estimate(k, n, partial(kernels.sample_abs, x, residual), state)
    return complete(k, x, residual, state, tracked, *kernels.select(x, residual, tracked.threshold, start, idx, val))


def complete(
    k: int, x: torch.Tensor, residual: torch.Tensor | None, state: State, tracked: Estimate,
    count: int, overflow: int, finite: bool,
) -> Picked:
    """Completes `pick` after the scan of a larger tensor: scans again if there are too few entries, trims if too many."""
    n, memory = x.numel(), state["_scratch"]
    idx, val, start = memory["idx"], memory["val"], rotation(n, state)
    if finite and count < ENOUGH * k and tracked.threshold > TINY:
        v = x
        if residual is not None:
            v = residual
            kernels.scatter_add(v, idx[:count], val[:count])
        tracked = estimate_lower(k, n, partial(kernels.sample_abs, v, None), state, tracked, count)
        count, overflow, _ = kernels.select(v, None, tracked.threshold, start, idx, val)
        if residual is not None:
            kernels.scatter_add(residual, idx[:count], -val[:count])
    if not finite:
        return Picked(idx[:count], val[:count], False)
    update(k, n, count + overflow, tracked, state)
    if count > room(n, k, False):
        count = kernels.trim(residual, n, idx, val, count, k, start, memory["words"])
    return Picked(idx[:count], val[:count], True)


EXACT_RUNS = 1024
"""With at most this many runs, `pick_runs` scores all of them."""


class PickedRuns(NamedTuple):
    """Numbers of the runs, increasing, and whether all of x + residual is finite."""

    ids: torch.Tensor
    finite: bool


def runs_room(runs: int, k: int) -> int:
    """The most runs that `pick_runs` returns."""
    return k if runs <= EXACT_RUNS else min(runs, k + max(1, k // 10))


def runs_scratch(runs: int, k: int) -> State:
    few = runs <= EXACT_RUNS
    candidates = k if few else min(runs, k + k // 2 + SPARE)
    sample = runs if few else sample_room(runs, k)
    return {
        "ids": torch.empty(candidates, dtype=torch.int32),
        "scores": torch.empty(candidates),
        "sample": torch.empty(sample),
        "words": torch.empty(max(sample, candidates), dtype=torch.int32),
    }


def pick_runs(k: int, run: int, x: torch.Tensor, residual: torch.Tensor | None, state: State) -> PickedRuns:
    """Selects runs. The residual becomes x + residual where that is finite.

    Selected elements stay in the residual until the codec writes its rounding errors. Runs are few and contiguous, so the
    second read is cheap.
    """
    runs, memory = -(-x.numel() // run), state["_scratch"]
    ids, scores = memory["ids"], memory["scores"]
    start = rotation(runs, state)
    draw = partial(kernels.score_runs, x, residual, run)
    if runs <= EXACT_RUNS:
        draw(0, memory["sample"])
        cut = kth_magnitude(k, memory["sample"], None, memory["words"]) if runs else TINY
        count, _, finite = kernels.select_runs(x, residual, run, cut, start, ids, scores)
        state["step"] += finite
        return PickedRuns(ids[:count], finite)
    tracked = estimate(k, runs, draw, state)
    count, overflow, finite = kernels.select_runs(x, residual, run, tracked.threshold, start, ids, scores)
    if not finite:
        return PickedRuns(ids[:0], False)
    if count < ENOUGH * k and tracked.threshold > TINY:
        v = x if residual is None else residual
        tracked = estimate_lower(k, runs, partial(kernels.score_runs, v, None, run), state, tracked, count)
        count, overflow, _ = kernels.select_runs(v, None, run, tracked.threshold, start, ids, scores)
    update(k, runs, count + overflow, tracked, state)
    if count > runs_room(runs, k):
        count = kernels.trim(None, runs, ids, scores, count, k, start, memory["words"])
    return PickedRuns(ids[:count], True)


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
STATE_LIMITS = {
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


class Estimate(NamedTuple):
    """This step's threshold and what estimate() measured. update() writes it to the state, so a failed step changes nothing."""

    threshold: float
    slope: float
    shift: float | None
    """How far the sample moved the expected log count; None if the sample replaced the threshold."""


def threshold_state() -> State:
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


def estimate(k: int, n: int, draw: Draw, state: State) -> Estimate:
    """The cut that slightly more than k of n magnitudes pass."""
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
    """A lower cut, after one that only `passed` magnitudes reached."""
    k = aim(n, k)
    larger = sample_sizes(n, k)[1]
    magnitudes = state["_scratch"]["sample"][:larger]
    draw(rotation(n, state), magnitudes)
    by_slope = estimated.threshold * math.exp(math.log(max(passed, 0.5) / k) / estimated.slope)
    sampled = _quantile(magnitudes, round(larger * k / n), state["_scratch"]["words"])
    return Estimate(clamp_threshold(min(by_slope, sampled)), estimated.slope, None)


def update(k: int, n: int, passed: int, estimated: Estimate, state: State) -> None:
    """Learns from the number of entries that reached the cut, including those that did not fit."""
    error = min(max(math.log(max(passed, 0.5) / aim(n, k)), -1.0), 1.0)
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
    """Where this step's scan begins: it moves each step, so that entries without room are not always the same part."""
    return int(state["step"]) * GOLDEN % n if n else 0


def kth_magnitude(k: int, x: torch.Tensor, residual: torch.Tensor | None, words: torch.Tensor) -> float:
    """The k-th largest magnitude of x + residual, or TINY if fewer than k are above TINY."""
    value = kernels.kth_abs(x, residual, min(max(k, 1), x.numel()), words)
    return clamp_threshold(value) if math.isfinite(value) else HUGE


def _quantile(magnitudes: torch.Tensor, rank: int, words: torch.Tensor) -> float:
    """The rank-th largest magnitude, as a threshold."""
    return kth_magnitude(rank, magnitudes, None, words)


def _passing(magnitudes: torch.Tensor, cut: float) -> int:
    return kernels.count_above(magnitudes, clamp_threshold(cut))


def clamp_threshold(value: float) -> float:
    return min(max(value, TINY), HUGE)
