"""The summation service as a state machine: order, idempotence, garbage, undo, kept results."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import CorruptFrame, PeerLost
from commlayer.transport.loopback import Hub, Loopback
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, Message, key
from commlayer.transport.summation import Summation
from commlayer.transport.summation_server import Stalled, SumServer, stalled_key


class Doubles:
    """Ops over one float64 per payload; the residual is what emitting as float32 keeps back, so undo has something to do."""

    codec, bound, in_means = 7, 8, False

    def __init__(self, rounds: int = 1) -> None:
        self.rounds, self.residual, self.last = rounds, 0.0, (0.0, 0.0)
        self.added: list[float] = []

    def zeros(self, r: int) -> list[float]:
        return [0.0]

    def add(self, r: int, payload: memoryview, acc: list[float], first: bool) -> None:
        if len(payload) != 8:
            raise CorruptFrame(f"{len(payload)} bytes, expected 8")
        (value,) = struct.unpack("<d", payload)
        acc[0] = value if first else acc[0] + value
        self.added.append(value)

    def emit(self, r: int, acc: list[float], out: memoryview) -> int:
        total = acc[0] + self.residual
        (sent,) = struct.unpack("<f", struct.pack("<f", total))
        self.residual, self.last = total - sent, (acc[0], sent)
        out[:8] = struct.pack("<d", sent)
        return 8

    def undo(self, slices: int) -> None:
        """The members take back what they sent: the residual is what it was before that step."""
        added, sent = self.last
        self.residual, self.last = self.residual - added + sent, (0.0, 0.0)

    def skip(self) -> None:
        self.last = (0.0, 0.0)

    def snapshot(self) -> bytes:
        return struct.pack("<d", self.residual)

    def restore(self, data: bytes | memoryview) -> None:
        (self.residual,) = struct.unpack("<d", data)


def push(sender: int, value: float, step: int = 0, r: int = 0, /, **fields: object) -> Message:
    header = Header(Kind.PUSH, 1, step, 5, round=r, codec=7, sender=sender, weight=float(sender + 1), used=1 << sender)
    return Message(sender, header._replace(**fields), memoryview(struct.pack("<d", value)))


def service(members: int = 3, rounds: int = 1, ops: Doubles | None = None) -> tuple[Summation, Doubles]:
    ops = ops or Doubles(rounds)
    return Summation(0, 1, {5: ops}, {5: tuple(range(members))}), ops


def value(reply: object) -> float:
    return float(struct.unpack("<d", reply.body)[0])  # type: ignore[attr-defined]


VALUES = [0.1, 1e8, -3.7]


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(3))))
def test_adds_in_member_order_whatever_the_arrival(arrival: tuple[int, ...]) -> None:
    core, ops = service()
    replies = [core.push(push(m, VALUES[m]), 0.0) for m in arrival]
    assert [len(r) for r in replies] == [0, 0, 3]
    assert ops.added == VALUES
    assert [r.peer for r in replies[2]] == [0, 1, 2]
    header = replies[2][0].header
    assert (header.kind, header.sender, header.weight, header.used) == (Kind.RESULT, SERVER_BASE, 6.0, 0b111)


def test_a_mean_beside_parts_of_a_sum_is_a_breach_of_its_sender() -> None:
    core, ops = service()
    core.push(push(0, VALUES[0]), 0.0)
    with pytest.raises(CorruptFrame, match="worker 1: .*sends a mean"):
        core.push(push(1, VALUES[1], flags=Flag.MEAN), 0.0)
    assert ops.added == VALUES[:1]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_each_contribution_counts_once(senders: list[int]) -> None:
    core, ops = service()
    for sender in senders:
        core.push(push(sender, VALUES[sender]), 0.0)
    prefix = next((m for m in range(3) if m not in senders), 3)
    assert ops.added == VALUES[:prefix]


def test_a_late_repeat_gets_the_kept_result_and_steps_leave_the_window() -> None:
    core, _ = service()
    for step in range(4):
        for m in range(3):
            core.push(push(m, step + m, step), 0.0)
    again = core.push(push(1, 99.0, 2), 0.0)
    assert [(r.peer, value(r)) for r in again] == [(1, 9.0)]
    with pytest.raises(CorruptFrame, match="worker 1: .*out of order.*round 0 of step 4 is next"):
        core.push(push(1, 99.0, 1), 0.0)


@pytest.mark.parametrize(("fields", "words"), [
    ({"bucket": 6}, "bucket 6 is not of this server"),
    ({"sender": 2}, "says it is worker 2"),
    ({"generation": 2}, "generation 2, here 1"),
    ({"round": 1}, "round 1"),
    ({"parts": 2}, "part 0 of 2"),
    ({"codec": 8}, "codec 8"),
    ({"weight": float("nan")}, "weight nan"),
    ({"weight": -1.0}, "weight -1"),
    ({"step": 1}, "out of order: round 0 of step 1, while worker 0 is in round 0 of step 0"),
])
def test_breaches_are_named_and_change_nothing(fields: dict[str, object], words: str) -> None:
    core, ops = service()
    core.push(push(0, VALUES[0]), 0.0)
    with pytest.raises(CorruptFrame, match=f"worker 1: .*{words}"):
        core.push(push(1, VALUES[1], **fields), 0.0)
    core.push(push(1, VALUES[1]), 0.0)
    replies = core.push(push(2, VALUES[2]), 0.0)
    assert ops.added == VALUES
    assert len(replies) == 3


def test_a_corrupt_payload_names_its_sender_even_when_another_push_uncovers_it() -> None:
    core, ops = service()
    core.push(Message(1, push(1, 0.0).header, memoryview(b"short")), 0.0)
    with pytest.raises(CorruptFrame, match="worker 1: 5 bytes, expected 8"):
        core.push(push(0, VALUES[0]), 0.0)
    assert ops.added == [VALUES[0]]
    core.push(push(1, VALUES[1]), 0.0)
    assert len(core.push(push(2, VALUES[2]), 0.0)) == 3


def test_a_stranger_is_refused() -> None:
    core, _ = service()
    with pytest.raises(CorruptFrame, match="worker 3"):
        core.push(push(3, 1.0), 0.0)


def test_old_generations_are_ignored() -> None:
    core, ops = service()
    assert core.push(push(0, 1.0, generation=0), 0.0) == []
    assert ops.added == []


def test_frames_of_an_ended_generation_are_counted_whatever_they_name() -> None:
    """In the new plan the bucket may be another, or none: who has not heard of it breaks no rule."""
    core, ops = service()
    for number, message in enumerate((push(0, 1.0, generation=0), push(1, 1.0, generation=0, bucket=77, codec=9)), 1):
        assert core.push(message, 0.0) == []
        assert core.fenced == number
    core.undo(ask(Kind.UNDO, 0, 0, b"", generation=0, bucket=77, undone=1))
    assert core.snapshot(ask(Kind.STATE_GET, 0, 0, b"", generation=0, bucket=77)) == []
    assert (core.fenced, ops.added) == (4, [])
    with pytest.raises(CorruptFrame, match="worker 1: says it is worker 0"):
        core.push(push(0, 1.0, generation=0)._replace(peer=1), 0.0)


def test_who_has_not_heard_that_a_step_is_coded_again_hears_it_again() -> None:
    class Means(Doubles):
        in_means = True

    core, ops = service(2, ops=Means())
    for m in range(2):
        replies = core.push(push(m, 1.0 + m, total=1.0), 0.0)
    assert [reply.header.flags for reply in replies] == [Flag.AGAIN] * 2
    (again,) = core.push(push(0, 1.0, total=1.0), 0.0)
    assert (again.peer, again.header) == (0, replies[0].header)
    assert core.push(push(0, 5.0, total=3.0, flags=Flag.AGAIN), 0.0) == []
    (again,) = core.push(push(1, 2.0, total=1.0), 0.0)
    assert again.peer == 1
    assert [value(r) for r in core.push(push(1, 6.0, total=3.0, flags=Flag.AGAIN), 0.0)] == [11.0] * 2
    assert ops.added == [1.0, 2.0, 5.0, 6.0]


def test_two_rounds_in_turn() -> None:
    core, _ = service(rounds=2)
    for r in (0, 1):
        replies = [core.push(push(m, 10.0 * r + m, 0, r), 0.0) for m in range(3)]
        assert value(replies[2][0]) == 30.0 * r + 3
        assert replies[2][0].header.round == r
    with pytest.raises(CorruptFrame, match="out of order"):
        core.push(push(0, 1.0, 1, 1), 0.0)


def test_undo_gives_back_the_last_result_once_and_all_must_say_it() -> None:
    core, ops = service(2)
    for m in range(2):
        core.push(push(m, 0.1), 0.0)
    assert ops.residual != 0.0
    for m in range(2):
        core.push(push(m, 2.0, 1, undone=1), 0.0)
    assert (ops.last, ops.residual) == ((4.0, 4.0), 0.0)  # nothing is left of the step before
    core.push(push(0, 1.0, 2, undone=1), 0.0)
    with pytest.raises(CorruptFrame, match="worker 1: applied all of the step before, worker 0 did not apply some averages"):
        core.push(push(1, 1.0, 2), 0.0)


def test_stalled_says_who_is_missing_and_who_waits() -> None:
    core, _ = service()
    core.push(push(2, 1.0), now=10.0)
    core.push(push(0, 1.0), now=11.0)
    assert core.stalled(9.0) == []
    (stall,) = core.stalled(10.0)
    assert (stall.bucket, stall.step, stall.missing, stall.waiting, stall.since) == (5, 0, (1,), (0, 2), 10.0)
    core.push(push(1, 1.0), now=12.0)
    assert core.stalled(99.0) == []


def ask(kind: Kind, sender: int = 0, step: int = 0, body: bytes = b"", /, **fields: object) -> Message:
    return Message(sender, Header(kind, 1, step, 5, sender=sender)._replace(**fields), memoryview(body))


def test_snapshot_and_restore_continue_at_the_saved_step() -> None:
    core, ops = service(1)
    core.push(push(0, 0.1, 6), 0.0)
    (kept,) = core.snapshot(ask(Kind.STATE_GET))
    assert (kept.peer, kept.header.kind, kept.header.sender) == (0, Kind.STATE, SERVER_BASE)
    other, fresh = service(1)
    (ok,) = other.restore(ask(Kind.STATE, 0, 7, bytes(kept.body)))
    assert (ok.peer, ok.header.kind) == (0, Kind.STATE_OK)
    assert fresh.residual == ops.residual != 0.0
    with pytest.raises(CorruptFrame, match="out of order.*round 0 of step 7 is next"):
        other.push(push(0, 0.1, 6), 0.0)
    assert value(other.push(push(0, 0.1, 7), 0.0)[0]) == value(core.push(push(0, 0.1, 7), 0.0)[0])


def test_a_running_sum_can_go_back_to_any_step_that_state_is_restored_for() -> None:
    core, _ = service(1)
    for step in range(3):
        core.push(push(0, 1.0 + step, step), 0.0)
    for back in (0, 2):
        core.restore(ask(Kind.STATE, 0, back, struct.pack("<d", 0.0)))
        assert value(core.push(push(0, 9.0, back), 0.0)[0]) == 9.0, "and no result of the former way is served"


@pytest.mark.parametrize("kind", [Kind.STATE, Kind.STATE_GET])
@pytest.mark.parametrize(("fields", "words"), [
    ({"bucket": 6}, "bucket 6 is not of this server"),
    ({"sender": 2}, "says it is worker 2"),
    ({"generation": 2}, "generation 2, here 1"),
])
def test_state_is_asked_and_restored_by_the_same_rules(kind: Kind, fields: dict[str, object], words: str) -> None:
    core, ops = service()
    do = core.restore if kind == Kind.STATE else core.snapshot
    ops.residual = 3.0
    with pytest.raises(CorruptFrame, match=f"worker 1: .*{words}"):
        do(ask(kind, 1, 4, struct.pack("<d", 1.0), **fields))
    assert do(ask(kind, 1, 4, struct.pack("<d", 1.0), generation=0)) == []
    core.push(push(0, 1.0), 0.0)
    with pytest.raises(CorruptFrame, match=f"worker 1: {kind.name} while step 0 is being summed"):
        do(ask(kind, 1, 4, struct.pack("<d", 1.0), undone=int(kind == Kind.STATE_GET)))
    assert ops.residual == 3.0
    core.push(push(1, 1.0), 0.0)
    assert len(core.push(push(2, 1.0), 0.0)) == 3, "the sum under way was not disturbed"


class Strict(Doubles):
    def restore(self, data: bytes | memoryview) -> None:
        raise ValueError("of another plan")


def test_a_state_that_does_not_fit_is_its_senders_fault_and_changes_nothing() -> None:
    core, _ = service(1, ops=Strict())
    first = core.push(push(0, 0.1, 3), 0.0)
    with pytest.raises(CorruptFrame, match="worker 0: sent a state that does not fit: of another plan"):
        core.restore(ask(Kind.STATE, 0, 9, b"?"))
    assert value(core.push(push(0, 5.0, 3), 0.0)[0]) == value(first[0])
    assert len(core.push(push(0, 5.0, 4), 0.0)) == 1


def test_a_step_far_ahead_costs_only_its_sender() -> None:
    core, _ = service()
    for m in range(3):
        core.push(push(m, 1.0), 0.0)
    with pytest.raises(CorruptFrame, match="worker 1: .*round 0 of step 4000000000, while round 0 of step 1 is next"):
        core.push(push(1, 1.0, 4_000_000_000), 0.0)
    assert [len(core.push(push(m, 1.0, 1), 0.0)) for m in range(3)] == [0, 0, 3]


def test_members_that_begin_at_different_steps_hear_both() -> None:
    core, _ = service()
    core.push(push(2, 1.0, 7), 0.0)
    with pytest.raises(CorruptFrame, match="worker 0: .*round 0 of step 5, while worker 2 is in round 0 of step 7"):
        core.push(push(0, 1.0, 5), 0.0)
    core.push(push(0, 1.0, 7), 0.0)
    assert len(core.push(push(1, 1.0, 7), 0.0)) == 3


def test_a_body_longer_than_any_payload_is_not_kept() -> None:
    core, _ = service()
    with pytest.raises(CorruptFrame, match="worker 2: 9 bytes, at most 8 for this bucket"):
        core.push(Message(2, push(2, 0.0).header, memoryview(bytes(9))), 0.0)
    assert core.stalled(99.0) == []


# ---- the service behind a transport


@pytest.fixture
def hub() -> Iterator[tuple[Hub, list[Any]]]:
    """A hub and what stands on it, to be closed."""
    things: list[Any] = []
    yield Hub(), things
    for thing in things:
        thing.close()


def served(hub: tuple[Hub, list[Any]], ops: Doubles, stall_s: float = 60.0, members: int = 3) -> list[Loopback]:
    """A server of bucket 5 on the hub; the transports of its members."""
    core = Summation(0, 1, {5: ops}, {5: tuple(range(members))})
    ends = hub[0].mesh([SERVER_BASE, *range(members)])
    hub[1].extend((SumServer(core, ends[0], range(members), stall_s=stall_s), *ends[1:]))
    return ends[1:]


def next_stalled(transport: Loopback) -> Stalled:
    handle = transport.recv(SERVER_BASE, stalled_key(1))
    return msgspec.msgpack.decode(transport.wait(handle, time.monotonic() + 30.0).body, type=Stalled)


class Broken(Doubles):
    def emit(self, r: int, acc: list[float], out: memoryview) -> int:
        raise MemoryError("no room")


def test_a_failure_of_the_server_itself_is_told_to_all_and_blamed_on_none(
    hub: tuple[Hub, list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("commlayer.transport.summation_server.FAREWELL_S", 0.0)
    members = served(hub, Broken())
    waiting = [m.recv(SERVER_BASE, key(push(0, 0.0).header._replace(kind=Kind.RESULT))) for m in members]
    for m, transport in enumerate(members):
        transport.send(SERVER_BASE, push(m, 1.0).header, push(m, 1.0).body)
    for transport, handle in zip(members, waiting, strict=True):
        assert next_stalled(transport) == Stalled(5, 0, (), failed="failed: MemoryError: no room")
        with pytest.raises(PeerLost, match="server 0: connection closed"):
            transport.wait(handle, time.monotonic() + 30.0)
    (said,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert said.getMessage() == "server 0: failed: MemoryError: no room (step 0, bucket 5)"
    assert said.exc_info, "with a traceback: this is for who mends the server"
    assert "dropped" not in caplog.text


class Picky(Doubles):
    def add(self, r: int, payload: memoryview, acc: list[float], first: bool) -> None:
        raise ValueError("not these bytes")


def test_a_payload_that_the_codec_refuses_is_blamed_on_its_sender(hub: tuple[Hub, list[Any]]) -> None:
    members = served(hub, Picky(), stall_s=0.0)
    members[1].send(SERVER_BASE, push(1, 1.0).header, push(1, 1.0).body)
    assert next_stalled(members[1]).missing == (0, 2)
    members[0].send(SERVER_BASE, push(0, 1.0).header, push(0, 1.0).body)
    while not (said := next_stalled(members[1])).dropped:
        pass
    assert (said.missing, said.dropped, said.failed) == ((0, 2), "not these bytes", "")


def test_who_is_awaited_is_said_again_and_again(hub: tuple[Hub, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing one may leave in order after it was first said; who waits learns of it with the next time."""
    monkeypatch.setattr("commlayer.transport.summation_server.REPEAT_S", 0.0)
    members = served(hub, Doubles(), stall_s=0.0)
    members[0].send(SERVER_BASE, push(0, 1.0).header, push(0, 1.0).body)
    assert [next_stalled(members[0]) for _ in range(3)] == [Stalled(5, 0, (1, 2))] * 3


