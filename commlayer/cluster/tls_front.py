"""TLS in front of the coordinator's gRPC server, which then listens on loopback. Knows connections and certificates; no calls.

gRPC can do TLS by itself, but not tell whom it refused, nor why, nor heed a list of the revoked. So connections of both kinds,
control and data, meet the same checks, the same limits ahead of them and the same log. Bytes pass through one thread each way.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from commlayer.cluster.farewell import goaway
from commlayer.config import join_host
from commlayer.errors import CommError, RecordError, coded
from commlayer.transport.connection import drop, tune, watch
from commlayer.transport.key_folder import Certified, Keys
from commlayer.transport.tls import CONTROL, LINGER_S, TlsSocket
from commlayer.transport.unproved_connections import HURRY_S, Hall

HANDSHAKE_S = 5.0
MOST_EACH = 256
"""Connections of one certificate at a time, unless more are allowed: a machine with one may have many workers."""
PIECE_NBYTES = 64 << 10
KEEPALIVE_S, SILENT_S = 10, 60.0
"""A machine that is gone without a word keeps no connection, of which each has two threads."""
CONNECT_S = 5.0


class Known(NamedTuple):
    """A connection whose certificate is a good one."""

    certified: Certified
    sock: TlsSocket
    where: str
    """Whose it is, and the other end's address: that which gRPC sees is this end's own."""


class Front:
    """Listens from construction on; passes on once started. `refused` is told where a dialler came from, and why it may not."""

    def __init__(self, keys: Keys, host: str, port: int, refused: Callable[[str, str], None]) -> None:
        self._keys, self._refused = keys, refused
        self._hall = Hall(hurry_s=2 * HURRY_S)
        self._lock = threading.Lock()
        self._known: dict[str, Known] = {}  # by what gRPC calls the connection
        self._unheard: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._most = MOST_EACH
        self._target = ("127.0.0.1", 0)
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = watch(socket.create_server((host, port), family=family, backlog=128))
        self.port = int(self._listener.getsockname()[1])

    def start(self, target: int) -> None:
        """The port of loopback that plain text goes to."""
        self._target = ("127.0.0.1", target)
        threading.Thread(target=self._accept, name="commlayer-control-accept", daemon=True).start()

    def allow(self, most: int) -> None:
        """So many connections of one certificate, if that is more than before."""
        self._most = max(self._most, most)

    def caller(self, peer: str) -> Certified | None:
        """Whose connection it is that gRPC calls by that name; None for one that did not come this way, or is let go."""
        with self._lock:
            found = None if peer in self._unheard else self._known.get(peer)
        return found.certified if found else None

    def where(self, peer: str) -> str:
        """Whose connection that is, and where it comes from, for errors and logs; empty for one that did not come this way."""
        with self._lock:
            found = self._known.get(peer)
        return found.where if found else ""

    def unheard(self, peer: str) -> None:
        """From now on it is nobody's, until end() ends it: what is on its way back still arrives."""
        with self._lock:
            if peer in self._known:
                self._unheard.add(peer)

    def end(self, peer: str) -> None:
        """Of the connection that gRPC calls so."""
        with self._lock:
            found = self._known.get(peer)
        if found:
            _end(found.sock)

    def drop(self, serials: frozenset[int]) -> list[Certified]:
        """Ends all connections of these certificates, which are returned."""
        with self._lock:
            over = [one for one in self._known.values() if one.certified.serial in serials]
        for one in over:
            _end(one.sock)
        return list(dict.fromkeys(one.certified for one in over))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            socks = [one.sock for one in self._known.values()]
        self._hall.close()
        _end(self._listener)
        drop(self._listener)
        for sock in socks:
            _end(sock)

    def _accept(self) -> None:
        while self._hall.room():
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # the system is short of something: others may free it
                continue
            try:
                made = TlsSocket(sock, self._keys, CONTROL, server=True)
            except (RecordError, OSError) as error:
                self._refused(join_host(*address[:2]), str(error))
                drop(sock)
                continue
            watch(made)
            self._hall.enter(made)
            where = join_host(*address[:2])
            threading.Thread(target=self._greet, args=(made, where), name=f"control {where}", daemon=True).start()

    def _greet(self, sock: TlsSocket, where: str) -> None:
        certified = None
        try:
            certified = sock.handshake(time.monotonic() + HANDSHAKE_S)
            where = f"{certified.name} at {where}"
            with self._lock:
                self._counts[certified.name] += 1
                most = self._most
                over = self._counts[certified.name] > most
            if over:
                reason = coded("E-CONNECTIONS", f"its certificate ({certified.name}) has {most} control connections already")
                self._refused(where, reason)
                _say(sock, reason)
                return
            sock.settimeout(None)
            tune(sock, KEEPALIVE_S, SILENT_S)
            self._hall.leave(sock)
            self._pass_on(Known(certified, sock, where))
        except CommError as error:
            self._refused(where, self._hall.why(sock, error))
        except OSError:
            pass  # it, or this process, has ended the connection
        finally:
            if certified is not None:
                with self._lock:
                    self._counts[certified.name] -= 1
            self._hall.leave(sock)
            drop(sock)

    def _pass_on(self, known: Known) -> None:
        """Both ways, until either end is over."""
        certified, sock, _ = known
        with socket.create_connection(self._target, CONNECT_S) as inner:
            watch(inner)
            inner.settimeout(None)
            inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host, port = inner.getsockname()[:2]
            name = f"ipv4:{host}:{port}"
            with self._lock:
                self._known[name] = known
                closed = self._closed
            # The list may have changed behind the handshake, and drop() has passed by who was not known yet.
            if closed or certified.serial in self._keys.revoked():
                _end(sock)
            back = threading.Thread(target=_pump, args=(inner, sock), name=f"control to {certified.name}", daemon=True)
            back.start()
            try:
                _pump(sock, inner)
            finally:
                back.join()
                with self._lock:
                    del self._known[name]
                    self._unheard.discard(name)
                drop(inner)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """What comes goes on, until either is over; then both are."""
    piece = memoryview(bytearray(PIECE_NBYTES))
    with contextlib.suppress(OSError, CommError):
        while n := source.recv_into(piece):
            sink.sendall(piece[:n])
    _end(source)
    _end(sink)


def _say(sock: TlsSocket, reason: str) -> None:
    """Hears out for a while what the other end still sends: a connection that is closed over unread bytes loses the reason."""
    until, heard = time.monotonic() + LINGER_S, bytearray(1024)
    with contextlib.suppress(OSError, CommError):
        sock.settimeout(LINGER_S)
        sock.sendall(goaway(reason))
        sock.shutdown(socket.SHUT_WR)
        while time.monotonic() < until and sock.recv_into(heard):
            pass


def _end(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended by itself
