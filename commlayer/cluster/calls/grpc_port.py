"""A listening port with a gRPC server. With keys, TLS connections are accepted here and forwarded to gRPC on a Unix socket.

gRPC's own TLS does not report which connection it refused or why, and has no revocation list. With forwarding, control
connections have the same checks, limits before the handshake and log lines as data connections. Each forwarded connection has
one thread for each direction. The Unix socket is in a folder that only this user can enter.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import socket
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from commlayer.cluster.calls.call_proofs import AuthenticationFailed
from commlayer.cluster.calls.rpc_server import UNPROVED, RpcServer
from commlayer.config import join_host
from commlayer.errors import CommError
from commlayer.transport.connection import close_channel, shut_down, track, tune_socket
from commlayer.transport.endpoint import accept_connections, open_listener
from commlayer.transport.flow.fair_share import ConnectionTable, FairShare, address_source
from commlayer.transport.grpc import stream_ends
from commlayer.transport.grpc.event_loop import event_loop
from commlayer.transport.grpc.library import grpc
from commlayer.transport.grpc.stream_ends import AcceptStream, Caller
from commlayer.transport.handshake import OverLimit, PendingHandshakes
from commlayer.transport.keys.key_folder import Keys, PeerCertificate
from commlayer.transport.keys.tls import CONTROL, TlsSocket

MAX_CONNECTIONS = 512
"""Maximum number of control connections with TLS, which the largest job does not reach: see fair_share.py. Each has two threads
and three descriptors. Beyond that, the oldest connection of the certificate with most connections is closed."""
TOO_MANY_CALLS = OverLimit("it has more unanswered calls than a job has")
MAX_PATH_CHARS = 70
"""Longest folder of temporary files in which a Unix socket has a valid path."""
REPLY_ARRIVES_S = 1.0
"""Seconds that a reply may take to reach a client before the client's connection is closed."""
HANDSHAKE_S = 5.0
LEAST_PIECE_NBYTES, PIECE_NBYTES = 4 << 10, 64 << 10
"""Initial and largest size of a forwarding thread's buffer, which grows when it is full. Most connections need only the first.
"""
KEEPALIVE_S, SILENT_S = 10, 60.0
"""Seconds between two keepalive probes, and seconds of silence after which a connection is closed. A machine that vanished
must not occupy a connection with its two threads."""


class Enrolment(Protocol):
    """The server's end of enrolment.py, which loads cryptography."""

    def is_meant(self, sock: socket.socket, deadline: float) -> bool: ...

    def serve(self, sock: socket.socket, where: str) -> str: ...


class _TlsConnection(NamedTuple):
    """An authenticated control connection. `address`: that of the other end, since gRPC sees only a Unix socket."""

    certified: PeerCertificate
    sock: TlsSocket
    address: str

    @property
    def where(self) -> str:
        return f"{self.certified.name} at {self.address}"