class Noted(Doubles):
    """What was done, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def undo(self, slices: int) -> None:
        self.done.append(f"undo {slices}")

    def restore(self, data: bytes | memoryview) -> None:
        self.done.append("restore")


def test_a_numbered_request_that_comes_twice_is_done_once_and_answered_twice(hub: tuple[Hub, list[Any]]) -> None:
    ops = Noted()
    member = served(hub, ops, members=1)[0]
    requests = [ask(Kind.UNDO, 0, 0, b"", used=1, undone=3), ask(Kind.STATE, 0, 4, b"state", used=2),
                ask(Kind.STATE_GET, 0, 0, b"", used=3, undone=1)]
    for request in (*requests, *requests):
        member.send(SERVER_BASE, request.header, request.body)
    for kind, step in ((Kind.STATE_OK, 4), (Kind.STATE, 0)) * 2:
        answer = member.recv(SERVER_BASE, key(requests[1].header._replace(kind=kind, step=step)))
        assert member.wait(answer, time.monotonic() + 30.0).header.used in (2, 3)
    assert ops.done == ["undo 3", "restore", "undo 1"]
    member.send(SERVER_BASE, push(0, 1.0, 4).header, push(0, 1.0, 4).body)
    assert member.peers == (SERVER_BASE,), "nobody was dropped"


def test_every_body_is_released_once() -> None:
    core, _ = service()
    released: list[Message] = []
    sent = [push(1, 1.0), push(1, 1.0), push(0, 1.0), push(2, 1.0), push(2, 1.0)]
    for message in sent:
        core.push(message, 0.0, released.append)
    assert sorted(map(id, released)) == sorted(map(id, sent))
