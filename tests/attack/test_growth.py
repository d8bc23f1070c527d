"""What one member can make a server hold: after 100 kB from a member the server has grown by at most 1 MiB, beside what the
job itself needs, and the other member's calls and steps go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from support.hostile import DataConnection, HonestMember, HostileMember, Victim, flood, joined

from commlayer import records
from commlayer.cluster import messages
from commlayer.planner import default_plan
from commlayer.records import Job, Plan, TensorInfo
from commlayer.transport import framing
from commlayer.transport.crc import crc32c
from commlayer.transport.protocol import Flag, Header, Kind

SENT_NBYTES = 100_000
MIB = 1 << 20
NUMEL = 1_000_000
STATE_NBYTES = 4 * NUMEL
"""The server's residual of the bucket. A reply with it is made from a copy, so a checkpoint needs twice as much."""
SLACK_NBYTES = 2 * MIB
"""Stacks and malloc arenas of the two threads of a new connection, and what the measuring itself needs."""
PLAN = default_plan(Job((TensorInfo("weight", (NUMEL,)),)), codec="error_feedback(int8())", path="service", servers=1,
                    ranks_per_node=1, fuse_nbytes=1 << 30, cut_nbytes=4 * NUMEL)


class Scene:
    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.victim = stack.enter_context(Victim("--workers", "2"))
        self.honest, self.hostile = joined(stack, self.victim, HonestMember, HostileMember, plan=PLAN)
        self.generation = 1

    def header(self, kind: Kind, **fields: Any) -> Header:
        return Header(kind, self.generation, sender=self.hostile.rank)._replace(**fields)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        yield Scene(stack)


Attack = Callable[[Scene, DataConnection], None]


def sent(data: DataConnection, header: Header, body: bytes = b"", nbytes: int | None = None) -> bool:
    """Sends a frame unless the server takes nothing more, as after a breach or while it waits for its replies to be read.
    `nbytes`: size of the body by the header, if not the truth."""
    try:
        data.raw(framing.encode(header, len(body) if nbytes is None else nbytes, crc32c(body)) + body, timeout_s=1.0)
    except OSError:
        return False
    return True


def many(data: DataConnection, frames: Iterator[tuple[Header, bytes]]) -> None:
    """Sends frames up to SENT_NBYTES."""
    total = 0
    for header, body in frames:
        total += 68 + len(body)
        if total > SENT_NBYTES or not sent(data, header, body):
            return


def states(scene: Scene, data: DataConnection) -> None:
    many(data, ((scene.header(Kind.STATE_GET), b"") for _ in range(10_000)))


def states_by_rank(scene: Scene, data: DataConnection) -> None:
    """Each is more urgent than the one before."""
    many(data, ((scene.header(Kind.STATE_GET, step=10_000 - i), b"") for i in range(10_000)))


def results_again(scene: Scene, data: DataConnection) -> None:
    """The result of zeros is nearly all zero chunks, of which the sender makes a copy without them."""
    header, _ = scene.hostile.contribution(0)
    many(data, ((header, b"") for _ in range(10_000)))


def probes(scene: Scene, data: DataConnection) -> None:
    many(data, ((scene.header(Kind.PROBE, step=i), b"") for i in range(10_000)))


def announced(kind: Kind) -> Attack:
    """Bodies that are announced and do not come. More urgent ones interrupt them."""

    def attack(scene: Scene, data: DataConnection) -> None:
        for i in range(700):
            part = scene.header(kind, step=10_000 - i, parts=64, part=0)
            if not sent(data, part, bytes(64 << 10) if i == 0 else b"x" * 64):
                return
        sent(data, scene.header(kind), nbytes=256 * MIB)

    return attack


