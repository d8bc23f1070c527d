"""Key-value store at the coordinator, through which sites exchange bytes; readers may wait for keys. Runs on one event loop.

The size of each value counts against its writer's quota. Each value belongs to the newest epoch at the time of writing; after
all workers have switched to a later epoch, no worker reads it again. Each change is a record, from which a journal can rebuild
the store.
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
"""Maximum size of all values together. Process groups drop values that all members have read, so a larger total is a leak."""
LEAST_EACH_NBYTES = 32 << 20
"""Smallest quota of one worker, however many workers there are. A joining worker needs a window of chunks (10 MB), and a large
collective keeps 2.5 MB in each process group."""
MAX_NAME_NBYTES = 256
KEY_NBYTES = 256
"""Bytes that each key costs in addition to its name and value."""
MAX_TOKENS = 4096
"""Maximum number of remembered additions per number, which are needed to recognize repeated requests. The oldest are
forgotten."""
TOKEN_NBYTES = KEY_NBYTES + MAX_NAME_NBYTES
MAX_FOUND_NBYTES = MAX_REPLY_NBYTES - (1 << 20)
"""Maximum size of the values in one reply. The rest of the reply's limit is for its other fields."""


class QuotaOwner(NamedTuple):
    """A writer (certificate or site) whose stored values are counted, with its quota in bytes."""

    name: str
    most_nbytes: int = MAX_KEPT_NBYTES
    all_nbytes: int = MAX_KEPT_NBYTES
    """Quota of all writers together, in bytes."""
    view: int = 1
    """Generation of the newest epoch at the time of writing."""


class _Row(NamedTuple):
    value: bytes
    writer: str
    view: int


class ValueSet(Record, frozen=True, tag=True):
    """A change: a value is set or replaced. `view`: generation of the newest epoch at that time."""

    name: str
    value: bytes
    writer: str
    view: int


class NumberAdded(Record, frozen=True, tag=True):
    """A change: a number was increased to `total`, which is also the key's value as text. `once`: unique token of this
    addition."""

    name: str
    total: int
    once: str
    writer: str
    view: int


class KeysDropped(Record, frozen=True, tag=True):
    names: tuple[str, ...]


Change = ValueSet | NumberAdded | KeysDropped


