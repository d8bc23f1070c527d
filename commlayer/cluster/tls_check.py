"""Asks an address what is wrong between its certificate and ours, or with the port. Knows TLS and greetings, and no gRPC, which
does not tell."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

import msgspec

from commlayer.cluster.farewell import MOST_NBYTES, reason_of
from commlayer.config import host_port
from commlayer.errors import CommError, Refused
from commlayer.transport import framing
from commlayer.transport.connection import drop, watch
from commlayer.transport.crc import crc32c
from commlayer.transport.hello import Hello
from commlayer.transport.key_folder import Certified, Keys
from commlayer.transport.protocol import Header, Kind
from commlayer.transport.secret import nonce
from commlayer.transport.tls import CONTROL, TlsSocket

HANDSHAKE = b"\x16\x03"


def check(address: str, keys: Keys | None, deadline: float, who: str = "") -> Certified | None:
    """Refused, with the reason, where either end does not take the other's certificate, one has none, or it is a data port.

    Whose certificate it is, if all is well with it; None where nobody answers, which may change, and without keys.
    """
    where = who or f"coordinator {address}"
    try:
        sock = watch(socket.create_connection(host_port(address), max(0.001, deadline - time.monotonic())))
    except OSError:
        return None
    good = None
    try:
        if keys is None:
            if not _plain(sock, deadline):
                _no_frames(address, deadline)
            return None
        made = TlsSocket(sock, keys, CONTROL, server=False)
        drop(sock)
        sock = watch(made)
        good = made.handshake(deadline)  # by our list; what follows is what the other end thinks of us
        made.settimeout(max(0.001, deadline - time.monotonic()))
        first = bytearray(2 * MOST_NBYTES)
        n = made.recv_into(first)  # the other end judges last: either gRPC says something first, or it refuses
        if why := reason_of(bytes(first[:n])):
            raise Refused(why)
    except Refused as error:
        raise error.located(peer=where) from None
    except (CommError, OSError):
        pass
    finally:
        drop(sock)
    return good


def _plain(sock: socket.socket, deadline: float) -> bool:
    """Whether anything comes back: of a TLS server its part of a handshake, which is refused; of gRPC its settings."""
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    begin, answer = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        stranger.wrap_bio(answer, begin).do_handshake()
    first = b""
    with contextlib.suppress(OSError):
        sock.sendall(begin.read())
        first = sock.recv(len(HANDSHAKE))
    if first == HANDSHAKE:
        raise Refused("asks for TLS: set keys (COMMLAYER_KEYS) to a folder that `commlayer keys add NAME` made", code="E-TLS")
    return bool(first)


def _no_frames(address: str, deadline: float) -> None:
    """Only a data port answers the beginning of a greeting with a frame; to all else it says nothing."""
    body = msgspec.msgpack.encode(Hello("", 0, nonce=nonce()))
    with watch(socket.create_connection(host_port(address), max(0.001, deadline - time.monotonic()))) as sock:
        sock.sendall(framing.encode(Header(Kind.HELLO), len(body), crc32c(body)) + body)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        if sock.recv(len(framing.MAGIC)) == framing.MAGIC:
            raise Refused("takes data there, and no control calls: check the port (`commlayer serve` prints both; that of data "
                          "is the coordinator's and 1)", code="E-ADDRESS")