def bomb(scene: Scene, data: DataConnection) -> None:
    """A body of zero chunks only, larger than any payload of the bucket."""
    nbytes = 32 * 8 * (SENT_NBYTES - 100)
    body = nbytes.to_bytes(4, "little") + bytes(-(-nbytes // 256))
    header, _ = scene.hostile.contribution(1)
    sent(data, header._replace(flags=Flag.WITHOUT_ZEROS), body)


def plan(change: Callable[[Plan], Plan]) -> Attack:
    def attack(scene: Scene, data: DataConnection) -> None:
        body = records.encode(change(PLAN))
        if len(body) <= 2 * SENT_NBYTES:
            sent(data, scene.header(Kind.PLAN, generation=scene.generation + 1, used=1), body)
        else:
            sent(data, scene.header(Kind.PLAN, generation=scene.generation + 1, used=1), body[:SENT_NBYTES], nbytes=len(body))

    return attack


def changed(**fields: Any) -> Callable[[Plan], Plan]:
    return lambda plan: msgspec.structs.replace(plan, buckets=(msgspec.structs.replace(plan.buckets[0], **fields),))


def split(count: int, numel: int) -> Callable[[Plan], Plan]:
    """`count` buckets of `numel` elements each."""
    def cut(plan: Plan) -> Plan:
        first = plan.buckets[0]
        buckets = (msgspec.structs.replace(first, id=i, slices=(records.Slice(0, i * numel, (i + 1) * numel),), shape=())
                   for i in range(count))
        return msgspec.structs.replace(plan, buckets=tuple(buckets))

    return cut


ATTACKS: dict[str, tuple[Attack, int]] = {
    "states": (states, 2 * STATE_NBYTES),
    "states, each more urgent": (states_by_rank, 2 * STATE_NBYTES),
    "results again": (results_again, 0),
    "probes": (probes, 0),
    "announced contributions": (announced(Kind.PUSH), 0),
    "announced states": (announced(Kind.STATE), 0),
    "announced plans": (announced(Kind.PLAN), 0),
    "zero chunks": (bomb, 0),
    "a plan of more elements": (plan(changed(slices=(records.Slice(0, 0, 1 << 25),), shape=())), 0),
    "a plan of many large buckets": (plan(split(500, 1 << 25)), 0),
    "a plan of small buckets": (plan(split(900, 1)), 0),
    "a plan of a long codec": (plan(changed(codec="topk(" + "1+" * 500_000 + "1)")), 0),
    "a plan of a deep codec": (plan(changed(codec="error_feedback(" * 190 + "int8()" + ")" * 190)), 0),
    "a plan of a large number": (plan(changed(codec=f"topk({'9' * 4000})")), 0),
    "a plan of many nodes": (plan(changed(by_node=("int8()",) * 9_000)), 0),
    "a plan of many dimensions": (plan(changed(shape=(1 << 62,) * 4_000)), 0),
    "a plan of a long path": (plan(changed(path="service " * 10_000)), 0),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ATTACKS)
def test_no_frames_of_a_member_fill_the_server(scene: Scene, name: str) -> None:
    attack, needed_nbytes = ATTACKS[name]
    with scene.hostile.data() as data:
        assert scene.honest.step(scene.hostile)
        time.sleep(0.5)
        scene.honest.start_calls()
        with scene.victim.watched(settle_s=1.0) as growth:
            attack(scene, data)
        assert scene.victim.alive
        print(f"{name}: peak {growth.peak_nbytes / MIB:.1f} MiB, cpu {growth.cpu_s:.1f} s of {growth.seconds:.1f}")
        assert growth.peak_nbytes < MIB + needed_nbytes + SLACK_NBYTES
        assert growth.cpu_s < 2.0
    with scene.hostile.data():
        assert scene.honest.step(scene.hostile)
    assert scene.honest.failed == []
    assert scene.honest.longest_call_s < 1.0


VALUE_NBYTES = 128 << 10


def stored(scene: Scene) -> messages.KvRequest:
    names = [f"value-{i}" for i in range(8)]
    for name in names:
        scene.hostile.call("KvRequest", messages.KvRequest(scene.hostile.home, put=((name, bytes(VALUE_NBYTES)),)))
    return messages.KvRequest(scene.hostile.home, want=tuple((name, messages.ANY) for name in names))


CALLS: dict[str, tuple[str, Callable[[Scene], Any], int]] = {
    "store": ("KvRequest", stored, 8 * VALUE_NBYTES),
    "events": ("Events", lambda _: messages.EventsRequest(), 0),
    "join": ("Join", lambda scene: msgspec.structs.replace(scene.hostile.request, plan=b""), 0),
    "heartbeat": ("Heartbeat", lambda scene: messages.Heartbeat(scene.hostile.token), 0),
}
CALL_NBYTES = 16 << 10
"""Memory of an open call in gRPC and Python."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CALLS)
def test_no_unread_replies_fill_the_coordinator(scene: Scene, name: str) -> None:
    method, make, reply_nbytes = CALLS[name]
    request = make(scene)
    count = SENT_NBYTES // max(200, len(messages.pack(request)))
    with scene.hostile.data(), scene.hostile.unread() as link:
        scene.honest.start_calls()
        time.sleep(0.5)
        with scene.victim.watched(settle_s=2.0) as growth:
            calls = flood(link, method, request, count)
        print(f"{name}: {count} calls, peak {growth.peak_nbytes / MIB:.1f} MiB, cpu {growth.cpu_s:.1f} s")
        assert scene.victim.alive
        assert growth.peak_nbytes < MIB + 4 * reply_nbytes + count * CALL_NBYTES + SLACK_NBYTES
        assert scene.honest.step(scene.hostile)
        for call in calls:
            call.cancel()
    assert scene.honest.failed == []
    assert scene.honest.longest_call_s < 1.0
