"""File format of the summation server's journal: a memory-mapped file of entries that survive a crash of the process.

Each place (entry) has two slots, written alternately: first the bytes, then a header with a number and their checksum. If the
process is killed while it writes, the other slot still holds the former entry. The kernel keeps what was written to the mapping
when the process dies. After a power failure some of it may be lost, which checksums detect.

The file is allocated completely before use, so that a full disk is noticed then. It gets its final name after the first
entries are written, so a partial journal is never read.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from commlayer.errors import CorruptFrame, InvalidInput
from commlayer.transport.crc import crc32c

MAGIC = b"CMLJ0001"
NAME, LOCK = "server.journal", "lock"
_FILE = struct.Struct("<8sQQII")
"""Magic, size of the file, offset of the first slot, size of the file's metadata, checksum of all these except the magic."""
_SIZES = struct.Struct("<QQI")
_HEAD = struct.Struct("<QIII")
"""Header of a slot: number, sizes of the entry's two parts, checksum of the header and the parts."""
_PLACE = struct.Struct("<QQ")
TRIES, TRY_S = 10, 0.02
"""Retries for the lock, because a process that checks whether it is free holds it for an instant."""
ALIGN = 64
MOST_ABOUT_NBYTES = 256 << 20


class Entry(NamedTuple):
    """The last entry written at a place: metadata and state."""

    words: bytes
    state: bytes


class Found(NamedTuple):
    """The journal of an earlier process. `entries` lacks places without an intact entry."""

    about: bytes
    entries: dict[int, Entry]
    places: tuple[int, ...]


def hold(folder: Path, name: str, taken: str) -> int:
    """Makes the folder and takes the lock file `name` in it (empty: the folder itself). The lock lasts while the returned
    descriptor is open. ValueError if the folder cannot be made or, with the text `taken`, if another process holds the lock."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / name, (os.O_RDWR | os.O_CREAT if name else os.O_RDONLY) | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidInput("E-JOURNAL",
                           f"journal: {folder} cannot be made: {error.strerror}; name a folder that this user may write to") \
            from None
    for left in reversed(range(TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            if left:
                time.sleep(TRY_S)
    os.close(lock)
    raise InvalidInput("E-JOURNAL-IN-USE", f"journal: {folder} {taken}")


class Folder:
    """A server's journal folder, locked against other processes."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock = hold(self.path, LOCK, "is in use by another server: give each server a folder of its own")

    @property
    def file(self) -> Path:
        return self.path / NAME

    def find(self) -> Found | None:
        """Reads the journal; None if there is none. CorruptFrame if its metadata cannot be read."""
        try:
            with self.file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _read(memoryview(bytes(mapped)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error) as error:
            raise CorruptFrame(f"journal {self.file} cannot be read: {error}", code="E-JOURNAL") from None

    def forget(self) -> None:
        """Removes the journal: the job is over or continues without one, so it must not be resumed."""
        with contextlib.suppress(OSError):
            self.file.unlink()

    def close(self) -> None:
        os.close(self._lock)


class Journal:
    """A new file, which replaces the former one at `publish`. Writes to one place must come from one thread at a time."""

    def __init__(self, folder: Folder, about: bytes, sizes: Mapping[int, int]) -> None:
        """`sizes`: by place, the most bytes of an entry. OSError if there is no space; nothing has changed then."""
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
        """When this returns, a later process will find this entry."""
        at, nbytes = self._places[place]
        if len(words) + len(state) > nbytes:
            raise InvalidInput("E-JOURNAL",
                               f"journal: place {place} has room for {nbytes} bytes, not for {len(words) + len(state)}")
        number = self._number[place] + 1
        start = at + (number % 2) * (-(-(_HEAD.size + nbytes) // ALIGN) * ALIGN)
        body = start + _HEAD.size
        self._map[body : body + len(words)] = words
        self._map[body + len(words) : body + len(words) + len(state)] = state
        check = crc32c(state, crc32c(words, crc32c(_HEAD.pack(number, len(words), len(state), 0))))
        self._map[start:body] = _HEAD.pack(number, len(words), len(state), check)
        self._number[place] = number

    def publish(self) -> None:
        """Replaces the former journal. OSError: the former one is still valid."""
        os.replace(self._path, self._folder.file)
        self._published = True

    def close(self) -> None:
        self._map.close()
        if not self._published:  # else the next journal may use the temporary name
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


def _read(data: memoryview) -> Found:
    magic, size, first, nbytes, check = _FILE.unpack_from(data)
    metadata = data[_FILE.size : _FILE.size + nbytes]
    if magic != MAGIC or size != len(data) or nbytes > MOST_ABOUT_NBYTES or len(metadata) != nbytes:
        raise InvalidInput("E-JOURNAL", "its beginning is not whole")
    if crc32c(metadata, crc32c(_SIZES.pack(size, first, nbytes))) != check:
        raise InvalidInput("E-JOURNAL", "the checksum of its beginning does not match")
    (length,) = struct.unpack_from("<I", metadata)
    about, table = bytes(metadata[4 : 4 + length]), metadata[4 + length :]
    places = list(_PLACE.iter_unpack(table))
    entries: dict[int, Entry] = {}
    at = first
    for place, room in places:
        step = -(-(_HEAD.size + room) // ALIGN) * ALIGN
        slots = [slot for slot in (_slot(data[start : start + _HEAD.size + room]) for start in (at, at + step)) if slot]
        if slots:
            entries[place] = max(slots, key=lambda slot: slot[0])[1]
        at += 2 * step
    return Found(about, entries, tuple(place for place, _ in places))


def _slot(data: memoryview) -> tuple[int, Entry] | None:
    number, words_nbytes, state_nbytes, check = _HEAD.unpack_from(data)
    body = data[_HEAD.size : _HEAD.size + words_nbytes + state_nbytes]
    if not number or len(body) != words_nbytes + state_nbytes:
        return None
    if crc32c(body, crc32c(_HEAD.pack(number, words_nbytes, state_nbytes, 0))) != check:
        return None
    return number, Entry(bytes(body[:words_nbytes]), bytes(body[words_nbytes:]))
