"""Key-value store at the coordinator, through which sites exchange bytes; readers may wait for keys. Runs on one event loop.

Each value belongs to the site that wrote it first, and counts against that site's share of the store. Only the owner site can
replace or drop a value. Each value also belongs to an epoch, which its writer names; after all workers have switched to a later
one, no worker reads it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from commlayer.callbacks import ignore
from commlayer.cluster.calls.messages import MAX_REPLY_NBYTES, StoreKey
from commlayer.errors import CorruptFrame
from commlayer.records import Record

MAX_KEPT_NBYTES, EACH_NBYTES = 512 << 20, 32 << 20
"""Maximum size, in bytes, of all values in the store together: MAX_KEPT_NBYTES, or EACH_NBYTES per worker if that is more. A
site's share is that of its workers. Process groups drop values that all members have read, so a larger total is a leak. A
joining worker needs a window of chunks (10 MB), and a large collective keeps 2.5 MB in each process group."""
MAX_NAME_NBYTES = 256
KEY_NBYTES = 512
"""Bytes that each key, and each remembered token of an addition, counts in addition to its name and value."""
MAX_TOKENS = 16
"""Maximum number of tokens that are remembered per numeric key and worker of a site, one token per addition. A repeated request
is recognized by its token. The oldest tokens are dropped."""
MAX_FOUND_NBYTES = MAX_REPLY_NBYTES - (1 << 20)
"""Maximum size of the values in one reply. The rest of the reply's limit is for its other fields."""


class StoreRow(Record, frozen=True):
    """The value of one key. A number is stored as text."""

    value: bytes
    generation: int
    """Generation of the epoch to which the value belongs."""
    home: str = ""
    """Token of the site that owns the value."""
    tokens: Mapping[str, Mapping[str, int]] = {}
    """For a number: the tokens of each site's last additions, and their sums."""


