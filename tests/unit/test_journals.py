"""Journals of coordinators and servers: entries are complete or absent, and jobs resume from them."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.coordinators import quick
from support.disks import files_up_to

from commlayer.cluster.calls import messages
from commlayer.cluster.membership import sites
from commlayer.cluster.membership.coordinator_journal import NAME, CoordinatorJournal, CoordinatorRecord
from commlayer.cluster.membership.kv_store import KvStore, StoreRow
from commlayer.cluster.membership.membership import State
from commlayer.cluster.membership.rendezvous_service import RendezvousService
from commlayer.cluster.processes.channels import node_ranks
from commlayer.cluster.servers.server_codecs import contributing_ranks, make_codec_ops
from commlayer.cluster.servers.server_journal import NAME as NAME_JOURNAL
from commlayer.cluster.servers.server_journal import ServerIdentity, ServerJournal, read
from commlayer.cluster.servers.summation import Summation
from commlayer.compressors import make_codec, seed
from commlayer.errors import RecordError
from commlayer.planner import default_plan
from commlayer.records import Epoch, Job, Plan, ServerInfo, TensorInfo
from commlayer.records import Member as MemberRecord
from commlayer.transport import framing
from commlayer.transport.handshake import RefusalLog
from commlayer.transport.protocol import Header, Kind, Message

HOMES = {"a": 2, "b": 1}
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
def test_store_survives_restarts(number: int, tmp_path: Path) -> None:
    chance, journal, store = random.Random(number), started(tmp_path), KvStore(HOMES)
    for _ in range(6):
        store.save = journal.write_row
        for _ in range(50):
            key, total = ((chance.choice("abcde"), rank) for rank in (0, messages.ANY))
            home, epoch = chance.choice([*HOMES]), chance.choice((1, 3))
            how = chance.choice(("put", "put", "add", "add", "drop", "forget"))
            if how == "put":
                store.put(home, [(key, chance.randbytes(chance.choice((0, 1, 1000))))], epoch)
            elif how == "add":
                store.add(home, total, chance.randrange(9), str(chance.randrange(40)), epoch)
            elif how == "drop":
                store.drop([key, total, ("never there", 0)])
            elif chance.random() < 0.2:
                store.forget(2)
        journal = restarted(tmp_path, journal)
        assert (journal.recovered, journal.sites, journal.rows) == (RECORD, SITES, store.rows)
        recovered = KvStore(HOMES, journal.rows.items())
        assert recovered.nbytes == store.nbytes
        journal.begin(SITES, recovered.rows)
        store = recovered
    assert {path.name.removeprefix(NAME) for path in tmp_path.iterdir()} <= {"", "-wal", "-shm"}
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    journal.close()


@pytest.mark.parametrize("room", [True, False])
def test_kill_loses_no_written_entry(room: bool, tmp_path: Path) -> None:
    """Also if the disk is full when the coordinator restarts."""
    program = f"""
import os, signal
from commlayer.cluster.membership.coordinator_journal import *
from commlayer.cluster.membership import sites
from commlayer.cluster.membership.kv_store import StoreRow
from commlayer.transport.handshake import RefusalLog
journal = CoordinatorJournal({str(tmp_path)!r})
journal.begin(sites.Sites(2, meeting="m"), {{}})
journal.write(CoordinatorRecord("127.0.0.1:1", "secret", State(2, 1)))
for number in range(1000):
    journal.write_row((f"{{number % 10}}", 0), StoreRow(bytes(1000) + str(number).encode(), 1))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == -9
    with files_up_to(1 << 30 if room else 4):
        journal = CoordinatorJournal(str(tmp_path))
    assert (journal.recovered, journal.sites) == (RECORD, SITES)
    assert sorted(row.value[1000:] for row in journal.rows.values()) == [str(n).encode() for n in range(990, 1000)]
    journal.close()


