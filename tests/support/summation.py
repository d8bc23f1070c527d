"""A summation service over codecs of one number, and the messages that go to it."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from commlayer.cluster.servers.summation import Summation
from commlayer.cluster.servers.summation_server import Stalled, SumServer
from commlayer.errors import CorruptFrame
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, Message, key
from support.loopback import Hub, Loopback


class Doubles:
    """Ops over one float64 per payload; the residual is what emitting as float32 keeps back, so undo has something to do."""

    codec, bound, in_means, leavers = 7, 8, False, ()
    means = False

    def __init__(self, rounds: int = 1) -> None:
        self.rounds, self.residual, self.last = rounds, 0.0, (0.0, 0.0)
        self.added: list[float] = []

    def new_accumulator(self, r: int) -> list[float]:
        return [0.0]

    def place(self, acc: list[float], out: memoryview) -> bool:
        return False

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

    def undo(self, slices: int) -> bool:
        """The members restore what they sent: the residual is what it was before that step."""
        added, sent = self.last
        self.residual, self.last = self.residual - added + sent, (0.0, 0.0)
        return True

    def skip(self) -> None:
        self.last = (0.0, 0.0)

    def begin_anew(self) -> None:
        self.residual, self.last = 0.0, (0.0, 0.0)

    def keeps_payloads(self, members: int) -> bool:
        return False

    def snapshot(self) -> bytes:
        return struct.pack("<d", self.residual)

    def restore(self, data: bytes | memoryview) -> None:
        (self.residual,) = struct.unpack("<d", data)


VALUES = [0.1, 1e8, -3.7]
"""Of which each order of adding has another sum."""


def push(sender: int, value: float, step: int = 0, r: int = 0, /, **fields: object) -> Message:
    header = Header(Kind.PUSH, 1, step, 5, round=r, codec=7, sender=sender, weight=float(sender + 1), used=1 << sender)
    return Message(sender, header._replace(**fields), memoryview(struct.pack("<d", value)))


def service(members: int = 3, rounds: int = 1, ops: Doubles | None = None) -> tuple[Summation, Doubles]:
    ops = ops or Doubles(rounds)
    return Summation(0, 1, {5: ops}, {5: tuple(range(members))}), ops


def value(reply: object) -> float:
    return float(struct.unpack("<d", reply.body)[0])  # type: ignore[attr-defined]



def ask(kind: Kind, sender: int = 0, step: int = 0, body: bytes = b"", /, **fields: object) -> Message:
    return Message(sender, Header(kind, 1, step, 5, sender=sender)._replace(**fields), memoryview(body))


@pytest.fixture(name="hub")
def hub_of_a_test() -> Iterator[tuple[Hub, list[Any]]]:
    """A hub and its endpoints, to be closed."""
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
    handle = transport.recv(SERVER_BASE, key(Header(Kind.STALLED, 1)))
    return msgspec.msgpack.decode(transport.wait(handle, time.monotonic() + 30.0).body, type=Stalled)
