"""Diagnosis of a failed connection, which gRPC does not explain: certificates of either end, or the wrong port."""

from __future__ import annotations

import contextlib
import socket
import ssl

import msgspec

from commlayer import config as settings
from commlayer.config import host_port
from commlayer.errors import CommError, Refused
from commlayer.transport import framing
from commlayer.transport.connection import close_channel, connect_socket, track
from commlayer.transport.crc import crc32c
from commlayer.transport.handshake import Hello
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.keys.secret import new_nonce
from commlayer.transport.keys.tls import CONTROL, TlsSocket
from commlayer.transport.protocol import Header, Kind, limit_wait

HANDSHAKE = b"\x16\x03"


class Unresolved(Refused):
    """The host name of an address cannot be resolved."""


def diagnose(address: str, keys: Keys | None, deadline: float, who: str = "") -> None:
    """Connects to the address in order to explain a failed connection. Raises Refused with the reason: one end rejects the
    other's certificate, only one end uses TLS, the address is a data port, or its host name cannot be resolved.

    Returns if there is no problem, or no answer, which may be temporary.
    """
    where = who or f"coordinator {address}"
    try:
        sock = connect_socket(host_port(address), deadline)
    except socket.gaierror as error:
        # Temporary if there is no name service yet, as after a power cut. A proxy, if there is one, resolves names.
        if error.errno == socket.EAI_AGAIN or settings.has_proxy():
            return
        raise Unresolved(f"its host name {host_port(address)[0]!r} cannot be resolved ({error.strerror}): correct the address, "
                         "or use an IP address", peer=where, code="E-ADDRESS") from None
    except OSError:
        return
    try:
        if keys is None:
            if not _expect_plain(sock, deadline):
                _refuse_data_port(address, deadline)
            return
        tls = TlsSocket(sock, keys, CONTROL, server=False)
        close_channel(sock)
        sock = track(tls)
        tls.handshake(deadline)  # checks the server's certificate; the next read shows whether the server accepts the own one
        limit_wait(tls, deadline)
        tls.recv_into(bytearray(1))  # the server decides last: gRPC sends its settings, or TLS refuses
    except Refused as error:
        raise error.located(peer=where) from None
    except (CommError, OSError):
        pass
    finally:
        close_channel(sock)


def _expect_plain(sock: socket.socket, deadline: float) -> bool:
    """Returns whether the peer sends anything. gRPC without TLS sends its settings. Raises Refused if the peer is a TLS server,
    which sends its part of a handshake."""
    limit_wait(sock, deadline)
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
        raise Refused("the server requires TLS: set keys (COMMLAYER_KEYS) to a folder that `commlayer keys add "
                      "NAME` made", code="E-TLS")
    return bool(first)


def _refuse_data_port(address: str, deadline: float) -> None:
    """Raises Refused if the address is a data port: only a data port answers the first handshake message with a frame."""
    body = msgspec.msgpack.encode(Hello("", 0, nonce=new_nonce()))
    with connect_socket(host_port(address), deadline) as sock:
        sock.sendall(framing.encode(Header(Kind.HELLO), len(body), crc32c(body)) + body)
        limit_wait(sock, deadline)
        if sock.recv(len(framing.MAGIC)) == framing.MAGIC:
            raise Refused("this is a data port, not the coordinator's port: check the port (`commlayer "
                          "serve` prints both; the data port is the coordinator's port plus 1)", code="E-ADDRESS")
