"""A summation server's journal: identity, plan and sums, so that a restarted server can resume.

A server that is restarted with the same folder finds its registration, its address, the plan in use and each bucket's sum.
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
    """The server that wrote the journal."""

    token: str
    """Of its registration."""
    number: int
    address: str
    """Where it listens."""
    view: View
    plan: bytes
    generation: int
    """Of the plan; may be later than the view's."""
    streams: str = ""
    """Its address for gRPC streams; empty for none."""


class ServerJournal:
    """`found`: what an earlier process recorded; None for nothing."""

    def __init__(self, path: str, *, required: bool) -> None:
        """`required`: without space for the journal the server refuses to run; if not, it continues without one."""
        self._folder, self._required = Folder(path), required
        self._path = path
        self._journal: Journal | None = None
        self._next: Journal | None = None
        """The new journal until `publish`."""
        self.found: About | None = None
        self.entries: Mapping[int, Entry] = {}
        try:
            if (former := self._folder.find()) is not None:
                self.found, self.entries = _about(former), former.entries
        except CorruptFrame as error:
            log.warning("%s: nothing of it is used", without_code(error))

    def begin(self, about: About, sizes: Mapping[int, int]) -> Keep | None:
        """Makes a new journal, which replaces the former one at `publish`. If there is no space: RecordError if it is
        required, and the former one stays; if not, returns None, and the server has no journal from now on.

        `sizes`: by bucket, the most bytes of metadata and state together.
        """
        self._discard()
        try:
            self._next = Journal(self._folder, msgspec.msgpack.encode(about), sizes)
        except OSError as error:
            self._fail(f"no room for {sum(sizes.values()) * 2 / (1 << 20):.1f} MiB: {error.strerror}", "make room")
            return None
        return self._next.write

    def publish(self) -> bool:
        """Replaces the former journal, after everything was written. False if that fails; handled as in `begin`."""
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
            raise RecordError("E-JOURNAL", f"{line}; {remedy}, or set journal_required to false") from None
        self._end()
        self._folder.forget()
        log.warning("%s; the job goes on without it, and a crash of this server ends it", line)

    def ignore(self, why: str) -> None:
        log.warning("journal %s: %s; nothing of it is used", self._path, why)
        self.found, self.entries = None, {}

    def close(self, *, over: bool) -> None:
        """`over`: the job is over, so the journal is removed; if not, it stays for a restart."""
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
