"""Defines threads that run queued jobs one at a time."""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import threading
from collections.abc import Callable

Urgency = tuple[int, ...]
"""Priority of a job; smaller tuples run first. Jobs of equal priority run in the order in which they were queued."""
_LAST: Urgency = (1 << 62,)
NEVER = math.inf
"""Deadline of waits on a lane. Such a wait ends when the training thread's deadline passes, because the training thread then
sets an error."""


class Lane:
    """A thread that runs queued jobs, the most urgent first. Any thread can call `put`. The thread is a daemon, so it does not
    delay the end of the process."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._jobs: list[tuple[Urgency, int, Callable[[], None] | None]] = []
        self._queued: queue.SimpleQueue[None] = queue.SimpleQueue()
        """A queue with one item for each queued job; the thread waits on this queue."""
        self._numbers = itertools.count()
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name=f"commlayer-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None] | None, urgency: Urgency = ()) -> None:
        """Queues a job. None ends the thread."""
        heapq.heappush(self._jobs, (urgency, next(self._numbers), job))  # atomic: it compares only integers
        self._queued.put(None)

    def _next(self) -> Callable[[], None] | None:
        self._queued.get()
        return heapq.heappop(self._jobs)[-1]

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except BaseException as error:
                self._on_error(error)

    def drain(self, timeout_s: float) -> bool:
        """Waits until all jobs that are queued now have run. Returns True if that took less than `timeout_s` seconds."""
        passed = threading.Event()
        self.put(passed.set, _LAST)
        return passed.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        self.put(None, _LAST)
        self._thread.join(timeout_s)
