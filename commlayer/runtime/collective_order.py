"""Issues collectives in plan order, whatever the order in which buckets become ready. Knows buckets and groups; no network.

All ranks must call collectives in one order. Ready order differs between ranks (an unused parameter, another branch), so a
bucket waits until those before it in the plan are ready. Whoever makes a bucket ready issues it and those it held up: the
order is what matters, not the thread, and a hand-over to a thread would cost more than the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from commlayer.runtime.bucket import WorkerBucket


class CollectiveOrder:
    """`ready(bucket)` calls `issue` on buckets strictly in the order given."""

    def __init__(self, buckets: Sequence[WorkerBucket], issue: Callable[[WorkerBucket], None]) -> None:
        self._buckets, self._issue = buckets, issue
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Before a step."""
        self._next = 0
        self._ready: set[int] = set()

    def ready(self, bucket: WorkerBucket) -> None:
        with self._lock:
            self._ready.add(bucket.id)
            while self._next < len(self._buckets) and self._buckets[self._next].id in self._ready:
                following = self._buckets[self._next]
                self._next += 1
                self._issue(following)
