"""Where homes meet at a coordinator: bytes by name, for whoever asks to wait for. Lives on one event loop; knows no meaning.

What is kept is charged to whoever left it, and belongs to the view that was the newest then: once all have gone over to a later
one, nobody asks for it any more. Each change is a record, from which the same store can be made again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from commlayer.cluster.messages import MAX_REPLY_NBYTES
from commlayer.errors import CorruptFrame
from commlayer.records import Record

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


class Put(Record, frozen=True, tag=True):
    """A value is there, in place of what was."""

    name: str
    value: bytes
    writer: str
    view: int


class Added(Record, frozen=True, tag=True):
    """To a number, which is `total` now and there as text, by that writer's token."""

    name: str
    total: int
    once: str
    writer: str
    view: int


class Dropped(Record, frozen=True, tag=True):
    names: tuple[str, ...]


Change = Put | Added | Dropped


class MeetingStore:
    """All calls come from the loop's thread. `note` hears of each change once it is made, ahead of everybody else."""

    def __init__(self) -> None:
        self.note: Callable[[Change], None] = lambda _: None
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
            self._check_row(name, len(value), 0, by)
            self._make(Put(name, value, by.name, by.view))
        self._tell()

    def drop(self, names: Iterable[str]) -> None:
        if there := tuple(name for name in names if name in self._rows or name in self._sums):
            self._make(Dropped(there))

    def forget(self, view: int) -> None:
        """What was left ahead of the view of that generation, to which all have gone over."""
        self.drop([name for name, row in self._rows.items() if row.view < view])

    def add(self, name: str, amount: int, once: str, by: Writer) -> int:
        """To a number; its new value, which is also there as text. What was added under the same name `once` counts once."""
        total, known = self._sums.get(name, (0, {}))
        if once not in known:
            _charge(once)
            total += amount
            self._check_row(name, len(str(total)), TOKEN_NBYTES, by)
            self._make(Added(name, total, once, by.name, by.view))
            self._tell()
        return total

    def found(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        """CorruptFrame for more than an answer may hold, and for a name that is there twice."""
        if len(set(names)) < len(names):
            raise CorruptFrame(f"wants {len(names)} keys, of which {len(set(names))} differ; allowed: each once")
        rows = [self._rows.get(name) for name in names]
        if (nbytes := sum(len(row.value) for row in rows if row is not None)) > MAX_FOUND_NBYTES:
            raise CorruptFrame(f"wants {nbytes} bytes in one answer, allowed {MAX_FOUND_NBYTES}")
        return tuple(None if row is None else row.value for row in rows)

    def again(self, change: Change) -> None:
        """As it was made before. What each may keep is not asked: it was then."""
        if isinstance(change, Dropped):
            for name in change.names:
                self._take(name)
                _, known = self._sums.pop(name, (0, {}))
                for writer in known.values():
                    self._free(writer, TOKEN_NBYTES)
            return
        value = change.value if isinstance(change, Put) else str(change.total).encode()
        self._take(change.name)
        self._charged[change.writer] += _charge(change.name) + len(value)
        self._rows[change.name] = _Row(value, change.writer, change.view)
        if isinstance(change, Added):
            _, known = self._sums.get(change.name, (0, {}))
            self._charged[change.writer] += TOKEN_NBYTES
            known[change.once] = change.writer
            if len(known) > MAX_TOKENS:
                self._free(known.pop(next(iter(known))), TOKEN_NBYTES)
            self._sums[change.name] = change.total, known

    def changes(self) -> Iterator[Change]:
        """Of which an empty store becomes this one."""
        for name, (total, known) in self._sums.items():
            for once, writer in known.items():
                yield Added(name, total, once, writer, 0)
        for name, row in self._rows.items():  # those of numbers, too, as whoever wrote them last has left them
            yield Put(name, *row)

    async def change(self, timeout_s: float) -> None:
        """Until something is put, or that time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def _make(self, change: Change) -> None:
        self.again(change)
        self.note(change)

    def _tell(self) -> None:
        """Those who wait."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _take(self, name: str) -> None:
        if (row := self._rows.pop(name, None)) is not None:
            self._free(row.writer, _charge(name) + len(row.value))

    def _free(self, writer: str, nbytes: int) -> None:
        self._charged[writer] -= nbytes
        if not self._charged[writer]:
            del self._charged[writer]

    def _check_row(self, name: str, nbytes: int, more_nbytes: int, by: Writer) -> None:
        """As `_check`, of a value of so many bytes in place of what is there, and of more beside it."""
        former = self._rows.get(name)
        freed = 0 if former is None else _charge(name) + len(former.value)
        self._check(_charge(name) + nbytes + more_nbytes, freed, former.writer if former else "", by)

    def _check(self, nbytes: int, freed: int, owner: str, by: Writer) -> None:
        """CorruptFrame if it may not be charged so much more, behind what `owner` is then charged no more."""
        mine = self._charged[by.name] - (freed if owner == by.name else 0)
        if mine + nbytes > by.most_nbytes:
            raise CorruptFrame(f"{by.name} keeps {mine} bytes at the coordinator already, allowed {by.most_nbytes}, its part: "
                               "leave less in torch's store, or use fewer process groups between homes", code="E-QUOTA")
        if self.nbytes - freed + nbytes > by.all_nbytes:
            raise CorruptFrame(f"the coordinator keeps {self.nbytes} bytes of homes already, allowed {by.all_nbytes}",
                               code="E-QUOTA")


def _charge(name: str) -> int:
    nbytes = len(name.encode())
    if nbytes > MAX_NAME_NBYTES:
        raise CorruptFrame(f"a key of {nbytes} bytes, allowed {MAX_NAME_NBYTES}")
    return nbytes + KEY_NBYTES
