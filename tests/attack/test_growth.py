"""Memory that one member can occupy at a server: after 100 kB from a member the server has grown by at most 1 MiB besides what
the job needs, and the other member's calls and steps continue.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from support.coordinators import WAIT_S
from support.hostile import DataConnection, HonestMember, HostileMember, Victim, flood, joined

from commlayer import records
from commlayer.cluster.calls import messages
from commlayer.compressors import make_codec
from commlayer.planner import default_plan
from commlayer.records import Job, Plan, TensorInfo
from commlayer.transport import framing
from commlayer.transport.crc import crc32c
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, key

SENT_NBYTES = 100_000
MIB = 1 << 20
NUMEL = 1_000_000
STATE_NBYTES = 4 * NUMEL
"""The server's residual of the bucket. While it is encoded there are three copies, as at every checkpoint, and the one that was
sent last may still be there."""
SLACK_NBYTES = 2 * MIB
"""Stacks and malloc arenas of the two threads of a new connection, and what the measuring itself needs: up to 1.5 MiB on a busy
machine."""
PLAN = default_plan(Job((TensorInfo("weight", (NUMEL,)),)), codec="error_feedback(int8())", path="service", servers=1,
                    ranks_per_node=1, fuse_nbytes=1 << 30, cut_nbytes=4 * NUMEL)


SMALL_BUCKETS = default_plan(Job((TensorInfo("weight", (NUMEL,)),)), codec="int8()", path="service", servers=1,
                             ranks_per_node=1, fuse_nbytes=0, cut_nbytes=4096)


class Scene:
    """A server with an honest and a hostile member, of which the job needs one."""

    def __init__(self, stack: contextlib.ExitStack, plan: Plan) -> None:
        self.victim = stack.enter_context(Victim("--workers", "2", "--min-workers", "1"))
        self.honest, self.hostile = joined(stack, self.victim, HonestMember, HostileMember, plan=plan)

    def header(self, kind: Kind, **fields: Any) -> Header:
        return Header(kind, 1, sender=self.hostile.rank)._replace(**fields)

    def step_alone(self, step: int) -> None:
        """A step of the honest member, which closes when the server has dropped the other one."""
        header, body = self.honest.contribution(step)
        result = self.honest.transport.recv(SERVER_BASE, key(header._replace(kind=Kind.RESULT)))
        self.honest.transport.send(SERVER_BASE, header, body)
        assert self.honest.transport.wait(result, time.monotonic() + WAIT_S).header.weight == 1.0


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """Of a job of one bucket, or of the given plan."""
    with contextlib.ExitStack() as stack:
        yield Scene(stack, getattr(request, "param", PLAN))


Attack = Callable[[Scene, DataConnection], None]


def sent(data: DataConnection, header: Header, body: bytes = b"", nbytes: int | None = None) -> bool:
    """Sends a frame unless the server accepts nothing more, as after a violation or while its replies are unread.

    `nbytes`: body size claimed by the header, if not the true one.
    """
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
    """A quarter of the result's chunks is not zero. The sender makes a copy of these."""
    x = np.zeros(NUMEL, np.float32)
    x[: NUMEL // 4] = 1.0
    codec, spec = make_codec(PLAN.buckets[0]), PLAN.buckets[0].spec
    out = memoryview(bytearray(codec.bound(spec)))
    body = bytes(out[: codec.start(x, codec.init(spec), out)])
    header, _ = scene.hostile.contribution(1)
    data.send(header, body)
    own, zeros = scene.honest.contribution(1)
    waiting = scene.honest.transport.recv(SERVER_BASE, key(own._replace(kind=Kind.RESULT)))
    scene.honest.transport.send(SERVER_BASE, own, zeros)
    scene.honest.transport.wait(waiting, time.monotonic() + WAIT_S)
    scene.honest.steps += 1
    many(data, ((header, b"") for _ in range(10_000)))


def announced(kind: Kind) -> Attack:
    """Bodies that are announced and never sent. More urgent ones interrupt them."""

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
        sent(data, scene.header(Kind.PLAN, generation=2, used=1), records.encode(change(PLAN)))

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
    "states": (states, 4 * STATE_NBYTES),
    "states, each more urgent": (states_by_rank, 4 * STATE_NBYTES),
    "results again": (results_again, 2 * NUMEL),  # the contributions to another step
    "a plan of more elements": (plan(changed(slices=(records.Slice(0, 0, 1 << 25),), shape=())), 0),
    "a plan of many large buckets": (plan(split(500, 1 << 25)), 0),
    "a plan of small buckets": (plan(split(900, 1)), 0),
    "a plan of a long codec": (plan(changed(codec="topk(" + "1+" * 500_000 + "1)")), 4 * MIB),
    "a plan of a large number": (plan(changed(codec=f"topk({'9' * 4000})")), 0),
    "a plan of many nodes": (plan(changed(by_node=("int8()",) * 9_000)), 0),
}
BREACHES: dict[str, Attack] = {
    "contributions": announced(Kind.PUSH), "states": announced(Kind.STATE), "plans": announced(Kind.PLAN), "zero chunks": bomb,
}
"""Frames that no correct member sends; the server evicts the sender."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ATTACKS)
def test_requests_of_a_member_do_not_fill_the_server(scene: Scene, name: str) -> None:
    attack, needed_nbytes = ATTACKS[name]
    with scene.hostile.data() as data:
        attacked(scene, attack, data, needed_nbytes)
    with scene.hostile.data():
        assert scene.honest.step(scene.hostile)
    undisturbed(scene)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", BREACHES)
def test_unexpected_bodies_do_not_fill_the_server(scene: Scene, name: str) -> None:
    with scene.hostile.data() as data:
        attacked(scene, BREACHES[name], data, 0)
    scene.step_alone(1)
    undisturbed(scene)


def attacked(scene: Scene, attack: Attack, data: DataConnection, needed_nbytes: int) -> None:
    """After a step, attacks the server and checks its usage. `needed_nbytes`: what a correct member could make it use."""
    assert scene.honest.step(scene.hostile)
    time.sleep(0.5)
    scene.honest.start_calls()
    with scene.victim.watched(settle_s=2.0) as growth:
        attack(scene, data)
    print(f"peak {growth.peak_nbytes / MIB:.1f} MiB, cpu {growth.cpu_s:.1f} s of {growth.seconds:.1f}")
    assert scene.victim.alive
    assert growth.peak_nbytes < MIB + needed_nbytes + SLACK_NBYTES
    assert growth.cpu_s < 2.0


def undisturbed(scene: Scene) -> None:
    assert scene.honest.failed == []
    assert scene.honest.calls > 0
    assert scene.honest.longest_call_s < 1.0


VALUE_NBYTES = 128 << 10


def stored(scene: Scene) -> messages.KvRequest:
    names = [(f"value-{i}", messages.ANY) for i in range(8)]
    for name in names:
        scene.hostile.call("KvRequest", messages.KvRequest(scene.hostile.home, put=((name, bytes(VALUE_NBYTES)),)))
    return messages.KvRequest(scene.hostile.home, want=tuple(names))


CALLS: dict[str, tuple[str, Callable[[Scene], Any], int]] = {
    "store": ("KvRequest", stored, 8 * VALUE_NBYTES),
    "join": ("Join", lambda scene: msgspec.structs.replace(scene.hostile.request, plan=b""),
             len(records.encode(SMALL_BUCKETS))),
}
CALL_NBYTES = 32 << 10
"""Memory of an open call in gRPC and Python, whatever its reply."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scene", [SMALL_BUCKETS], indirect=True, ids=["small buckets"])
@pytest.mark.parametrize("name", CALLS)
def test_unread_replies_do_not_fill_the_coordinator(scene: Scene, name: str) -> None:
    method, make, reply_nbytes = CALLS[name]
    scene.honest.start_calls()
    request = make(scene)
    count = SENT_NBYTES // max(200, len(messages.pack(request)))
    with scene.hostile.data(), scene.hostile.unread() as link:
        time.sleep(0.5)
        with scene.victim.watched(settle_s=2.0) as growth:
            calls = flood(link, method, request, count)
        print(f"{name}: {count} calls, peak {growth.peak_nbytes / MIB:.1f} MiB, cpu {growth.cpu_s:.1f} s")
        assert scene.victim.alive
        assert growth.peak_nbytes < MIB + 4 * reply_nbytes + count * CALL_NBYTES + SLACK_NBYTES
        assert scene.honest.step(scene.hostile)
        for call in calls:
            call.cancel()
    undisturbed(scene)
