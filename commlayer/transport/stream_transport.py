"""The carrier over TCP, and over channels that others open: listens, dials, keeps a connection for each peer. No matching."""

from __future__ import annotations

import errno
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from commlayer.errors import CommError, DeadlineExceeded, InvalidInput, PeerLost, RecordError, Refused, coded
from commlayer.transport import framing, mailbox, tls
from commlayer.transport import hello as greeting
from commlayer.transport.byte_channel import ByteChannel, binding_of, certified_of
from commlayer.transport.connection import Connection, drop, tune, watch
from commlayer.transport.framing import Reader
from commlayer.transport.hello import Admit, Hello, Later, same_job
from commlayer.transport.key_folder import Keys
from commlayer.transport.listener import listening, wake
from commlayer.transport.mailbox import Mailbox
from commlayer.transport.pacing import Pacer
from commlayer.transport.protocol import Handle, Header, Key, Kind, Message, peer_name
from commlayer.transport.receive_buffers import Pool
from commlayer.transport.unproved_connections import HURRY_S, Hall, Probe

Address = tuple[str, int]
FORMER_S = 0.5
"""How long a new connection waits for the end of the peer's former one, which may still be on its way."""
MOST_EACH = 1024
"""Connections of one certificate at a time, each of another worker: the machines of a cluster may have one for all."""
REVOKED_S = 1.0
"""How often the list of revoked certificates is looked at. A connection of one ends within twice that."""
Refusal = Callable[[str, str], None]
Broken = Callable[[int, CommError], None]
Open = Callable[[float], ByteChannel]
"""Opens a channel before that deadline. CommError if it cannot; the caller knows to whom."""


def note_refusal(where: str, why: str) -> None:
    (mailbox.log.info if isinstance(why, Probe) else mailbox.log.warning)("connection from %s dropped: %s", where, why)


class Settings(NamedTuple):
    max_nbytes: int = framing.DEFAULT_MAX_NBYTES
    """Largest body taken from a peer."""
    max_kept_nbytes: int = mailbox.DEFAULT_MAX_KEPT_NBYTES
    """Most that one peer may send ahead of any receive."""
    buffer_nbytes: int = 0
    """Of each socket, each way; 0 leaves it to the kernel, which tunes it to the link."""
    keepalive_s: int = 10
    """Silence after which the kernel asks whether the peer's machine is there; three missing answers end the connection."""
    user_timeout_s: float = 0.0
    """As TCP_USER_TIMEOUT, where the system has it: how long what was sent may be unacknowledged, or find no room at the peer,
    before the kernel ends the connection; 0 leaves it to the kernel. A peer whose threads wait for the GIL makes no room, so
    a short one would take it for dead."""
    secret: str = ""
    """Of the job: who does not know it is refused, either way."""
    keys: Keys | None = None
    """With these all connections are TLS, and both ends of each show a certificate; else they are plain text."""
    refused: Refusal = note_refusal
    """Told where a dialler came from, and why it was not let in."""
    hello_s: float = 5.0
    """How long who dials in may take to prove that; less where many do."""
    greeting_s: float = 10.0
    flush_s: float = 3.0
    """How long close() may take to send what is queued."""
    resume: bool = False
    """Whether a broken connection may be made again: see Transport."""


