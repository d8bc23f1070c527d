"""Follows the events of a running job in `commlayer serve`: counts its costs, and raises alerts."""

from __future__ import annotations

import logging
import threading

from commlayer.observe.event_log import EventLog
from commlayer.observe.events import decode
from commlayer.observe.job.alerts import Alerts
from commlayer.observe.job.costs import Costs
from commlayer.observe.job.story import Story

log = logging.getLogger("commlayer")

LOOK_S = 1.0
COUNT_S = 30.0
"""Seconds between two events about costs."""
LAST_S = 5.0


class Watcher:
    """Follows an EventLog on a thread of its own, until close(). While the job runs, the watcher waits for no receiver of
    alerts."""

    def __init__(self, events: EventLog, costs: Costs, alerts: Alerts) -> None:
        self._events, self._costs, self._alerts, self._story, self._cursor = events, costs, alerts, Story(), 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-watcher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        left_s, ends = 0.0, False
        while not ends:
            ends = self._closing.wait(LOOK_S)
            try:
                self._follow()
                left_s -= LOOK_S
                if left_s <= 0 or ends:
                    left_s = COUNT_S if self._count() else 0.0
            except Exception:
                log.exception("the events of the job cannot be followed: no more alerts, and costs are not counted")
                return

    def _follow(self) -> None:
        while (batch := self._events.since(self._cursor)).lines:
            self._cursor = batch.cursor
            for line in batch.lines:
                if (event := decode(line)) is not None:
                    sentences = self._story.apply(event)
                    self._costs.apply(self._story.view, event)
                    self._alerts.apply(self._story.view, event, sentences)

    def _count(self) -> bool:
        """Appends the costs so far, and keeps them. Returns whether there are any."""
        event = self._costs.event
        if event is not None:
            self._events.append(event)
            self._costs.save()
        return event is not None

    def close(self) -> None:
        self._closing.set()
        self._thread.join(LAST_S)
        self._alerts.close()
