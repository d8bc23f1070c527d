"""Diagnoses a failed connection to the coordinator, which gRPC does not explain: certificates of either end, or wrong port."""

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
    """Connects to the address. Refused with the reason if either end rejects the other's certificate, if one end has none, or
    if the address is a data port.

    Returns the other end's certificate if all is well. None without keys, or if there is no answer, which may be temporary.
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
        tls = TlsSocket(sock, keys, CONTROL, server=False)
        drop(sock)
        sock = watch(tls)
        good = tls.handshake(deadline)  # checks their certificate; what follows shows whether they accept ours
        tls.settimeout(max(0.001, deadline - time.monotonic()))
        first = bytearray(2 * MOST_NBYTES)
        n = tls.recv_into(first)  # the other end decides last: either gRPC sends its settings, or it refuses
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
    """Whether the peer sends anything: a TLS server sends its part of a handshake, which is an error; gRPC sends settings."""
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
    """Detects a data port, the only one that answers the beginning of a handshake with a frame."""
    body = msgspec.msgpack.encode(Hello("", 0, nonce=nonce()))
    with watch(socket.create_connection(host_port(address), max(0.001, deadline - time.monotonic()))) as sock:
        sock.sendall(framing.encode(Header(Kind.HELLO), len(body), crc32c(body)) + body)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        if sock.recv(len(framing.MAGIC)) == framing.MAGIC:
            raise Refused("takes data there, and no control calls: check the port (`commlayer serve` prints both; that of data "
                          "is the coordinator's and 1)", code="E-ADDRESS")
