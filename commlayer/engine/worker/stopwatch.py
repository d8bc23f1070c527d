"""Measures how long a worker computes in each step, without its waits for other ranks."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, cast

import torch

LAPS_KEPT = 256
"""Largest number of measured steps that are kept for `take`; older measurements are dropped."""


class StepTiming(NamedTuple):
    """Computation time of one step. `step` counts from 0. `seconds` extends from the end of the previous averaging to the end
    of this step's backward pass; under local steps, from one optimizer step to the next."""

    step: int
    seconds: float


class Stopwatch:
    """Measures the computation time of every step, without waits for other ranks. On CUDA it records events in the stream,
    because the host only enqueues work."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._begin: float | torch.cuda.Event | None = None
        self._skipped_s = 0.0
        self._laps: deque[tuple[int, float | torch.cuda.Event, float | torch.cuda.Event, float]] = deque(maxlen=LAPS_KEPT)

    def start(self) -> None:
        """Starts to time a step, after an averaging has ended. Calling it again restarts the time."""
        self._begin, self._skipped_s = self._now(), 0.0

    def drop(self) -> None:
        """Discards the current measurement, because this step has no computation."""
        self._begin = None

    def skip(self, seconds: float) -> None:
        """Excludes `seconds` of waiting or other work from the current measurement."""
        self._skipped_s += seconds

    def stop(self, step: int) -> None:
        if self._begin is not None:
            self._laps.append((step, self._begin, self._now(), self._skipped_s))
            self._begin = None

    def take(self) -> list[StepTiming]:
        """Returns the measurements that are complete and were not returned before."""
        laps = []
        while self._laps:
            step, begin, end, skipped_s = self._laps[0]
            if self._on_device:
                if not cast(torch.cuda.Event, end).query():
                    break
                seconds = cast(torch.cuda.Event, begin).elapsed_time(cast(torch.cuda.Event, end)) / 1e3
            else:
                seconds = cast(float, end) - cast(float, begin)
            self._laps.popleft()
            laps.append(StepTiming(step, max(0.0, seconds - skipped_s)))
        return laps

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
