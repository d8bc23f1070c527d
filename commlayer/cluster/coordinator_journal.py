"""What a coordinator must not forget, in a file: who has which seat, the view and the plan. Knows no network and no clock.

It is written when a seat or the view changes, which is seldom. It holds no times: who takes it up has just heard everybody.
What homes have left for each other is in a file of its own (meeting_journal.py), which means nothing without this one.
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
    """The job's secret, if this process has made it: with another one nobody's calls would be proved."""
    state: State


class CoordinatorJournal:
    """Of one process. `found` is what an earlier one has left, None for nothing."""

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
            write_whole({self._path: packed(kept)}, mode=0o600)  # the secret may be in it
        except OSError as error:
            self.forget()
            self._failed = True
            log.warning("journal %s: %s; the job goes on without it, and a crash of the coordinator ends it", self._path,
                        error.strerror)

    def close(self) -> None:
        """Another coordinator may use the folder."""
        os.close(self._lock)

    def forget(self) -> None:
        """The job is over, or goes on without."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.meeting.close()


def packed(kept: Kept) -> bytes:
    """The file."""
    still = {token: msgspec.structs.replace(place, seen_s=0.0, overdue=None, hangs=())
             for token, place in kept.state.places.items()}
    state = msgspec.structs.replace(kept.state, places=still, ticked_s=None, held=None)
    return MAGIC + msgspec.msgpack.encode(msgspec.structs.replace(kept, state=state))


def unpacked(data: bytes) -> Kept:
    """MsgspecError where it is none."""
    if not data.startswith(MAGIC):
        raise msgspec.DecodeError("it begins with something else")
    return msgspec.msgpack.decode(data[len(MAGIC) :], type=Kept)


def taken_up(kept: Kept, now: float) -> State:
    """The state of a coordinator that goes on: everybody has just been heard."""
    places: dict[str, Place] = {token: msgspec.structs.replace(place, seen_s=now) for token, place in kept.state.places.items()}
    return msgspec.structs.replace(kept.state, places=places, ticked_s=now)


def seats(state: State) -> tuple[object, ...]:
    """What has changed when the file must be written anew."""
    return state.view, tuple((token, p.dead, p.left, p.join.serial) for token, p in state.places.items())