class GrpcPort:
    """A port with a gRPC server. With keys, the port listens from construction on. It serves calls after start(). The
    constructor raises InvalidInput if the port cannot be opened. `refused` is called with the address of a refused peer and the
    reason. All methods identify a connection by the name that gRPC gives it."""

    def __init__(self, keys: Keys | None, bind: str, port: int, refused: Callable[[str, str], None]) -> None:
        self._keys, self._bind, self.number, self._refused = keys, bind, port, refused
        self._server: RpcServer | None = None
        self.accept: AcceptStream = _no_server
        """Function that accepts data streams that arrive at this port."""
        self.enrolment: Enrolment | None = None
        """Serves homes that fetch their first certificate at this port. The value is None if this process has no CA."""
        self._lock = threading.Lock()
        self._known: dict[str, _TlsConnection] = {}
        self._closed = threading.Event()
        self._folder, self._names = "", itertools.count()
        self._handshakes, self._connections, self._calls = PendingHandshakes(), ConnectionTable(MAX_CONNECTIONS), FairShare()
        self._listener: socket.socket | None = None
        listener = open_listener(bind, port)
        if keys is None:
            listener.close()  # opened only for its error: gRPC opens the port itself, and does not say why it cannot
        else:
            self._listener, self.number = track(listener), int(listener.getsockname()[1])

    def start(self, server: RpcServer) -> None:
        self._server = server
        if self._listener is None:
            self.number = server.start(join_host(self._bind, self.number), self.identify)
            return
        # gRPC would encode other characters in the names of connections.
        plain = re.fullmatch(r"[\w/.-]+", tempfile.gettempdir(), re.ASCII) and len(tempfile.gettempdir()) < MAX_PATH_CHARS
        self._folder = tempfile.mkdtemp(prefix="commlayer-", dir=None if plain else "/tmp")
        try:
            server.start(f"unix:{self._folder}/grpc", self.identify)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        threading.Thread(target=accept_connections, name="commlayer-control-accept", daemon=True, args=(
            self._listener, self._handshakes, self._serve, self._keys, CONTROL, self._refused, self._closed)).start()

    def _connection(self, peer: str) -> _TlsConnection:
        with self._lock:
            connection = self._known.get(peer)
        if connection is None:
            raise AuthenticationFailed
        return connection

    async def identify(self, context: Any) -> Caller:
        """Returns the caller of a call whose first bytes have arrived. Counts the call until it ends, or ends it if its
        connection is not authenticated or its source has too many calls. Call this on the event loop."""
        name = context.peer()
        try:
            caller = self.caller(name)
        except AuthenticationFailed:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, UNPROVED)
        if not self._calls.take(caller.source):
            self._refused(self.where(name), TOO_MANY_CALLS)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(TOO_MANY_CALLS))
        context.add_done_callback(lambda _: self._calls.give(caller.source))
        return caller

    def caller(self, peer: str) -> Caller:
        """Returns who uses a connection. Raises AuthenticationFailed if the port requires TLS and the connection did not use
        TLS, or distrust() was called for the connection."""
        if self._keys is None:
            address = urllib.parse.unquote(peer.partition(":")[2])
            return Caller(address, address_source(address.rpartition(":")[0].strip("[]")), None)
        known = self._connection(peer)
        return Caller(known.address, known.certified.name, known.certified)

    def streams(self) -> Any:
        """Returns the gRPC handler of data streams on this port."""
        return stream_ends.handler(lambda *stream: self.accept(*stream), self.identify)

    def where(self, peer: str) -> str:
        """Returns the certificate name and address of a connection, for errors and logs."""
        with self._lock:
            return self._known[peer].where if peer in self._known else peer

    def distrust(self, peer: str) -> None:
        """Treats a TLS connection as unauthenticated from now on. Closes the connection after REPLY_ARRIVES_S seconds, in
        which the pending reply can arrive. Call this on the event loop."""
        with self._lock:
            connection = self._known.pop(peer, None)
        if connection is not None:
            event_loop().call_later(REPLY_ARRIVES_S, shut_down, connection.sock)

    def drop(self, serials: frozenset[int]) -> None:
        """Closes all connections that use certificates with these serial numbers."""
        with self._lock:
            socks = [one.sock for one in self._known.values() if one.certified.serial in serials]
        for sock in socks:
            shut_down(sock)

    def close(self) -> None:
        """Stops the gRPC server and closes all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        self._closed.set()
        for table in (self._handshakes, self._connections):
            table.close()
        if self._listener is not None:
            shut_down(self._listener)
            close_channel(self._listener)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self, sock: TlsSocket, where: str) -> None:
        try:
            deadline = time.monotonic() + HANDSHAKE_S
            if self.enrolment is not None and self.enrolment.is_meant(sock, deadline):
                self._enrol(self.enrolment, sock, where)
                return
            known = _TlsConnection(sock.handshake(deadline), sock, where)
            where = known.where
            sock.settimeout(None)
            tune_socket(sock, KEEPALIVE_S, SILENT_S)
            self._handshakes.prove(sock, known.certified.name)
            if self._connections.add(sock, known.certified.name):
                self._forward(known)
        except CommError as error:
            self._refused(where, self._handshakes.drop_reason(sock, error))
        except OSError:
            pass  # either end closed the connection
        finally:
            for table in (self._handshakes, self._connections):
                table.remove(sock)
            close_channel(sock)

    def _enrol(self, enrolment: Enrolment, sock: TlsSocket, where: str) -> None:
        """Passes a connection whose first byte is not TLS to `enrolment`, and closes it afterwards. An enrolment connection
        never reaches gRPC."""
        plain = socket.socket(sock.family, sock.type, sock.proto, sock.detach())
        with plain, plain.dup() as guard:  # ends the connection on eviction, whatever wraps the other one
            self._handshakes.replace(sock, guard)
            try:
                if reason := enrolment.serve(plain, where):
                    self._refused(where, reason)
                else:
                    self._handshakes.prove(guard)
            finally:
                self._handshakes.remove(guard)

    def _forward(self, known: _TlsConnection) -> None:
        """Forwards both directions until either end closes."""
        certified, sock, _ = known
        with socket.socket(socket.AF_UNIX) as inner:
            path = f"{self._folder}/{next(self._names)}"
            name = f"unix:{path}"
            inner.bind(path)  # by this name gRPC tells connections apart
            track(inner).connect(f"{self._folder}/grpc")
            Path(path).unlink()
            with self._lock:
                self._known[name] = known
            # The revocation list may have changed after the handshake, when drop() did not know this connection yet.
            if self._closed.is_set() or (self._keys is not None and certified.serial in self._keys.revoked()):
                shut_down(sock)
            back = threading.Thread(target=_pump, args=(inner, sock), name=f"control to {certified.name}", daemon=True)
            back.start()
            try:
                _pump(sock, inner)
            finally:
                back.join()
                with self._lock:
                    self._known.pop(name, None)
                close_channel(inner)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copies bytes until either socket ends, then ends both sockets."""
    piece = memoryview(bytearray(LEAST_PIECE_NBYTES))
    with contextlib.suppress(OSError, CommError):
        while n := source.recv_into(piece):
            sink.sendall(piece[:n])
            if n == len(piece) < PIECE_NBYTES:
                piece = memoryview(bytearray(2 * n))
    shut_down(source)
    shut_down(sink)


def open_stream_port(keys: Keys | None, bind: str, port: int, take: AcceptStream,
                     refused: Callable[[str, str], None]) -> GrpcPort:
    """Opens a port for data streams only. Raises InvalidInput if the port cannot be opened."""
    stream_port = GrpcPort(keys, bind, port, refused)
    stream_port.accept = take
    stream_port.start(RpcServer({}, [stream_port.streams()]))
    return stream_port


def _no_server(*_: object) -> bool:
    raise LookupError("no summation server uses this port")
