"""The first four frames of a connection: who dials, that both ends know the job's secret, and whether the other end takes them.

HELLO and CHALLENGE bring a random number each, PROOF and WELCOME what only who knows the secret can make of both: so nothing
said here is of use on another connection. Until then nobody is told anything of the job. Knows channels that block, no threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from commlayer.errors import CorruptFrame, DeadlineExceeded, NotYet, PeerLost, Refused, Unsaid, coded, one_line
from commlayer.records import MALFORMED, Record
from commlayer.transport import framing
from commlayer.transport.byte_channel import ByteChannel
from commlayer.transport.crc import crc32c
from commlayer.transport.framing import Frame, Reader
from commlayer.transport.protocol import Header, Kind, peer_name
from commlayer.transport.secret import nonce, proof, proves, unproved

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
    nonce: bytes = b""
    """Random; set for each connection."""
    session: bytes = b""
    """Random; of one end's process, the same on each connection that follows a broken one. Empty: there will be none."""


class Challenge(Record, frozen=True):
    """The acceptor's random number."""

    nonce: bytes


class Proof(Record, frozen=True):
    """The dialler's."""

    proof: bytes


class Welcome(Record, frozen=True):
    """The answer: who answers, and why not, in one line, or nothing."""

    rank: int
    error: str = ""
    proof: bytes = b""
    """The acceptor's; empty for who has not proved itself."""
    later: bool = False
    """Whether the reason passes, so that it is worth dialling again."""


UNPROVED = "does not prove that it knows the job's secret"


class Later(str):
    """A reason of an Admit that passes."""


class Met(NamedTuple):
    """Who dialled and has proved itself, and what proves this end to it."""

    hello: Hello
    proof: bytes


Admit = Callable[[Hello], str]
T = TypeVar("T", bound=Record)


def same_job(mine: Hello) -> Admit:
    """Admits who trains the same job by the same protocol, and the same plan where both have one. Tells no digest of mine."""

    def admit(theirs: Hello) -> str:
        if theirs.protocol != mine.protocol:
            return coded("E-VERSION", f"speaks protocol {theirs.protocol} (commlayer {one_line(theirs.version) or '?'}), here "
                         f"{mine.protocol} (commlayer {mine.version or '?'}): install the same version on all machines")
        if theirs.job != mine.job:
            return coded("E-RANKS-DIFFER", "is of another job: start all with the same model and job id")
        if theirs.plan and mine.plan and theirs.plan != mine.plan:
            return coded("E-RANKS-DIFFER", "follows another plan: start all with the same plan")
        return ""

    return admit


def greet(
    sock: ByteChannel, reader: Reader, mine: Hello, secret: str, peer: int, deadline: float, channel: bytes = b"",
    answer_by: float = math.inf,
) -> None:
    """The dialler's half. Raises Refused with the other side's reason. `channel`: what both ends know of it, and no third.
    `answer_by`: when its first word must be here; the last one may take longer, since it waits for a plan."""
    who = peer_name(peer)
    mine = msgspec.structs.replace(mine, nonce=nonce())
    said = msgspec.msgpack.encode(mine)
    _write(sock, Kind.HELLO, mine.rank, mine, who, deadline)
    theirs = _decode(_read(sock, reader, Kind.CHALLENGE, who, min(deadline, answer_by)), Challenge, who).nonce
    _write(sock, Kind.PROOF, mine.rank, Proof(proof(secret, b"dial", theirs, said, *_bound(channel))), who, deadline)
    welcome = _decode(_read(sock, reader, Kind.WELCOME, who, deadline), Welcome, who)
    if welcome.error == UNPROVED:
        raise Refused(unproved(secret), peer=who, code="E-SECRET")
    if not proves(welcome.proof, secret, b"accept", theirs, said, *_bound(channel)):
        raise Refused(f"{UNPROVED}, so it is not of this job: check the address", peer=who, code="E-ADDRESS")
    if welcome.error:
        raise (NotYet if welcome.later else Refused)(welcome.error, peer=who)
    if welcome.rank != peer:
        raise Refused(f"{peer_name(welcome.rank)} answered in its place: check the address", peer=who, code="E-ADDRESS")


def meet(
    sock: ByteChannel, reader: Reader, rank: int, secret: str, who: str, deadline: float, channel: bytes = b"",
) -> Met:
    """The acceptor's half, to be answered with `welcome`. Refused, on both sides, for who does not know the secret."""
    frame = _read(sock, reader, Kind.HELLO, who, deadline)
    said, hello = bytes(frame.body), _decode(frame, Hello, who)
    if not 0 <= hello.rank <= 0xFFFF:
        raise CorruptFrame(f"says it is peer {hello.rank}, allowed 0 to 65535", peer=who)
    mine = nonce()
    _write(sock, Kind.CHALLENGE, rank, Challenge(mine), who, deadline)
    given = _decode(_read(sock, reader, Kind.PROOF, who, deadline), Proof, who).proof
    if not proves(given, secret, b"dial", mine, said, *_bound(channel)):
        welcome(sock, rank, UNPROVED, b"", who, deadline)
        raise Refused(UNPROVED, peer=who, code="E-SECRET")
    return Met(hello, proof(secret, b"accept", mine, said, *_bound(channel)))


def _bound(channel: bytes) -> tuple[bytes, ...]:
    """The last part of a proof where there is a channel to bind it to: what was proved here proves nothing on another one."""
    return (channel,) if channel else ()


def welcome(sock: ByteChannel, rank: int, error: str, proof: bytes, who: str, deadline: float) -> None:
    _write(sock, Kind.WELCOME, rank, Welcome(rank, str(error), proof, isinstance(error, Later)), who, deadline)


def _write(sock: ByteChannel, kind: Kind, rank: int, record: Record, who: str, deadline: float) -> None:
    body = msgspec.msgpack.encode(record)
    head = framing.encode(Header(kind, sender=rank), len(body), crc32c(body))
    try:
        _wait_until(sock, deadline)
        sock.sendall(head + body)
    except TimeoutError:
        raise DeadlineExceeded(f"{kind.name} not taken before the deadline", peer=who) from None
    except OSError as error:
        raise PeerLost(f"connection lost in the greeting: {error.strerror}", peer=who) from None


def _read(sock: ByteChannel, reader: Reader, kind: Kind, who: str, deadline: float) -> Frame:
    heard = kind != Kind.HELLO  # which is the first that an acceptor reads
    try:
        while (frame := reader.next()) is None:
            _wait_until(sock, deadline)
            n = sock.recv_into(reader.wanted())
            if n == 0:
                raise PeerLost("connection closed in the greeting", peer=who) if heard else Unsaid()
            heard = True
            reader.filled(n)
    except TimeoutError:
        raise DeadlineExceeded(f"no {kind.name} before the deadline", peer=who) from None
    except OSError as error:
        if not heard:
            raise Unsaid() from None
        raise PeerLost(f"connection lost in the greeting: {error.strerror}", peer=who) from None
    except (CorruptFrame, Refused) as error:
        raise error.located(peer=who) from None
    if frame.header.kind != kind:
        raise CorruptFrame(f"begins with {Kind(frame.header.kind).name}, expected {kind.name}", peer=who)
    return frame


def _wait_until(sock: ByteChannel, deadline: float) -> None:
    """TimeoutError once it has passed: bytes that trickle in keep nothing alive."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(left_s)


def _decode(frame: Frame, kind: type[T], who: str) -> T:
    try:
        return msgspec.msgpack.decode(frame.body, type=kind)
    except MALFORMED as error:
        raise CorruptFrame(f"{kind.__name__.lower()} is malformed: {one_line(error)}", peer=who) from None
