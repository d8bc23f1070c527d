"""What homes have told a coordinator is found by the one that is started after it, as far as it was written."""

from __future__ import annotations

import asyncio
import random
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commlayer.cluster import coordinator_journal, messages, sites
from commlayer.cluster.audit import Audit
from commlayer.cluster.coordinator_journal import KV_NAME, CoordinatorJournal, KvJournal, SitesRecord
from commlayer.cluster.coordinator_journal import KV_NAME as SEATS
from commlayer.cluster.kv_store import Change, KeysDropped, KvStore, NumberAdded, QuotaOwner, ValueSet
from commlayer.cluster.rendezvous_service import RendezvousService

BY = QuotaOwner("home a (pid 1)"), QuotaOwner("gpu-1", view=3)


def read(folder: Path) -> list[SitesRecord | Change]:
    return list(KvJournal(str(folder)).read())


def taken_up(folder: Path) -> KvStore:
    store = KvStore()
    for record in read(folder):
        if not isinstance(record, SitesRecord):
            store.replay(record)
    return store


def held(store: KvStore) -> tuple[Any, ...]:
    return store._rows, store._sums, dict(store._charged), [list(known) for _, known in store._sums.values()]


def kept(folder: Path, journal: KvJournal) -> KvStore:
    """A store whose changes are written there."""
    store = KvStore()
    journal.begin(lambda: [SitesRecord(sites.Sites(2)), *store.changes()])
    store.note = journal.note
    return store


def changed(store: KvStore, chance: random.Random) -> None:
    name, by = chance.choice("abcde"), chance.choice(BY)
    how = chance.choice(("put", "put", "add", "add", "drop", "forget"))
    if how == "put":
        store.put([(name, chance.randbytes(chance.choice((0, 1, 1000))))], by)
    elif how == "add":
        store.add(f"{name}/sum", chance.randrange(9), str(chance.randrange(40)), by)
    elif how == "drop":
        store.drop([name, f"{name}/sum", "never there"])
    elif chance.random() < 0.2:
        store.forget(2)


@pytest.mark.parametrize("number", range(6))
def test_a_store_is_the_same_behind_each_change_and_however_often_the_file_is_written_anew(
        number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_journal, "SLACK_NBYTES", 1 << 30 if number % 2 else 500)
    monkeypatch.setattr(coordinator_journal, "CHUNK_NBYTES", 100)
    chance, store = random.Random(number), kept(tmp_path, KvJournal(str(tmp_path)))
    largest = 0
    for _ in range(300):
        changed(store, chance)
        assert held(taken_up(tmp_path)) == held(store)
        largest = max(largest, (tmp_path / KV_NAME).stat().st_size)
    assert [path.name for path in tmp_path.iterdir()] == [KV_NAME]
    assert (tmp_path / KV_NAME).stat().st_mode & 0o777 == 0o600
    assert (largest < 40_000) == (number % 2 == 0), "it grows for ever where it is never written anew"


@pytest.mark.parametrize("last", [ValueSet("name", b"value", "w", 1), NumberAdded("sum", 7, "once", "w", 1),
                                  KeysDropped(("name", "sum"))])
