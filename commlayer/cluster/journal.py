"""What a summation server must not forget, in a file that is mapped into memory. Knows places and bytes; no codec, no plan.

Each place has two slots, written in turn: the bytes first, then a head with a number and their checksum. So a process that is
killed while it writes leaves the entry before whole. The kernel keeps what was written to the mapping, whatever becomes of the
process; a machine that loses power may lose some of it, which the checksums tell.

The file gets its whole size before it is used, so that a full disk is known then, and appears under its name when the first
entries are in it: half of a journal is never read.
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
"""Magic, size of all, place of the first slot, size of what is said of the file, checksum of all but the magic."""
_SIZES = struct.Struct("<QQI")
_HEAD = struct.Struct("<QIII")
"""Of a slot: number, sizes of the entry's two parts, checksum of them behind the number."""
_PLACE = struct.Struct("<QQ")
TRIES, TRY_S = 10, 0.02
"""Who only looks whether a server holds the lock shares it for an instant."""
ALIGN = 64
MOST_ABOUT_NBYTES = 256 << 20


class Entry(NamedTuple):
    """The last that was written at a place: a few words, and state."""

    words: bytes
    state: bytes


class Found(NamedTuple):
    """A file of an earlier process. `entries` lacks the places that hold nothing whole."""

    about: bytes
    entries: dict[int, Entry]
    places: tuple[int, ...]


def hold(folder: Path, name: str, taken: str) -> int:
    """Makes the folder, and holds the lock of that name in it, or without one that on itself, as long as the descriptor is
    open. ValueError where the folder cannot be made, or, with `taken`, where somebody else holds the lock."""
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
    """Where one server keeps its journal. One process at a time: another one is refused while this holds it."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock = hold(self.path, LOCK, "is in use by another server: give each server a folder of its own")

    @property
    def file(self) -> Path:
        return self.path / NAME

    def find(self) -> Found | None:
        """What is there; None for nothing. CorruptFrame if not even what the file is about can be read."""
        try:
            with self.file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _read(memoryview(bytes(mapped)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error) as error:
            raise CorruptFrame(f"journal {self.file} cannot be read: {error}", code="E-JOURNAL") from None

    def forget(self) -> None:
        """The job is over, or goes on without a journal: nobody may take it up."""
        with contextlib.suppress(OSError):
            self.file.unlink()

    def close(self) -> None:
        os.close(self._lock)


class Journal:
    """A new file, which takes the place of the former one at `publish`. Writes of one place come from one thread at a time."""

    def __init__(self, folder: Folder, about: bytes, sizes: Mapping[int, int]) -> None:
        """`sizes`: of each place, the most bytes of an entry. OSError if there is no room, and nothing has changed."""
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
            os.posix_fallocate(descriptor, 0, at)  # a mapping of a file with holes would end the process on a full disk
            self._map = mmap.mmap(descriptor, at)
        except BaseException:
            self._path.unlink()
            raise
        finally:
            os.close(descriptor)
        table = b"".join(_PLACE.pack(place, nbytes) for place, nbytes in sizes.items())
        said = struct.pack("<I", len(about)) + about + table
        check = crc32c(said, crc32c(_SIZES.pack(at, self._first(), len(said))))
        self._map[: _FILE.size + len(said)] = _FILE.pack(MAGIC, at, self._first(), len(said), check) + said

    def _first(self) -> int:
        return min((at for at, _ in self._places.values()), default=0)

    def write(self, place: int, words: bytes, state: bytes | memoryview) -> None:
        """When it returns, this is what a process that comes after this one finds there."""
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
        """From now on this is the journal. OSError, and the former one is."""
        os.replace(self._path, self._folder.file)
        self._published = True

    def close(self) -> None:
        self._map.close()
        if not self._published:  # else the name is that of the one that comes next
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


def _read(data: memoryview) -> Found:
    magic, size, first, nbytes, check = _FILE.unpack_from(data)
    said = data[_FILE.size : _FILE.size + nbytes]
    if magic != MAGIC or size != len(data) or nbytes > MOST_ABOUT_NBYTES or len(said) != nbytes:
        raise InvalidInput("E-JOURNAL", "its beginning is not whole")
    if crc32c(said, crc32c(_SIZES.pack(size, first, nbytes))) != check:
        raise InvalidInput("E-JOURNAL", "the checksum of its beginning does not match")
    (length,) = struct.unpack_from("<I", said)
    about, table = bytes(said[4 : 4 + length]), said[4 + length :]
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
