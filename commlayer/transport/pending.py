"""A torch.distributed collective in progress: waits with a deadline, and one-line errors."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

from commlayer.errors import CommError, DeadlineExceeded

GROUP = "a peer of the process group"
"""A collective does not report which peer failed; the heartbeats do."""
LOOK_S = 0.5
POLL_S = 2e-4


class Pending:
    def __init__(self, work: Any, what: str, *, on_device: bool) -> None:
        self._work, self._what, self._on_device = work, what, on_device

    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        work = self._work
        return work is None or bool(work.is_completed())

    def over(self, deadline: float, failed: Callable[[], BaseException | None] = lambda: None) -> None:
        """Like `wait`, but on CUDA the host waits too, so the current stream is not blocked during the wait."""
        while self._on_device and not self.is_over() and time.monotonic() < deadline:
            if (cause := failed()) is not None:
                raise cause
            time.sleep(POLL_S)
        self.wait(deadline, failed)

    def wait(self, deadline: float, failed: Callable[[], BaseException | None] = lambda: None) -> None:
        """Waits until `deadline` (time.monotonic()), or until failed() returns an error, which is raised.

        On CUDA `wait` orders the current stream and does not block the host; there the group's own timeout applies.
        """
        work = self._work
        with named(self._what):
            if self._on_device:
                work.wait()
                return
            while work is not None:
                left_s = deadline - time.monotonic()
                try:
                    work.wait(datetime.timedelta(seconds=max(min(left_s, LOOK_S), 0.001)))
                    work = self._work = None  # the work object would keep its group's connections open
                except RuntimeError as error:
                    if not _timed_out(error) or left_s <= 0:
                        raise
                    if (cause := failed()) is not None:
                        raise cause from None


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Turns torch's errors into a one-line CommError that names the failed operation."""
    try:
        yield
    except RuntimeError as error:
        kind = DeadlineExceeded if _timed_out(error) else CommError
        raise kind(f"{what} failed: {str(error).splitlines()[0]}", peer=GROUP) from None


def _timed_out(error: RuntimeError) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()
