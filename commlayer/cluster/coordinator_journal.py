"""The coordinator's journal: registrations, epoch and plan in a file, so a restarted coordinator can resume the job.

The file is rewritten when a registration or the epoch changes, which is rare. It contains no times: after a restart, every
process is treated as if its last heartbeat had just arrived. The sites' key-value store has a second file (below), which is
useless without this one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from commlayer.cluster.kv_store import Change, KeysDropped, NumberAdded, ValueSet
from commlayer.cluster.membership import Registration, State
from commlayer.cluster.server_journal import lock_folder
from commlayer.cluster.sites import Sites
from commlayer.errors import one_line
from commlayer.files import write_whole
from commlayer.records import MALFORMED, Record
from commlayer.transport.crc import crc32c

log = logging.getLogger("commlayer")

NAME = "coordinator.state"
MAGIC = b"CMLC0002"


class CoordinatorRecord(Record, frozen=True):
    """Contents of the coordinator's journal file."""

    address: str
    token: str
    """The job's secret, if the coordinator's process generated it; "" otherwise. A restarted coordinator needs the same secret,
    or no worker could authenticate."""
    state: State


class CoordinatorJournal:
    """The coordinator's journal in a folder, which is locked against other coordinators. `recovered`: what a previous
    coordinator recorded; None if there is nothing to resume."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / NAME
        self._lock = lock_folder(Path(folder), "", "is in use by another coordinator: use a separate folder for each job")
        self._failed = False
        self.meeting = KvJournal(folder)
        self.recovered: CoordinatorRecord | None = None
        with contextlib.suppress(FileNotFoundError):
            data = self._path.read_bytes()
            try:
                self.recovered = decode_record(data)
            except msgspec.MsgspecError as error:
                log.warning("journal %s cannot be read (%s): starting without it", self._path, error)
        if self.recovered is None:
            self.meeting.forget()

    def write(self, kept: CoordinatorRecord) -> None:
        if self._failed:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole({self._path: encode_record(kept)}, mode=0o600)  # it may hold the secret
        except OSError as error:
            self.forget()
            self._failed = True
            log.warning("journal %s: %s; the job continues without a journal, so a crash of the coordinator will "
                        "end the job", self._path,
                        error.strerror)

    def close(self) -> None:
        """Unlocks the folder for another coordinator."""
        os.close(self._lock)

    def forget(self) -> None:
        """Removes the journal, because the job is over or continues without one."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.meeting.close()


def encode_record(kept: CoordinatorRecord) -> bytes:
    """Encodes the contents of the journal file, without times."""
    timeless = {token: msgspec.structs.replace(place, seen_s=0.0, overdue=None, hung=())
                for token, place in kept.state.registrations.items()}
    state = msgspec.structs.replace(kept.state, registrations=timeless, ticked_s=None, held=None)
    return MAGIC + msgspec.msgpack.encode(msgspec.structs.replace(kept, state=state))


def decode_record(data: bytes) -> CoordinatorRecord:
    """Decodes what encode_record() returned. Raises MsgspecError if the data is malformed."""
    if not data.startswith(MAGIC):
        raise msgspec.DecodeError("wrong magic number")
    return msgspec.msgpack.decode(data[len(MAGIC) :], type=CoordinatorRecord)


def resumed_state(kept: CoordinatorRecord, now: float) -> State:
    """Returns the state of a coordinator that resumes at time `now`. Every process is treated as if its heartbeat had just
    arrived."""
    present: dict[str, Registration] = {
        token: msgspec.structs.replace(one, seen_s=now) for token, one in kept.state.registrations.items()}
    return msgspec.structs.replace(kept.state, registrations=present, ticked_s=now)


def journaled_part(state: State) -> tuple[object, ...]:
    """Returns the part of the state whose changes must be written to the journal."""
    return state.view, tuple((token, p.dead, p.left, p.join.serial) for token, p in state.registrations.items())


# ---- The journal of the sites and their key-value store. Each change is appended as a record and passed to the kernel before
# the caller gets its reply. A crash of the process therefore loses nothing that was acknowledged; a power failure may lose the
# last records. Reading stops at the first damaged record. When the file has grown too much it is rewritten with the current
# contents.
#
# Each change is appended as a record and handed to the kernel before the caller gets its reply. A crash of the process
# therefore loses nothing that was acknowledged; a power failure may lose the last records. Reading stops at the first damaged
# record. When the file has grown too much it is rewritten with the current contents.

