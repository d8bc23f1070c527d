"""Connection handshake: four frames that identify the dialer, prove the job's secret to both ends, and admit or refuse.

HELLO and CHALLENGE contain random nonces. PROOF and WELCOME contain proofs over both nonces, which only an end with the secret
can compute. A recorded handshake is therefore useless on another connection. Nothing about the job is revealed before the
dialer's proof is verified. Pending handshakes are limited, so silent, slow or many dialers cannot block others.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from commlayer.errors import (
    MAX_PEER_TEXT_CHARS,
    CorruptFrame,
    DeadlineExceeded,
    HandshakeLost,
    NotYet,
    PeerLost,
    Refused,
    SentNothing,
    append_code,
    short_line,
)
from commlayer.records import MALFORMED, Record, complete
from commlayer.transport import framing
from commlayer.transport.chunking import HeldBody
from commlayer.transport.crc import crc32c
from commlayer.transport.flow.fair_share import ConnectionTable, FairShare, MinuteCounts
from commlayer.transport.framing import Frame, Reader
from commlayer.transport.keys.key_folder import Keys, PeerCertificate
from commlayer.transport.keys.secret import bound, check_signature, make_proof, new_nonce, sign, verify, wrong_secret
from commlayer.transport.keys.tls import signing_certificate
from commlayer.transport.protocol import ByteChannel, Header, Kind, limit_wait, peer_name

log = logging.getLogger("commlayer")

MAX_NBYTES = 4096
"""Largest handshake frame. An unauthenticated peer cannot cause a larger allocation."""


class Hello(Record, frozen=True):
    """HELLO: identifies the dialer and the job that it belongs to."""

    job: str
    rank: int
    plan: str = ""
    """Digest of the plan that the dialer uses; "" if it has none yet."""
    version: str = ""
    """Version of the dialer's package, for the text of a refusal."""
    protocol: int = framing.VERSION
    nonce: bytes = b""
    """Random bytes, different for each connection."""
    session: bytes = b""
    """Random bytes that identify the dialer's process, equal when it reconnects; b"" if it never reconnects."""
    held: tuple[HeldBody, ...] = ()
    """Unfinished bodies of the dialer's former connection, as far as the dialer has them."""


class Challenge(Record, frozen=True, omit_defaults=True):
    """CHALLENGE: the acceptor's nonce; and over gRPC with keys the acceptor's certificate (DER) and signature."""

    nonce: bytes
    certificate: bytes = b""
    signature: bytes = b""


class Proof(Record, frozen=True):
    """PROOF: the dialer's proof that it knows the secret."""

    proof: bytes


class Welcome(Record, frozen=True):
    """WELCOME: the acceptor's answer. `error`: the reason of a refusal in one line; "" if the dialer is admitted."""

    rank: int
    error: str = ""
    proof: bytes = b""
    """The acceptor's proof that it knows the secret; b"" if the dialer has not proved the secret."""
    later: bool = False
    """True: the reason is temporary, so dialing again may succeed."""
    held: tuple[HeldBody, ...] = ()
    """Unfinished bodies of the dialer's former connection, as far as the acceptor has them."""


NOT_AUTHENTICATED = "does not prove that it knows the job's secret"


class RetryLater(str):
    """A temporary reason for a refusal, returned by a function of type Admit."""


Admit = Callable[[Hello], str]
T = TypeVar("T", bound=Record)


def same_job(mine: Hello) -> Admit:
    """Returns a function that admits dialers of the same job and protocol, and of the same plan if both ends have one. The
    reasons reveal no digest of this end."""

    def admit(theirs: Hello) -> str:
        if theirs.protocol != mine.protocol:
            return append_code("E-VERSION",
                               f"uses protocol {theirs.protocol} (commlayer {short_line(theirs.version, 64) or '?'}), "
                               f"but this process uses {mine.protocol} (commlayer {mine.version or '?'}): install the "
                               "same version on all machines")
        if theirs.job != mine.job:
            return append_code("E-RANKS-DIFFER", "belongs to another job: start all processes with the same model and job id")
        if theirs.plan and mine.plan and theirs.plan != mine.plan:
            return append_code("E-RANKS-DIFFER", "uses a different plan: start all processes with the same plan")
        return ""

    return admit