def test_a_tail_that_is_torn_at_any_byte_is_cut_off(last: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal, first = KvJournal(str(tmp_path)), [SitesRecord(sites.Sites(2, meeting="m")), ValueSet("x", b"y", "w", 1)]
    journal.begin(lambda: first)
    before = (tmp_path / KV_NAME).read_bytes()
    journal.note(last)
    whole = (tmp_path / KV_NAME).read_bytes()
    assert read(tmp_path) == [*first, last]
    assert read(tmp_path) == [*first, last], "nothing is lost by reading"
    assert not caplog.records
    for nbytes in range(len(before) + 1, len(whole)):
        (tmp_path / KV_NAME).write_bytes(whole[:nbytes])
        assert read(tmp_path) == first
        (tmp_path / KV_NAME).write_bytes(whole[:nbytes] + bytes(len(whole) - nbytes + 20))  # as behind a power failure
        assert read(tmp_path) in (first, [*first, last])
    for at in range(len(before), len(whole)):
        (tmp_path / KV_NAME).write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert read(tmp_path) == first
    assert "its last 1 bytes are incomplete or damaged and are ignored" in caplog.text
    (tmp_path / KV_NAME).write_bytes(b"something else")
    assert read(tmp_path) == []


def test_what_is_no_record_of_this_version_ends_what_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = KvJournal(str(tmp_path))
    journal.begin(lambda: [ValueSet("x", b"y", "w", 1)])
    journal.note(messages.HeartbeatReply())  # type: ignore[arg-type]
    assert read(tmp_path) == [ValueSet("x", b"y", "w", 1)]
    assert "reading stopped early" in caplog.text


@pytest.fixture
def full() -> Iterator[Any]:
    """What a full disk is: the system refuses to make a file larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("when", ["from the start", "later", "as it is written anew"])
def test_a_full_disk_is_one_line_and_nothing_is_taken_up_of_what_has_a_gap(
        when: str, full: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = KvJournal(str(tmp_path))
    if when == "from the start":
        full(4)
    store = kept(tmp_path, journal)
    if when == "later":
        full((tmp_path / KV_NAME).stat().st_size + 40)
    if when == "as it is written anew":
        monkeypatch.setattr(journal, "_most_nbytes", 0)
        monkeypatch.setattr(coordinator_journal, "_packed", lambda _: bytes(1 << 20))
        full(1 << 20)
    for number in range(20):
        store.put([(f"{number}", bytes(30))], BY[0])
    full(1 << 30)
    store.put([("behind", b"")], BY[0])
    assert list(tmp_path.iterdir()) == []
    assert [record.message.partition(KV_NAME)[2] for record in caplog.records] == [
        ": File too large; the job continues without a journal, so a crash of the coordinator will end the job"]
    assert len(store._rows) == 21


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = kept(tmp_path, KvJournal(str(tmp_path / "gone")))
    store.put([("a", b"")], BY[0])
    lines = [record.message.partition(KV_NAME)[2].partition(";")[0] for record in caplog.records]
    assert lines == [": No such file or directory"]


def test_without_seats_nothing_is_taken_up(tmp_path: Path) -> None:
    """Of a job that has not begun, or of one whose seats cannot be written."""
    KvJournal(str(tmp_path)).begin(lambda: [ValueSet("x", b"y", "w", 1)])
    journal = CoordinatorJournal(str(tmp_path))
    assert list(journal.meeting.read()) == []
    assert not (tmp_path / KV_NAME).exists()
    journal.meeting.begin(lambda: [ValueSet("x", b"y", "w", 1)])
    (tmp_path / SEATS).touch()
    journal.forget()
    journal.meeting.begin(lambda: [ValueSet("x", b"y", "w", 1)])
    assert list(tmp_path.iterdir()) == [], "the job is over"


# ---- the meeting


class Meeting:
    """A coordinator's, which is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.now, self.door, self.lost = folder, 100.0, sites.AdmissionState("", 2, 2), dict[int, str]()
        self.start()

    def start(self) -> RendezvousService:
        self.gathering = RendezvousService(3, 10.0, lambda: self.lost, Audit(""), 2, clock=lambda: self.now,
                                           door=lambda: self.door,
                                   journal=KvJournal(str(self._folder)))
        return self.gathering

    def again(self) -> None:
        """As Coordinator takes a job up that has begun."""
        self.start().begin()

    def ask(self, home: str, **asked: Any) -> messages.KvReply:
        return asyncio.run(self.gathering.handle(messages.KvRequest(home, **asked)))


def home(name: str, workers: int = 1) -> messages.RegisterSite:
    return messages.RegisterSite(name, name, 1, messages.PROTOCOL, "1.0", workers)


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Meeting:
    monkeypatch.setattr(messages, "version", lambda: "1.0")
    monkeypatch.setattr("commlayer.cluster.rendezvous_service.version", lambda: "1.0")
    return Meeting(tmp_path)


def test_while_a_disk_blocks_nobody_is_judged(meeting: Meeting) -> None:
    """The loop that hears everybody stands still then."""
    journal: Any = meeting.gathering._journal
    ticks = threading.Thread(target=meeting.gathering.tick)
    with journal._lock:
        ticks.start()
        ticks.join(0.1)
        assert ticks.is_alive()
    ticks.join(30.0)
    assert not ticks.is_alive()


def test_homes_keep_their_ranks_and_what_they_left_and_nothing_counts_twice(meeting: Meeting) -> None:
    every = [home("a", 2), home("b")]
    for one in every:
        assert meeting.gathering.register(one).error == ""
    before = [meeting.gathering.register(one) for one in every]
    meeting.ask("a", put=(("ahead of the job", b"1"),), add=("count", 5, "once"))
    meeting.gathering.begin()
    meeting.ask("a", put=(("key", b"value"), ("gone", b"")))
    assert meeting.ask("b", add=("count", 2, "again"), drop=("gone",)).sum == 7
    for number in range(3):
        meeting.now = 1000.0 * (number + 1)
        meeting.again()
        assert meeting.gathering.staying(()), "their silence begins anew"
        assert [meeting.gathering.register(one) for one in every] == before
        known = msgspec.structs.replace(every[0], meeting=before[0].meeting)
        assert meeting.gathering.register(known) == before[0]
        assert meeting.ask("b", add=("count", 2, "again")).sum == meeting.ask("a", add=("count", 5, "once")).sum == 7
        wanted = tuple((name, messages.ANY) for name in ("ahead of the job", "key", "gone", "count"))
        assert meeting.ask("b", want=wanted).values == (b"1", b"value", None, b"7")
    meeting.now += 10.0
    assert not meeting.gathering.staying(())


def test_who_came_and_went_behind_the_beginning_is_known_and_no_number_is_given_twice(meeting: Meeting) -> None:
    every = [home("a"), home("b"), home("c")]
    for one in every:
        meeting.gathering.register(one)
    meeting.gathering.begin()
    meeting.gathering.register(msgspec.structs.replace(every[2], leave="it has had enough"))
    late = meeting.gathering.register(home("d"))
    assert (late.first, late.joins) == (3, True)
    meeting.again()
    assert meeting.gathering.register(home("d")) == msgspec.structs.replace(late, nodes=late.nodes)
    assert "has left: it has had enough" in meeting.gathering.register(every[2]).error
    assert "has left: it has had enough" in meeting.ask("a", want=(("never", 2),)).error
    assert meeting.ask("a", want=(("never", 2),), without=True).over
    assert meeting.gathering.register(home("e")).first == 4
    meeting.again()
    assert meeting.gathering.register(home("f")).first == 5
    meeting.lost = {1: "died"}
    assert meeting.ask("b", put=(("late", b""),)).error == "worker 1: died [E-PEER-LOST]", "no more for a lost one"


def test_words_of_an_ended_view_count_for_nothing_and_are_dropped(meeting: Meeting) -> None:
    meeting.gathering.register(home("a", 3))
    meeting.gathering.begin()
    meeting.ask("a", put=(("of 2", b""),), view=2)
    meeting.door = sites.AdmissionState("", 3, 3)
    meeting.ask("a", put=(("of 3", b""),))
    meeting.again()
    meeting.ask("a", put=(("late", b""),), view=2)
    wanted = tuple((name, messages.ANY) for name in ("of 2", "of 3", "late"))
    assert meeting.ask("a", want=wanted).values == (b"", b"", None)
    meeting.gathering.forget(3)
    meeting.again()
    assert meeting.ask("a", want=wanted).values == (None, b"", None)
    assert meeting.gathering._store.nbytes < 600


def test_homes_that_have_met_and_begun_nothing_start_again(meeting: Meeting, tmp_path: Path) -> None:
    one = home("a", 3)
    there = meeting.gathering.register(one)
    assert list(tmp_path.iterdir()) == []
    meeting.start()
    assert meeting.gathering.register(msgspec.structs.replace(one, meeting=there.meeting)).error == sites.RESTARTED


def test_a_job_without_homes_has_no_such_file(meeting: Meeting, tmp_path: Path) -> None:
    meeting.gathering.begin()
    meeting.gathering.register(home("a"))
    assert list(tmp_path.iterdir()) == []
