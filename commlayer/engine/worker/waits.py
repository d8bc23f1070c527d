"""Logs which members a rank waits for: a line after 5 s, more at growing intervals, and one when the wait is over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from msgspec import structs

from commlayer.cluster.processes.collectives import Groups
from commlayer.engine.worker.worker import Worker
from commlayer.observe.event_log import EventLog
from commlayer.observe.events import WaitEvent

FIRST_S = 5.0
GROWTH = 2.0
EVENT_S = 2.0
"""Seconds of a wait after which it is an event, and between two events about it."""
LOOK_S = 1.0
"""Seconds between two checks whether the training thread still waits. The training thread only stores when its wait began, or
0; the logging thread reads this value."""


Waiting = Worker | Groups
"""An object that waits for peers: the current worker, or the process groups of a call between two steps."""


class WaitNotices:
    """Thread that logs which peers the training thread waits for, until close()."""

    def __init__(self, waiting: Callable[[], Waiting | None], called: Callable[[str], str], silent_s: float,
                 log: Callable[[str, int], None], events: EventLog) -> None:
        """Starts the thread. `waiting` returns None if the thread must end. `called` returns a peer's name for the user. A peer
        that is silent for `silent_s` seconds counts as dead. `events` receives an event about each wait of EVENT_S and more."""
        self._waiting, self._called, self._silent_s, self._log, self._events = waiting, called, silent_s, log, events
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-waits", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        since, peers, next_s = 0.0, "", FIRST_S
        shown: WaitEvent | None = None
        while not self._closing.wait(LOOK_S):
            if (waiting := self._waiting()) is None:
                return
            begun, waited_s = waiting.waiting_since, time.monotonic() - since
            if begun != since:  # the wait is over
                if shown is not None:
                    self._events.append(structs.replace(shown, waited_s=waited_s, over=True))
                if peers:
                    self._log(f"continues after {waited_s:.0f} s of waiting for {peers}", logging.WARNING)
                since, peers, next_s, shown = begun, "", FIRST_S, None
            elif since and waited_s >= EVENT_S:
                names = waiting.missing()
                if shown is None or shown.names != names or waited_s - shown.waited_s >= EVENT_S:
                    shown = WaitEvent(what=waiting.wait_kind, names=names, waited_s=waited_s, limit_s=waiting.waits_s)
                    self._events.append(shown)
                if waited_s >= next_s:
                    peers, next_s = ", ".join(map(self._called, names)) or "other ranks", GROWTH * next_s
                    self._log(f"waiting for {peers}: {waited_s:.0f} s, up to {waiting.waits_s:.0f} s "
                              f"({self._silent_s:.0f} s without a sign of life)", logging.WARNING)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2 * LOOK_S)
