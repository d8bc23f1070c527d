"""A summation server's journal: identity, plan and sums, so that a server restarted with the same folder resumes bit for bit.

The journal is a memory-mapped file with one entry per bucket, and one for the workers that have joined. An entry has two slots,
written alternately: first the bytes, then a header with a sequence number and a checksum. If the process is killed while it
writes, the other slot still contains the previous version. The kernel keeps what was written to the mapping when the process
dies. After a power failure some of it may be lost, which checksums detect. The file is allocated completely before use, so that
a full disk is detected then. The file gets its final name after the first entries are written, so an incomplete journal is
never read.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from commlayer.cluster.processes.folder_lock import lock_folder
from commlayer.cluster.servers.bucket_sum import WriteEntry
from commlayer.errors import InvalidInput, RecordError
from commlayer.records import MALFORMED, Epoch, Record, complete
from commlayer.transport.crc import crc32c

log = logging.getLogger("commlayer")
NAME, LOCK = "server.journal", "lock"
_FILE = struct.Struct("<8sII")
"""Header of the journal file: magic, and size and checksum of the Metadata. The Metadata comes next, then the slots."""
_SLOT = struct.Struct("<QIII")
"""Header of a slot: sequence number, sizes of the entry's two parts, checksum of the header and the parts."""
MAGIC, ALIGN = b"CMLJ0005", 64
JOINED = (1 << 32) - 2
"""Key of the entry with the workers that have joined, as no plan numbers a bucket."""
JOINED_NBYTES, NUMBER_NBYTES = 4096, 5
"""Room in that entry for further workers, and the maximum size of a worker's number."""
Entry = tuple[bytes, bytes]
"""A bucket's entry: encoded metadata of the sum, and codec state."""


class ServerIdentity(Record, frozen=True):
    """The server process that wrote the journal, with its epoch and plan."""

    token: str
    """Token of the server's registration with the coordinator."""
    number: int
    address: str
    """Address where the server listens for data connections."""
    epoch: Epoch
    """The epoch with which the server began to serve the job."""
    plan: bytes
    generation: int
    """Number of the plan, which counts the job's plans."""
    streams: str = ""
    """The server's address for gRPC streams; "" for none."""
    joined: tuple[int, ...] = ()
    """Workers that have joined since that epoch, in that order."""


class Metadata(Record, frozen=True):
    identity: ServerIdentity
    sizes: dict[int, int]
    """Maps a bucket to the maximum bytes of its entry."""


class ServerJournal:
    """The journal of one server. `recovered`: what an earlier process of the server recorded; None for nothing. `entries`: the
    intact entries among the recovered ones, keyed by bucket."""

    def __init__(self, path: str, *, required: bool) -> None:
        """Locks the folder and reads an earlier journal. `required`: True: if there is no space for the journal, the server
        refuses to run. False: the server then runs without a journal."""
        self._path, self._required = Path(path), required
        self._lock = lock_folder(self._path, LOCK, "is in use by another server: use a separate folder for each server")
        self._file: _JournalFile | None = None
        self.recovered: ServerIdentity | None = None
        self.entries: dict[int, Entry] = {}
        try:
            self.recovered, self.entries = read(self._path / NAME)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, struct.error, *MALFORMED) as error:
            log.warning("journal %s cannot be read: %s: ignored", self._path / NAME, error)

    def replace(self, identity: ServerIdentity, sizes: Mapping[int, int], write_all: Callable[[WriteEntry], None]) -> bool:
        """Replaces the previous journal by a new one. `sizes`: maps a bucket to the maximum bytes of its entry. `write_all`
        writes all entries with the function that it gets as argument; later writes use the same function.

        Returns whether there is a journal from now on. If the file cannot be written and the journal is required, raises
        RecordError and keeps the previous one.
        """
        new = None
        try:
            room = {JOINED: JOINED_NBYTES + NUMBER_NBYTES * len(identity.joined)}
            new = _JournalFile(self._path, Metadata(identity, {**sizes, **room}))
            write_all(new.write)
            new.publish()
        except OSError as error:
            if new is not None:
                new.close()
            mib = 2 * sum(sizes.values()) / (1 << 20)
            line = f"journal {self._path}: cannot write {mib:.1f} MiB: {error.strerror}"
            if self._required:
                raise RecordError("E-JOURNAL", f"{line}; free some space, or set journal_required to false") from None
            self._end()
            self._forget()
            log.warning("%s; the job continues without a journal, so a crash of this server will end the job", line)
            return False
        self._end()
        self._file = new
        return True

    def write_joined(self, joined: Sequence[int], sizes: Mapping[int, int]) -> bool:
        """Records the workers that have joined. Returns False if the journal has no room for their number, or for entries of
        `sizes`, so that it must be replaced. Thread: that of `replace`."""
        words, file = msgspec.msgpack.encode(joined), self._file
        if file is None:
            return True
        if any(file.sizes[bucket] < nbytes for bucket, nbytes in {**sizes, JOINED: len(words)}.items()):
            return False
        file.write(JOINED, words, b"")
        return True

    def ignore(self, why: str) -> None:
        log.warning("journal %s: ignored, because %s", self._path, why)
        self.recovered, self.entries = None, {}

    def close(self, *, over: bool) -> None:
        """Closes the journal and unlocks its folder. `over`: True: the job is over, so the journal is removed. False: the
        journal is kept for a restart."""
        self._end()
        if over:
            self._forget()
        os.close(self._lock)

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            (self._path / NAME).unlink()


