"""Reads a job's events from its coordinator."""

from __future__ import annotations

import time

from commlayer.cluster.calls import messages
from commlayer.cluster.calls.coordinator_channel import CALL_S, connect
from commlayer.config import Config
from commlayer.errors import CorruptFrame, short_line
from commlayer.observe.events import Event, clean, decode
from commlayer.records import MALFORMED


class EventClient:
    """The events of the job at the coordinator of the setting `join`. Does not register this process."""

    def __init__(self, config: Config) -> None:
        """Connects. Raises CommError with the reason if that fails."""
        self._channel = connect(config)
        self._request = messages.EventsRequest()
        self.ahead_s = 0.0
        """The coordinator's clock, to which the events refer, minus this process's, in seconds."""

    def read(self) -> list[Event]:
        """Returns the events that were not returned before. Raises CommError if the coordinator does not answer."""
        events = list[Event]()
        while True:
            reply = self._channel.call("Events", self._request, messages.EventsReply, CALL_S)
            self._request = messages.EventsRequest(reply.log, reply.cursor)
            self.ahead_s = reply.time_s - time.time()
            if not reply.lines:
                return events
            try:
                events += [clean(event) for event in map(decode, reply.lines) if event is not None]
            except MALFORMED as error:
                raise CorruptFrame(f"sent a malformed event: {short_line(error, 200)}", peer=self._channel.peer) from None

    def close(self) -> None:
        self._channel.close()