class KvStore:
    """Values and numbers by key. Call all methods in the event loop's thread. `save` is called with each changed row (None: the
    row was dropped), before any reader sees the change."""

    def __init__(self, workers: Mapping[str, int] = {}, rows: Iterable[tuple[StoreKey, StoreRow]] = ()) -> None:
        """`workers`: see `allow`."""
        self.save: Callable[[StoreKey, StoreRow | None], None] = ignore
        self.rows: dict[StoreKey, StoreRow] = dict(rows)
        self.nbytes = Counter[str]()
        """Maps a site's token to the number of bytes that count against its share."""
        for key, row in self.rows.items():
            self.nbytes.update(_charges(key, row))
        self._waiting: dict[StoreKey, dict[_Reader, None]] = {}
        self._left = list[str]()
        """Sites with values that are no longer in the job, in the order in which they left."""
        self.allow(workers)

    def allow(self, workers: Mapping[str, int]) -> None:
        """Sets the sites that may write, each with its number of workers. Values of other sites remain, as long as they have
        together no more bytes than all present sites may have."""
        total = max(MAX_KEPT_NBYTES, EACH_NBYTES * sum(workers.values()))
        self.workers = workers
        self._share_nbytes = {home: total * count // sum(workers.values()) for home, count in workers.items() if count}
        for home in [home for home, nbytes in self.nbytes.items() if not nbytes and home not in workers]:
            del self.nbytes[home]
        self._left = [home for home in dict.fromkeys((*self._left, *self.nbytes)) if home in self.nbytes.keys() - workers]
        while self._left and sum(self.nbytes[home] for home in self._left) > total:
            oldest = self._left.pop(0)
            self.drop([key for key, row in self.rows.items() if row.home == oldest])

    def owner(self, key: StoreKey, *, adds: bool = False) -> str:
        """Returns the token of the site that owns the key; "" if any site may write it, or with `adds` add to it."""
        row = self.rows.get(key)
        return "" if row is None or (adds and row.tokens) else row.home

    def put(self, home: str, pairs: Iterable[tuple[StoreKey, bytes]], generation: int = 1) -> None:
        """Sets or replaces values of the site `home`. Raises CorruptFrame if its share is used up; pairs before the one that
        exceeds it stay set."""
        for key, value in pairs:
            self._change(home, key, StoreRow(value, generation, home))

    def add(self, home: str, key: StoreKey, amount: int, once: str, generation: int = 1) -> int:
        """Adds `amount` to a number and returns the sum; the key's value is the sum as text. A repeated call with the same
        token `once` changes nothing, and returns the same sum."""
        row = self.rows.get(key, StoreRow(b"0", generation, home))
        try:
            total = int(row.value)
        except ValueError:
            raise CorruptFrame(f"adds to the key {key[0][:MAX_NAME_NBYTES]!r}, whose value is not a number") from None
        tokens = row.tokens.get(home, {})
        if once in tokens:
            return tokens[once]
        _check_name(once)
        total += amount
        tokens = dict([*tokens.items(), (once, total)][-MAX_TOKENS * self.workers.get(home, 1) :])
        row = StoreRow(str(total).encode(), max(row.generation, generation), row.home, {**row.tokens, home: tokens})
        self._change(home, key, row)
        return total

    def drop(self, keys: Iterable[StoreKey]) -> None:
        for key in keys:
            if (row := self.rows.pop(key, None)) is not None:
                self.nbytes.subtract(_charges(key, row))
                self.save(key, None)

    def forget(self, generation: int) -> None:
        """Drops values of epochs before this generation. Call this after all workers have switched."""
        self.drop([key for key, row in self.rows.items() if row.generation < generation])

    def values(self, keys: Sequence[StoreKey]) -> tuple[bytes | None, ...]:
        """Returns the values of these keys, None for a key that is not set. Raises CorruptFrame if the values do not fit in one
        reply, or if a key is repeated."""
        if len(set(keys)) < len(keys):
            raise CorruptFrame(f"requests {len(keys)} keys, but only {len(set(keys))} different ones; each key must be "
                               "requested only once")
        rows = [self.rows.get(key) for key in keys]
        if (nbytes := sum(len(row.value) for row in rows if row is not None)) > MAX_FOUND_NBYTES:
            raise CorruptFrame(f"requests values of {nbytes} bytes, but a reply may contain at most {MAX_FOUND_NBYTES}")
        return tuple(None if row is None else row.value for row in rows)

    async def wait_written(self, keys: Iterable[StoreKey], timeout_s: float) -> None:
        """Waits until each of these keys has been written, at most `timeout_s`. A write costs each reader the same, however
        many keys it waits for."""
        reader = _Reader(keys)
        for key in reader.missing:
            self._waiting.setdefault(key, {})[reader] = None
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.over.wait(), timeout_s)
        finally:
            for key in reader.missing:
                readers = self._waiting[key]
                del readers[reader]
                if not readers:
                    del self._waiting[key]

    def _change(self, home: str, key: StoreKey, row: StoreRow) -> None:
        """Sets a row, if the share of the site that writes allows it, and wakes the readers."""
        _check_name(key[0])
        grown = _charges(key, row)
        if (former := self.rows.get(key)) is not None:
            grown.subtract(_charges(key, former))
        nbytes, share_nbytes = self.nbytes[home] + grown[home], self._share_nbytes.get(home, 0)
        if nbytes > share_nbytes:
            raise CorruptFrame(f"this home would store {nbytes} bytes at the coordinator, allowed {share_nbytes}: store less "
                               "in torch's store, or use fewer process groups that span homes", code="E-QUOTA")
        self.rows[key] = row
        self.nbytes.update(grown)
        self.save(key, row)
        for reader in self._waiting.pop(key, ()):
            reader.missing.discard(key)
            if not reader.missing:
                reader.over.set()


class _Reader:
    """A call that waits until all of its keys have been written."""

    def __init__(self, missing: Iterable[StoreKey]) -> None:
        self.missing, self.over = set(missing), asyncio.Event()


def _check_name(name: str) -> None:
    if (nbytes := len(name.encode())) > MAX_NAME_NBYTES:
        raise CorruptFrame(f"sent a key of {nbytes} bytes, allowed {MAX_NAME_NBYTES}")


def _charges(key: StoreKey, row: StoreRow) -> Counter[str]:
    """Returns the bytes that a row counts, by site: the value for its owner, and tokens for those that added."""
    charges = Counter({row.home: KEY_NBYTES + len(key[0].encode()) + len(row.value)})
    for home, tokens in row.tokens.items():
        charges[home] += sum(KEY_NBYTES + len(token) for token in tokens)
    return charges
