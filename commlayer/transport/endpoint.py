"""The transport over byte streams (TCP, or channels that a caller opens): listens, dials, and keeps one connection per peer."""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from commlayer.callbacks import ignore
from commlayer.config import join_host
from commlayer.errors import CommError, DeadlineExceeded, InvalidInput, PeerLost, RecordError, Refused, append_code
from commlayer.transport import framing
from commlayer.transport import handshake as greeting
from commlayer.transport.buffer_pool import BufferPool
from commlayer.transport.chunking import HeldBody, UnfinishedBodies
from commlayer.transport.connection import (
    Connection,
    Content,
    SizeLimits,
    close_channel,
    connect_socket,
    shut_down,
    track,
    tune_socket,
)
from commlayer.transport.flow.fair_share import address_source
from commlayer.transport.flow.pacing import Pacer
from commlayer.transport.framing import Reader
from commlayer.transport.handshake import TOO_MANY, Admit, Hello, PendingHandshakes, RefusalLog, RetryLater, same_job
from commlayer.transport.keys import tls
from commlayer.transport.keys.key_folder import Keys, PeerCertificate
from commlayer.transport.protocol import (
    ByteChannel,
    Handle,
    Header,
    Kind,
    Message,
    channel_binding,
    clear_traceback,
    key,
    make_send_handle,
    peer_certificate,
    peer_name,
)

Address = tuple[str, int]
FORMER_END_S = 0.5
"""Seconds for which a new connection waits for the end of the peer's previous connection, whose last packets may still be in
transit."""
KEEPALIVE_S = 10
"""Seconds of silence after which the kernel probes the peer's machine. Three unanswered probes end the connection."""
HANDSHAKE_S = 10.0
BACKLOG = 4096
"""Connections that the kernel keeps for the accepting thread (if net.core.somaxconn allows as many): some 0.8 s of a flood of
5,000 a second. The kernel drops further ones, whose dialers try again only after a second."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with which close() resets the connection. The kernel then keeps no state of it."""
REVOCATION_CHECK_S = 1.0
"""Seconds between two reads of the revocation list. A connection with a revoked certificate is closed within twice this
time."""
Refusal = Callable[[str, str], None]
Broken = Callable[[int, CommError], None]
Open = Callable[[float], ByteChannel]
"""A function that opens a channel before the given deadline, or raises CommError. Its caller adds the peer's name to the
error."""


class Settings(NamedTuple):
    max_nbytes: int = framing.DEFAULT_MAX_NBYTES
    """Largest body accepted from a peer, in bytes."""
    buffer_nbytes: int = 0
    """Size of each socket's send and receive buffers. 0: the kernel tunes the size to the link."""
    user_timeout_s: float = 0.0
    """TCP_USER_TIMEOUT in seconds, where the system supports it; 0: the kernel's default. The kernel ends a connection if data
    stays unacknowledged, or the peer's window stays closed, for this long. A peer whose threads wait for the GIL closes its
    window, so with a short timeout such a peer is declared dead."""
    secret: str = ""
    """The job's secret. A peer that cannot prove the same secret is refused; both ends check this."""
    keys: Keys | None = None
    """This node's keys. If set, all connections use mutual TLS; otherwise they are plaintext."""
    refused: Refusal = RefusalLog().refused
    """Called with the address of a refused dialer and the reason."""
    hello_s: float = 5.0
    """Seconds that a dialer may take to authenticate. When many dial at once, those of one address are disconnected sooner."""
    flush_s: float = 3.0
    """Seconds that close() may take to send queued frames."""
    resume: bool = False
    """True: a broken connection may be re-established: see StreamTransport."""


