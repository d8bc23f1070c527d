"""A summation server's journal: what it is about, and whether what is found belongs to this job. Knows no sums, no codec.

A server that was killed and is started again with the same folder finds who it was: its seat, its address, the job's secret
if it was made there, the plan in force, and each bucket's sum.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from commlayer.cluster.journal import Entry, Folder, Found, Journal
from commlayer.cluster.summation_cell import Keep
from commlayer.errors import CorruptFrame, RecordError, without_code
from commlayer.records import Record, View

log = logging.getLogger("commlayer")


class About(Record, frozen=True):
    """Whose journal it is."""

    token: str
    """Of its seat."""
    number: int
    address: str
    """Where it listens."""
    view: View
    plan: bytes
    generation: int
    """Of that plan, which may be a later one than the view's."""
    streams: str = ""
    """Where its gRPC streams come in, if they may."""


class ServerJournal:
    """Of one process. `found` is what an earlier one has left, None for nothing."""

    def __init__(self, path: str, *, required: bool) -> None:
        """`required`: without room for it nothing is served, else the job goes on without."""
        self._folder, self._required = Folder(path), required
        self._path = path
        self._journal: Journal | None = None
        self._next: Journal | None = None
        """Not yet in force."""
        self.found: About | None = None
        self.entries: Mapping[int, Entry] = {}
        try:
            if (found := self._folder.find()) is not None:
                self.found, self.entries = _about(found), found.entries
        except CorruptFrame as error:
            log.warning("%s: nothing of it is used", without_code(error))

    def begin(self, about: About, sizes: Mapping[int, int]) -> Keep | None:
        """A new one, not yet in force: see `publish`. None if there is no room, and then there is none at all; RecordError
        where it is required, and the former one stays.

        `sizes`: by bucket, the most bytes of words and state together.
        """
        self._discard()
        try:
            self._next = Journal(self._folder, msgspec.msgpack.encode(about), sizes)
        except OSError as error:
            self._fail(f"no room for {sum(sizes.values()) * 2 / (1 << 20):.1f} MiB: {error.strerror}", "make room")
            return None
        return self._next.write

    def publish(self) -> bool:
        """All of it has been written, and it takes the place of the former one. False if it cannot: as in `begin`."""
        if self._next is None:
            return False
        try:
            self._next.publish()
        except OSError as error:
            self._discard()
            self._fail(f"cannot be put in force: {error.strerror}", "mend the folder")
            return False
        self._end()
        self._journal, self._next = self._next, None
        return True

    def _fail(self, what: str, remedy: str) -> None:
        line = f"journal {self._path}: {what}"
        if self._required:
            raise RecordError(f"{line}; {remedy}, or set journal_required to false", "E-JOURNAL") from None
        self._end()
        self._folder.forget()
        log.warning("%s; the job goes on without it, and a crash of this server ends it", line)

    def ignore(self, why: str) -> None:
        log.warning("journal %s: %s; nothing of it is used", self._path, why)
        self.found, self.entries = None, {}

    def close(self, *, over: bool) -> None:
        """`over`: the job is, so nobody is to take it up; else the file stays for who comes next."""
        self._discard()
        self._end()
        if over:
            self._folder.forget()
        self._folder.close()

    def _discard(self) -> None:
        journal, self._next = self._next, None
        if journal is not None:
            journal.close()

    def _end(self) -> None:
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()


def _about(found: Found) -> About:
    try:
        return msgspec.msgpack.decode(found.about, type=About)
    except msgspec.MsgspecError as error:
        raise CorruptFrame(f"the journal says of itself what nobody understands: {error}") from None
