"""The audit log: joins, refusals, departures and plans, as JSON lines appended to a file."""

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
"""Refusals logged per minute, here and in the log, and as many probes. Above that they are only counted, so that a flood cannot
fill the disk."""


class Audit:
    """Several processes of a machine may share a file: each line is one append."""

    def __init__(self, path: str) -> None:
        """RecordError if the file cannot be written. An empty path: writes nothing."""
        self._path, self._lock = path, threading.Lock()
        self._shown: dict[str, tuple[int, int]] = {}
        """By event: the minute of the last one, and the count in that minute."""
        self._file = -1
        if path:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise RecordError("E-SETTING",
                                  f"audit: {path} cannot be written: {error.strerror}; name a file in a folder that is "
                                  "there") from None

    def refused(self, where: str, why: str, level: int = logging.WARNING) -> None:
        """Also logs it. Probes are marked as such: `commlayer doctor` and port monitors cause them."""
        event = "probed" if isinstance(why, SilentConnection) else "refused"
        if self._bounded(event, where, why):
            log.log(logging.INFO if event == "probed" else level, "connection from %s %s: %s", where, event, why)

    def denied(self, where: str, why: str) -> None:
        """As `refused`, for an authenticated request that cannot be met. A client may repeat such a request forever."""
        if self._bounded("refused", where, why):
            log.warning("refused: %s", why)

    def _bounded(self, event: str, where: str, why: str) -> bool:
        """Writes the event unless the limit per minute is reached. Whether it did."""
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
        """If the file cannot be written, logs that and continues."""
        if self._file < 0:
            return
        line = json.dumps({"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"), "event": event,
                           "pid": os.getpid()} | what) + "\n"
        try:
            with self._lock:  # otherwise close() could free the descriptor for another file first
                if self._file >= 0:
                    os.write(self._file, line.encode())
        except OSError as error:
            log.warning("audit: %s: %s; not written: %s", self._path, error.strerror, line.rstrip())

    def close(self) -> None:
        """Idempotent. Later events are only logged."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
