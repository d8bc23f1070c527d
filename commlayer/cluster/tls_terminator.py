"""A TLS terminator in front of the coordinator's gRPC server, which listens on loopback.

gRPC's own TLS does not report which connection it refused or why, and has no revocation list. With the terminator, control
connections have the same checks, limits before the handshake and log lines as data connections. Each connection has one thread
for each direction.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from commlayer.config import join_host
from commlayer.errors import CommError, RecordError
from commlayer.transport.connection import close_channel, track, tune_socket
from commlayer.transport.handshake import EVICT_AFTER_S, PendingHandshakes
from commlayer.transport.key_folder import Keys, PeerCertificate
from commlayer.transport.tls import CONTROL, TlsSocket

HANDSHAKE_S = 5.0
PIECE_NBYTES = 64 << 10
KEEPALIVE_S, SILENT_S = 10, 60.0
"""Seconds between keepalive probes, and of silence until a connection is closed. A machine that vanished must not occupy a
connection with its two threads."""
CONNECT_S = 5.0


class TlsConnection(NamedTuple):
    """An authenticated control connection."""

    certified: PeerCertificate
    sock: TlsSocket
    where: str
    """Certificate name and address of the other end, for logs. gRPC sees only the terminator's loopback address."""


class TlsTerminator:
    """Accepts TLS connections and forwards them in plaintext. It listens from construction on, and forwards after start().
    `refused` is called with the address of a refused peer and the reason."""

    def __init__(self, keys: Keys, host: str, port: int, refused: Callable[[str, str], None]) -> None:
        self._keys, self._refused = keys, refused
        self._handshakes = PendingHandshakes(evict_after_s=2 * EVICT_AFTER_S)
        self._lock = threading.Lock()
        self._known: dict[str, TlsConnection] = {}  # by gRPC's name of the connection
        self._distrusted: set[str] = set()
        self._target = ("127.0.0.1", 0)
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = track(socket.create_server((host, port), family=family, backlog=128))
        self.port = int(self._listener.getsockname()[1])

    def start(self, target: int) -> None:
        """Starts to forward. `target`: the loopback port to which plaintext is forwarded."""
        self._target = ("127.0.0.1", target)
        threading.Thread(target=self._accept, name="commlayer-control-accept", daemon=True).start()

    def caller(self, peer: str) -> PeerCertificate | None:
        """Returns the certificate of the connection that gRPC calls `peer`. None if the connection is unknown or distrusted."""
        with self._lock:
            connection = None if peer in self._distrusted else self._known.get(peer)
        return connection.certified if connection else None

    def where(self, peer: str) -> str:
        """Returns the certificate name and address of this connection, for errors and logs; "" if it is unknown."""
        with self._lock:
            connection = self._known.get(peer)
        return connection.where if connection else ""

    def distrust(self, peer: str) -> None:
        """Treats this connection as unauthenticated from now on. Replies in flight are still delivered, until end()."""
        with self._lock:
            if peer in self._known:
                self._distrusted.add(peer)

    def end(self, peer: str) -> None:
        """Closes the connection that gRPC calls `peer`."""
        with self._lock:
            connection = self._known.get(peer)
        if connection:
            _shut_down(connection.sock)

    def drop(self, serials: frozenset[int]) -> list[PeerCertificate]:
        """Closes all connections whose certificates have these serial numbers. Returns the certificates."""
        with self._lock:
            over = [one for one in self._known.values() if one.certified.serial in serials]
        for one in over:
            _shut_down(one.sock)
        return list(dict.fromkeys(one.certified for one in over))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            socks = [one.sock for one in self._known.values()]
        self._handshakes.close()
        _shut_down(self._listener)
        close_channel(self._listener)
        for sock in socks:
            _shut_down(sock)

    def _accept(self) -> None:
        while self._handshakes.acquire():
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of a system resource, for example descriptors: retry
                continue
            try:
                tls = TlsSocket(sock, self._keys, CONTROL, server=True)
            except (RecordError, OSError) as error:
                self._refused(join_host(*address[:2]), str(error))
                close_channel(sock)
                continue
            track(tls)
            self._handshakes.add(tls)
            where = join_host(*address[:2])
            threading.Thread(target=self._handshake, args=(tls, where), name=f"control {where}", daemon=True).start()

    def _handshake(self, sock: TlsSocket, where: str) -> None:
        try:
            certified = sock.handshake(time.monotonic() + HANDSHAKE_S)
            where = f"{certified.name} at {where}"
            sock.settimeout(None)
            tune_socket(sock, KEEPALIVE_S, SILENT_S)
            self._handshakes.remove(sock)
            self._forward(TlsConnection(certified, sock, where))
        except CommError as error:
            self._refused(where, self._handshakes.drop_reason(sock, error))
        except OSError:
            pass  # either end closed the connection
        finally:
            self._handshakes.remove(sock)
            close_channel(sock)

    def _forward(self, known: TlsConnection) -> None:
        """Forwards both directions until either end closes."""
        certified, sock, _ = known
        with socket.create_connection(self._target, CONNECT_S) as inner:
            track(inner)
            inner.settimeout(None)
            inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host, port = inner.getsockname()[:2]
            name = f"ipv4:{host}:{port}"
            with self._lock:
                self._known[name] = known
                closed = self._closed
            # The revocation list may have changed after the handshake, when drop() did not know this connection yet.
            if closed or certified.serial in self._keys.revoked():
                _shut_down(sock)
            back = threading.Thread(target=_pump, args=(inner, sock), name=f"control to {certified.name}", daemon=True)
            back.start()
            try:
                _pump(sock, inner)
            finally:
                back.join()
                with self._lock:
                    del self._known[name]
                    self._distrusted.discard(name)
                close_channel(inner)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copies bytes until either socket ends, then ends both sockets."""
    piece = memoryview(bytearray(PIECE_NBYTES))
    with contextlib.suppress(OSError, CommError):
        while n := source.recv_into(piece):
            sink.sendall(piece[:n])
    _shut_down(source)
    _shut_down(sink)


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # already closed
