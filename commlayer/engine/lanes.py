"""A lane: one thread that runs jobs one at a time, the most urgent first."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections.abc import Callable

Urgency = tuple[int, ...]
"""Smaller is sooner. Jobs of equal urgency run in the order in which they were put."""
_LAST: Urgency = (1 << 62,)


class Lane:
    """`put(job)` may be called from any thread. The thread is a daemon, so it never delays the end of a process."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._jobs: list[tuple[Urgency, int, Callable[[], None] | None]] = []
        self._there: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One item per queued job."""
        self._numbers = itertools.count()
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name=f"commlayer-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None], urgency: Urgency = ()) -> None:
        self._put(job, urgency)

    def _put(self, job: Callable[[], None] | None, urgency: Urgency) -> None:
        heapq.heappush(self._jobs, (urgency, next(self._numbers), job))  # atomic: it compares only integers
        self._there.put(None)

    def _next(self) -> Callable[[], None] | None:
        self._there.get()
        return heapq.heappop(self._jobs)[-1]

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except BaseException as error:
                self._on_error(error)

    def drain(self, timeout_s: float) -> bool:
        """Waits for all jobs put before. Returns whether they ran in time."""
        passed = threading.Event()
        self.put(passed.set, _LAST)
        return passed.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._put(None, _LAST)
        self._thread.join(timeout_s)