KV_NAME = "meeting.log"
KV_MAGIC = b"CMLM0002"
_HEAD = struct.Struct("<II")
"""Header of a record: size of its contents, and the checksum of size and contents."""
_SIZE = struct.Struct("<I")
SLACK_NBYTES = 64 << 20
"""The file is rewritten when it exceeds twice its size after the previous rewrite by this many bytes."""
CHUNK_NBYTES = 1 << 20


class SitesRecord(Record, frozen=True, tag=True):
    """Replaces all earlier records of sites. Contains no times."""

    homes: Sites


class KvJournal:
    """Journal of the sites and their key-value store. The CoordinatorJournal of the same process has locked the folder."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / KV_NAME
        self._lock = threading.RLock()
        self._file, self._nbytes, self._most_nbytes = -1, 0, 0
        self._closed = False
        self._snapshot: Callable[[], Iterable[SitesRecord | Change]] = tuple

    def read(self) -> Iterator[SitesRecord | Change]:
        """Yields the intact records that a previous process wrote; none if there is no file."""
        try:
            with self._path.open("rb") as file:
                left_nbytes = os.fstat(file.fileno()).st_size - len(KV_MAGIC)
                if file.read(len(KV_MAGIC)) != KV_MAGIC:
                    log.warning("journal %s is not a journal of this version (wrong magic number): ignored", self._path)
                    return
                while left_nbytes:
                    head = file.read(min(_HEAD.size, left_nbytes))
                    nbytes, check = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
                    data = file.read(nbytes) if nbytes <= left_nbytes - _HEAD.size else b""
                    if not data or len(data) < nbytes or crc32c(data, crc32c(_SIZE.pack(nbytes))) != check:
                        log.warning("journal %s: its last %d bytes are incomplete or damaged and are ignored", self._path,
                                    left_nbytes)
                        return
                    yield msgspec.msgpack.decode(data, type=SitesRecord | ValueSet | NumberAdded | KeysDropped)
                    left_nbytes -= len(head) + nbytes
        except FileNotFoundError:
            return
        except (OSError, *MALFORMED) as error:
            log.warning("journal %s: reading stopped early: %s", self._path, one_line(error))

    def begin(self, snapshot: Callable[[], Iterable[SitesRecord | Change]]) -> None:
        """Rewrites the file with the records that `snapshot` returns, now and whenever the file has grown too much."""
        with self._lock:
            if self._closed:
                return
            self._snapshot, part = snapshot, self._path.with_name(f"{KV_NAME}.new")
            former, self._file, self._nbytes = self._file, -1, 0
            try:
                with contextlib.suppress(FileNotFoundError):
                    part.unlink()  # left by an earlier process, possibly with another mode
                self._file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                data = bytearray(KV_MAGIC)
                for record in snapshot():
                    data += _packed(record)
                    if len(data) >= CHUNK_NBYTES:
                        self._append(data)
                        data = bytearray()
                self._append(data)
                part.replace(self._path)
            except OSError as error:
                self._fail(error)
            finally:
                if former >= 0:
                    os.close(former)
            self._most_nbytes = 2 * self._nbytes + SLACK_NBYTES

    def note(self, record: SitesRecord | Change) -> None:
        """Appends a record. After this returns, the record survives a crash of the process."""
        with self._lock:
            if self._file < 0:
                return
            try:
                self._append(_packed(record))
            except OSError as error:
                self._fail(error)
                return
            if self._nbytes > self._most_nbytes:
                self.begin(self._snapshot)

    def wait(self) -> None:
        """Waits until a pending journal write has ended. While a slow disk blocks a write, the coordinator cannot receive
        calls. Sites must not count as silent in that time."""
        with self._lock:
            return

    def forget(self) -> None:
        """Removes the file, so no later process resumes from it."""
        for path in (self._path, self._path.with_name(f"{KV_NAME}.new")):
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Removes the file and stops writing: the job is over, or continues without a journal."""
        with self._lock:
            self._closed = True
            self.forget()
            if self._file >= 0:
                with contextlib.suppress(OSError):  # in case its name could not be removed
                    os.ftruncate(self._file, 0)
                os.close(self._file)
                self._file = -1

    def _append(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._nbytes += len(data)

    def _fail(self, error: OSError) -> None:
        """Gives up the journal after a failed write, since a journal with a gap is useless."""
        self.close()
        log.warning("journal %s: %s; the job continues without a journal, so a crash of the coordinator will end "
                    "the job", self._path,
                    error.strerror)


def _packed(record: SitesRecord | Change) -> bytes:
    data = msgspec.msgpack.encode(record)
    return _HEAD.pack(len(data), crc32c(data, crc32c(_SIZE.pack(len(data))))) + data
