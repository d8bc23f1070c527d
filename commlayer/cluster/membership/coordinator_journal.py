"""The coordinator's journal: an SQLite database with which a restarted coordinator resumes the job.

The journal contains the registrations, the epoch and plan, the sites, and their key-value store. The journal contains no times:
after a restart, every process is treated as if its last heartbeat had just arrived. Each change is committed before the caller
gets its reply. A crash of the process therefore loses nothing that was acknowledged; a power failure may lose the last changes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from commlayer.cluster.calls.messages import StoreKey
from commlayer.cluster.membership.kv_store import StoreRow
from commlayer.cluster.membership.membership import Registration, State
from commlayer.cluster.membership.sites import Sites
from commlayer.cluster.processes.folder_lock import lock_folder
from commlayer.errors import InvalidInput, one_line
from commlayer.records import MALFORMED, Record, complete

if TYPE_CHECKING:
    from sqlite3 import Connection

log = logging.getLogger("commlayer")

Statement = tuple[str, tuple[object, ...]]
"""A statement of SQL and its arguments."""
NAME, VERSION = "coordinator.sqlite", 6
SETUP = f"""
PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA wal_autocheckpoint = 16384; PRAGMA user_version = {VERSION};
CREATE TABLE IF NOT EXISTS part (name TEXT PRIMARY KEY, data BLOB); CREATE TABLE IF NOT EXISTS row (name TEXT, rank INTEGER,
data BLOB, PRIMARY KEY (name, rank))"""
"""Tables: `part` has one row for the CoordinatorRecord and one for Sites, `row` has the rows of the key-value store."""


class CoordinatorRecord(Record, frozen=True):
    """The job's record in the journal: the coordinator's local address, the secret, registrations, epoch and plan."""

    address: str
    token: str
    """The job's secret, if the coordinator's process generated it; "" otherwise. A restarted coordinator needs the same secret,
    or no worker could authenticate."""
    state: State


class CoordinatorJournal:
    """The coordinator's journal in a folder, which is locked against other coordinators. Thread-safe.

    `recovered`, `sites` and `rows`: what a previous coordinator recorded. They are None and empty if there is nothing to
    resume. `token`: the secret to record, if this process generated it.
    """

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / NAME
        self._folder = lock_folder(Path(folder), "", "is in use by another coordinator: use a separate folder for each job")
        self._lock = threading.RLock()
        self._database: Connection | None = None
        self._over = False
        self.recovered: CoordinatorRecord | None = None
        self.sites: Sites | None = None
        self.rows: Mapping[StoreKey, StoreRow] = {}
        self.token = ""
        if self._path.exists():
            self._read()
        if self.recovered is None:
            self._remove()
            self.sites, self.rows = None, {}

    def _read(self) -> None:
        import sqlite3  # imported late, because most coordinators have no journal

        try:
            with contextlib.closing(sqlite3.connect(self._path)) as database:
                # Otherwise SQLite would create a file of shared memory, even for reading, which fails on a full disk.
                database.execute("PRAGMA locking_mode = EXCLUSIVE")
                if database.execute("PRAGMA user_version").fetchone() != (VERSION,):
                    raise InvalidInput("E-JOURNAL", "it is of another version")
                parts = dict(database.execute("SELECT name, data FROM part"))
                if "job" in parts:
                    self.recovered = msgspec.msgpack.decode(parts["job"], type=complete(CoordinatorRecord))
                if "sites" in parts:
                    self.sites = msgspec.msgpack.decode(parts["sites"], type=complete(Sites))
                self.rows = {(name, rank): msgspec.msgpack.decode(data, type=complete(StoreRow))
                             for name, rank, data in database.execute("SELECT name, rank, data FROM row ORDER BY rowid")}
        except (sqlite3.Error, InvalidInput, *MALFORMED) as error:
            self.recovered = None
            log.warning("journal %s cannot be read (%s): starting without it", self._path, one_line(error))

    def begin(self, sites: Sites, rows: Mapping[StoreKey, StoreRow]) -> None:
        """Writes the sites and all rows of their key-value store, when the job begins or is resumed."""
        self._commit(("DELETE FROM row", ()), _replace("part", ("sites",), sites),
                     *(_replace("row", key, row) for key, row in rows.items()))

    def write(self, kept: CoordinatorRecord) -> None:
        self._commit(_replace("part", ("job",), without_times(kept)))

    def write_sites(self, sites: Sites) -> None:
        self._commit(_replace("part", ("sites",), sites))

    def write_row(self, key: StoreKey, row: StoreRow | None) -> None:
        """Writes a row of the key-value store; None: removes it."""
        self._commit(("DELETE FROM row WHERE name = ? AND rank = ?", key) if row is None else _replace("row", key, row))

    def wait(self) -> None:
        """Waits until a pending write has ended. While a slow disk blocks a write, the coordinator cannot receive calls, so
        sites must not count as silent in that time."""
        with self._lock:
            return

    def forget(self) -> None:
        """Removes the journal, because the job is over or continues without one."""
        with self._lock:
            self._over = True
            self._remove()

    def close(self) -> None:
        """Stops writing and unlocks the folder for another coordinator."""
        with self._lock:
            self._over = True
            self._disconnect()
            os.close(self._folder)

    def _commit(self, *statements: Statement) -> None:
        """Executes the statements in one transaction. After an error the journal is given up, since a journal with a gap is
        useless."""
        import sqlite3

        with self._lock:
            if self._over:
                return
            try:
                with self._connected() as database:
                    database.execute("BEGIN")
                    for statement, arguments in statements:
                        database.execute(statement, arguments)
            except (OSError, sqlite3.Error) as error:
                self.forget()
                log.warning("journal %s: %s; the job continues without a journal, so a crash of the coordinator will end the "
                            "job", self._path, getattr(error, "strerror", None) or error)

    def _connected(self) -> Connection:
        if self._database is None:
            import sqlite3

            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # it may hold the secret
            self._database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._database.executescript(SETUP)
        return self._database

    def _disconnect(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _remove(self) -> None:
        with contextlib.suppress(Exception):  # sqlite3.Error, if the disk is full
            self._disconnect()
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                self._path.with_name(NAME + suffix).unlink()


def _replace(table: str, key: tuple[object, ...], record: Record) -> Statement:
    return f"REPLACE INTO {table} VALUES ({'?, ' * len(key)}?)", (*key, msgspec.msgpack.encode(record))


def without_times(kept: CoordinatorRecord) -> CoordinatorRecord:
    """Returns a copy of `kept` without times, as it is written to the journal."""
    registrations = {token: msgspec.structs.replace(place, seen_s=0.0, heard_s=0.0, overdue=None, hung=())
                     for token, place in kept.state.registrations.items()}
    state = msgspec.structs.replace(kept.state, registrations=registrations, ticked_s=None)
    return msgspec.structs.replace(kept, state=state)


def resumed_state(kept: CoordinatorRecord, now: float) -> State:
    """Returns the state of a coordinator that resumes at time `now`. Every process is treated as if its heartbeat had just
    arrived."""
    present: dict[str, Registration] = {
        token: msgspec.structs.replace(one, seen_s=now) for token, one in kept.state.registrations.items()}
    return msgspec.structs.replace(kept.state, registrations=present, ticked_s=now)