class _JournalFile:
    """A new journal file. Writes to one entry must come from one thread at a time."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        """Allocates the file. Raises OSError, and changes nothing, if there is no space."""
        data, self.sizes = msgspec.msgpack.encode(metadata), metadata.sizes
        self._slots, nbytes = _layout(_FILE.size + len(data), metadata.sizes)
        self._number = dict.fromkeys(metadata.sizes, 0)
        self._path, self._published = folder / f"{NAME}.new", folder / NAME
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # writing to a hole of a mapped file on a full disk kills the process
            self._map = mmap.mmap(descriptor, nbytes)
        except BaseException:
            self._path.unlink()
            raise
        finally:
            os.close(descriptor)
        self._map[: _FILE.size + len(data)] = _FILE.pack(MAGIC, len(data), crc32c(data)) + data

    def write(self, bucket: int, words: bytes, state: bytes | memoryview) -> None:
        """Writes the bucket's entry. After this returns, the entry survives a crash of the process."""
        if len(words) + len(state) > self.sizes[bucket]:
            raise InvalidInput("E-JOURNAL", f"journal: the entry of bucket {bucket} has {len(words) + len(state)} bytes, "
                                            f"allowed {self.sizes[bucket]}")
        self._number[bucket] = number = self._number[bucket] + 1
        start = self._slots[bucket][number % 2]
        body, middle = start + _SLOT.size, start + _SLOT.size + len(words)
        self._map[body:middle] = words
        self._map[middle : middle + len(state)] = state
        check = crc32c(state, crc32c(words, crc32c(_SLOT.pack(number, len(words), len(state), 0))))
        self._map[start:body] = _SLOT.pack(number, len(words), len(state), check)

    def publish(self) -> None:
        """Replaces the previous journal. If this raises OSError, the previous one is still valid."""
        self._path.replace(self._published)

    def close(self) -> None:
        """Closes the file, and removes it unless it was published."""
        self._map.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


def _layout(begin: int, sizes: Mapping[int, int]) -> tuple[dict[int, tuple[int, int]], int]:
    """Returns the offsets of each bucket's two slots, and the size of the file. `begin`: offset of the first free byte."""
    slots, at = {}, -(-begin // ALIGN) * ALIGN
    for bucket, nbytes in sizes.items():
        slot_nbytes = -(-(_SLOT.size + nbytes) // ALIGN) * ALIGN
        slots[bucket] = at, at + slot_nbytes
        at += 2 * slot_nbytes
    return slots, at


def read(path: Path) -> tuple[ServerIdentity, dict[int, Entry]]:
    """Reads a journal: the identity of its server, and the intact entries. Raises OSError, ValueError, struct.error or
    MsgspecError if its metadata cannot be read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        magic, nbytes, check = _FILE.unpack_from(mapped)
        data = mapped[_FILE.size : _FILE.size + nbytes]
        if magic != MAGIC or len(data) != nbytes or crc32c(data) != check:
            raise InvalidInput("E-JOURNAL", "its header is damaged or of another version")
        metadata = msgspec.msgpack.decode(data, type=complete(Metadata))
        slots, size = _layout(_FILE.size + nbytes, metadata.sizes)
        if size != len(mapped):
            raise InvalidInput("E-JOURNAL", f"it has {len(mapped)} bytes, expected {size}")
        found = {bucket: [entry for start in starts for entry in _entry(mapped, start, metadata.sizes[bucket])]
                 for bucket, starts in slots.items()}
        identity, last = metadata.identity, {bucket: max(entries)[1:] for bucket, entries in found.items() if entries}
        if (joined := last.pop(JOINED, None)) is not None:
            identity = msgspec.structs.replace(identity, joined=msgspec.msgpack.decode(joined[0], type=tuple[int, ...]))
        return identity, last


def _entry(mapped: mmap.mmap, start: int, most: int) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields sequence number, metadata and codec state of the entry in the slot at `start`, if the entry is intact."""
    number, words_nbytes, state_nbytes, check = _SLOT.unpack_from(mapped, start)
    if not number or words_nbytes + state_nbytes > most:
        return
    body, middle = start + _SLOT.size, start + _SLOT.size + words_nbytes
    words, state = mapped[body:middle], mapped[middle : middle + state_nbytes]
    if crc32c(state, crc32c(words, crc32c(_SLOT.pack(number, words_nbytes, state_nbytes, 0)))) == check:
        yield number, words, state
