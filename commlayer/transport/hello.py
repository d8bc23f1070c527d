"""The first two frames of a connection: who dials, and whether the other end takes them. Knows blocking sockets, no threads."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from commlayer.errors import CorruptFrame, DeadlineExceeded, PeerLost, Refused
from commlayer.records import Record
from commlayer.transport import framing
from commlayer.transport.crc import crc32c
from commlayer.transport.framing import Frame, Reader
from commlayer.transport.protocol import Header, Kind, peer_name

MAX_NBYTES = 4096
"""Of a hello or welcome: whoever has not been admitted makes us allocate no more."""


class Hello(Record, frozen=True):
    """What the dialler says of itself."""

    job: str
    rank: int
    plan: str = ""
    """Digest of the plan that it follows; empty if it has none yet."""
    version: str = ""
    """Of the package, for the reader of a refusal."""
    protocol: int = framing.VERSION


class Welcome(Record, frozen=True):
    """The answer: who answers, and why not, in one line, or nothing."""

    rank: int
    error: str = ""


Admit = Callable[[Hello], str]
T = TypeVar("T", bound=Record)


def same_job(mine: Hello) -> Admit:
    """Admits who trains the same job by the same protocol, and the same plan where both have one."""

    def admit(theirs: Hello) -> str:
        if theirs.protocol != mine.protocol:
            return (f"speaks protocol {theirs.protocol} (commlayer {theirs.version or '?'}), here {mine.protocol} "
                    f"(commlayer {mine.version or '?'}): install the same version on all machines")
        if theirs.job != mine.job:
            return f"is of job {theirs.job!r}, here {mine.job!r}: start all with the same model and job id"
        if theirs.plan and mine.plan and theirs.plan != mine.plan:
            return f"follows plan {theirs.plan}, here {mine.plan}: start all with the same plan"
        return ""

    return admit


def greet(sock: socket.socket, reader: Reader, mine: Hello, peer: int, deadline: float) -> None:
    """The dialler's half. Raises Refused with the other side's reason."""
    who = peer_name(peer)
    _write(sock, Kind.HELLO, mine.rank, mine, who, deadline)
    welcome = _decode(_read(sock, reader, Kind.WELCOME, who, deadline), Welcome, who)
    if welcome.error:
        raise Refused(welcome.error, peer=who)
    if welcome.rank != peer:
        raise Refused(f"{peer_name(welcome.rank)} answered in its place: check the address", peer=who)


def read_hello(sock: socket.socket, reader: Reader, who: str, deadline: float) -> Hello:
    """The acceptor's half, to be answered with `welcome`."""
    hello = _decode(_read(sock, reader, Kind.HELLO, who, deadline), Hello, who)
    if not 0 <= hello.rank <= 0xFFFF:
        raise CorruptFrame(f"says it is peer {hello.rank}, allowed 0 to 65535", peer=who)
    return hello


def welcome(sock: socket.socket, rank: int, error: str, who: str, deadline: float) -> None:
    _write(sock, Kind.WELCOME, rank, Welcome(rank, error), who, deadline)


def _write(sock: socket.socket, kind: Kind, rank: int, record: Record, who: str, deadline: float) -> None:
    body = msgspec.msgpack.encode(record)
    head = framing.encode(Header(kind, sender=rank), len(body), crc32c(body))
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.sendall(head + body)
    except TimeoutError:
        raise DeadlineExceeded(f"{kind.name} not taken before the deadline", peer=who) from None
    except OSError as error:
        raise PeerLost(f"connection lost in the greeting: {error.strerror}", peer=who) from None


def _read(sock: socket.socket, reader: Reader, kind: Kind, who: str, deadline: float) -> Frame:
    try:
        while (frame := reader.next()) is None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            n = sock.recv_into(reader.wanted())
            if n == 0:
                raise PeerLost("connection closed in the greeting", peer=who)
            reader.filled(n)
    except TimeoutError:
        raise DeadlineExceeded(f"no {kind.name} before the deadline", peer=who) from None
    except OSError as error:
        raise PeerLost(f"connection lost in the greeting: {error.strerror}", peer=who) from None
    except CorruptFrame as error:
        raise CorruptFrame(error.what, peer=who) from None
    if frame.header.kind != kind:
        raise CorruptFrame(f"begins with {Kind(frame.header.kind).name}, expected {kind.name}", peer=who)
    return frame


def _decode(frame: Frame, kind: type[T], who: str) -> T:
    try:
        return msgspec.msgpack.decode(frame.body, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptFrame(f"{kind.__name__.lower()} is malformed: {error}", peer=who) from None
