"""Measures how long a worker computes in each step, without its waits."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, cast

import torch

LAPS_KEPT = 256
"""Most laps that wait for `take`; older ones are dropped."""


class Lap(NamedTuple):
    """A step, counted from 0, and its seconds from the end of the previous averaging to the end of its backward pass."""

    step: int
    seconds: float


class Stopwatch:
    """Always on: a step costs two clock reads. On CUDA it times events of the stream, since enqueued work is not yet computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._begin: float | torch.cuda.Event | None = None
        self._skipped_s = 0.0
        self._laps: deque[tuple[int, float | torch.cuda.Event, float | torch.cuda.Event, float]] = deque(maxlen=LAPS_KEPT)

    def start(self) -> None:
        """An averaging has ended. Calling it again discards the time since the first call."""
        self._begin, self._skipped_s = self._now(), 0.0

    def drop(self) -> None:
        """The current step computes nothing: no lap."""
        self._begin = None

    def skip(self, seconds: float) -> None:
        """Excludes these seconds, which were spent waiting or on other work."""
        self._skipped_s += seconds

    def stop(self, step: int) -> None:
        if self._begin is not None:
            self._laps.append((step, self._begin, self._now(), self._skipped_s))
            self._begin = None

    def take(self) -> list[Lap]:
        """The completed laps that were not taken before."""
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
            laps.append(Lap(step, max(0.0, seconds - skipped_s)))
        return laps

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
