"""A server's journal: entries that are whole or not there, and sums that go on from them with the same bits."""

from __future__ import annotations

import contextlib
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from commlayer.cluster.coordinator_journal import CoordinatorJournal
from commlayer.cluster.server_codecs import ops_of, senders_of
from commlayer.cluster.server_journal import NAME, ServerIdentity, ServerJournal, read
from commlayer.cluster.summation import Summation
from commlayer.compressors import codec_of, seed
from commlayer.errors import RecordError
from commlayer.planner import default_plan
from commlayer.records import Job, Plan, ServerInfo, TensorInfo, View
from commlayer.records import Member as MemberRecord
from commlayer.transport import framing
from commlayer.transport.protocol import Flag, Header, Kind, Message

JOB = Job((TensorInfo("a", (24, 20)), TensorInfo("b", (9,))))
WORLD, STEPS = 2, 6
CODECS = ["identity()", "int8()", "topk(ratio=0.1)", "powersgd(rank=2)", "randomk(ratio=0.2)",
          "momentum(topk(ratio=0.1))", "qsgd(levels=7)"]


def about() -> ServerIdentity:
    view = View(1, (MemberRecord(0, 0, "host"),), (ServerInfo(0, "127.0.0.1:7001"),), "digest")
    return ServerIdentity("a token", 0, "127.0.0.1:7001", view, b"plan", 1)


def written(folder: Path, *entries: tuple[int, bytes, bytes]) -> bytes:
    journal = ServerJournal(str(folder), required=True)
    assert journal.replace(about(), {1: 100, 2: 50}, lambda write: [write(*entry) for entry in entries] and None)
    journal.close(over=False)
    return (folder / NAME).read_bytes()


def test_the_last_entry_of_each_bucket_is_read(tmp_path: Path) -> None:
    written(tmp_path, (1, b"a", b"one"), (2, b"", b""), (1, b"b", b"two"), (1, b"c", b"x" * 99))
    assert read(tmp_path / NAME) == (about(), {1: (b"c", b"x" * 99), 2: (b"", b"")})
    with pytest.raises(ValueError, match=r"bucket 2 .*51 bytes, allowed 50.*E-JOURNAL"):
        written(tmp_path, (2, b"x", bytes(50)))


def test_every_torn_byte_leaves_the_entry_before_or_none(tmp_path: Path) -> None:
    full = written(tmp_path, (1, b"old", b"state"), (1, b"new", b"later"), (2, b"w", b"s"))
    seen = set()
    for at in range(len(full)):
        (tmp_path / NAME).write_bytes(full[:at] + bytes([full[at] ^ 0x5A]) + full[at + 1 :])
        try:
            identity, entries = read(tmp_path / NAME)
        except ValueError:
            seen.add("nothing")
            continue
        assert identity == about()
        assert entries[1] in ((b"new", b"later"), (b"old", b"state"))
        assert entries.get(2) in (None, (b"w", b"s"))
        seen.add(entries[1][0].decode())
    assert seen == {"nothing", "new", "old"}
    for cut in range(0, len(full), 7):
        (tmp_path / NAME).write_bytes(full[:cut])
        journal = ServerJournal(str(tmp_path), required=True)
        assert (journal.recovered, journal.entries) == (None, {})
        journal.close(over=False)


def test_a_folder_has_one_server_and_one_coordinator(tmp_path: Path) -> None:
    for make, who in ((lambda path: ServerJournal(path, required=True), "another server"),
                      (CoordinatorJournal, "another coordinator")):
        journal = make(str(tmp_path))
        with pytest.raises(ValueError, match=f"{tmp_path} .*{who}.*E-JOURNAL-IN-USE"):
            make(str(tmp_path))
        with pytest.raises(ValueError, match=r"/proc/j .*No such file or directory.*E-JOURNAL\]"):
            make("/proc/j")
        assert journal.recovered is None


# ---- sums


class Member:
    """A worker's coding of every bucket, one round at a time."""

    def __init__(self, rank: int, plan: Plan) -> None:
        self.rank, self.plan = rank, plan
        self.codecs = {b.id: codec_of(b, rank, plan) for b in plan.buckets}
        self.states = {b.id: self.codecs[b.id].init(b.spec) for b in plan.buckets}
        for number, state in self.states.items():
            seed(state, plan.job, number, rank)
        self.outs = {b.id: memoryview(bytearray(self.codecs[b.id].bound(b.spec))) for b in plan.buckets}

    def push(self, bucket: Any, step: int, r: int, nbytes: int, undone: int) -> Message:
        codec = self.codecs[bucket.id]
        header = Header(Kind.PUSH, 1, step, bucket.id, round=r, codec=codec.id, sender=self.rank, weight=1.0, used=1,
                        total=float(WORLD) if codec.keeps else 0.0, undone=undone)
        return Message(self.rank, header, memoryview(bytes(self.outs[bucket.id][:nbytes])))


