"""What records of storms say: throughput kept, seconds to a loss, and how fast exchanges go on after a killed home."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bench.storms.reports import Stepped
from bench.storms.storm import KILL, KINDS, Record

SMOOTHED_S = 2.0
"""A loss is the mean of all homes' training losses within this time before."""


def steps_per_s(record: Record) -> float:
    """Steps of the job, which homes take together."""
    at = [_newest(record, now) for now in (record.begin_s, record.end_s)]
    return (at[1] - at[0]) / (record.end_s - record.begin_s)


def batches_per_s(record: Record) -> float:
    """Batches of all homes."""
    within = [step for step in _all(record) if record.begin_s < step.at_s <= record.end_s]
    return len(within) / (record.end_s - record.begin_s)


def _newest(record: Record, now: float) -> int:
    return max((step.step for step in _all(record) if step.at_s <= now), default=0)


def _all(record: Record) -> list[Stepped]:
    return sorted((step for steps in record.steps.values() for step in steps), key=lambda step: step.at_s)


def loss_at(record: Record, seconds: float) -> float:
    """The loss after that time; nan if no home trained."""
    now = record.begin_s + seconds
    losses = [step.loss for step in _all(record) if now - SMOOTHED_S < step.at_s <= now]
    return statistics.fmean(losses) if losses else math.nan


def seconds_to(record: Record, loss: float) -> float:
    """When this loss is reached; infinite if it is not."""
    steps = [step for step in _all(record) if step.at_s > record.begin_s]
    times, sums = np.array([step.at_s for step in steps]), np.cumsum([0.0, *(step.loss for step in steps)])
    first = np.searchsorted(times, times - SMOOTHED_S, side="right")
    means = (sums[1:] - sums[first]) / (np.arange(len(steps)) + 1 - first)
    reached = times[(times >= record.begin_s + SMOOTHED_S) & (means <= loss)] - record.begin_s
    return float(reached[0]) if len(reached) else math.inf


def exchange_times(steps: Sequence[Stepped]) -> list[float]:
    """When a home had completed each of its exchanges."""
    return [step.at_s for before, step in pairwise(steps) if step.exchanges > before.exchanges]


def usual_s(record: Record) -> float:
    """Median seconds between two exchanges of a home."""
    gaps = [b - a for steps in record.steps.values() for a, b in pairwise(exchange_times(steps))]
    return statistics.median(gaps) if gaps else 0.0


def recoveries(record: Record, interval_s: float) -> list[float]:
    """For each killed home: seconds from the coordinator's decision until the last survivor has completed its next exchange.
    They begin later if this exchange was due later, or if it waited for the decision on another home. `interval_s`: usual time
    between two exchanges."""
    result = []
    for strike in record.strikes:
        decisions = [at for at, name in record.removals if strike.kind == KILL and name == strike.name and at >= strike.at_s]
        if decisions:
            later = [at for at, _ in record.removals if at >= decisions[0]]
            late = [_late_s([steps[0].at_s, *exchange_times(steps)], later, interval_s)
                    for name, steps in record.steps.items() if name != strike.name]
            result += [max(each)] if (each := [s for s in late if s is not None]) else []
    return result


def _late_s(times: Sequence[float], decisions: Sequence[float], interval_s: float) -> float | None:
    """None for a home that was not there, or gone before its next exchange. `decisions`: in order of time."""
    at = bisect.bisect_right(times, decisions[0])
    if not 0 < at < len(times):
        return None
    last = max(decided for decided in decisions if decided <= times[at])
    return max(0.0, times[at] - max(last, times[at - 1] + interval_s))


def percentile(values: Sequence[float], share: float) -> float:
    """
    >>> percentile([3, 1, 2], 0.5), percentile([1, 2, 3], 0.95)
    (2, 3)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def faults(record: Record) -> str:
    """How many faults of each kind struck."""
    counts = Counter(strike.kind for strike in record.strikes)
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]) or "none"
