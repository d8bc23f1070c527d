"""Where homes meet at a coordinator: bytes by name, for whoever asks to wait for. Lives on one event loop; knows no meaning.

What is kept is charged to whoever left it, and belongs to the view that was the newest then: once all have gone over to a later
one, nobody asks for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from commlayer.control.messages import MAX_REPLY_NBYTES
from commlayer.errors import CorruptFrame

MAX_KEPT_NBYTES = 512 << 20
"""Of all values together. Groups drop what everybody has read: more than a few parts for each member has been forgotten."""
LEAST_EACH_NBYTES = 32 << 20
"""Of one worker at least, however many there are: a window of parts for who joins has 10 MB, and what stays of a large
collective 2.5 MB in each group."""
MAX_NAME_NBYTES = 256
KEY_NBYTES = 256
"""What a key is charged beside its name and value."""
MAX_TOKENS = 4096
"""Of a number: the latest of what was added to it are told from what is said again."""
TOKEN_NBYTES = KEY_NBYTES + MAX_NAME_NBYTES
MAX_FOUND_NBYTES = MAX_REPLY_NBYTES - (1 << 20)
"""Of the values in one answer; the rest is for what is around them."""


class Writer(NamedTuple):
    """To whom something is charged, and how much may be."""

    name: str
    most_nbytes: int = MAX_KEPT_NBYTES
    all_nbytes: int = MAX_KEPT_NBYTES
    """Of all writers together."""
    view: int = 1
    """Generation of the newest view as it writes."""


class _Row(NamedTuple):
    value: bytes
    writer: str
    view: int


class MeetingStore:
    """All calls come from the loop's thread."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._sums: dict[str, tuple[int, dict[str, str]]] = {}
        """By name: the number, and whose each token is that was added to it."""
        self._charged = Counter[str]()
        self._changed = asyncio.Event()

    @property
    def nbytes(self) -> int:
        return self._charged.total()

    def put(self, pairs: Iterable[tuple[str, bytes]], by: Writer) -> None:
        """CorruptFrame for more than it keeps; what a key held is replaced."""
        for name, value in pairs:
            nbytes, former = _charge(name) + len(value), self._rows.get(name)
            freed = 0 if former is None else _charge(name) + len(former.value)
            self._check(nbytes, freed, former.writer if former else "", by)
            self._take(name)
            self._charged[by.name] += nbytes
            self._rows[name] = _Row(value, by.name, by.view)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._take(name)
            _, known = self._sums.pop(name, (0, {}))
            for writer in known.values():
                self._free(writer, TOKEN_NBYTES)

    def forget(self, view: int) -> None:
        """What was left ahead of the view of that generation, to which all have gone over."""
        self.drop([name for name, row in self._rows.items() if row.view < view])

    def add(self, name: str, amount: int, once: str, by: Writer) -> int:
        """To a number; its new value, which is also there as text. What was added under the same name `once` counts once."""
        total, known = self._sums.get(name, (0, {}))
        if once not in known:
            _charge(once)
            total += amount
            self.put([(name, str(total).encode())], by)
            self._check(TOKEN_NBYTES, 0, "", by)
            self._charged[by.name] += TOKEN_NBYTES
            known[once] = by.name
            if len(known) > MAX_TOKENS:
                self._free(known.pop(next(iter(known))), TOKEN_NBYTES)
            self._sums[name] = total, known
        return total

    def found(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        """CorruptFrame for more than an answer may hold, and for a name that is there twice."""
        if len(set(names)) < len(names):
            raise CorruptFrame(f"wants {len(names)} keys, of which {len(set(names))} differ; allowed: each once")
        rows = [self._rows.get(name) for name in names]
        if (nbytes := sum(len(row.value) for row in rows if row is not None)) > MAX_FOUND_NBYTES:
            raise CorruptFrame(f"wants {nbytes} bytes in one answer, allowed {MAX_FOUND_NBYTES}")
        return tuple(None if row is None else row.value for row in rows)

    async def change(self, timeout_s: float) -> None:
        """Until something is put, or that time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def _take(self, name: str) -> None:
        if (row := self._rows.pop(name, None)) is not None:
            self._free(row.writer, _charge(name) + len(row.value))

    def _free(self, writer: str, nbytes: int) -> None:
        self._charged[writer] -= nbytes
        if not self._charged[writer]:
            del self._charged[writer]

    def _check(self, nbytes: int, freed: int, owner: str, by: Writer) -> None:
        """CorruptFrame if it may not be charged so much more, behind what `owner` is then charged no more."""
        mine = self._charged[by.name] - (freed if owner == by.name else 0)
        if mine + nbytes > by.most_nbytes:
            raise CorruptFrame(f"{by.name} keeps {mine} bytes at the coordinator already, allowed {by.most_nbytes}, its part: "
                               "leave less in torch's store, or use fewer process groups between homes")
        if self.nbytes - freed + nbytes > by.all_nbytes:
            raise CorruptFrame(f"the coordinator keeps {self.nbytes} bytes of homes already, allowed {by.all_nbytes}")


def _charge(name: str) -> int:
    nbytes = len(name.encode())
    if nbytes > MAX_NAME_NBYTES:
        raise CorruptFrame(f"a key of {nbytes} bytes, allowed {MAX_NAME_NBYTES}")
    return nbytes + KEY_NBYTES