def dial_handshake(
    sock: ByteChannel, reader: Reader, mine: Hello, secret: str, peer: int, deadline: float, channel: bytes = b"",
    answer_by: float = math.inf, keys: Keys | None = None,
) -> tuple[PeerCertificate | None, tuple[HeldBody, ...]]:
    """Runs the dialer's side of the handshake. Raises Refused with the acceptor's reason. `channel` binds the proof to this
    channel. `answer_by` limits the wait for the CHALLENGE. The WELCOME may take longer, since the acceptor may wait for a
    plan.

    `keys`: this node's keys if the acceptor must sign, because the channel does not check its certificate: gRPC checks only the
    CA, so a revoked node would pass. Returns the acceptor's certificate then, and `Welcome.held`.
    """
    who = peer_name(peer)
    mine = msgspec.structs.replace(mine, nonce=new_nonce())
    hello_bytes = msgspec.msgpack.encode(mine)
    _write(sock, Kind.HELLO, mine.rank, mine, who, deadline)
    challenge = _decode(_read(sock, reader, Kind.CHALLENGE, who, min(deadline, answer_by)), Challenge, who)
    transcript, signer = (challenge.nonce, hello_bytes, *bound(channel)), None
    if keys is not None:
        try:
            signer = signing_certificate(challenge.certificate, keys)
            check_signature(signer, challenge.signature, b"accept", *transcript)
        except Refused as error:
            raise error.located(peer=who) from None
    _write(sock, Kind.PROOF, mine.rank, Proof(make_proof(secret, b"dial", *transcript)), who, deadline)
    welcome = _decode(_read(sock, reader, Kind.WELCOME, who, deadline), Welcome, who)
    if welcome.error == NOT_AUTHENTICATED:
        raise Refused(wrong_secret(secret), peer=who, code="E-SECRET")
    if not verify(welcome.proof, secret, b"accept", *transcript):
        raise Refused(f"{NOT_AUTHENTICATED}, so it does not belong to this job: check the address", peer=who, code="E-ADDRESS")
    if welcome.error:
        raise (NotYet if welcome.later else Refused)(welcome.error, peer=who)
    if welcome.rank != peer:
        raise Refused(f"{peer_name(welcome.rank)} answered instead: check the address", peer=who, code="E-ADDRESS")
    return signer.certificate if signer else None, welcome.held


def accept_handshake(
    sock: ByteChannel, reader: Reader, rank: int, secret: str, who: str, deadline: float, channel: bytes = b"",
    keys: Keys | None = None,
) -> tuple[Hello, bytes]:
    """Runs the acceptor's side of the handshake. Returns the dialer's hello, and the proof for `send_welcome`. If the dialer
    does not know the secret, sends a refusal and raises Refused. `keys`: see dial_handshake."""
    frame = _read(sock, reader, Kind.HELLO, who, deadline)
    hello_bytes, hello = bytes(frame.body), _decode(frame, Hello, who)
    if not 0 <= hello.rank <= 0xFFFF:
        raise CorruptFrame(f"got peer number {hello.rank}, allowed 0 to 65535", peer=who)
    mine = new_nonce()
    transcript = (mine, hello_bytes, *bound(channel))
    signed = (keys.der, sign(keys, b"accept", *transcript)) if keys else ()
    _write(sock, Kind.CHALLENGE, rank, Challenge(mine, *signed), who, deadline)
    answer = _decode(_read(sock, reader, Kind.PROOF, who, deadline), Proof, who).proof
    if not verify(answer, secret, b"dial", *transcript):
        send_welcome(sock, rank, NOT_AUTHENTICATED, b"", who, deadline)
        raise Refused(NOT_AUTHENTICATED, peer=who, code="E-SECRET")
    return hello, make_proof(secret, b"accept", *transcript)


def send_welcome(sock: ByteChannel, rank: int, error: str, proof: bytes, who: str, deadline: float,
                 held: tuple[HeldBody, ...] = ()) -> None:
    welcome = Welcome(rank, str(error), proof, isinstance(error, RetryLater), held)
    _write(sock, Kind.WELCOME, rank, welcome, who, deadline)


def _write(sock: ByteChannel, kind: Kind, rank: int, record: Record, who: str, deadline: float) -> None:
    body = msgspec.msgpack.encode(record)
    head = framing.encode(Header(kind, sender=rank), len(body), crc32c(body))
    try:
        limit_wait(sock, deadline)
        sock.sendall(head + body)
    except TimeoutError:
        raise DeadlineExceeded(f"did not receive {kind.name} before the deadline of the handshake", peer=who) from None
    except OSError as error:
        raise PeerLost(f"connection lost during the handshake: {error.strerror}", peer=who) from None


def _read(sock: ByteChannel, reader: Reader, kind: Kind, who: str, deadline: float) -> Frame:
    received = kind != Kind.HELLO  # HELLO is the acceptor's first frame
    try:
        while (frame := reader.next()) is None:
            limit_wait(sock, deadline)
            n = sock.recv_into(reader.wanted())
            if n == 0:
                raise PeerLost("connection closed during the handshake", peer=who) if received else SentNothing()
            received = True
            reader.filled(n)
    except TimeoutError:
        raise DeadlineExceeded(f"sent no {kind.name} before the deadline of the handshake", peer=who) from None
    except OSError as error:
        if not received:
            raise SentNothing() from None
        raise PeerLost(f"connection lost during the handshake: {error.strerror}", peer=who) from None
    except (CorruptFrame, Refused) as error:
        raise error.located(peer=who) from None
    if frame.header.kind != kind:
        raise CorruptFrame(f"started the handshake with {Kind(frame.header.kind).name}, expected {kind.name}", peer=who)
    return frame


