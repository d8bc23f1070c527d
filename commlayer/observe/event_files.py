"""The files of an event stream: events.jsonl of a coordinator, or rank-N.jsonl of the ranks."""

from __future__ import annotations

import contextlib
import logging
import threading
from operator import attrgetter
from pathlib import Path

from commlayer.errors import InvalidInput, short_line
from commlayer.observe.event_log import EventLog
from commlayer.observe.events import FORMAT, Event, JobEvent, clean, decode
from commlayer.records import MALFORMED

log = logging.getLogger("commlayer")

WHERE = "give a folder that COMMLAYER_EVENTS or `commlayer serve --events` named"
WRITE_S = 0.5
"""Seconds between two writes of new events."""
CLOSE_S = 5.0
"""Seconds that close() waits for the last write, for example to a network disk that does not answer."""
MAX_FILE_NBYTES = 1 << 30



class EventFiles:
    """The events in a folder or in one file. `read` returns the new events, so an instance can follow a running job."""

    ahead_s = 0.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[Path, tuple[int, int]] = {}
        """Maps a file to the number of bytes and of lines that were read."""
        if not path.exists():
            raise InvalidInput("E-EVENTS", f"{path}: no such file or folder; {WHERE}")

    def read(self) -> list[Event]:
        """Returns the events that were not returned before, in order of time."""
        events = [event for file in self._files() for event in self._new(file)]
        return sorted(events, key=attrgetter("time"))

    def _files(self) -> list[Path]:
        """A coordinator's file contains the events of all ranks."""
        if not self._path.is_dir():
            return [self._path]
        of_job = self._path / "events.jsonl"
        return [of_job] if of_job.exists() else sorted(self._path.glob("rank-*.jsonl"))

    def _new(self, file: Path) -> list[Event]:
        begin, number = self._read.get(file, (0, 0))
        try:
            with file.open("rb") as stream:
                stream.seek(begin)
                events = list[Event]()
                for line in stream:
                    if not line.endswith(b"\n"):
                        break  # the last line is not complete yet
                    begin, number = begin + len(line), number + 1
                    if (event := _event(line, file, number)) is not None:
                        events.append(event)
        except OSError as error:
            raise InvalidInput("E-EVENTS", f"{file} cannot be read: {error.strerror}; {WHERE}") from None
        self._read[file] = begin, number
        return events


def read_run(path: Path) -> list[Event]:
    """Returns all events in a folder or file. Raises InvalidInput if there are none."""
    events = EventFiles(path).read()
    if not events:
        raise InvalidInput("E-EVENTS", f"{path}: has no events; {WHERE}")
    return events


def _event(line: bytes, file: Path, number: int) -> Event | None:
    try:
        event = decode(line)
        event = None if event is None else clean(event)
    except MALFORMED as error:
        raise InvalidInput("E-EVENTS", f"{file}:{number} is not an event ({short_line(error, 100)}); {WHERE}") from None
    if isinstance(event, JobEvent) and event.format > FORMAT:
        raise InvalidInput("E-EVENTS", f"{file}:{number} has format {event.format}, but this version reads formats up to "
                                       f"{FORMAT}: install commlayer {event.version}, which wrote it")
    return event


class EventFile:
    """Appends the events of an EventLog to a file, on a thread of its own, until close(). A full disk stops the file, not the
    training."""

    def __init__(self, events: EventLog, path: Path) -> None:
        """Creates the folder and opens the file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as error:
            raise InvalidInput("E-EVENTS", f"events: {path} cannot be written: {error.strerror}; set events to a folder that "
                                           "can be written, or leave it out") from None
        self._events, self._path, self._cursor = events, path, 0
        self._left_nbytes = MAX_FILE_NBYTES - self._file.tell()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._closing.wait(WRITE_S):
                self._write()
            self._write()
        except OSError as error:
            log.warning("%s: no more events are written: %s", self._path, error.strerror)

    def _write(self) -> None:
        while (batch := self._events.since(self._cursor)).lines:
            self._cursor = batch.cursor
            data = b"\n".join((*batch.lines, b""))
            self._left_nbytes -= len(data)
            if self._left_nbytes < 0:
                raise OSError(0, f"the file has reached {MAX_FILE_NBYTES >> 20} MiB")
            self._file.write(data)
            self._file.flush()
            if batch.missed:
                log.warning("%s: %d events were dropped, because they came faster than they were written", self._path,
                            batch.missed)

    def close(self) -> None:
        """Writes the last events and closes the file. Idempotent."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            with contextlib.suppress(OSError):  # of a full disk, which was logged
                self._file.close()
