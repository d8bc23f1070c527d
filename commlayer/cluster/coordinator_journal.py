"""The coordinator's journal: registrations, view and plan in a file, so that a restarted coordinator can resume the job.

It is written when a registration or the view changes, which is rare. It holds no times: on resuming, all processes count as
just heard from. The homes' store is in a file of its own (meeting_journal.py), which is useless without this one.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from commlayer.cluster.journal import hold
from commlayer.cluster.meeting_journal import MeetingJournal
from commlayer.cluster.membership import Place, State
from commlayer.files import write_whole
from commlayer.records import Record

log = logging.getLogger("commlayer")

NAME = "coordinator.state"
MAGIC = b"CMLC0001"


class Kept(Record, frozen=True):
    """The file's contents."""

    address: str
    token: str
    """The job's secret, if this process generated it. With another secret, no worker could authenticate."""
    state: State


class CoordinatorJournal:
    """`found`: what an earlier process recorded; None for nothing."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / NAME
        self._lock = hold(Path(folder), "", "is in use by another coordinator: give each job a folder of its own")
        self._failed = False
        self.meeting = MeetingJournal(folder)
        self.found: Kept | None = None
        with contextlib.suppress(FileNotFoundError):
            data = self._path.read_bytes()
            try:
                self.found = unpacked(data)
            except msgspec.MsgspecError as error:
                log.warning("journal %s cannot be read (%s): nothing of it is used", self._path, error)
        if self.found is None:
            self.meeting.forget()

    def write(self, kept: Kept) -> None:
        if self._failed:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole({self._path: packed(kept)}, mode=0o600)  # it may hold the secret
        except OSError as error:
            self.forget()
            self._failed = True
            log.warning("journal %s: %s; the job goes on without it, and a crash of the coordinator ends it", self._path,
                        error.strerror)

    def close(self) -> None:
        """Frees the folder for another coordinator."""
        os.close(self._lock)

    def forget(self) -> None:
        """Removes the journal: the job is over, or continues without one."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.meeting.close()


def packed(kept: Kept) -> bytes:
    """The file's contents, without times."""
    timeless = {token: msgspec.structs.replace(place, seen_s=0.0, overdue=None, hangs=())
                for token, place in kept.state.places.items()}
    state = msgspec.structs.replace(kept.state, places=timeless, ticked_s=None, held=None)
    return MAGIC + msgspec.msgpack.encode(msgspec.structs.replace(kept, state=state))


def unpacked(data: bytes) -> Kept:
    """The reverse of packed(). MsgspecError if the data is malformed."""
    if not data.startswith(MAGIC):
        raise msgspec.DecodeError("it begins with something else")
    return msgspec.msgpack.decode(data[len(MAGIC) :], type=Kept)


def taken_up(kept: Kept, now: float) -> State:
    """The state of a coordinator that resumes: all processes count as just heard from."""
    places: dict[str, Place] = {token: msgspec.structs.replace(place, seen_s=now) for token, place in kept.state.places.items()}
    return msgspec.structs.replace(kept.state, places=places, ticked_s=now)


def seats(state: State) -> tuple[object, ...]:
    """The part of the state whose change requires a write."""
    return state.view, tuple((token, p.dead, p.left, p.join.serial) for token, p in state.places.items())
