"""Sends a training worker's state to joining workers, in parts, through the store of the rendezvous.

Homes have no other connection to each other, and the store is small, so a window of parts is sent at a time. After each window
all members report, also those that neither give nor take. So no member waits longer than one window's deadline for a slow home.
If a member dies meanwhile, all get a newer view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from commlayer.cluster.site_process_group import PART_NBYTES, PARTS_IN_FLIGHT
from commlayer.engine.agreement import Word, name_of
from commlayer.engine.view_words import ViewWords
from commlayer.records import View

T = TypeVar("T")
WINDOW = 64
"""Parts; 10 MB in total."""


class Relay:
    """For one view. Each member calls `give`, `take` or `watch`, once."""

    def __init__(self, words: ViewWords, view: View, mine: int, word: Word, limit_s: float, judged_s: float) -> None:
        """`limit_s`: longest wait for others; `judged_s`: additional time for the verdict on those that are missing by then."""
        self._words, self._view, self._mine, self._word = words, view, mine, word
        self._limit_s, self._deadline_s = limit_s, limit_s + judged_s
        self.giver = view.members[0].rank
        """The oldest member: joining workers come last in a view."""

    def give(self, data: bytes) -> None:
        windows = self._windows(len(data))
        self._words.put(self._view, [(self._size, msgspec.msgpack.encode(len(data)))], self._until())
        for window in range(windows):
            parts = self._parts(window, len(data))
            names = [self._name(part) for part in parts]
            try:
                for part, name in zip(parts, names, strict=True):
                    self._words.put(self._view, [(name, data[part * PART_NBYTES : (part + 1) * PART_NBYTES])], self._until())
                self._meet(window)
            finally:
                self._words.put(self._view, [], self._until(), drop=names)
        self._meet(windows)

    def take(self, enter: Callable[[bytes], T]) -> T:
        """Applies `enter` to the complete state, before the others learn that it has arrived. Returns the result."""
        nbytes = self._nbytes()
        windows, data = self._windows(nbytes), bytearray()
        for window in range(windows):
            parts = self._parts(window, nbytes)
            for first in range(0, len(parts), PARTS_IN_FLIGHT):
                want = [(self._name(part), self.giver) for part in parts[first : first + PARTS_IN_FLIGHT]]
                for row in self._read(want):
                    data += row
            self._meet(window)
        entered = enter(bytes(data))
        self._meet(windows)
        return entered

    def watch(self) -> None:
        for window in range(self._windows(self._nbytes()) + 1):
            self._meet(window)

    # ----

    def _nbytes(self) -> int:
        (row,) = self._read([(self._size, self.giver)])
        return msgspec.msgpack.decode(row, type=int)

    def _read(self, want: Sequence[tuple[str, int]]) -> list[bytes]:
        return self._words.read(self._view, want, self._until(), step=self._word.step, waits=(self._mine, self._limit_s))

    @property
    def _size(self) -> str:
        return name_of(self._view, "state", self.giver)

    def _name(self, part: int) -> str:
        return name_of(self._view, f"part{part}", self.giver)

    def _windows(self, nbytes: int) -> int:
        return -(-nbytes // (WINDOW * PART_NBYTES))

    def _parts(self, window: int, nbytes: int) -> range:
        return range(window * WINDOW, min((window + 1) * WINDOW, -(-nbytes // PART_NBYTES)))

    def _meet(self, window: int) -> None:
        self._words.tell(self._view, f"window{window}", self._mine, self._word, self._until(), limit_s=self._limit_s)

    def _until(self) -> float:
        return time.monotonic() + self._deadline_s
