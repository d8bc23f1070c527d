"""The summation service as a state machine: order, idempotence, garbage, undo, kept results."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import CorruptFrame
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, Message
from commlayer.transport.service import Summation


class Doubles:
    """Ops over one float64 per payload; the residual is what emitting as float32 keeps back, so undo has something to do."""

    codec, bound = 7, 8

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

    def undo(self) -> None:
        """The members take back what they sent: the residual is what it was before that step."""
        added, sent = self.last
        self.residual, self.last = self.residual - added + sent, (0.0, 0.0)

    def snapshot(self) -> bytes:
        return struct.pack("<d", self.residual)

    def restore(self, data: bytes | memoryview) -> None:
        (self.residual,) = struct.unpack("<d", data)


def push(sender: int, value: float, step: int = 0, r: int = 0, /, **fields: object) -> Message:
    header = Header(Kind.PUSH, 1, step, 5, round=r, codec=7, sender=sender, weight=float(sender + 1), used=1 << sender)
    return Message(sender, header._replace(**fields), memoryview(struct.pack("<d", value)))


def service(members: int = 3, rounds: int = 1) -> tuple[Summation, Doubles]:
    ops = Doubles(rounds)
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
    with pytest.raises(CorruptFrame, match="worker 1: .*out of order.*after step 3"):
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
    ({"step": 1}, "out of order"),
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
        core.push(push(m, 2.0, 1, flags=Flag.UNDO), 0.0)
    assert (ops.last, ops.residual) == ((4.0, 4.0), 0.0)  # nothing is left of the step before
    core.push(push(0, 1.0, 2, flags=Flag.UNDO), 0.0)
    with pytest.raises(CorruptFrame, match="worker 1: disagrees"):
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


def test_snapshot_and_restore_continue_at_the_saved_step() -> None:
    core, ops = service(1)
    core.push(push(0, 0.1, 6), 0.0)
    kept = core.snapshot(5, undo=False)
    other, fresh = service(1)
    other.restore(5, 6, kept)
    assert fresh.residual == ops.residual != 0.0
    with pytest.raises(CorruptFrame, match="out of order"):
        other.push(push(0, 0.1, 6), 0.0)
    assert value(other.push(push(0, 0.1, 7), 0.0)[0]) == value(core.push(push(0, 0.1, 7), 0.0)[0])


def test_every_body_is_released_once() -> None:
    core, _ = service()
    released: list[Message] = []
    sent = [push(1, 1.0), push(1, 1.0), push(0, 1.0), push(2, 1.0), push(2, 1.0)]
    for message in sent:
        core.push(message, 0.0, released.append)
    assert sorted(map(id, released)) == sorted(map(id, sent))