def trained(codec: str, down: str, crash: Callable[[], bool]) -> tuple[list[bytes], int]:
    """All results, and how often the server was lost. Some steps are taken back, so servers must, too."""
    plan = default_plan(JOB, codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=64, cut_nbytes=4096)
    import msgspec

    plan = msgspec.structs.replace(plan, buckets=tuple(msgspec.structs.replace(b, down=down) for b in plan.buckets))
    kept: dict[int, tuple[bytes, bytes]] = {}

    def begun() -> Summation:
        summation = Summation(0, 1, ops_of(plan, 0), senders_of(plan, WORLD))
        for bucket, entry in kept.items():
            summation.recall(bucket, *entry)
        summation.remember(lambda bucket, words, state: kept.__setitem__(bucket, (words, bytes(state))))
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
                assert not replies[0].header.flags & Flag.AGAIN
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
def test_a_server_that_is_lost_anywhere_goes_on_with_the_same_bits(codec: str, down: str) -> None:
    expected, _ = trained(codec, down, lambda: False)
    for number in range(6):
        chance = random.Random(number)
        result, crashes = trained(codec, down, lambda: chance.random() < 0.3)  # noqa: B023
        assert crashes > 3
        assert result == expected, number


def test_a_bucket_without_a_whole_entry_begins_anew_at_whatever_step_comes() -> None:
    plan = default_plan(JOB, codec="topk(ratio=0.2)", path="service", servers=1, ranks_per_node=1, fuse_nbytes=64,
                        cut_nbytes=4096)
    bucket, members = plan.buckets[0], [Member(rank, plan) for rank in range(WORLD)]
    server = Summation(0, 1, ops_of(plan, 0), senders_of(plan, WORLD))
    server.forget(bucket.id)
    for member in members:
        x = torch.ones(bucket.numel)
        nbytes = member.codecs[bucket.id].start(x, member.states[bucket.id], member.outs[bucket.id])
        replies = server.push(member.push(bucket, 41, 0, nbytes, 0), 0.0)
    assert [reply.header.step for reply in replies] == [41] * WORLD


def test_a_bucket_whose_members_are_ahead_of_its_entry_begins_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """After a power failure: the machine had not written the last entries."""
    plan = default_plan(JOB, codec="topk(ratio=0.2)", path="service", servers=1, ranks_per_node=1, fuse_nbytes=64,
                        cut_nbytes=4096)
    bucket, member = plan.buckets[0], Member(0, plan)
    kept: list[tuple[bytes, bytes]] = []
    former = Summation(0, 1, ops_of(plan, 0), dict.fromkeys((b.id for b in plan.buckets), (0,)))
    former.remember(lambda number, words, state: kept.append((words, state)) if number == bucket.id else None)

    def push(server: Summation, step: int) -> list[Any]:
        x = torch.arange(bucket.numel, dtype=torch.float32) + step
        nbytes = member.codecs[bucket.id].start(x, member.states[bucket.id], member.outs[bucket.id])
        message = member.push(bucket, step, 0, nbytes, 0)
        return server.push(message._replace(header=message.header._replace(total=1.0)), 0.0)

    for step in range(5):
        assert len(push(former, step)) == 1
    behind = Summation(0, 1, ops_of(plan, 0), dict.fromkeys((b.id for b in plan.buckets), (0,)))
    behind.recall(bucket.id, *kept[3])
    assert [reply.header.step for reply in push(behind, 5)] == [5]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"bucket {bucket.id}: the journal ends before step 5, round 0, so its residual is lost and restarts at zero"


# ---- whose it is, and a disk that is full


@contextlib.contextmanager
def files_up_to(nbytes: int) -> Iterator[None]:
    """What a full disk is: the system refuses to make a file larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("required", [False, True])
def test_a_full_disk_is_one_line_and_leaves_no_half_of_a_journal(
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
    assert left == (["lock", NAME] if required else ["lock"]), "an old one must not be taken for the new plan's"
    assert [r.getMessage().endswith("without a journal, so a crash of this server will end the job") for r in caplog.records] \
        == ([] if required else [True])
    journal.close(over=True)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
