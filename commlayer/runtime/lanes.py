"""A lane: one thread that runs what it is given, in order. Knows nothing of buckets; errors go to a function."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Lane:
    """`put(job)` from any thread; jobs run one after the other. A daemon thread: it never holds up the end of a process."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name=f"commlayer-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._on_error(error)

    def drain(self, timeout_s: float) -> bool:
        """Whether all that was put before has run within that time."""
        passed = threading.Event()
        self._jobs.put(passed.set)
        return passed.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(timeout_s)
