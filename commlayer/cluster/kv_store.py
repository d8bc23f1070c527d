"""Key-value store at the coordinator, through which sites exchange bytes; readers may wait for keys. Runs on one event loop.

The size of all values together is limited. Each value belongs to the newest epoch at the time of writing; after
all workers have switched to a later epoch, no worker reads it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from commlayer.cluster.messages import MAX_REPLY_NBYTES
from commlayer.errors import CorruptFrame
from commlayer.records import Record

MAX_KEPT_NBYTES, EACH_NBYTES = 512 << 20, 32 << 20
"""Maximum size, in bytes, of all values in the store together: MAX_KEPT_NBYTES, or EACH_NBYTES per worker if that is more.
Process groups drop values that all members have read, so a larger total is a leak. A joining worker needs a window of chunks
(10 MB), and a large collective keeps 2.5 MB in each process group."""
MAX_NAME_NBYTES = 256
KEY_NBYTES = 256
"""Bytes that each key, and each remembered token of an addition, counts in addition to its name and value."""
MAX_TOKENS = 1024
"""Maximum number of tokens that are remembered per numeric key, one token per addition. A repeated request is recognized by
its token. The oldest tokens are dropped."""
MAX_FOUND_NBYTES = MAX_REPLY_NBYTES - (1 << 20)
"""Maximum size of the values in one reply. The rest of the reply's limit is for its other fields."""


class Row(Record, frozen=True):
    """The value of one key. A number is stored as text."""

    value: bytes
    view: int
    """Generation of the newest epoch when the value was written."""
    tokens: tuple[str, ...] = ()
    """Tokens of the last additions to a number."""


class KvStore:
    """Values and numbers by key. Call all methods in the event loop's thread. `save` is called with each changed row (None: the
    row was dropped), before any reader sees the change."""

    def __init__(self, workers: int = 0, rows: Iterable[tuple[str, Row]] = ()) -> None:
        """`workers`: see `allow`."""
        self.save: Callable[[str, Row | None], None] = lambda *_: None
        self.rows: dict[str, Row] = dict(rows)
        self.nbytes = sum(_charge(name, row) for name, row in self.rows.items())
        self._most_nbytes = MAX_KEPT_NBYTES
        self.allow(workers)
        self._changed = asyncio.Event()

    def allow(self, workers: int) -> None:
        """Raises the limit on the size of all values to that of a job with this many workers. A job that has become smaller
        keeps its limit, because values of the departed workers may remain for a while."""
        self._most_nbytes = max(self._most_nbytes, EACH_NBYTES * workers)

    def put(self, pairs: Iterable[tuple[str, bytes]], view: int = 1) -> None:
        """Sets or replaces values. Raises CorruptFrame if the limit is exceeded; pairs before the one that exceeds it stay
        set."""
        for name, value in pairs:
            self._change(name, Row(value, view))

    def add(self, name: str, amount: int, once: str, view: int = 1) -> int:
        """Adds `amount` to a number and returns the sum; the key's value is the sum as text. A repeated call with the same
        token `once` changes nothing."""
        row = self.rows.get(name, Row(b"0", view))
        try:
            total = int(row.value)
        except ValueError:
            raise CorruptFrame(f"adds to the key {name[:MAX_NAME_NBYTES]!r}, whose value is not a number") from None
        if once in row.tokens:
            return total
        _check_name(once)
        self._change(name, Row(str(total + amount).encode(), view, (*row.tokens, once)[-MAX_TOKENS:]))
        return total + amount

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            if (row := self.rows.pop(name, None)) is not None:
                self.nbytes -= _charge(name, row)
                self.save(name, None)

    def forget(self, view: int) -> None:
        """Drops values that were written in epochs before generation `view`. Call this after all workers have switched to that
        epoch."""
        self.drop([name for name, row in self.rows.items() if row.view < view])

    def values(self, names: Sequence[str]) -> tuple[bytes | None, ...]:
        """Returns the values of these keys, None for a key that is not set. Raises CorruptFrame if the values do not fit in one
        reply, or if a key is repeated."""
        if len(set(names)) < len(names):
            raise CorruptFrame(f"requests {len(names)} keys, but only {len(set(names))} different ones; each key must be "
                               "requested only once")
        rows = [self.rows.get(name) for name in names]
        if (nbytes := sum(len(row.value) for row in rows if row is not None)) > MAX_FOUND_NBYTES:
            raise CorruptFrame(f"requests values of {nbytes} bytes, but a reply may contain at most {MAX_FOUND_NBYTES}")
        return tuple(None if row is None else row.value for row in rows)

    async def change(self, timeout_s: float) -> None:
        """Waits for the next write, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def _change(self, name: str, row: Row) -> None:
        """Sets a row, if the limit allows it, and wakes the readers."""
        _check_name(name)
        former = self.rows.get(name)
        nbytes = self.nbytes + _charge(name, row) - (0 if former is None else _charge(name, former))
        if nbytes > self._most_nbytes:
            raise CorruptFrame(f"homes would store {nbytes} bytes at the coordinator, allowed {self._most_nbytes}: store less "
                               "in torch's store, or use fewer process groups that span homes", code="E-QUOTA")
        self.rows[name], self.nbytes = row, nbytes
        self.save(name, row)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _check_name(name: str) -> None:
    if (nbytes := len(name.encode())) > MAX_NAME_NBYTES:
        raise CorruptFrame(f"sent a key of {nbytes} bytes, allowed {MAX_NAME_NBYTES}")


def _charge(name: str, row: Row) -> int:
    return KEY_NBYTES + len(name.encode()) + len(row.value) + len(row.tokens) * (KEY_NBYTES + MAX_NAME_NBYTES)
