"""A summation server's journal: identity, plan and sums, so a restarted server can resume.

A server that is restarted with the same folder restores its registration, its address, the plan in use and each bucket's sum.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from commlayer.cluster.summation import WriteEntry
from commlayer.errors import CorruptFrame, InvalidInput, RecordError, without_code
from commlayer.records import Record, View
from commlayer.transport.crc import crc32c

log = logging.getLogger("commlayer")


class ServerIdentity(Record, frozen=True):
    """The server process that wrote the journal, with its epoch and plan."""

    token: str
    """Token of the server's registration with the coordinator."""
    number: int
    address: str
    """Address where the server listens for data connections."""
    view: View
    plan: bytes
    generation: int
    """Generation of the plan; may be later than the epoch's."""
    streams: str = ""
    """The server's address for gRPC streams; "" for none."""


class ServerJournal:
    """The journal of one server. `recovered`: what an earlier process of the server recorded; None for nothing. `entries`: the
    recovered sums, keyed by bucket."""

    def __init__(self, path: str, *, required: bool) -> None:
        """Locks the folder and reads an earlier journal. `required`: if there is no space for the journal, the server refuses
        to run; otherwise it continues without one."""
        self._folder, self._required = JournalFolder(path), required
        self._path = path
        self._journal: Journal | None = None
        self._next: Journal | None = None
        """The new journal until `publish`; otherwise None."""
        self.recovered: ServerIdentity | None = None
        self.entries: Mapping[int, JournalEntry] = {}
        try:
            if (former := self._folder.find()) is not None:
                self.recovered, self.entries = _identity(former), former.entries
        except CorruptFrame as error:
            log.warning("%s: the journal is ignored", without_code(error))

    def begin(self, about: ServerIdentity, sizes: Mapping[int, int]) -> WriteEntry | None:
        """Creates a new journal, which replaces the previous one at `publish`. Returns the function that writes entries, or
        None without a journal.

        If there is no space and the journal is required, raises RecordError and keeps the previous journal. If it is not
        required, removes the previous one, and the server has no journal from now on. `sizes`: maps a bucket to the maximum
        bytes of its metadata and state together.
        """
        self._discard()
        try:
            self._next = Journal(self._folder, msgspec.msgpack.encode(about), sizes)
        except OSError as error:
            self._fail(f"no space for {sum(sizes.values()) * 2 / (1 << 20):.1f} MiB: {error.strerror}", "free some space")
            return None
        return self._next.write

    def publish(self) -> bool:
        """Replaces the previous journal, after every bucket's entry was written. Returns False if that fails and the journal is
        not required; if it is required, raises RecordError."""
        if self._next is None:
            return False
        try:
            self._next.publish()
        except OSError as error:
            self._discard()
            self._fail(f"cannot replace the previous journal: {error.strerror}", "repair the folder")
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
        log.warning("%s; the job continues without a journal, so a crash of this server will end the job", line)

    def ignore(self, why: str) -> None:
        log.warning("journal %s: ignored, because %s", self._path, why)
        self.recovered, self.entries = None, {}

    def close(self, *, over: bool) -> None:
        """Closes the journal and unlocks its folder. `over`: the job is over, so the journal is removed; otherwise it is kept
        for a restart."""
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


def _identity(journal: StoredJournal) -> ServerIdentity:
    try:
        return msgspec.msgpack.decode(journal.about, type=ServerIdentity)
    except msgspec.MsgspecError as error:
        raise CorruptFrame(f"the journal's metadata is malformed: {error}") from None


