"""Asks an address what is wrong between its certificate and ours. Knows TLS; gRPC, which does not tell, it does not."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from commlayer.config import host_port
from commlayer.control.farewell import MOST_NBYTES, reason_of
from commlayer.errors import CommError, Refused
from commlayer.transport.connection import drop, watch
from commlayer.transport.key_folder import Certified, Keys
from commlayer.transport.tls import CONTROL, TlsSocket

HANDSHAKE = b"\x16\x03"


def check(address: str, keys: Keys | None, deadline: float, who: str = "") -> Certified | None:
    """Refused, with the reason, where either end does not take the other's certificate, or only one has any.

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
            _plain(sock, deadline)
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
        raise type(error)(error.what, peer=where) from None
    except (CommError, OSError):
        pass
    finally:
        drop(sock)
    return good


def _plain(sock: socket.socket, deadline: float) -> None:
    """Only a TLS server answers the beginning of a handshake with its own part of it."""
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    begin, answer = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        stranger.wrap_bio(answer, begin).do_handshake()
    sock.sendall(begin.read())
    if sock.recv(2) == HANDSHAKE:
        raise Refused("asks for TLS: set keys (COMMLAYER_KEYS) to a folder that `commlayer keys add NAME` made")
