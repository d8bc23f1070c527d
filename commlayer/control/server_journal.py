"""A summation server's journal: what it is about, and whether what is found belongs to this job. Knows no sums, no codec.

A server that was killed and is started again with the same folder finds who it was: its seat, its address, the job's secret
if it was made there, the plan in force, and each bucket's sum.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from commlayer.errors import CorruptFrame, RecordError
from commlayer.records import Record, View
from commlayer.transport.journal import Entry, Folder, Found, Journal
from commlayer.transport.summation_cell import Keep

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


class ServerJournal:
    """Of one process. `found` is what an earlier one has left, None for nothing."""

    def __init__(self, path: str, *, required: bool) -> None:
        """`required`: without room for it nothing is served, else the job goes on without."""
        self._folder, self._required = Folder(path), required
        self._path = path
        self._journal: Journal | None = None
        self.found: About | None = None
        self.entries: Mapping[int, Entry] = {}
        try:
            if (found := self._folder.find()) is not None:
                self.found, self.entries = _about(found), found.entries
        except CorruptFrame as error:
            log.warning("%s: nothing of it is used", error)

    def begin(self, about: About, sizes: Mapping[int, int]) -> Keep | None:
        """A new one, not yet in force: see `publish`. None if there is no room, and then there is none at all.

        `sizes`: by bucket, the most bytes of words and state together.
        """
        try:
            journal = Journal(self._folder, msgspec.msgpack.encode(about), sizes)
        except OSError as error:
            line = f"journal {self._path}: no room for {sum(sizes.values()) * 2 / (1 << 20):.1f} MiB: {error.strerror}"
            if self._required:
                raise RecordError(f"{line}; make room, or set journal_required to false") from None
            self._end()
            self._folder.forget()
            log.warning("%s; the job goes on without it, and a crash of this server ends it", line)
            return None
        self._end()
        self._journal = journal
        return journal.write

    def publish(self) -> None:
        """All of it has been written."""
        if self._journal is not None:
            self._journal.publish()

    def ignore(self, why: str) -> None:
        log.warning("journal %s: %s; nothing of it is used", self._path, why)
        self.found, self.entries = None, {}

    def close(self) -> None:
        """The end of the job: nobody is to take it up."""
        self._end()
        self._folder.forget()
        self._folder.close()

    def _end(self) -> None:
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()


def _about(found: Found) -> About:
    try:
        return msgspec.msgpack.decode(found.about, type=About)
    except msgspec.MsgspecError as error:
        raise CorruptFrame(f"the journal says of itself what nobody understands: {error}") from None
