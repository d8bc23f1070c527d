"""The coordinator's journal: what a coordinator recorded is found by the next one, and a job goes on with it."""

from __future__ import annotations

import asyncio
import random
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commlayer.cluster import messages, sites
from commlayer.cluster.coordinator_journal import NAME, CoordinatorJournal, CoordinatorRecord
from commlayer.cluster.kv_store import KvStore, Row
from commlayer.cluster.membership import State
from commlayer.cluster.rendezvous_service import RendezvousService
from commlayer.transport.handshake import RefusalLog

RECORD, SITES = CoordinatorRecord("127.0.0.1:1", "secret", State(2, 1)), sites.Sites(2, meeting="m")


def started(folder: Path, *, begun: bool = True) -> CoordinatorJournal:
    journal = CoordinatorJournal(str(folder))
    if begun:
        journal.begin(SITES, {})
        journal.write(RECORD)
    return journal


def restarted(folder: Path, journal: CoordinatorJournal) -> CoordinatorJournal:
    journal.close()
    return CoordinatorJournal(str(folder))


@pytest.mark.parametrize("number", range(4))
def test_a_store_is_the_same_after_each_restart(number: int, tmp_path: Path) -> None:
    chance, journal, store = random.Random(number), started(tmp_path), KvStore()
    for _ in range(6):
        store.save = journal.write_row
        for _ in range(50):
            name, view = chance.choice("abcde"), chance.choice((1, 3))
            how = chance.choice(("put", "put", "add", "add", "drop", "forget"))
            if how == "put":
                store.put([(name, chance.randbytes(chance.choice((0, 1, 1000))))], view)
            elif how == "add":
                store.add(f"{name}/sum", chance.randrange(9), str(chance.randrange(40)), view)
            elif how == "drop":
                store.drop([name, f"{name}/sum", "never there"])
            elif chance.random() < 0.2:
                store.forget(2)
        journal = restarted(tmp_path, journal)
        assert (journal.recovered, journal.sites, journal.rows) == (RECORD, SITES, store.rows)
        again = KvStore(2, journal.rows.items())
        assert again.nbytes == store.nbytes
        journal.begin(SITES, again.rows)
        store = again
    assert {path.name.removeprefix(NAME) for path in tmp_path.iterdir()} <= {"", "-wal", "-shm"}
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    journal.close()


def test_a_kill_loses_nothing_that_was_written(tmp_path: Path) -> None:
    program = f"""
import os, signal
from commlayer.cluster.coordinator_journal import *
from commlayer.cluster import sites
from commlayer.cluster.kv_store import Row
from commlayer.transport.handshake import RefusalLog
journal = CoordinatorJournal({str(tmp_path)!r})
journal.begin(sites.Sites(2, meeting="m"), {{}})
journal.write(CoordinatorRecord("127.0.0.1:1", "secret", State(2, 1)))
for number in range(1000):
    journal.write_row(f"{{number % 10}}", Row(bytes(1000) + str(number).encode(), 1))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == -9
    journal = CoordinatorJournal(str(tmp_path))
    assert (journal.recovered, journal.sites) == (RECORD, SITES)
    assert sorted(row.value[1000:] for row in journal.rows.values()) == [str(n).encode() for n in range(990, 1000)]
    journal.close()


@pytest.mark.parametrize("damage", ["no database", "other version", "malformed record", "no job"])
def test_a_journal_that_cannot_be_read_is_removed(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    started(tmp_path).close()
    if damage == "no database":
        (tmp_path / NAME).write_bytes(bytes(range(256)) * 40)
    else:
        with sqlite3.connect(tmp_path / NAME) as database:
            database.execute({"other version": "PRAGMA user_version = 2", "no job": "DELETE FROM part WHERE name = 'job'",
                              "malformed record": "UPDATE part SET data = x'c1'"}[damage])
        database.close()
    journal = CoordinatorJournal(str(tmp_path))
    assert (journal.recovered, journal.sites, journal.rows) == (None, None, {})
    assert list(tmp_path.iterdir()) == []
    assert [record.getMessage().endswith("starting without it") for record in caplog.records] == [True] * (damage != "no job")
    journal.close()


@pytest.fixture
def full() -> Iterator[Any]:
    """What a full disk is: the system refuses to make a file larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("later", [False, True])
