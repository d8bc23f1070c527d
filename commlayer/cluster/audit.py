"""The audit log: one JSON line in a file for each join, refusal, departure and plan of a job."""

from __future__ import annotations

import datetime
import json
import logging
import os
import threading
import time

from commlayer.errors import RecordError
from commlayer.transport.handshake import SilentConnection

log = logging.getLogger("commlayer")

MOST_REFUSED = 600
"""Limit per minute for refused connections, and separately for probes, in the audit file and in the log. Further ones are only
counted, so a flood cannot fill the disk."""


class Audit:
    """Writes the audit log. Several processes of a machine may share a file, because each line is written with one append."""

    def __init__(self, path: str) -> None:
        """Opens the file for appending. Raises RecordError if the file cannot be written. With an empty path nothing is
        written."""
        self._path, self._lock = path, threading.Lock()
        self._shown: dict[str, tuple[int, int]] = {}
        """Maps an event name to the minute of the last such event and the number of such events in that minute."""
        self._file = -1
        if path:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise RecordError("E-SETTING",
                                  f"audit: {path} cannot be written: {error.strerror}; name a file in a folder that is "
                                  "there") from None

    def refused(self, where: str, why: str) -> None:
        """Records and logs a refused connection. A connection that was closed without sending anything is recorded as "probed":
        `commlayer doctor` and port monitors open such connections."""
        event = "probed" if isinstance(why, SilentConnection) else "refused"
        if self._bounded(event, where, why):
            log.log(logging.INFO if event == "probed" else logging.WARNING, "connection from %s %s: %s", where, event, why)

    def denied(self, where: str, why: str) -> None:
        """Records and logs that an authenticated request was refused. A client may repeat such a request forever, so the limit
        per minute applies here too."""
        if self._bounded("refused", where, why):
            log.warning("refused: %s", why)

    def _bounded(self, event: str, where: str, why: str) -> bool:
        """Writes the event unless the limit per minute is reached. Returns whether the event was written."""
        with self._lock:
            minute, over = int(time.monotonic() // 60), 0
            last, count = self._shown.get(event, (minute, 0))
            if minute != last:
                over, count = max(0, count - MOST_REFUSED), 0
            self._shown[event] = minute, count + 1
        if over:
            log.log(logging.INFO if event == "probed" else logging.WARNING, "%d more were %s within a minute", over, event)
            self.note(event, where="many", why=f"{over} more within a minute")
        if count < MOST_REFUSED:
            self.note(event, where=where, why=why)
        return count < MOST_REFUSED

    def note(self, event: str, **what: str | int) -> None:
        """Appends one event to the audit file. If the file cannot be written, logs that and continues."""
        if self._file < 0:
            return
        line = json.dumps({"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"), "event": event,
                           "pid": os.getpid()} | what) + "\n"
        try:
            with self._lock:  # otherwise close() could free the descriptor for another file first
                if self._file >= 0:
                    os.write(self._file, line.encode())
        except OSError as error:
            log.warning("audit file %s: %s; this event was not written: %s", self._path, error.strerror, line.rstrip())

    def close(self) -> None:
        """Closes the file. Idempotent. Later events are logged, but no longer written to the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