# ---- File format of the summation server's journal: a memory-mapped file of entries that survive a crash of the process. Each
# entry has two slots, written alternately: first the bytes, then a header with a sequence number and their checksum. If the
# process is killed while it writes, the other slot still contains the previous version. The kernel keeps what was written to
# the mapping when the process dies. After a power failure some of it may be lost, which checksums detect. The file is allocated
# completely before use, so that a full disk is detected then. It gets its final name after the first entries are written, so an
# incomplete journal is never read.
#
# Each place (entry) has two slots, written alternately: first the bytes, then a header with a number and their checksum. If the
# process is killed while it writes, the other slot still holds the former entry. The kernel keeps what was written to the
# mapping when the process dies. After a power failure some of it may be lost, which checksums detect.
#
# The file is allocated completely before use, so that a full disk is noticed then. It gets its final name after the first
# entries are written, so a partial journal is never read.

MAGIC = b"CMLJ0002"
NAME, LOCK = "server.journal", "lock"
_FILE = struct.Struct("<8sQQII")
"""File header: magic, size of the file, offset of the first slot, size of the file's metadata, checksum of all these except the
magic."""
_SIZES = struct.Struct("<QQI")
_HEAD = struct.Struct("<QIII")
"""Header of a slot: sequence number, sizes of the entry's two parts, checksum of the header and the parts."""
_PLACE = struct.Struct("<QQ")
LOCK_TRIES, LOCK_RETRY_S = 10, 0.02
"""Retries of locking the folder, and the pause between two. Another process may hold the lock for an instant while it checks
whether the lock is free."""
ALIGN = 64
MAX_METADATA_NBYTES = 256 << 20


class JournalEntry(NamedTuple):
    """One entry of the journal, as last written: encoded metadata (`words`) and codec state."""

    words: bytes
    state: bytes


class StoredJournal(NamedTuple):
    """The journal of an earlier process. `entries` has no key for an entry that was not intact; `places` are the keys of all
    entries."""

    about: bytes
    entries: dict[int, JournalEntry]
    places: tuple[int, ...]


