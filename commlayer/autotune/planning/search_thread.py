"""Runs plan searches on a thread of rank 0, while training continues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from commlayer.autotune.planning.candidate import Candidate
from commlayer.autotune.state import SearchRequest

if TYPE_CHECKING:
    from commlayer.autotune.job_actions import JobActions

SEARCH_S = 60.0
"""Seconds after which a search is aborted for which training waits. Planning takes seconds."""

SearchEnd = tuple[SearchRequest, Candidate | None, str]
"""A search, the plan that it found, and the error if it found none."""


class SearchThread:
    def __init__(self, actions: JobActions) -> None:
        self._do = actions
        self._thread: threading.Thread | None = None
        self._results: deque[SearchEnd] = deque()

    def start(self, order: SearchRequest) -> None:
        """Starts a search after the end of the previous one."""
        self.join()
        if self._thread is not None and self._thread.is_alive():
            # The search hangs: it is aborted before the other ranks time out.
            self._do.stop_search()
            self._thread.join()
        try:
            limits = self._do.limits()
        except Exception as error:
            self._results.append((order, None, f"{type(error).__name__}: {error}"))
            return

        def search() -> None:
            try:
                self._results.append((order, self._do.search(order, limits), ""))
            except Exception as error:
                self._results.append((order, None, f"{type(error).__name__}: {error}"))

        self._thread = threading.Thread(target=search, name="commlayer-planner", daemon=True)
        self._thread.start()

    def join(self, most_s: float = SEARCH_S) -> None:
        """Waits until the search has ended, if one is in progress, for at most `most_s` seconds and never above SEARCH_S."""
        if self._thread is not None:
            self._thread.join(min(most_s, SEARCH_S))

    def results(self) -> Iterator[SearchEnd]:
        """Yields each result once."""
        while self._results:
            yield self._results.popleft()
