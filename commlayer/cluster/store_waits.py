"""Deadlines for calls that wait in torch's store.

The store's own timeout does not work if its server stops responding: after the timeout the client sends a cancellation and
waits for the reply to it without a limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from commlayer.errors import DeadlineExceeded

T = TypeVar("T")

GRACE_S = 1.0
"""The call's own deadline should come first, since its error says more."""


def bounded(call: Callable[[], T], deadline_s: float, what: str, peer: str) -> T:
    """Runs call(), which has that deadline itself. DeadlineExceeded of `peer` if it does not return by then.

    The call runs in a daemon thread, which is left behind after a timeout and does not keep the process alive.
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
