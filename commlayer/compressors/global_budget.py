"""Global budget and warm-up: sparse codecs whose number of entries is set before each step (`ratio_over` and `warmup` of a
plan).

BudgetedTopK has no name in plans; plans create it for `ratio_over` and `warmup`. On a worker, the step's code calls
`set_entries` for all buckets. A server sends as many entries as its members sent on average, so downloads have the size of
uploads.

share_budget() divides a plan's entries among its buckets as if one threshold selected from all of them. The last payload of
each bucket predicts how many of its entries are above a nearby threshold. The prediction is the payload's count times (its
least magnitude / threshold) to the power of its slope.

Warm-up: the ratio falls from 25 % to the plan's ratio over the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec.structs
import numpy as np
import numpy.typing as npt

from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import Codec, CodecWrapper, State, place
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer, Out, on_device
from commlayer.compressors.selection import ENOUGH, HUGE, SLOPES, clamp_threshold
from commlayer.compressors.topk import BlockThreshold, TopK
from commlayer.records import Spec

BUDGET_LIMITS: Mapping[str, tuple[float, float]] = {
    "entries": (0, payload.MAX_NUMEL),
    "sent": (-1, payload.MAX_NUMEL),
    "available": (0, payload.MAX_NUMEL),
    "least": (0.0, HUGE),
}
"""Allowed range of each number in a state. `slope` has the range in selection.STATE_LIMITS."""

MAX_SHARE = 8
"""A bucket gets at most MAX_SHARE times, and at least 1 / MAX_SHARE times, the entries that its own ratio would give."""

DIGITS = 6
"""Number of decimals of a slope. Devices add in different orders, but all must compute the same number of entries."""

UNKNOWN = -1
"""Value of `sent` if there is no last payload or it was flagged as not finite."""


class BudgetedTopK(CodecWrapper, frozen=True):
    """Wraps a sparse codec so that the number of entries in its payload can change in every step.

    State: `entries`, the entries of the next payload, and the inner state, whose memory is reallocated when `entries` changes.
    A worker's state also describes its last payload. `sent` is its number of entries, and `least` its smallest magnitude.
    `slope` is how steeply counts fall above that magnitude. `available` is the number of entries that can be sent if the
    payload had all that are not zero.
    """

    name: ClassVar[str] = "budgeted_topk"

    inner: TopK | BlockThreshold
    max_ratio: float
    """Largest ratio that can be requested."""
    mean_ratio: float
    """Mean of the ratios of the members' own codecs. A server with another ratio scales its number of entries by ratio /
    mean_ratio."""
    warmup_steps: int = 0
    shared: bool = False
    """True: this bucket's entries are part of a budget that several buckets share."""

    def __str__(self) -> str:
        return str(self.inner)

    def bound(self, spec: Spec) -> int:
        return max(int(self._with_entries(self._entries_at_ratio(spec, self.max_ratio), spec).bound(spec)),
                   int(self.inner.bound(spec)))

    def init(self, spec: Spec) -> State:
        return self.init_server(spec) | {"sent": UNKNOWN, "available": spec.numel, "least": 0.0, "slope": SLOPES[0]}

    def init_server(self, spec: Spec) -> State:
        entries = self._entries_at_ratio(spec, self.inner.ratio)
        return {"entries": entries, "inner": self.inner.init(spec), "_codec_entries": entries, "_codec": self.inner,
                "_spec": spec}

    def set_entries(self, state: State, entries: int) -> None:
        """Sets the number of entries from the next step on. A tracked threshold is changed so that about this many entries are
        expected to exceed it."""
        before, inner = state["entries"], state["inner"]
        if inner["threshold"] and entries != before:
            inner["threshold"] = clamp_threshold(inner["threshold"] * (before / entries) ** (1 / inner["slope"]))
        state["entries"] = entries

    def demand(self, state: State, ratio: float) -> Demand:
        """Returns what this bucket needs from the shared budget in the next step. `ratio`: the bucket's own ratio in that
        step."""
        spec, sent = state["_spec"], state["sent"]
        plain = self._entries_at_ratio(spec, ratio)
        fewest, most = max(1, plain // MAX_SHARE), self._entries_at_ratio(spec, min(self.max_ratio, MAX_SHARE * ratio))
        most = max(fewest, min(most, state["available"]))
        tail = None if sent == UNKNOWN else MagnitudeTail(sent, state["least"], state["slope"])
        return Demand(state["entries"], fewest, plain, most, tail)

    def start(self, x: Array, state: State, out: Out) -> int:
        return self.start_fused(x, None, state, out)

    def start_fused(self, x: Array, residual: Array | None, state: State, out: Out) -> int:
        self._resize(state, x)
        nbytes = int(state["_codec"].start_fused(x, residual, state["inner"], out))
        if self.shared and "sent" in state:
            head = payload.read(out[:nbytes], self.id, len(x))
            self._measure(state, UNKNOWN if head.flagged else head.entries)
        return nbytes

    def new_accumulator(self, spec: Spec, r: int) -> Any:
        return {**self.inner.new_accumulator(spec, r), "members": [0, 0]}

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        self.inner.add(r, payload_, acc, first=first)
        if (counted := acc.get("members")) is not None:
            head = payload.read(payload_, self.id, len(acc["sum"]))
            entries, members = (0, 0) if first else counted
            counted[:] = entries + head.entries, members + (not head.flagged)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        self.before_emit(acc, state)
        if acc["flagged"][0]:
            return payload.write_flagged(out, self.id, len(acc["sum"]))
        return self.start(acc["sum"], state, out)

    def before_emit(self, acc: Any, state: State) -> None:
        """Sets the number of entries to the members' average, before `emit`."""
        total, members = acc.get("members", (0, 0))
        if members:
            share = self.inner.ratio / self.mean_ratio
            spec, least = state["_spec"], max(1, self._entries_at_ratio(state["_spec"], self.inner.ratio) // MAX_SHARE)
            self.set_entries(state,
                             min(max(round(share * total / members), least), self._entries_at_ratio(spec, self.max_ratio)))

    def _resize(self, state: State, x: Array) -> None:
        if state["_codec_entries"] != state["entries"]:
            state["_codec"], state["_codec_entries"] = self._with_entries(state["entries"], state["_spec"]), state["entries"]
            fresh = {name: value for name, value in state["_codec"].init(state["_spec"]).items() if name.startswith("_")}
            if on_device(state["inner"]["_scratch"]["val"]):
                place(fresh, x.device)
            state["inner"] |= fresh

    def _measure(self, state: State, sent: int) -> None:
        state["sent"] = sent
        state["available"] = sent if 0 < sent < ENOUGH * state["entries"] else state["_spec"].numel
        if sent <= 0:
            return
        magnitudes = np.abs(kernels.to_host(state["inner"]["_scratch"]["val"][:sent]))
        least = magnitudes.min()
        # The inverse of Hill's estimate of a tail's exponent.
        rise = float(np.log((magnitudes / least).astype(np.float64)).mean())
        slope = min(max(1 / rise, SLOPES[0]), SLOPES[1]) if rise > 0 else SLOPES[1]
        state["least"], state["slope"] = float(least), round(slope, DIGITS)

    def _with_entries(self, entries: int, spec: Spec) -> Any:
        """Returns the inner codec with the ratio at which it sends `entries` entries of the bucket."""
        return msgspec.structs.replace(self.inner, ratio=min(1.0, max(entries - 0.5, 0.5) / max(spec.numel, 1)))

    def _entries_at_ratio(self, spec: Spec, ratio: float) -> int:
        return min(spec.numel, max(1, math.ceil(ratio * spec.numel)))


def with_budget(codec: Codec, mean_ratio: float | None, *, steps: int, shared: bool) -> Codec:
    """Wraps the innermost codecs in BudgetedTopK if their number of entries can vary. Wrappers around them stay.

    `mean_ratio`: the mean ratio of the payloads that a server receives. None: the codecs have no ratio. `steps`: length of the
    warm-up. `shared`: True if buckets share a budget.
    """
    if codec.parts:
        parts = {name: with_budget(part, mean_ratio, steps=steps, shared=shared) for name, part in codec.parts.items()}
        return msgspec.structs.replace(codec, **parts)
    shared = shared and isinstance(codec, TopK)
    if not isinstance(codec, TopK | BlockThreshold) or not (steps or shared):
        return codec
    max_ratio = max(codec.ratio * (MAX_SHARE if shared else 1), FIRST_RATIO if steps else 0.0)
    return BudgetedTopK(codec, min(1.0, max_ratio), codec.ratio if mean_ratio is None else mean_ratio, steps, shared)


Floats: TypeAlias = "npt.NDArray[np.float64]"

MOST_CHANGE = 2.0
"""Largest factor by which a bucket's entries change in one step. The prediction is accurate only near the last threshold."""

HALVINGS = 30
"""Number of bisection steps over the range of thresholds."""


ROUNDING = 1e-6
"""Bound of the rounding error of a number of entries that was computed by logarithm and exponential."""


class MagnitudeTail(NamedTuple):
    """The magnitudes in one payload: number of entries sent, the least magnitude, and the exponent of the tail."""

    sent: float
    least: float
    slope: float


EMPTY_TAIL = MagnitudeTail(1e-9, 1.0, 1.0)
"""Tail of a bucket that sent no entries, since 0 has no logarithm."""


class Demand(NamedTuple):
    """What one bucket needs from a budget of entries that several buckets share. `now`: entries of its last payload. `plain`:
    entries that its own ratio gives. `fewest`, `most`: limits for its next payload."""

    now: int
    fewest: int
    plain: int
    most: int
    tail: MagnitudeTail | None
    """Tail of the last payload. None: the tail is unknown, and the bucket keeps its share. A bucket that sent nothing because
    all was zero gets the fewest entries."""


def share_budget(demands: Sequence[Demand]) -> list[int]:
    """Returns the number of entries for each bucket. Their total equals the total of the buckets' own ratios. Equal demands
    give equal results.

    >>> calm, wild = MagnitudeTail(100, 0.1, 3.0), MagnitudeTail(100, 10.0, 3.0)
    >>> share_budget([Demand(100, 12, 100, 800, calm), Demand(100, 12, 100, 800, wild)])
    [50, 150]
    """
    total, now = sum(demand.plain for demand in demands), sum(demand.now for demand in demands)
    if not now:
        return [demand.plain for demand in demands]
    kept = np.array([demand.now * total / now for demand in demands])
    tails = [demand.tail if demand.tail is not None and demand.tail.sent else EMPTY_TAIL for demand in demands]
    sent, least, slope = np.array(tails, dtype=float).T
    level, base = np.log(least), np.log(sent)
    change = np.array([1.0 if demand.tail is None else MOST_CHANGE for demand in demands])
    fewest, most = np.array([(demand.fewest, demand.most) for demand in demands], dtype=float).T
    low, high = (np.log(np.minimum(np.maximum(limit, fewest), most)) for limit in (kept / change, kept * change))
    # The lowest and the highest threshold at which some bucket reaches a limit.
    below, above = float((level + (base - high) / slope).min()), float((level + (base - low) / slope).max())
    for _ in range(HALVINGS):
        middle = (below + above) / 2
        reached = np.exp(np.minimum(np.maximum(base + slope * (level - middle), low), high)).sum()
        below, above = (middle, above) if reached > total else (below, middle)
    wanted = np.exp(np.minimum(np.maximum(base + slope * (level - above), low), high))
    return _rounded(wanted, demands, total)


def _rounded(wanted: Floats, demands: Sequence[Demand], total: int) -> list[int]:
    """Rounds to integers with the given total. The remaining entries are given to the largest remainders first, then to buckets
    below their limit."""
    counts = np.floor(wanted + ROUNDING).astype(int)
    order = np.argsort(counts - wanted, kind="stable")
    fewest, most = np.array([demand.fewest for demand in demands]), np.array([demand.most for demand in demands])
    while rest := total - int(counts.sum()):
        room = most - counts if rest > 0 else counts - fewest
        takers = [i for i in order if room[i] > 0][: abs(rest)]
        if not takers:
            break  # every bucket is at its limit
        each = np.minimum(room[takers], max(1, abs(rest) // len(takers)))
        counts[takers] += each if rest > 0 else -each
    return [int(count) for count in counts]


FIRST_RATIO = 0.25
"""Ratio of the first step of a warm-up."""


def stage_count(ratio: float) -> int:
    """Returns the number of warm-up stages before the last one, which has the ratio itself. 0 if the ratio is not below
    FIRST_RATIO."""
    return max(0, math.ceil(math.log2(FIRST_RATIO / ratio)))


def stage_ratio(ratio: float, stage: int) -> float:
    """Returns the ratio in a stage of a warm-up that ends at `ratio`.

    >>> [round(stage_ratio(0.02, stage), 3) for stage in range(stage_count(0.02) + 1)]
    [0.25, 0.133, 0.071, 0.038, 0.02]
    """
    stages = stage_count(ratio)
    return ratio if stage == stages else FIRST_RATIO * (ratio / FIRST_RATIO) ** (stage / stages)


def ratio_at(ratio: float, steps: int, step: int) -> float:
    """Returns the ratio in step `step` of a warm-up over `steps` steps; with 0 steps there is no warm-up."""
    return stage_ratio(ratio, min(stage_count(ratio), step * stage_count(ratio) // steps)) if step < steps else ratio