class KvStore:
    """Values and numbers by key, with quotas per writer. Call all methods in the event loop's thread. `note` is called after
    each change, before any reader sees it."""

    def __init__(self) -> None:
        self.note: Callable[[Change], None] = lambda _: None
        self._rows: dict[str, _Row] = {}
        self._sums: dict[str, tuple[int, dict[str, str]]] = {}
        """Maps a number's key to the number and its remembered additions, as a map from token to writer."""
        self._charged = Counter[str]()
        self._changed = asyncio.Event()

    @property
    def nbytes(self) -> int:
        return self._charged.total()

    def put(self, pairs: Iterable[tuple[str, bytes]], by: QuotaOwner) -> None:
        """Sets or replaces values. Raises CorruptFrame if a quota is exceeded; pairs before the one that exceeds it stay
        set."""
        for name, value in pairs:
            self._check_row(name, len(value), 0, by)
            self._apply(ValueSet(name, value, by.name, by.view))
        self._wake_readers()

    def drop(self, names: Iterable[str]) -> None:
        if present := tuple(name for name in names if name in self._rows or name in self._sums):
            self._apply(KeysDropped(present))

    def forget(self, view: int) -> None:
        """Drops values that were written in epochs before generation `view`. Call this after all workers have switched to that
        epoch."""
        self.drop([name for name, row in self._rows.items() if row.view < view])

    def add(self, name: str, amount: int, once: str, by: QuotaOwner) -> int:
        """Adds `amount` to a number and returns the sum; the key's value is the sum as text. A repeated call with the same
        token `once` changes nothing."""
        total, writers = self._sums.get(name, (0, {}))
        if once not in writers:
            _charge(once)
            total += amount
            self._check_row(name, len(str(total)), TOKEN_NBYTES, by)
            self._apply(NumberAdded(name, total, once, by.name, by.view))
            self._wake_readers()
        return total

    def values(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        """Returns the values of these keys, None for a key that is not set. Raises CorruptFrame if the values do not fit in one
        reply, or if a key is repeated."""
        if len(set(names)) < len(names):
            raise CorruptFrame(f"requests {len(names)} keys, but only {len(set(names))} different ones; each key must be "
                               "requested only once")
        rows = [self._rows.get(name) for name in names]
        if (nbytes := sum(len(row.value) for row in rows if row is not None)) > MAX_FOUND_NBYTES:
            raise CorruptFrame(f"requests values of {nbytes} bytes, but a reply may contain at most {MAX_FOUND_NBYTES}")
        return tuple(None if row is None else row.value for row in rows)

    def replay(self, change: Change) -> None:
        """Applies a change from the journal without checking quotas, since they were checked when the change was made."""
        if isinstance(change, KeysDropped):
            for name in change.names:
                self._remove(name)
                _, writers = self._sums.pop(name, (0, {}))
                for writer in writers.values():
                    self._free(writer, TOKEN_NBYTES)
            return
        value = change.value if isinstance(change, ValueSet) else str(change.total).encode()
        self._remove(change.name)
        self._charged[change.writer] += _charge(change.name) + len(value)
        self._rows[change.name] = _Row(value, change.writer, change.view)
        if isinstance(change, NumberAdded):
            _, writers = self._sums.get(change.name, (0, {}))
            self._charged[change.writer] += TOKEN_NBYTES
            writers[change.once] = change.writer
            if len(writers) > MAX_TOKENS:
                self._free(writers.pop(next(iter(writers))), TOKEN_NBYTES)
            self._sums[change.name] = change.total, writers

    def changes(self) -> Iterator[Change]:
        """Yields changes that turn an empty store into this one."""
        for name, (total, writers) in self._sums.items():
            for once, writer in writers.items():
                yield NumberAdded(name, total, once, writer, 0)
        for name, row in self._rows.items():  # including numbers, to restore the last writer
            yield ValueSet(name, *row)

    async def change(self, timeout_s: float) -> None:
        """Waits for the next write, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def _apply(self, change: Change) -> None:
        self.replay(change)
        self.note(change)

    def _wake_readers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _remove(self, name: str) -> None:
        if (row := self._rows.pop(name, None)) is not None:
            self._free(row.writer, _charge(name) + len(row.value))

    def _free(self, writer: str, nbytes: int) -> None:
        self._charged[writer] -= nbytes
        if not self._charged[writer]:
            del self._charged[writer]

    def _check_row(self, name: str, nbytes: int, more_nbytes: int, by: QuotaOwner) -> None:
        """Checks quotas for a value of `nbytes` that replaces the present value of the key, plus `more_nbytes`."""
        former = self._rows.get(name)
        freed = 0 if former is None else _charge(name) + len(former.value)
        self._check(_charge(name) + nbytes + more_nbytes, freed, former.writer if former else "", by)

    def _check(self, nbytes: int, freed: int, owner: str, by: QuotaOwner) -> None:
        """Raises CorruptFrame if the writer's quota does not allow `nbytes` more, after `freed` bytes of writer `owner` are
        released."""
        mine = self._charged[by.name] - (freed if owner == by.name else 0)
        if mine + nbytes > by.most_nbytes:
            raise CorruptFrame(f"{by.name} already stores {mine} bytes at the coordinator, and its quota is "
                               f"{by.most_nbytes}: store less in torch's store, or use fewer process groups "
                               "that span homes", code="E-QUOTA")
        if self.nbytes - freed + nbytes > by.all_nbytes:
            raise CorruptFrame(f"the coordinator already stores {self.nbytes} bytes for all homes together, allowed "
                               f"{by.all_nbytes}",
                               code="E-QUOTA")


def _charge(name: str) -> int:
    nbytes = len(name.encode())
    if nbytes > MAX_NAME_NBYTES:
        raise CorruptFrame(f"sent a key of {nbytes} bytes, allowed {MAX_NAME_NBYTES}")
    return nbytes + KEY_NBYTES
