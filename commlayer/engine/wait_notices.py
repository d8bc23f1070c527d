"""Logs which members a rank waits for: a line after 5 s, more at growing intervals, and one when the wait is over."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

FIRST_S = 5.0
GROWTH = 2.0
LOOK_S = 1.0
"""Seconds between two checks. Training only stores when it began to wait, or 0; this thread reads it."""


class Waiting(Protocol):
    """The current worker, or the groups of a call between two steps."""

    waiting_since: float

    @property
    def waits_s(self) -> float: ...

    def missing(self) -> tuple[str, ...]: ...


class State(NamedTuple):
    """What has been logged of the wait that began at `since`."""

    since: float = 0.0
    who: str = ""
    next_s: float = FIRST_S


def decide(state: State, since: float, now: float, told: Callable[[], tuple[str, str]]) -> tuple[State, str]:
    """The state after a check, and the line to log or "".

    `since`: when the current wait began, 0 for none. `told`: returns the peers and how long the wait may last."""
    if since != state.since:
        line = f"goes on after {now - state.since:.0f} s of waiting for {state.who}" if state.who else ""
        return State(since), line
    if not since or now - since < state.next_s:
        return state, ""
    peers, limits = told()
    return State(since, peers, GROWTH * state.next_s), f"waiting for {peers}: {now - since:.0f} s, {limits}"


class WaitNotices:
    """A thread that checks for waits until close()."""

    def __init__(self, waiting: Callable[[], Waiting | None], called: Callable[[str], str], silent_s: float,
                 log: Callable[[str, int], None]) -> None:
        """`called` gives a peer's name for the user. A peer that is silent for `silent_s` counts as dead."""
        self._waiting, self._called, self._silent_s, self._log = waiting, called, silent_s, log
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-waits", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        state = State()
        while not self._closing.wait(LOOK_S):
            if (waiting := self._waiting()) is not None:
                state, line = decide(state, waiting.waiting_since, time.monotonic(), functools.partial(self._told, waiting))
                if line:
                    self._log(line, logging.WARNING)

    def _told(self, waiting: Waiting) -> tuple[str, str]:
        peers = ", ".join(map(self._called, waiting.missing())) or "other ranks"
        return peers, f"up to {waiting.waits_s:.0f} s ({self._silent_s:.0f} s without a sign of life)"

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2 * LOOK_S)
