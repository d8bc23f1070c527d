"""Deadlines for calls that wait in torch's store."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from commlayer.errors import CommError, DeadlineExceeded

T = TypeVar("T")
GRACE_S = 1.0
"""Seconds added to a call's own deadline. The call's own error should come first, since it contains more information."""


def run_bounded(call: Callable[[], T], deadline_s: float, what: str, peer: str) -> T:
    """Runs call(), which must observe the same deadline itself. Raises DeadlineExceeded for `peer` if the call does not return
    GRACE_S seconds after the deadline.

    The call runs in a daemon thread. After a timeout that thread continues, but does not keep the process alive.
    """
    over: Future[T] = Future()

    def run() -> None:
        try:
            over.set_result(call())
        except BaseException as error:
            over.set_exception(error)

    threading.Thread(target=run, name="commlayer-store", daemon=True).start()
    try:
        return over.result(deadline_s + GRACE_S)
    except TimeoutError:
        if over.done():
            raise
        raise DeadlineExceeded(f"{what}: the process group's store has not answered within {deadline_s:g} s",
                               peer=peer) from None


ANY_PEER = "a peer of the process group"
"""Peer name in errors of collectives. A collective does not report which peer failed; the heartbeats do."""
CHECK_S = 0.5
POLL_S = 2e-4


class PendingCollective:
    def __init__(self, work: Any, what: str, *, on_device: bool) -> None:
        self._work, self._what, self._on_device = work, what, on_device

    def is_over(self) -> bool:
        """Returns whether the collective has ended, so `wait` would return at once."""
        work = self._work
        return work is None or bool(work.is_completed())

    def over(self, deadline: float, failed: Callable[[], BaseException | None] = lambda: None) -> None:
        """Waits like `wait`, but on CUDA the host waits too, so the current stream is not blocked during the wait."""
        while self._on_device and not self.is_over() and time.monotonic() < deadline:
            if (cause := failed()) is not None:
                raise cause
            time.sleep(POLL_S)
        self.wait(deadline, failed)

    def wait(self, deadline: float, failed: Callable[[], BaseException | None] = lambda: None) -> None:
        """Waits until the collective has ended. Raises an error after `deadline` (time.monotonic()), or when failed() returns
        an error.

        On CUDA `wait` orders the current stream after the collective and does not block the host. In that case the process
        group's own timeout applies.
        """
        work = self._work
        with torch_errors(self._what):
            if self._on_device:
                work.wait()
                return
            while work is not None:
                left_s = deadline - time.monotonic()
                try:
                    work.wait(datetime.timedelta(seconds=max(min(left_s, CHECK_S), 0.001)))
                    work = self._work = None  # the work object would keep its group's connections open
                except RuntimeError as error:
                    if not _timed_out(error) or left_s <= 0:
                        raise
                    if (cause := failed()) is not None:
                        raise cause from None


@contextlib.contextmanager
def torch_errors(what: str) -> Iterator[None]:
    """Context manager that turns torch's errors into a one-line CommError that names the failed operation."""
    try:
        yield
    except RuntimeError as error:
        kind = DeadlineExceeded if _timed_out(error) else CommError
        raise kind(f"{what} failed: {str(error).splitlines()[0]}", peer=ANY_PEER) from None


def _timed_out(error: RuntimeError) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()
