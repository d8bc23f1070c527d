"""Follows the events of a running job for the web pages of `commlayer serve`: the page, its updates, and metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from http import HTTPStatus
from itertools import islice

import msgspec

from commlayer.observe.event_log import EventLog
from commlayer.observe.events import decode
from commlayer.observe.pages.metrics import CONTENT_TYPE, exposition
from commlayer.observe.pages.page import Update, document, state_of
from commlayer.observe.pages.run_record import RunRecord
from commlayer.observe.pages.web import Page, Pages

log = logging.getLogger("commlayer")

UPDATE_S = 1.0
"""Seconds between two updates."""
MAX_STREAMS = 8
"""Number of pages that may be open. Each page needs a thread and a connection."""
LAST_S = 1.0
"""Seconds in which clients can take the last update before the server ends."""


class JobFeed:
    """A view of a job that follows an EventLog on a thread of its own, until close(). Thread-safe.

    All clients get the same updates. A client that misses an update gets the complete state next, so no update is kept for it.
    """

    def __init__(self, events: EventLog, paused: Callable[[], bool] | None = None) -> None:
        """`paused`: whether the homes of this machine are paused, for a page with the button; None: without."""
        self._events, self._cursor, self._record = events, 0, RunRecord()
        self._sent = 0, 0, self._record.curves.points
        """What clients have: number of notable events, number of points, and the list of these points."""
        self._changed = threading.Condition()
        self._number, self._update, self._streams = 0, b"", 0
        self._closing = self._closed = False
        self._paused = paused
        self.ahead_s, self.note = 0.0, ""
        """By how much the clock of the events is ahead of this one, and what the page says first; the owner sets both."""
        self._thread = threading.Thread(target=self._run, name="commlayer-feed", daemon=True)
        self._thread.start()

    @property
    def pages(self) -> Pages:
        page, policy = document()
        headers = {"Content-Security-Policy": f"{policy}; frame-ancestors 'none'", "Referrer-Policy": "no-referrer"}
        return {"/": lambda: Page("text/html; charset=utf-8", page, headers), "/updates": self._stream,
                "/metrics": self._metrics}

    def _run(self) -> None:
        with self._changed:
            while not self._closing:
                self._publish()
                self._changed.wait_for(lambda: self._closing, UPDATE_S)
            self._closed = True
            self._publish()

    def _publish(self) -> None:
        """Makes the update about what is new. The caller holds the lock. An error leaves clients with what they have."""
        try:
            self._make_update()
        except Exception:
            log.exception("the page of the job cannot show its latest events")
            self._number, self._update = self._number + 1, b""
        self._changed.notify_all()

    def _make_update(self) -> None:
        self._follow()
        record, (notable, points, curve) = self._record, self._sent
        self._sent = record.notable, len(record.curves.points), record.curves.points
        self._number += 1
        # Curves that were merged or that belong to another run are sent as a whole.
        goes_on = self._streams and curve is record.curves.points
        self._update = self._message(record.notable - notable, points) if goes_on else b""

    def _follow(self) -> None:
        while (batch := self._events.since(self._cursor)).lines:
            self._cursor = batch.cursor
            for line in batch.lines:
                if (event := decode(line)) is not None:
                    self._record.apply(event)

    def _message(self, events: int, point: int, *, whole: bool = False) -> bytes:
        """An update as a server-sent event, with the last `events` notable events and the points from `point` on."""
        record = self._record
        latest = list(islice(reversed(record.events), events))[::-1]
        state = state_of(record.view, max(time.time() + self.ahead_s, record.view.time))
        state["waits"] = [*([self.note] if self.note else []), *state["waits"]]
        state["paused"] = self._paused() if self._paused else None
        update = msgspec.json.encode(Update([state], record.curves.points[point:], latest, whole))
        return b"data: %b\n\n" % update

    def _metrics(self) -> Page:
        with self._changed:
            self._follow()
            return Page(CONTENT_TYPE, exposition(self._record.view, time.time()).encode())

    def _stream(self) -> Page:
        with self._changed:
            if self._streams == MAX_STREAMS:
                return Page("text/plain; charset=utf-8", b"as many pages of this job are open as are allowed: close one\n",
                            status=HTTPStatus.SERVICE_UNAVAILABLE)
            self._streams += 1
        return Page("text/event-stream", self._updates())

    def _updates(self) -> Generator[bytes]:
        number, ended = -1, False
        try:
            while not ended:
                with self._changed:
                    while self._number == number:
                        self._changed.wait()
                    missed, number, ended = self._number != number + 1, self._number, self._closed
                    whole = missed or not self._update
                    update = self._message(len(self._record.events), 0, whole=True) if whole else self._update
                yield update
        finally:
            with self._changed:
                self._streams -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Sends the last update and ends all streams."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(LAST_S)
        with self._changed:
            self._changed.wait_for(lambda: not self._streams, LAST_S)
