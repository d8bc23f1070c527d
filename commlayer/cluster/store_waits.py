"""Calls that wait in torch's store, each with a limit. Knows no store, and not what is asked of it.

A store's own deadline is none where its server falls silent: behind it the client says that it waits no longer, and waits for
the answer to that without a limit, as it does for every answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from commlayer.errors import DeadlineExceeded

T = TypeVar("T")

GRACE_S = 1.0
"""The call's own deadline comes first, whose error says more."""


def bounded(call: Callable[[], T], deadline_s: float, what: str, peer: str) -> T:
    """call(), which has that deadline itself; DeadlineExceeded of `peer` where it has not come back behind it.

    It runs in a thread of its own, which then stays where it waits, and keeps no process from its end.
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