@pytest.mark.parametrize("damage", ["no database", "other version", "malformed record", "no job"])
def test_unreadable_journal_is_removed(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize("later", [False, True])
def test_full_disk_is_one_line_and_leaves_no_gap_in_the_journal(
        later: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal, store = started(tmp_path, begun=False), KvStore(HOMES)
    if later:
        journal.begin(SITES, {})
    with files_up_to((tmp_path / f"{NAME}-wal").stat().st_size + 40 if later else 4):
        store.save = journal.write_row
        journal.begin(SITES, {("a", 0): StoreRow(b"", 1)})
        journal.write(RECORD)
        for number in range(20):
            store.put("a", [((f"{number}", 0), bytes(30))])
    store.put("a", [(("behind", 0), b"")])
    assert list(tmp_path.iterdir()) == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("the job continues without a journal, so a crash of the coordinator will end the job")
    assert len(store.rows) == 21
    journal.close()


def test_journal_of_a_finished_job_is_deleted(tmp_path: Path) -> None:
    journal = started(tmp_path)
    journal.forget()
    journal.write(RECORD)
    journal.write_row(("x", 0), StoreRow(b"y", 1))
    assert list(tmp_path.iterdir()) == []
    journal.close()


class SiteService:
    """A coordinator's service for sites, which is killed and restarted."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.now, self.door, self.lost = folder, 100.0, sites.AdmissionState("", 2, 2), dict[int, str]()
        self.journal: CoordinatorJournal | None = None
        self.start()

    def start(self) -> None:
        if self.journal is not None:
            self.journal.close()
        self.journal = CoordinatorJournal(str(self._folder))
        config = quick(min_workers=2, dead_after_s=10.0, last_call_s=60.0)
        self.service = RendezvousService(3, config, lambda: self.lost, RefusalLog(), lambda: self.door, self.journal,
                                         clock=lambda: self.now)

    def begin(self) -> None:
        self.service.begin()
        assert self.journal is not None
        self.journal.write(RECORD)

    def restart(self) -> None:
        """As a coordinator resumes a job that has started."""
        self.start()
        self.service.begin()

    def ask(self, home: str, **request: Any) -> messages.KvReply:
        return asyncio.run(self.service.handle(messages.KvRequest(home, **request)))


def key(name: str) -> messages.StoreKey:
    return name, messages.ANY


def home(name: str, workers: int = 1) -> messages.Join:
    return messages.Join("site", name, name, 1, messages.PROTOCOL, "1.0", world=workers)


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SiteService]:
    monkeypatch.setattr(messages, "version", lambda: "1.0")
    monkeypatch.setattr("commlayer.cluster.membership.rendezvous_service.version", lambda: "1.0")
    result = SiteService(tmp_path)
    yield result
    assert result.journal is not None
    result.journal.close()


def test_sites_keep_ranks_and_progress_and_nothing_counts_twice(meeting: SiteService) -> None:
    every = [home("a", 2), home("b")]
    for one in every:
        assert meeting.service.register(one).error == ""
    before = [meeting.service.register(one) for one in every]
    meeting.ask("a", put=((key("before the job"), b"1"),), add=(key("count"), 5, "once"))
    meeting.begin()
    before = [msgspec.structs.replace(reply, begun=True) for reply in before]
    meeting.ask("a", put=((key("key"), b"value"), (key("gone"), b"")))
    assert (meeting.ask("a", drop=(key("gone"),)).error, meeting.ask("b", add=(key("count"), 2, "again")).sum) == ("", 7)
    for number in range(3):
        meeting.now = 1000.0 * (number + 1)
        meeting.restart()
        assert meeting.service.staying(()), "their silence begins again"
        assert [meeting.service.register(one) for one in every] == before
        known = msgspec.structs.replace(every[0], meeting=before[0].meeting)
        assert meeting.service.register(known) == before[0]
        assert meeting.ask("b", add=(key("count"), 2, "again")).sum == 7
        assert meeting.ask("a", add=(key("count"), 5, "once")).sum == 5
        wanted = tuple(key(name) for name in ("before the job", "key", "gone", "count"))
        assert meeting.ask("b", want=wanted).values == (b"1", b"value", None, b"7")
    meeting.now += 10.0
    assert not meeting.service.staying(())


def test_values_of_an_ended_epoch_are_dropped(meeting: SiteService) -> None:
    meeting.service.register(home("a", 3))
    meeting.begin()
    meeting.ask("a", put=((key("of 2"), b""),), generation=2)
    meeting.door = sites.AdmissionState("", 3, 3)
    meeting.ask("a", put=((key("of 3"), b""),), generation=3)
    meeting.restart()
    wanted = tuple(key(name) for name in ("of 2", "of 3"))
    assert meeting.ask("a", want=wanted).values == (b"", b"")
    meeting.service.forget(3)
    meeting.restart()
    assert meeting.ask("a", want=wanted).values == (None, b"")


def test_later_joins_and_leaves_are_journaled_and_ranks_are_unique(meeting: SiteService) -> None:
    every = [home("a"), home("b"), home("c")]
    for one in every:
        meeting.service.register(one)
    meeting.begin()
    meeting.service.register(msgspec.structs.replace(every[2], leave="it has had enough"))
    late = meeting.service.register(home("d"))
    assert (late.rank, late.joins) == (3, True)
    meeting.restart()
    assert meeting.service.register(home("d")) == msgspec.structs.replace(late, nodes=late.nodes)
    assert "has left: it has had enough" in meeting.service.register(every[2]).error
    assert "has left: it has had enough" in meeting.ask("a", want=(("never", 2),)).error
    assert meeting.ask("a", want=(("never", 2),), without=True).over
    assert meeting.service.register(home("e")).rank == 4
    meeting.restart()
    assert meeting.service.register(home("f")).rank == 5
    meeting.lost = {1: "died"}
    assert meeting.ask("b", put=((key("late"), b""),)).error == "worker 1: died [E-PEER-LOST]", "no more for a lost one"


JOB = Job((TensorInfo("a", (24, 20)), TensorInfo("b", (9,))))
WORLD, STEPS = 2, 6
CODECS = ["identity()", "int8()", "topk(ratio=0.1)", "powersgd(rank=2)", "randomk(ratio=0.2)",
          "momentum(topk(ratio=0.1))", "qsgd(levels=7)"]


def about() -> ServerIdentity:
    epoch = Epoch(1, (MemberRecord(0, 0, "host"),), (ServerInfo(0, "127.0.0.1:7001"),), "digest")
    return ServerIdentity("a token", 0, "127.0.0.1:7001", epoch, b"plan", 1)


def written(folder: Path, *entries: tuple[int, bytes, bytes]) -> bytes:
    journal = ServerJournal(str(folder), required=True)
    assert journal.replace(about(), {1: 100, 2: 50}, lambda write: [write(*entry) for entry in entries] and None)
    journal.close(over=False)
    return (folder / NAME_JOURNAL).read_bytes()


def test_last_entry_of_each_bucket_is_read(tmp_path: Path) -> None:
    written(tmp_path, (1, b"a", b"one"), (2, b"", b""), (1, b"b", b"two"), (1, b"c", b"x" * 99))
    assert read(tmp_path / NAME_JOURNAL) == (about(), {1: (b"c", b"x" * 99), 2: (b"", b"")})
    with pytest.raises(ValueError, match=r"bucket 2 .*51 bytes, allowed 50.*E-JOURNAL"):
        written(tmp_path, (2, b"x", bytes(50)))


def test_workers_that_join_are_added_while_there_is_room(tmp_path: Path) -> None:
    journal = ServerJournal(str(tmp_path), required=True)
    assert journal.write_joined([7], {1: 100}), "there is no journal to add them to"
    assert journal.replace(about(), {1: 100}, lambda write: write(1, b"a", b"one"))
    for joined in ([7], [7, 8], [*range(1 << 31, (1 << 31) + 800)]):
        assert journal.write_joined(joined, {1: 100})
        assert read(tmp_path / NAME_JOURNAL) == (msgspec.structs.replace(about(), joined=tuple(joined)), {1: (b"a", b"one")})
    assert not journal.write_joined([7], {1: 101}), "an entry has grown"
    assert not journal.write_joined([*range(1 << 31, (1 << 31) + 900)], {1: 100})
    journal.close(over=False)


def test_torn_write_leaves_the_previous_entry_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)  # no power fails here
    full = written(tmp_path, (1, b"old", b"state"), (1, b"new", b"later"), (2, b"w", b"s"))
    seen = set()
    for at in range(len(full)):
        (tmp_path / NAME_JOURNAL).write_bytes(full[:at] + bytes([full[at] ^ 0x5A]) + full[at + 1 :])
        try:
            identity, entries = read(tmp_path / NAME_JOURNAL)
        except ValueError:
            seen.add("nothing")
            continue
        assert identity == about()
        assert entries[1] in ((b"new", b"later"), (b"old", b"state"))
        assert entries.get(2) in (None, (b"w", b"s"))
        seen.add(entries[1][0].decode())
    assert seen == {"nothing", "new", "old"}
    for cut in range(0, len(full), 7):
        (tmp_path / NAME_JOURNAL).write_bytes(full[:cut])
        journal = ServerJournal(str(tmp_path), required=True)
        assert (journal.recovered, journal.entries) == (None, {})
        journal.close(over=False)


def test_folder_is_locked_by_one_server_and_one_coordinator(tmp_path: Path) -> None:
    for make, who in ((lambda path: ServerJournal(path, required=True), "another server"),
                      (CoordinatorJournal, "another coordinator")):
        journal = make(str(tmp_path))
        with pytest.raises(ValueError, match=f"{tmp_path} .*{who}.*E-JOURNAL-IN-USE"):
            make(str(tmp_path))
        with pytest.raises(ValueError, match=r"/proc/j .*No such file or directory.*E-JOURNAL\]"):
            make("/proc/j")
        assert journal.recovered is None


class Member:
    """A worker's coding of every bucket, one round at a time."""

    def __init__(self, rank: int, plan: Plan) -> None:
        self.rank, self.plan = rank, plan
        self.codecs = {b.id: make_codec(b, rank, plan) for b in plan.buckets}
        self.states = {b.id: self.codecs[b.id].init(b.spec) for b in plan.buckets}
        for number, state in self.states.items():
            seed(state, plan.job, number, rank)
        self.outs = {b.id: memoryview(bytearray(self.codecs[b.id].bound(b.spec))) for b in plan.buckets}

    def push(self, bucket: Any, step: int, r: int, nbytes: int, undone: int) -> Message:
        codec = self.codecs[bucket.id]
        header = Header(Kind.PUSH, 1, step, bucket.id, round=r, codec=codec.id, sender=self.rank, weight=1.0, used=1,
                        total=float(WORLD) if codec.needs_undo else 0.0, undone=undone)
        return Message(self.rank, header, memoryview(bytes(self.outs[bucket.id][:nbytes])))


def trained(codec: str, down: str, crash: Callable[[], bool]) -> tuple[list[bytes], int]:
    """All results, and how often the server was lost. Some steps are rolled back, also by the servers."""
    plan = default_plan(JOB, codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=64, cut_nbytes=4096)
    import msgspec

    plan = msgspec.structs.replace(plan, buckets=tuple(msgspec.structs.replace(b, down=down) for b in plan.buckets))
    kept: dict[int, tuple[bytes, bytes]] = {}

    def begun() -> Summation:
        summation = Summation(0, 1, make_codec_ops(plan, 0), contributing_ranks(plan, node_ranks(WORLD, 1)))
        for bucket, entry in kept.items():
            summation.restore_from_journal(bucket, *entry)
        summation.journal_state(lambda bucket, words, state: kept.__setitem__(bucket, (words, bytes(state))))
        return summation

    server, results, crashes, heads = begun(), list[bytes](), 0, set[bytes]()
    members = [Member(rank, plan) for rank in range(WORLD)]
    for step in range(STEPS):
        for bucket in plan.buckets:
            undone = (1 << len(bucket.slices)) - 1 if step in (2, 3) else 0
            pushes = []
            for member in members:
                generator = torch.Generator().manual_seed(100 * step + 10 * bucket.id + member.rank)
                x = torch.randn(bucket.numel, generator=generator)
                nbytes = member.codecs[bucket.id].start(x, member.states[bucket.id], member.outs[bucket.id])
                pushes.append(member.push(bucket, step, 0, nbytes, undone))
            for r in range(len(member.codecs[bucket.id].rounds)):
                replies: list[Any] = []
                while len(replies) < WORLD:
                    for push in pushes:
                        replies += server.push(push, 0.0)
                        if crash():
                            crashes, server, replies = crashes + 1, begun(), []
                body = bytes(replies[0].body)
                assert all(bytes(reply.body) == body for reply in replies)
                heads.update(framing.pack(reply.header, len(body)) for reply in replies)
                results.append(body)
                if r + 1 < len(member.codecs[bucket.id].rounds):
                    pushes = [m.push(bucket, step, r + 1, m.codecs[bucket.id].next(
                        r, body, m.states[bucket.id], m.outs[bucket.id]), 0) for m in members]
                else:
                    for m in members:
                        m.codecs[bucket.id].decode(body, m.states[bucket.id], torch.empty(bucket.numel))
    return [*results, *sorted(heads)], crashes


@pytest.mark.parametrize(("codec", "down"), [*((codec, "") for codec in CODECS), ("int8()", "topk(ratio=0.2)")])
def test_server_lost_at_any_point_resumes_bit_for_bit(codec: str, down: str) -> None:
    expected, _ = trained(codec, down, lambda: False)
    for number in range(6):
        chance = random.Random(number)
        result, crashes = trained(codec, down, lambda: chance.random() < 0.3)  # noqa: B023
        assert crashes > 3
        assert result == expected, number


def test_bucket_without_a_complete_entry_starts_fresh_at_any_step() -> None:
    plan = default_plan(JOB, codec="topk(ratio=0.2)", path="service", servers=1, ranks_per_node=1, fuse_nbytes=64,
                        cut_nbytes=4096)
    bucket, members = plan.buckets[0], [Member(rank, plan) for rank in range(WORLD)]
    server = Summation(0, 1, make_codec_ops(plan, 0), contributing_ranks(plan, node_ranks(WORLD, 1)))
    server.forget(bucket.id)
    for member in members:
        x = torch.ones(bucket.numel)
        nbytes = member.codecs[bucket.id].start(x, member.states[bucket.id], member.outs[bucket.id])
        replies = server.push(member.push(bucket, 41, 0, nbytes, 0), 0.0)
    assert [reply.header.step for reply in replies] == [41] * WORLD


def test_bucket_older_than_its_members_starts_fresh_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    """After a power failure: the machine had not written the last entries."""
    plan = default_plan(JOB, codec="topk(ratio=0.2)", path="service", servers=1, ranks_per_node=1, fuse_nbytes=64,
                        cut_nbytes=4096)
    bucket, member = plan.buckets[0], Member(0, plan)
    kept: list[tuple[bytes, bytes]] = []
    former = Summation(0, 1, make_codec_ops(plan, 0), dict.fromkeys((b.id for b in plan.buckets), (0,)))
    former.journal_state(lambda number, words, state: kept.append((words, state)) if number == bucket.id else None)

    def push(server: Summation, step: int) -> list[Any]:
        x = torch.arange(bucket.numel, dtype=torch.float32) + step
        nbytes = member.codecs[bucket.id].start(x, member.states[bucket.id], member.outs[bucket.id])
        message = member.push(bucket, step, 0, nbytes, 0)
        return server.push(message._replace(header=message.header._replace(total=1.0)), 0.0)

    for step in range(5):
        assert len(push(former, step)) == 1
    behind = Summation(0, 1, make_codec_ops(plan, 0), dict.fromkeys((b.id for b in plan.buckets), (0,)))
    behind.restore_from_journal(bucket.id, *kept[3])
    assert [reply.header.step for reply in push(behind, 5)] == [5]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"bucket {bucket.id}: the journal ends before step 5, round 0, so its residual is lost and restarts at zero"


@pytest.mark.parametrize("required", [False, True])
def test_full_disk_is_one_line_and_leaves_no_partial_journal(
        required: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal, former = ServerJournal(str(tmp_path), required=required), list[Any]()
    assert journal.replace(about(), {0: 1000}, former.append)
    with files_up_to(1 << 20):
        if required:
            with pytest.raises(RecordError, match=rf"{tmp_path}: .*8\.0 MiB: File too large.*E-JOURNAL\]"):
                journal.replace(about(), {0: 4 << 20}, lambda _: None)
            former[0](0, b"words", b"state")  # the plan before is still served, and written down
        else:
            assert not journal.replace(about(), {0: 4 << 20}, lambda _: None)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == (["lock", NAME_JOURNAL] if required else ["lock"]), "an old one must not be taken for the new plan's"
    assert [r.getMessage().endswith("without a journal, so a crash of this server will end the job") for r in caplog.records] \
        == ([] if required else [True])
    journal.close(over=True)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
