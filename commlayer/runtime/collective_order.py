"""Issues collectives in plan order, whatever the order in which buckets become ready. Knows flows and groups; no network.

All ranks must call collectives in one order. Ready order differs between ranks (an unused parameter, another branch), so a
bucket waits until those before it in the plan are ready. Whoever makes a bucket ready issues it and those it held up: the
order is what matters, not the thread, and a hand-over to a thread would cost more than the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from commlayer.runtime.flow import Flow


class CollectiveOrder:
    """`ready(flow)` calls `issue` on flows strictly in the order given."""

    def __init__(self, flows: Sequence[Flow], issue: Callable[[Flow], None]) -> None:
        self._flows, self._issue = flows, issue
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Before a step."""
        self._next = 0
        self._ready: set[int] = set()

    def ready(self, flow: Flow) -> None:
        with self._lock:
            self._ready.add(flow.bucket.id)
            while self._next < len(self._flows) and self._flows[self._next].bucket.id in self._ready:
                following = self._flows[self._next]
                self._next += 1
                self._issue(following)