class StreamTransport:
    """A Transport. `hello` says who this end is and may be replaced, as when a plan arrives; its rank stays. `admit` judges who
    dials in; by default the job, protocol and plan must be those of `hello`.

    Bodies of received messages lie in buffers of `pool`; who gives them back to it saves page faults.
    """

    def __init__(
        self, hello: Hello, admit: Admit | None = None, settings: Settings = Settings(), pool: Pool | None = None,
    ) -> None:
        self.hello = hello
        self.pool = pool or Pool()
        self._admit, self._settings = admit, settings
        self._pacer = Pacer()
        self._mailbox = Mailbox(settings.max_kept_nbytes)
        self._lock = threading.Condition()  # notified when a rank is free again
        self._connections: dict[int, Connection] = {}
        self._taken: set[int] = set()  # ranks that are connected or in their greeting
        self._ending: set[Connection] = set()
        self._listeners: list[socket.socket] = []
        # A handshake of TLS is one round trip more.
        self._hall = Hall(hurry_s=2 * HURRY_S if settings.keys else HURRY_S)
        self._closed = threading.Event()
        self._missed: set[int] = set()  # whose machine has ended a connection that has not been made again
        self._barred: dict[bytes, str] = {}  # sessions that were ended here, and why
        self.broken: Broken = lambda *_: None
        """Told of a connection that broke and may be made again, on the thread that found it."""
        self._heeds = False
        self.named: Callable[[int], str] = lambda _: ""
        """Whose certificate who dials in under that rank must show; empty: anybody's."""

    @property
    def rank(self) -> int:
        return self.hello.rank

    @property
    def peers(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(peer for peer in self._connections if self._mailbox.failure(peer) is None))

    # ---- connecting

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Takes connections from now on. Returns the address bound; port 0 lets the system choose one."""
        sock = watch(listening(host, port))
        with self._lock:
            self._listeners.append(sock)
        threading.Thread(target=self._accept_loop, args=(sock,), name=f"accept on {host}:{port}", daemon=True).start()
        self._heed_revoked()
        bound: Address = sock.getsockname()[:2]
        return bound

    def dial(self, peer: int, address: Address, deadline: float, answer_by: float = math.inf) -> None:
        """Connects to `peer` at `address`, whose first word must be there at `answer_by`; on return messages can flow. Raises
        Refused with the other side's reason."""
        self.dial_over(lambda until: self._reached(peer_name(peer), address, until), peer, deadline, answer_by)

    def dial_over(self, opened: Open, peer: int, deadline: float, answer_by: float = math.inf) -> None:
        """The same over a channel of another kind."""
        self._reserve(peer)
        sock = None
        try:
            try:
                sock = opened(min(deadline, answer_by))
            except CommError as error:
                raise error.located(peer=error.peer or peer_name(peer)) from None
            reader = self._reader()
            greeting.greet(sock, reader, self.hello, self._settings.secret, peer, deadline, binding_of(sock), answer_by)
            self._mailbox.admit(peer)
            self._connect(sock, peer, reader, b"")
        except BaseException:
            if sock is not None:
                drop(sock)
            with self._lock:
                self._taken.discard(peer)
                self._lock.notify_all()
            raise

    def _reached(self, who: str, address: Address, deadline: float) -> socket.socket:
        (host, port), begin = address, time.monotonic()
        try:
            sock = watch(socket.create_connection(address, max(0.001, deadline - begin)))
        except TimeoutError:
            raise DeadlineExceeded(f"{host}:{port} gave no answer within {deadline - begin:.1f} s: check the address, "
                                   "that it runs, and the firewalls between", peer=who) from None
        except OSError as error:
            raise PeerLost(f"cannot reach {host}:{port} (deadline {deadline - begin:.1f} s): {error.strerror}: check the "
                           "address and that it runs there", peer=who) from None
        try:
            self._tune(sock)
            return self._secured(sock, deadline, f"{who} at {host}:{port}")
        except BaseException:
            drop(sock)
            raise

    def take(self, channel: ByteChannel, where: str) -> bool:
        """Greets who has opened a channel to this end from there, on a thread of its own. Whether there was room."""
        if not self._hall.enter_now(channel):
            return False
        self._heed_revoked()
        threading.Thread(target=self._greet, args=(channel, where), name=f"greet {where}", daemon=True).start()
        return True

    def _reserve(self, peer: int) -> None:
        with self._lock:
            if not self._lock.wait_for(lambda: peer not in self._taken, FORMER_S):
                raise InvalidInput("E-TRANSPORT-USE", f"{peer_name(peer)} is connected already")
            self._taken.add(peer)

    def _accept_loop(self, listener: socket.socket) -> None:
        while self._hall.room():
            try:
                sock, address = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    self._closed.wait(0.1)  # the system is short of something: others may free it
                    continue
                if error.errno in (errno.ECONNABORTED, errno.EINTR):
                    continue
                return  # close() shut the listener down
            where = f"{address[0]}:{address[1]}"
            if self._settings.keys is not None:
                try:
                    sock = tls.TlsSocket(sock, self._settings.keys, tls.DATA, server=True)
                except (RecordError, OSError) as error:
                    self._settings.refused(where, str(error))
                    drop(sock)
                    continue
            watch(sock)
            self._hall.enter(sock)
            threading.Thread(target=self._greet, args=(sock, where), name=f"greet {where}", daemon=True).start()

    def _greet(self, sock: ByteChannel, where: str) -> None:
        deadline = time.monotonic() + self._settings.greeting_s
        peer = None
        try:
            reader, hello_deadline = self._reader(), time.monotonic() + self._settings.hello_s
            who = f"the dialler at {where}"
            if isinstance(sock, socket.socket):
                self._tune(sock)
            if isinstance(sock, tls.TlsSocket):
                sock.handshake(hello_deadline)
            if (certified := certified_of(sock)) is not None:
                who = where = f"{certified.name} at {where}"
            hello, proof = greeting.meet(
                sock, reader, self.rank, self._settings.secret, who, hello_deadline, binding_of(sock))
            self._hall.leave(sock)
            reason = self._crowded(sock) or self._judge(hello, certified.name if certified else "")
            if not reason:
                peer = hello.rank
            greeting.welcome(sock, self.rank, reason, proof, where, deadline)
            if peer is None:
                self._settings.refused(where, reason)
                drop(sock)
            else:
                self._connect(sock, peer, reader, hello.session)
        except (CommError, OSError) as error:
            self._settings.refused(where, self._hall.why(sock, error))
            drop(sock)
            if peer is not None:
                if not self._settings.resume:
                    self._mailbox.end(PeerLost("connection lost in the greeting", peer=peer_name(peer)), peer)
                with self._lock:
                    self._taken.discard(peer)
                    self._lock.notify_all()
        finally:
            self._hall.leave(sock)

    def _crowded(self, sock: ByteChannel) -> str:
        certified = certified_of(sock)
        with self._lock:
            full = sum(c.certified == certified for c in self._connections.values()) >= MOST_EACH
        if certified is None or not full:
            return ""
        return coded("E-CONNECTIONS", f"its certificate ({certified.name}) has {MOST_EACH} data connections already")

    def _judge(self, hello: Hello, name: str) -> str:
        reason = (self._admit or same_job(self.hello))(hello)
        if not reason and name != (its := self.named(hello.rank) or name):
            reason = coded("E-RANK", f"shows the certificate of {name}, but {peer_name(hello.rank)} has joined with that "
                           f"of {its}")
        with self._lock:
            if not reason and hello.session in self._barred:
                reason = f"was dropped: {self._barred[hello.session]}"
            former = None if reason else self._connections.get(hello.rank)
        if former is not None and self._settings.resume and hello.session and former.session == hello.session:
            former.end(PeerLost("came back on another connection", peer=peer_name(hello.rank)), broken=True)
        with self._lock:
            if not reason and not self._lock.wait_for(lambda: hello.rank not in self._taken, FORMER_S):
                reason = Later(coded("E-RANK", f"{peer_name(hello.rank)} is connected already: give each process its own rank "
                                     "or end the old one"))
            if not reason and hello.rank == self.rank:
                reason = coded("E-RANK", f"{peer_name(self.rank)} is this end itself: give each process its own rank")
            if not reason:
                self._taken.add(hello.rank)
                self._mailbox.admit(hello.rank)  # before the welcome: who was welcomed counts as connected
        return reason

    def _secured(self, sock: socket.socket, deadline: float, who: str) -> socket.socket:
        """The dialler's end, in TLS where there are keys."""
        if self._settings.keys is None:
            return sock
        made = tls.TlsSocket(sock, self._settings.keys, tls.DATA, server=False)
        watch(made)
        drop(sock)  # which that has taken over
        try:
            made.handshake(deadline)
        except CommError as error:
            drop(made)
            raise error.located(peer=who) from None
        return made

    def _heed_revoked(self) -> None:
        """From the first time on that others may come in."""
        with self._lock:
            heeds, self._heeds = self._heeds, True
        if not heeds and self._settings.keys is not None:
            threading.Thread(target=self._drop_revoked, args=(self._settings.keys,), name="revocations", daemon=True).start()

    def _drop_revoked(self, keys: Keys) -> None:
        while not self._closed.wait(REVOKED_S):
            revoked = keys.revoked()
            with self._lock:
                over = [c for c in self._connections.values() if c.certified is not None and c.certified.serial in revoked]
            for connection in over:
                assert connection.certified is not None
                reason = Refused(f"its certificate ({connection.certified.name}) was revoked", peer=peer_name(connection.peer),
                                 code="E-CERTIFICATE-REVOKED")
                self._settings.refused(connection.certified.name, reason.what)
                connection.end(reason)

    def _reader(self) -> Reader:
        return Reader(greeting.MAX_NBYTES, self.pool.take)

    def _tune(self, sock: socket.socket) -> None:
        tune(sock, self._settings.keepalive_s, self._settings.user_timeout_s)
        if self._settings.buffer_nbytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._settings.buffer_nbytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._settings.buffer_nbytes)

    def _connect(self, sock: ByteChannel, peer: int, reader: Reader, session: bytes) -> None:
        sock.settimeout(None)
        reader.max_nbytes = self._settings.max_nbytes
        connection = Connection(
            sock, peer, self._mailbox, reader, self._ended, self._pacer, session, resumes=self._settings.resume)
        with self._lock:
            if self._closed.is_set():
                raise PeerLost("this end of the transport was closed", peer=peer_name(peer), code="E-SESSION-CLOSED")
            self._connections[peer] = connection
            self._missed.discard(peer)
            connection.start()  # under the lock: close() must find only what it can join

    def _ended(self, connection: Connection) -> None:
        with self._lock:
            self._connections.pop(connection.peer, None)
            self._taken.discard(connection.peer)
            self._lock.notify_all()
            self._ending = {c for c in self._ending if c.alive()} | {connection}
            over = connection.over
            if connection.session and over is not None and not (connection.broken or self._closed.is_set()):
                self._barred[connection.session] = coded(over.code, over.what)
            if connection.broken and connection.by_peer:
                self._missed.add(connection.peer)
        if connection.broken and over is not None and not self._closed.is_set():
            self.broken(connection.peer, over)

    def missed(self) -> tuple[str, ...]:
        """Peers whose machine has ended their connection without a word, and who have not come back."""
        with self._lock:
            return tuple(peer_name(peer) for peer in sorted(self._missed))

    def limit_kept(self, nbytes: int) -> None:
        """As Settings.max_kept_nbytes, once it is known what peers have reason to send."""
        self._mailbox.max_kept_nbytes = nbytes

    def pace(self, bps: float) -> None:
        """So much this end's link carries out, as far as is known (0: unknown): connections that send much at once share it."""
        self._pacer.follow(bps)

    # ---- the five methods

    def send(self, peer: int, header: Header, body: memoryview | bytes = b"") -> Handle:
        if len(body) > self._settings.max_nbytes:
            raise InvalidInput("E-TRANSPORT-USE",
                               f"a body of {len(body)} bytes for {peer_name(peer)}, allowed {self._settings.max_nbytes}")
        operation = mailbox.sending(peer, header)
        with self._lock:
            connection = self._connections.get(peer)
        if connection is not None:
            connection.send(operation, header, body)
        else:
            operation.fail(self._mailbox.failure(peer) or PeerLost("not connected", peer=peer_name(peer)))
        return operation

    def recv(self, peer: int | None = None, match: Key | None = None) -> Handle:
        return self._mailbox.recv(peer, match)

    def wait(self, handle: Handle, deadline: float) -> Message:
        return mailbox.wait(handle, deadline)

    def abort(self, reason: CommError, peer: int | None = None) -> None:
        """Drops the connections too: the other side reads "connection closed"."""
        self._mailbox.abort(reason, peer)
        with self._lock:
            cut = [c for c in self._connections.values() if peer in (None, c.peer)]
        for connection in cut:
            connection.end(reason)

    def close(self, flush_s: float | None = None) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            listeners, self._listeners = self._listeners, []
            connections = list(self._connections.values())
        self._hall.close()
        for listener in listeners:
            wake(listener)
            drop(listener)
        reason = CommError("this end of the transport was closed", code="E-SESSION-CLOSED")
        self._mailbox.abort(reason)
        deadline = time.monotonic() + (self._settings.flush_s if flush_s is None else flush_s)
        bye = Header(Kind.BYE, sender=self.rank)
        for connection in connections:
            connection.send(mailbox.sending(connection.peer, bye), bye, b"", last=True)
        for connection in connections:
            if not connection.join(deadline):
                connection.end(reason)
        with self._lock:
            rest = list(self._ending)
        for connection in rest:
            connection.join(time.monotonic() + 1.0)
