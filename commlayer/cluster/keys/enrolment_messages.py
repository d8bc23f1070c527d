"""Messages of enrolment: four bytes of length, then the bytes; records are msgpack."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from commlayer.errors import (
    PeerLost,
    Refused,
    short_line,
)
from commlayer.records import MALFORMED, Record, complete
from commlayer.transport.keys.key_folder import ENROLMENT
from commlayer.transport.keys.tls import bad_certificate
from commlayer.transport.protocol import limit_wait

T = TypeVar("T", bound=Record)
NAME = b"COMMLAYER ENROL "
MAGIC = NAME + b"1\n"
MAX_REQUEST_NBYTES, MAX_AUTHORITY_NBYTES, MAX_REPLY_NBYTES = 4096, 8192, 1 << 20
"""Largest messages: of an unauthenticated home; the CA's certificate; and the reply, which contains the revocation list."""
MAX_ERROR_CHARACTERS = 400
ENROL_S = 10.0
"""Seconds that one enrolment may take."""


class EnrolmentChallenge(Record, frozen=True):
    nonce: bytes


class EnrolmentRequest(Record, frozen=True):
    name: str
    csr: bytes
    """Certificate request as DER."""
    proof: bytes
    """Signature with the invitation's key: see invitations.statement()."""


class EnrolmentReply(Record, frozen=True):
    """Contains an error with its code, or all else."""

    error: str = ""
    certificate: bytes = b""
    revoked: bytes = b""
    secret: str = ""


@contextlib.contextmanager
def secured(context: ssl.SSLContext, sock: socket.socket, deadline: float, *, server: bool) -> Iterator[ssl.SSLSocket]:
    """Context manager that gives the TLS connection over a connected socket, after its handshake."""
    limit_wait(sock, deadline)
    try:
        tls = context.wrap_socket(sock, server_side=server)
    except ssl.SSLCertVerificationError as error:
        raise bad_certificate(error) from None
    try:
        if tls.selected_alpn_protocol() != ENROLMENT:
            raise Refused("the other end's TLS connection is not for enrolment", code="E-ADDRESS")
        yield tls
    finally:
        tls.close()


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def send(sock: socket.socket, data: bytes, deadline: float) -> None:
    limit_wait(sock, deadline)
    sock.sendall(data)


def receive(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        limit_wait(sock, deadline)
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise PeerLost("the connection was closed")
        data += piece
    return data


def receive_framed(sock: socket.socket, most: int, deadline: float) -> bytes:
    nbytes = int.from_bytes(receive(sock, 4, deadline), "little")
    if nbytes > most:
        raise Refused(f"got a message of {nbytes} bytes, allowed: {most}", code="E-FRAME")
    return receive(sock, nbytes, deadline)


def send_record(sock: socket.socket, record: Record, deadline: float) -> None:
    send(sock, framed(msgspec.msgpack.encode(record)), deadline)


def receive_record(sock: socket.socket, kind: type[T], most: int, deadline: float) -> T:
    try:
        return msgspec.msgpack.decode(receive_framed(sock, most, deadline), type=complete(kind))
    except MALFORMED as error:
        raise Refused(f"got a malformed {kind.__name__.lower()}: {short_line(error, 200)}", code="E-FRAME") from None