def lock_folder(folder: Path, name: str, taken: str) -> int:
    """Creates the folder and locks the file `name` in it (empty: the folder itself). The lock lasts while the returned
    descriptor is open. Raises InvalidInput if the folder cannot be created or, with the text `taken`, if another process holds
    the lock."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / name, (os.O_RDWR | os.O_CREAT if name else os.O_RDONLY) | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidInput("E-JOURNAL",
                           f"journal: {folder} cannot be created: {error.strerror}; name a folder that this user may write "
                           "to") \
            from None
    for left in reversed(range(LOCK_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            if left:
                time.sleep(LOCK_RETRY_S)
    os.close(lock)
    raise InvalidInput("E-JOURNAL-IN-USE", f"journal: {folder} {taken}")


class JournalFolder:
    """A server's journal folder, locked against other processes."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock = lock_folder(self.path, LOCK, "is in use by another server: use a separate folder for each server")

    @property
    def file(self) -> Path:
        return self.path / NAME

    def find(self) -> StoredJournal | None:
        """Reads the journal; None if there is none. Raises CorruptFrame if its metadata cannot be read."""
        try:
            with self.file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _read(memoryview(bytes(mapped)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error) as error:
            raise CorruptFrame(f"journal {self.file} cannot be read: {error}", code="E-JOURNAL") from None

    def forget(self) -> None:
        """Removes the journal: the job is over or continues without one, so no later process may resume from it."""
        with contextlib.suppress(OSError):
            self.file.unlink()

    def close(self) -> None:
        os.close(self._lock)


class Journal:
    """A new journal file, which replaces the previous one at `publish`. Writes to one entry must come from one thread at a
    time."""

    def __init__(self, folder: JournalFolder, about: bytes, sizes: Mapping[int, int]) -> None:
        """Allocates the file. `about`: encoded identity; `sizes`: maps each entry's key to its maximum size in bytes. Raises
        OSError, and changes nothing, if there is no space."""
        self._folder, self._published = folder, False
        first = _FILE.size + len(about) + 4 + _PLACE.size * len(sizes)
        at = -(-first // ALIGN) * ALIGN
        self._places: dict[int, tuple[int, int]] = {}
        for place, nbytes in sizes.items():
            self._places[place] = (at, nbytes)
            at += 2 * (-(-(_HEAD.size + nbytes) // ALIGN) * ALIGN)
        self._number = dict.fromkeys(sizes, 0)
        self._path = folder.path / f"{NAME}.new"
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, at)  # writing to a hole of a mapped file on a full disk would kill the process
            self._map = mmap.mmap(descriptor, at)
        except BaseException:
            self._path.unlink()
            raise
        finally:
            os.close(descriptor)
        table = b"".join(_PLACE.pack(place, nbytes) for place, nbytes in sizes.items())
        metadata = struct.pack("<I", len(about)) + about + table
        check = crc32c(metadata, crc32c(_SIZES.pack(at, self._first(), len(metadata))))
        self._map[: _FILE.size + len(metadata)] = _FILE.pack(MAGIC, at, self._first(), len(metadata), check) + metadata

    def _first(self) -> int:
        return min((at for at, _ in self._places.values()), default=0)

    def write(self, place: int, words: bytes, state: bytes | memoryview) -> None:
        """Writes the entry with key `place`. After this returns, the entry survives a crash of the process."""
        at, nbytes = self._places[place]
        if len(words) + len(state) > nbytes:
            raise InvalidInput("E-JOURNAL",
                               f"journal: entry {place} is larger than planned: {len(words) + len(state)} bytes, allowed "
                               f"{nbytes}")
        number = self._number[place] + 1
        start = at + (number % 2) * (-(-(_HEAD.size + nbytes) // ALIGN) * ALIGN)
        body = start + _HEAD.size
        self._map[body : body + len(words)] = words
        self._map[body + len(words) : body + len(words) + len(state)] = state
        check = crc32c(state, crc32c(words, crc32c(_HEAD.pack(number, len(words), len(state), 0))))
        self._map[start:body] = _HEAD.pack(number, len(words), len(state), check)
        self._number[place] = number

    def publish(self) -> None:
        """Replaces the previous journal. If this raises OSError, the previous one is still valid."""
        os.replace(self._path, self._folder.file)
        self._published = True

    def close(self) -> None:
        self._map.close()
        if not self._published:  # otherwise the next journal may use the temporary name
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


def _read(data: memoryview) -> StoredJournal:
    magic, size, first, nbytes, check = _FILE.unpack_from(data)
    metadata = data[_FILE.size : _FILE.size + nbytes]
    if magic != MAGIC or size != len(data) or nbytes > MAX_METADATA_NBYTES or len(metadata) != nbytes:
        raise InvalidInput("E-JOURNAL", "its header is incomplete or of another version")
    if crc32c(metadata, crc32c(_SIZES.pack(size, first, nbytes))) != check:
        raise InvalidInput("E-JOURNAL", "the checksum of its header does not match")
    (length,) = struct.unpack_from("<I", metadata)
    about, table = bytes(metadata[4 : 4 + length]), metadata[4 + length :]
    places = list(_PLACE.iter_unpack(table))
    entries: dict[int, JournalEntry] = {}
    at = first
    for place, room in places:
        step = -(-(_HEAD.size + room) // ALIGN) * ALIGN
        slots = [slot for slot in (_slot(data[start : start + _HEAD.size + room]) for start in (at, at + step)) if slot]
        if slots:
            entries[place] = max(slots, key=lambda slot: slot[0])[1]
        at += 2 * step
    return StoredJournal(about, entries, tuple(place for place, _ in places))


def _slot(data: memoryview) -> tuple[int, JournalEntry] | None:
    number, words_nbytes, state_nbytes, check = _HEAD.unpack_from(data)
    body = data[_HEAD.size : _HEAD.size + words_nbytes + state_nbytes]
    if not number or len(body) != words_nbytes + state_nbytes:
        return None
    if crc32c(body, crc32c(_HEAD.pack(number, words_nbytes, state_nbytes, 0))) != check:
        return None
    return number, JournalEntry(bytes(body[:words_nbytes]), bytes(body[words_nbytes:]))
