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
from commlayer.observe.pages.page import Update, document, page_state
from commlayer.observe.pages.run_record import Point, RunRecord
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

    Each client gets the complete state first, and then what is new since its last update.
    """

    def __init__(self, events: EventLog, paused: Callable[[], bool] | None = None) -> None:
        """`paused`: whether the homes of this machine are paused, for a page with the button; None: without."""
        self._events, self._cursor, self._record = events, 0, RunRecord()
        self._changed = threading.Condition()
        self._number = self._streams = 0
        """Number of times that the record was brought up to date, and of open streams."""
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
            while not self._closed:
                self._closed = self._closing
                try:
                    self._follow()
                except Exception:
                    log.exception("the page of the job cannot show its latest events")
                self._number += 1
                self._changed.notify_all()
                if not self._closed:
                    self._changed.wait_for(lambda: self._closing, UPDATE_S)

    def _follow(self) -> None:
        while (batch := self._events.since(self._cursor)).lines:
            self._cursor = batch.cursor
            for line in batch.lines:
                if (event := decode(line)) is not None:
                    self._record.apply(event)

    @property
    def _now(self) -> float:
        """The time in the clock of the events."""
        return max(time.time() + self.ahead_s, self._record.view.time)

    def _message(self, notable: int, point: int, *, whole: bool) -> bytes:
        """An update as a server-sent event, with the notable events and the points from these numbers on."""
        record = self._record
        latest = list(islice(reversed(record.events), record.notable - notable))[::-1]
        state = page_state(record.view, self._now)
        state["waits"] = [*([self.note] if self.note else []), *state["waits"]]
        state["paused"] = self._paused() if self._paused else None
        update = msgspec.json.encode(Update([state], record.curves.points[point:], latest, whole))
        return b"data: %b\n\n" % update

    def _metrics(self) -> Page:
        with self._changed:
            self._follow()
            return Page(CONTENT_TYPE, exposition(self._record.view, self._now).encode())

    def _stream(self) -> Page:
        with self._changed:
            if self._streams == MAX_STREAMS:
                return Page("text/plain; charset=utf-8", b"as many pages of this job are open as are allowed: close one\n",
                            status=HTTPStatus.SERVICE_UNAVAILABLE)
            self._streams += 1
        return Page("text/event-stream", self._updates())

    def _updates(self) -> Generator[bytes]:
        number, notable, points, curve, ended = -1, 0, 0, list[Point](), False
        try:
            while not ended:
                with self._changed:
                    while self._number == number:
                        self._changed.wait()
                    number, ended, record = self._number, self._closed, self._record
                    # Curves that were merged or that belong to another run are sent as a whole.
                    whole = curve is not record.curves.points
                    try:
                        update = self._message(0 if whole else notable, 0 if whole else points, whole=whole)
                    except Exception:
                        log.exception("the page of the job cannot show its state")
                        continue
                    notable, points, curve = record.notable, len(record.curves.points), record.curves.points
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