def test_a_full_disk_is_one_line_and_leaves_no_journal_with_a_gap(
        later: bool, full: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal, store = started(tmp_path, begun=False), KvStore()
    if later:
        journal.begin(SITES, {})
    full((tmp_path / f"{NAME}-wal").stat().st_size + 40 if later else 4)
    store.save = journal.write_row
    journal.begin(SITES, {"a": Row(b"", 1)})
    journal.write(RECORD)
    for number in range(20):
        store.put([(f"{number}", bytes(30))])
    full(1 << 30)
    store.put([("behind", b"")])
    assert list(tmp_path.iterdir()) == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("the job continues without a journal, so a crash of the coordinator will end the job")
    assert len(store.rows) == 21
    journal.close()


def test_the_journal_of_a_job_that_is_over_stays_away(tmp_path: Path) -> None:
    journal = started(tmp_path)
    journal.forget()
    journal.write(RECORD)
    journal.write_row("x", Row(b"y", 1))
    assert list(tmp_path.iterdir()) == []
    journal.close()


# ---- the sites' service


class Meeting:
    """A coordinator's service for sites, which is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.now, self.door, self.lost = folder, 100.0, sites.AdmissionState("", 2, 2), dict[int, str]()
        self.journal: CoordinatorJournal | None = None
        self.start()

    def start(self) -> None:
        if self.journal is not None:
            self.journal.close()
        self.journal = CoordinatorJournal(str(self._folder))
        self.service = RendezvousService(3, 10.0, lambda: self.lost, RefusalLog(), 2, clock=lambda: self.now,
                                         door=lambda: self.door, journal=self.journal)

    def begin(self) -> None:
        self.service.begin()
        assert self.journal is not None
        self.journal.write(RECORD)

    def again(self) -> None:
        """As Coordinator takes a job up that has begun."""
        self.start()
        self.service.begin()

    def ask(self, home: str, **request: Any) -> messages.KvReply:
        return asyncio.run(self.service.handle(messages.KvRequest(home, **request)))


def home(name: str, workers: int = 1) -> messages.Join:
    return messages.Join("site", name, name, 1, messages.PROTOCOL, "1.0", world=workers)


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    monkeypatch.setattr(messages, "version", lambda: "1.0")
    monkeypatch.setattr("commlayer.cluster.rendezvous_service.version", lambda: "1.0")
    result = Meeting(tmp_path)
    yield result
    assert result.journal is not None
    result.journal.close()


def test_homes_keep_their_ranks_and_what_they_left_and_nothing_counts_twice(meeting: Meeting) -> None:
    every = [home("a", 2), home("b")]
    for one in every:
        assert meeting.service.register(one).error == ""
    before = [meeting.service.register(one) for one in every]
    meeting.ask("a", put=(("before the job", b"1"),), add=("count", 5, "once"))
    meeting.begin()
    meeting.ask("a", put=(("key", b"value"), ("gone", b"")))
    assert meeting.ask("b", add=("count", 2, "again"), drop=("gone",)).sum == 7
    for number in range(3):
        meeting.now = 1000.0 * (number + 1)
        meeting.again()
        assert meeting.service.staying(()), "their silence begins again"
        assert [meeting.service.register(one) for one in every] == before
        known = msgspec.structs.replace(every[0], meeting=before[0].meeting)
        assert meeting.service.register(known) == before[0]
        assert meeting.ask("b", add=("count", 2, "again")).sum == meeting.ask("a", add=("count", 5, "once")).sum == 7
        wanted = tuple((name, messages.ANY) for name in ("before the job", "key", "gone", "count"))
        assert meeting.ask("b", want=wanted).values == (b"1", b"value", None, b"7")
    meeting.now += 10.0
    assert not meeting.service.staying(())


def test_who_came_and_went_behind_the_beginning_is_known_and_no_number_is_given_twice(meeting: Meeting) -> None:
    every = [home("a"), home("b"), home("c")]
    for one in every:
        meeting.service.register(one)
    meeting.begin()
    meeting.service.register(msgspec.structs.replace(every[2], leave="it has had enough"))
    late = meeting.service.register(home("d"))
    assert (late.rank, late.joins) == (3, True)
    meeting.again()
    assert meeting.service.register(home("d")) == msgspec.structs.replace(late, nodes=late.nodes)
    assert "has left: it has had enough" in meeting.service.register(every[2]).error
    assert "has left: it has had enough" in meeting.ask("a", want=(("never", 2),)).error
    assert meeting.ask("a", want=(("never", 2),), without=True).over
    assert meeting.service.register(home("e")).rank == 4
    meeting.again()
    assert meeting.service.register(home("f")).rank == 5
    meeting.lost = {1: "died"}
    assert meeting.ask("b", put=(("late", b""),)).error == "worker 1: died [E-PEER-LOST]", "no more for a lost one"