def _decode(frame: Frame, kind: type[T], who: str) -> T:
    try:
        return msgspec.msgpack.decode(frame.body, type=complete(kind))
    except MALFORMED as error:
        raise CorruptFrame(f"sent a malformed {kind.__name__.upper()}: {short_line(error, 200)}", peer=who) from None


MAX_PENDING = 512
"""Maximum number of concurrent handshakes, of which the largest job has 320. Each has a thread and a descriptor."""
MAX_BEGUN, FORGET_S = 640, 20.0
"""Limit and time constant of FairShare for the connections of addresses that have not authenticated, and for those of members.
One address may open 320 at once, as many as the largest job has (see fair_share.py), and 16 a second. All together may open 640
and 32 a second. A handshake costs the server 2 ms, so strangers use a tenth of a core, and all of it for a second at first."""


MAX_REFUSED = 600
"""Maximum number of refused connections that are logged per minute, and likewise of probes (connections that sent nothing).
Further ones are only counted, because a flood must not fill the disk."""
MAX_LOST = 1
"""Maximum number of log lines per minute about lost handshakes, and about connections above the limit of their source. When a
network fails, all members lose their handshakes again and again."""


MAX_EVENTS = 8
"""Above the number of different events of a RefusalLog."""


class SilentConnection(str):
    """The reason for a dropped connection that sent nothing and used no certificate, as a port scan or health check does."""

    event = "probed"


class LostHandshake(str):
    """The reason for a dropped connection that was lost during its handshake."""

    event = "lost"


class OverLimit(str):
    """The reason for closing a connection whose source has used its share of a limit."""

    event = "dropped"


TOO_MANY = OverLimit("its address opens more connections than a job does")


class RefusalLog:
    """Logs refused connections and requests. Thread-safe."""

    def __init__(self) -> None:
        self._counts = MinuteCounts(MAX_EVENTS)

    def refused(self, where: str, why: str) -> None:
        """Logs a refused connection. The log line says "probed" if the peer closed the connection without sending anything, as
        `commlayer doctor` and port monitors do. It says "lost" for a connection that was lost during its handshake, and
        "dropped" if the source has used its share of a limit."""
        event: str = getattr(why, "event", "refused")
        self._log(event, "connection from %s %s: %s", where, event, why)

    def denied(self, why: str) -> None:
        """Logs that an authenticated request was refused."""
        self._log("refused", "refused: %s", why)

    def _log(self, event: str, line: str, *values: str) -> None:
        level = logging.INFO if event in ("probed", "lost") else logging.WARNING
        most = MAX_LOST if event in ("lost", "dropped") else MAX_REFUSED
        count, former = self._counts.add(event, time.monotonic())
        if former > most:
            log.log(level, "%d more were %s within a minute", former - most, event)
        if count < most:
            log.log(level, line, *(short_line(value, MAX_PEER_TEXT_CHARS) for value in values))


class PendingHandshakes(ConnectionTable):
    """The handshakes that have not finished yet. Their number is limited, and so is the rate of those that fail; addresses
    share both fairly. Members have a rate of their own, since a member may flood, too."""

    def __init__(self, most: int = MAX_PENDING) -> None:
        super().__init__(most)
        self._begun, self._proved = FairShare(MAX_BEGUN, FORGET_S), FairShare(MAX_BEGUN, FORGET_S)

    def admit(self, source: str) -> bool:
        """Returns whether a new connection of this source may begin its handshake: the source does not open too many."""
        return self._begun.take(source)

    def prove(self, sock: ByteChannel, name: str = "") -> None:
        """Removes a connection that has authenticated, with a certificate of that name if there is one. The connection no
        longer counts against its address, unless this member opens too many."""
        source = self.remove(sock)
        if source and self._proved.take(name or source):
            self._begun.give(source)

    def drop_reason(self, sock: ByteChannel, error: Exception) -> str:
        """Returns the reason for a failed handshake. The reason is a SilentConnection if the peer closed its connection without
        sending anything, and a LostHandshake if the connection was lost later, but not if this end ended it."""
        if sock not in self:
            return str(error)
        return SilentConnection(error.what) if isinstance(error, SentNothing) else \
            LostHandshake(error) if isinstance(error, HandshakeLost) else str(error)
