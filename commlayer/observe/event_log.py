"""The newest events of one process, for readers that request the events after a given line."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from msgspec import structs

from commlayer.observe.events import COORDINATOR, Event, Key, clean, encode, replacement_key

MAX_RETAINED = 4096
"""Maximum number of keys whose last events a log keeps. A job of 256 workers has half as many."""


class Batch(NamedTuple):
    """Lines of an EventLog. `cursor`: number of the next line, with which to ask again. `missed`: number of lines before these
    that the log had dropped."""

    lines: tuple[bytes, ...]
    cursor: int
    missed: int = 0


class EventLog:
    """The newest events of one process, as lines of JSON. Thread-safe. Appending takes microseconds and waits for no reader.

    Lines are numbered from 0. The oldest ones are dropped when the log is full.
    """

    def __init__(self, rank: int = COORDINATOR, *, most: int = 1024, most_nbytes: int = 1 << 20, retains: bool = False,
                 clock: Callable[[], float] = time.time) -> None:
        """`rank`: put into events that have no time yet. `retains`: keeps the last event of each key (replacement_key) when it
        would be dropped, so a new reader still gets the complete state of the job."""
        self.rank, self.id = rank, secrets.token_hex(8)
        self._most, self._most_nbytes, self._retains, self._clock = most, most_nbytes, retains, clock
        self._lock = threading.Lock()
        self._lines: deque[tuple[Key | None, bytes]] = deque()
        self._nbytes = self._first = 0
        """`_nbytes`: size of the kept lines. `_first`: number of the oldest one."""
        self._newest: dict[Key, int] = {}
        self._retained: dict[Key, tuple[int, bytes]] = {}

    def append(self, event: Event) -> None:
        if not event.time:
            event = structs.replace(event, time=self._clock(), rank=self.rank)
        line, key = encode(clean(event)), replacement_key(event) if self._retains else None
        with self._lock:
            if key is not None:
                self._retained.pop(key, None)
                self._newest[key] = self._first + len(self._lines)
            self._lines.append((key, line))
            self._nbytes += len(line)
            while self._nbytes > self._most_nbytes or len(self._lines) > self._most:
                self._drop()

    def _drop(self) -> None:
        key, line = self._lines.popleft()
        self._nbytes -= len(line)
        if key is not None and self._newest[key] == self._first:
            del self._newest[key]
            self._retained[key] = self._first, line
            if len(self._retained) > MAX_RETAINED:
                del self._retained[next(iter(self._retained))]
        self._first += 1

    def since(self, cursor: int, *, most: int = 1024, most_nbytes: int = 1 << 20) -> Batch:
        """Returns the lines from number `cursor` on, at most `most` lines and `most_nbytes` bytes, but at least one if there is
        one."""
        with self._lock:
            retained = sorted(each for each in self._retained.values() if each[0] >= cursor)
            begin = max(0, cursor - self._first)
            kept = list(itertools.islice(self._lines, begin, begin + most)) if len(retained) < most else []
            first = self._first + begin
        numbered = [*retained, *((first + place, line) for place, (_, line) in enumerate(kept))][:most]
        lines, nbytes, after = list[bytes](), 0, max(cursor, first)
        for number, line in numbered:
            if lines and nbytes + len(line) > most_nbytes:
                break
            lines.append(line)
            nbytes, after = nbytes + len(line), number + 1
        return Batch(tuple(lines), after, max(0, first - begin - max(0, cursor) - len(retained)))