class StreamTransport:
    """Moves messages between peers over byte streams. Every error names its peer. `hello` identifies this end. `hello` may be
    replaced, for example when a plan arrives, but its rank stays. `admit` checks each dialer's hello; by default the job,
    protocol and plan must equal those of `hello`.

    The body of a send must stay unchanged until the send's handle is done. Frames to one peer are sent in order of (step,
    order), then in order of the calls. An urgent bucket thus overtakes waiting buckets, and between machines also the rest of
    the bucket that is being sent. The bodies of received messages are in buffers of `pool`. Receivers that return the buffers
    avoid page faults.

    The end that dialed may re-establish a broken connection (reconnect.py). A transport with Settings.resume:
    - ends a connection that is lost without BYE, fails its sends with PeerLost, then calls `broken(peer, error)` once;
    - delivers no later messages of that connection;
    - lets the peer be dialed again, with a new handshake. When a hello of the same `session` arrives, the acceptor ends a
      previous connection whose end it has not detected. It refuses a session that it has aborted;
    - ends the peer permanently only by `abort(reason, peer)`, by BYE, or when a frame violates the format.

    Messages in transit are lost in both directions. The requester sends its requests again; the answering end drops requests
    that it has already handled.
    """

    def __init__(
        self, hello: Hello, admit: Admit | None = None, settings: Settings = Settings(), pool: BufferPool | None = None,
    ) -> None:
        self.hello = hello
        self.pool = pool or BufferPool()
        self._admit, self._settings = admit, settings
        self.limits = SizeLimits()
        """Limits on the memory and messages that each peer may cause at this end. The owner replaces them once they are
        known."""
        self._pacer = Pacer()
        self._failed: dict[int | None, CommError] = {}  # why a peer has ended; None: all peers
        self._lock = threading.Condition()  # notified when a rank is free again
        self._connections: dict[int, Connection] = {}
        self._taken: set[int] = set()  # ranks that are connected or in their handshake
        self._ending: set[Connection] = set()
        self._former: dict[int, Connection] = {}  # broken connections of peers that have not reconnected
        self._listeners: list[socket.socket] = []
        self._handshakes = PendingHandshakes()
        self._closed = threading.Event()
        self._barred: dict[bytes, str] = {}  # sessions that this end has aborted, with the reason
        self.broken: Broken = ignore
        """Function that is called with the peer and the error when a connection breaks that may be re-established. Runs in the
        thread that detected the break."""
        self.arrived: Callable[[Message], None] = ignore
        """Function that each connection's receive thread calls with a message that has arrived. It must not block, and may
        raise CorruptFrame. Set before the first connection."""
        self.ended: Broken = ignore
        """Function that is called with the peer and the reason when a connection ends that is not re-established."""
        self.named: Callable[[int], str] = lambda _: ""
        """Function that returns the name of the certificate that a dialer with this rank must use; "": any certificate."""
        if settings.keys is not None:
            threading.Thread(target=self._drop_revoked, args=(settings.keys,), name="revocations", daemon=True).start()

    @property
    def rank(self) -> int:
        return self.hello.rank

    @property
    def peers(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(peer for peer in self._connections if self._failure(peer) is None))

    def _failure(self, peer: int) -> CommError | None:
        """Returns the error that ended this peer; None if no error has."""
        return self._failed.get(None) or self._failed.get(peer)

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Starts to accept connections. Returns the bound address; with port 0 the system chooses the port."""
        sock = track(open_listener(host, port))
        with self._lock:
            self._listeners.append(sock)
        arguments = sock, self._handshakes, self._handshake, self._settings.keys, tls.DATA, self._settings.refused, self._closed
        threading.Thread(target=accept_connections, name=f"accept on {host}:{port}", daemon=True, args=arguments).start()
        bound: Address = sock.getsockname()[:2]
        return bound

    def dial(self, peer: int, address: Address, deadline: float, answer_by: float = math.inf) -> None:
        """Connects to `peer` at `address`. After this returns, messages can be sent. The peer's first reply must arrive before
        `answer_by`. Raises Refused with the peer's reason."""
        self.dial_over(lambda until: self._connect_tcp(peer_name(peer), address, until), peer, deadline, answer_by)

    def dial_over(self, opened: Open, peer: int, deadline: float, answer_by: float = math.inf) -> None:
        """Connects to `peer` like `dial`, but over a channel that `opened` opens."""
        self._reserve(peer)
        sock = None
        try:
            try:
                sock = opened(min(deadline, answer_by))
            except CommError as error:
                raise error.located(peer=error.peer or peer_name(peer)) from None
            reader, former = self._reader(), self._unfinished(peer, b"")
            hello = msgspec.structs.replace(self.hello, held=_held_bodies(former))
            certified, held = greeting.dial_handshake(
                sock, reader, hello, self._settings.secret, peer, deadline, channel_binding(sock), answer_by,
                self._signing_keys(sock))
            self._failed.pop(peer, None)
            self._connect(sock, peer, reader, b"", former, held, certified)
        except BaseException:
            if sock is not None:
                close_channel(sock)
            with self._lock:
                self._taken.discard(peer)
                self._lock.notify_all()
            raise

    def _connect_tcp(self, who: str, address: Address, deadline: float) -> socket.socket:
        (host, port), begin = address, time.monotonic()
        try:
            sock = connect_socket(address, deadline)
        except TimeoutError:
            raise DeadlineExceeded(f"{host}:{port} did not answer within {deadline - begin:.1f} s: check "
                                   "the address, that a server runs there, and firewalls", peer=who) from None
        except OSError as error:
            raise PeerLost(f"cannot reach {host}:{port} (deadline {deadline - begin:.1f} s): "
                           f"{error.strerror}: check the address and that a server runs there", peer=who) from None
        try:
            self._tune(sock)
            return self._wrap_tls(sock, deadline, f"{who} at {host}:{port}")
        except BaseException:
            close_channel(sock)
            raise

    def take(self, channel: ByteChannel, where: str, source: str) -> bool:
        """Runs the handshake of an incoming channel, in a new thread. Returns False if its source opens too many."""
        if not (self._handshakes.admit(source) and self._handshakes.add(channel, source)):
            return False
        threading.Thread(target=self._handshake, args=(channel, where), name=f"greet {where}", daemon=True).start()
        return True

    def _reserve(self, peer: int) -> None:
        with self._lock:
            if not self._lock.wait_for(lambda: peer not in self._taken, FORMER_END_S):
                raise InvalidInput("E-TRANSPORT-USE", f"{peer_name(peer)} is already connected")
            self._taken.add(peer)

    def _handshake(self, sock: ByteChannel, where: str) -> None:
        deadline = time.monotonic() + HANDSHAKE_S
        peer = None
        try:
            reader, hello_deadline = self._reader(), time.monotonic() + self._settings.hello_s
            who = f"the dialer at {where}"
            if isinstance(sock, socket.socket):
                self._tune(sock)
            if isinstance(sock, tls.TlsSocket):
                sock.handshake(hello_deadline)
            if (certified := peer_certificate(sock)) is not None:
                who = where = f"{certified.name} at {where}"
            hello, proof = greeting.accept_handshake(
                sock, reader, self.rank, self._settings.secret, who, hello_deadline, channel_binding(sock),
                self._signing_keys(sock))
            self._handshakes.prove(sock, certified.name if certified else "")
            reason = self._refusal(hello, certified.name if certified else "")
            if not reason:
                peer = hello.rank
            former = {} if reason else self._unfinished(hello.rank, hello.session)
            greeting.send_welcome(sock, self.rank, reason, proof, where, deadline, _held_bodies(former))
            if peer is None:
                self._settings.refused(where, reason)
                close_channel(sock)
            else:
                self._connect(sock, peer, reader, hello.session, former, hello.held)
        except (CommError, OSError) as error:
            self._settings.refused(where, self._handshakes.drop_reason(sock, error))
            close_channel(sock)
            if peer is not None:
                with self._lock:
                    self._taken.discard(peer)
                    self._lock.notify_all()
        finally:
            self._handshakes.remove(sock)

    def _refusal(self, hello: Hello, name: str) -> str:
        """Returns why the dialer is refused; "" if it is admitted."""
        who = peer_name(hello.rank)
        if reason := (self._admit or same_job(self.hello))(hello):
            return reason
        if name != (its := self.named(hello.rank) or name):
            return append_code("E-RANK",
                               f"uses the certificate of {name}, but {who} joined the job with the certificate of {its}")
        if hello.rank == self.rank:
            return append_code("E-RANK", f"{who} is this process itself: give each process its own rank")
        with self._lock:
            if hello.session in self._barred:
                return f"was dropped: {self._barred[hello.session]}"
            former = self._connections.get(hello.rank)
        if former is not None and self._settings.resume and hello.session and former.session == hello.session:
            former.end(PeerLost("replaced by a newer connection of the same process", peer=who), broken=True)
        with self._lock:
            if not self._lock.wait_for(lambda: hello.rank not in self._taken, FORMER_END_S):
                return RetryLater(append_code("E-RANK",
                                              f"{who} is already connected: give each process its own rank, or end the old "
                                              "process"))
            self._taken.add(hello.rank)
            self._failed.pop(hello.rank, None)  # done before the welcome, after which the dialer counts as connected
        return ""

    def _wrap_tls(self, sock: socket.socket, deadline: float, who: str) -> socket.socket:
        """Wraps the dialer's socket in TLS if keys are set; otherwise returns the socket itself."""
        if self._settings.keys is None:
            return sock
        secured = tls.TlsSocket(sock, self._settings.keys, tls.DATA, server=False)
        track(secured)
        close_channel(sock)  # `secured` owns the descriptor now
        try:
            secured.handshake(deadline)
        except CommError as error:
            close_channel(secured)
            raise error.located(peer=who) from None
        return secured

    def _drop_revoked(self, keys: Keys) -> None:
        """Closes the connections of certificates that are revoked, until close()."""
        while not self._closed.wait(REVOCATION_CHECK_S):
            revoked = keys.revoked()
            with self._lock:
                ending = [(c, c.certified.name) for c in self._connections.values()
                          if c.certified and c.certified.serial in revoked]
            for connection, name in ending:
                reason = Refused(f"its certificate ({name}) was revoked", peer=peer_name(connection.peer),
                                 code="E-CERTIFICATE-REVOKED")
                self._settings.refused(name, reason.what)
                connection.end(reason)

    def _reader(self) -> Reader:
        return Reader(greeting.MAX_NBYTES, self.pool.take)

    def _tune(self, sock: socket.socket) -> None:
        tune_socket(sock, KEEPALIVE_S, self._settings.user_timeout_s)
        if self._settings.buffer_nbytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._settings.buffer_nbytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._settings.buffer_nbytes)

    def _signing_keys(self, sock: ByteChannel) -> Keys | None:
        """Returns the keys for greeting.dial_handshake and accept_handshake. In TlsSocket both ends check certificates."""
        return None if isinstance(sock, tls.TlsSocket) else self._settings.keys

    def _unfinished(self, peer: int, session: bytes) -> UnfinishedBodies:
        """Returns what the broken connection of this session has left unfinished."""
        with self._lock:
            former = self._former.get(peer)
        return {} if former is None or former.session != session else former.unfinished(time.monotonic() + FORMER_END_S)

    def nbytes_at_peer(self, peer: int, header: Header) -> int:
        """Returns how much of a message that is to be sent again the peer has from its former connection."""
        connection = self._connections.get(peer)
        held = None if connection is None else connection.at_peer.get(key(header))
        return 0 if held is None else held.part * held.part_nbytes

    def _connect(self, sock: ByteChannel, peer: int, reader: Reader, session: bytes, former: UnfinishedBodies,
                 held: tuple[HeldBody, ...], certified: PeerCertificate | None = None) -> None:
        sock.settimeout(None)
        reader.max_nbytes = self._settings.max_nbytes
        connection = Connection(
            sock, peer, self.arrived, reader, self._ended, self._pacer, session, resumes=self._settings.resume,
            limits=lambda: self.limits, former=former, held=held)
        connection.certified = connection.certified or certified
        with self._lock:
            if self._closed.is_set():
                raise PeerLost("this end of the transport was closed", peer=peer_name(peer), code="E-SESSION-CLOSED")
            self._connections[peer] = connection
            self._former.pop(peer, None)
            connection.start()  # under the lock: close() must find only started threads to join
        if (aborted := self._failure(peer)) is not None:  # aborted after the handshake had admitted the peer
            connection.end(aborted)

    def _ended(self, connection: Connection) -> None:
        reason = connection.error
        if reason is not None and not connection.broken:
            reason = self._failed.setdefault(connection.peer, clear_traceback(reason))
            self.ended(connection.peer, reason)  # before the peer may reconnect
        with self._lock:
            self._connections.pop(connection.peer, None)
            self._taken.discard(connection.peer)
            self._lock.notify_all()
            self._ending = {c for c in self._ending if c.alive()} | {connection}
            if connection.session and reason is not None and not (connection.broken or self._closed.is_set()):
                self._barred[connection.session] = append_code(reason.code, reason.what)
            if connection.broken and self._failure(connection.peer) is None:
                self._former[connection.peer] = connection
        if connection.broken and reason is not None and not self._closed.is_set():
            self.broken(connection.peer, reason)

    def disconnected_peers(self) -> tuple[str, ...]:
        """Returns the names of peers whose machine closed their connection without a BYE, and that have not reconnected."""
        with self._lock:
            return tuple(peer_name(peer) for peer, former in sorted(self._former.items()) if former.by_peer)

    def heard_since(self, since_s: float) -> tuple[str, ...]:
        """Returns the names of connected peers from which bytes have arrived since that time.monotonic()."""
        with self._lock:
            return tuple(peer_name(peer) for peer, one in sorted(self._connections.items()) if one.heard_s >= since_s)

    def pace(self, bps: float) -> None:
        """Sets the measured upload rate of this machine's link in bit/s; 0: unknown. The connections that send large bodies are
        paced so that together they send at about this rate."""
        self._pacer.follow(bps)

    def send(self, peer: int, header: Header, body: memoryview | bytes = b"") -> Handle:
        operation = make_send_handle(peer, header)
        self._send(operation, (peer,), header, body)
        return operation

    def replace(self, peer: int, operation: Handle, header: Header) -> bool:
        """See Connection.replace."""
        connection = self._connections.get(peer)
        return connection is not None and connection.replace(operation, header)

    @property
    def unsent_nbytes(self) -> int:
        """Bytes of messages that wait to be sent to any peer."""
        with self._lock:
            connections = [*self._connections.values()]
        return sum(connection.waiting_nbytes for connection in connections)

    def send_all(self, peers: Sequence[int], header: Header, body: memoryview | bytes = b"") -> None:
        """Sends one message to several peers, of which some may have ended. Its frame is made once."""
        self._send(make_send_handle(peers[0], header), peers, header, body)

    def _send(self, operation: Handle, peers: Sequence[int], header: Header, body: memoryview | bytes) -> None:
        """`operation` ends when the first peer has been sent the message."""
        if len(body) > self._settings.max_nbytes:
            raise InvalidInput("E-TRANSPORT-USE",
                               f"message to {', '.join(map(peer_name, peers))}: its body has {len(body)} bytes, allowed "
                               f"{self._settings.max_nbytes}")
        content = Content(header, body)
        for peer in peers:
            if (connection := self._connections.get(peer)) is not None:
                connection.send(operation, content)
            else:
                operation.fail(self._failure(peer) or PeerLost("not connected", peer=peer_name(peer)))

    def abort(self, reason: CommError, peer: int | None = None) -> None:
        """Fails the present and later sends to one peer, or to all, with `reason`, and closes their connections. The peers see
        a lost connection."""
        self._failed.setdefault(peer, clear_traceback(reason))
        with self._lock:
            dropped = [c for c in self._connections.values() if peer in (None, c.peer)]
            self._former = {other: former for other, former in self._former.items() if peer not in (None, other)}
        for connection in dropped:
            connection.end(reason)

    def close(self, flush_s: float | None = None) -> None:
        """Sends queued frames (within `flush_s`, by default a few seconds), sends BYE, releases all resources. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            listeners, self._listeners = self._listeners, []
            connections = list(self._connections.values())
        self._handshakes.close()
        for listener in listeners:
            shut_down(listener)
            close_channel(listener)
        reason = self._failed.setdefault(None, closed_error())
        deadline = time.monotonic() + (self._settings.flush_s if flush_s is None else flush_s)
        bye = Header(Kind.BYE, sender=self.rank)
        for connection in connections:
            connection.send(make_send_handle(connection.peer, bye), Content(bye, b""), last=True)
        for connection in connections:
            if not connection.join(deadline):
                connection.end(reason)
        with self._lock:
            rest = list(self._ending)
        for connection in rest:
            connection.join(time.monotonic() + 1.0)


def closed_error() -> CommError:
    """Returns the error of operations that are in progress when their end of the transport is closed."""
    return CommError("this end of the transport was closed", code="E-SESSION-CLOSED")


def _held_bodies(former: UnfinishedBodies) -> tuple[HeldBody, ...]:
    return tuple(body.held() for body in former.values())


def open_listener(host: str, port: int) -> socket.socket:
    """Opens a listening socket; port 0 lets the system choose. Raises InvalidInput with a remedy."""
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(where[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidInput("E-ADDRESS", _cannot_listen(error, join_host(host, port))) from None


def accept_connections(
    listener: socket.socket, handshakes: PendingHandshakes, serve: Callable[[Any, str], None], keys: Keys | None, protocol: str,
    refused: Refusal, closed: threading.Event,
) -> None:
    """Accepts connections until `closed`, and calls `serve` with each socket and its address in a thread of its own. With keys
    the socket is a TlsSocket before its handshake. A connection of a source that opens too many is closed at once."""
    while True:
        try:
            sock, address = listener.accept()
        except OSError as error:
            if closed.is_set():
                return
            if error.errno not in (errno.ECONNABORTED, errno.EINTR):
                closed.wait(0.1)  # file descriptors or memory are short: other threads may free some
            continue
        where, source = f"{address[0]}:{address[1]}", address_source(address[0])
        if not handshakes.admit(source):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            sock.close()
            refused(where, TOO_MANY)
            continue
        if keys is not None:
            try:
                sock = tls.TlsSocket(sock, keys, protocol, server=True)
            except (RecordError, OSError) as error:
                refused(where, str(error))
                close_channel(sock)
                continue
        if not handshakes.add(track(sock), source):
            close_channel(sock)
            return
        threading.Thread(target=serve, args=(sock, where), name=f"greet {where}", daemon=True).start()


def _cannot_listen(error: OSError, where: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use: stop what listens there, or choose another port (--port; 0 for any free one)"
    remedy = "choose a port above 1023" if error.errno == errno.EACCES else "bind this machine's address, or 0.0.0.0 for all"
    return f"cannot listen on {where}: {error.strerror or error}; {remedy}"
