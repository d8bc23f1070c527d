"""One connected socket after the greeting: sender, receiver, order on the wire. Knows one peer, not how it was reached."""

from __future__ import annotations

import heapq
import os
import socket
import threading
import time
from collections.abc import Callable

from commlayer.errors import CommError, CorruptFrame, PeerLost
from commlayer.transport import framing, mailbox
from commlayer.transport.crc import crc32c
from commlayer.transport.framing import Frame, Reader
from commlayer.transport.mailbox import Mailbox, Operation
from commlayer.transport.pacing import Pacer
from commlayer.transport.protocol import Header, Kind, Message, peer_name

INLINE_NBYTES = 64 << 10
"""On an idle wire, bodies up to this go out on the caller's thread, as far as they go without blocking."""

_LAST = 1 << 32
"""After every step: where BYE waits its turn."""
_ONCE = frozenset((Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME))
_PROBES = frozenset((Kind.PROBE, Kind.PROBE_OK))

_sockets: set[socket.socket] = set()
"""All open ones. A forked child (a DataLoader worker) closes its copies, else a dead trainer would seem connected."""


def watch(sock: socket.socket) -> socket.socket:
    _sockets.add(sock)
    return sock


def drop(sock: socket.socket) -> None:
    _sockets.discard(sock)
    sock.close()


def _close_copies() -> None:
    for sock in _sockets:
        sock.close()  # never shutdown: that would end the parent's connection
    _sockets.clear()


os.register_at_fork(after_in_child=_close_copies)


def _on_one_machine(sock: socket.socket) -> bool:
    """Its two ends, which then have no link to share."""
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:  # the peer is gone already, as its reader will say
        return True


class _Outgoing:
    """A frame that is queued or partly on the wire."""

    def __init__(self, operation: Operation, header: Header, body: memoryview | bytes) -> None:
        self.operation, self.header = operation, header
        self._body = memoryview(body).cast("B")
        self._packed = framing.pack(header, len(self._body))
        self._left: list[memoryview] | None = None

    @property
    def nbytes(self) -> int:
        return len(self._body)

    def write(self, sock: socket.socket, flags: int) -> bool:
        """One system call's worth. Whether all is out."""
        if self._left is None:
            head = framing.seal(self._packed, crc32c(self._body))
            self._left = [memoryview(head), self._body] if self._body else [memoryview(head)]
        n = sock.sendmsg(self._left, [], flags | socket.MSG_NOSIGNAL)
        while self._left and n >= len(self._left[0]):
            n -= len(self._left.pop(0))
        if self._left and n:
            self._left[0] = self._left[0][n:]
        return not self._left


class Connection:
    """Made connected; start() begins. `ended` is called once, when it is over."""

    def __init__(
        self, sock: socket.socket, peer: int, box: Mailbox, reader: Reader, ended: Callable[[Connection], None], pacer: Pacer,
    ) -> None:
        self.peer = peer
        self._pacer = None if _on_one_machine(sock) else pacer
        self._sock, self._mailbox, self._reader, self._ended = sock, box, reader, ended
        self._work = threading.Condition()
        self._queue: list[tuple[int, int, int, _Outgoing]] = []
        self._seq = 0
        self._busy = False  # somebody is writing a frame
        self._rest: _Outgoing | None = None  # a frame that a caller began and the sender thread must finish
        self._users = 2  # threads that may be inside a system call on the socket; the last one out closes it
        self._over: CommError | None = None
        name = peer_name(peer)
        self._threads = [
            threading.Thread(target=self._send_loop, name=f"send to {name}", daemon=True),
            threading.Thread(target=self._receive_loop, name=f"receive from {name}", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send(self, operation: Operation, header: Header, body: memoryview | bytes, *, last: bool = False) -> None:
        frame = _Outgoing(operation, header, body)
        with self._work:
            over = self._over
            inline = over is None and not (self._busy or self._queue) and len(body) <= INLINE_NBYTES and not last
            if inline:
                self._busy = True
                self._users += 1
            elif over is None:
                self._seq += 1
                heapq.heappush(self._queue, (_LAST if last else header.step, header.order, self._seq, frame))
                if not self._busy:
                    self._work.notify()
        if over is not None:
            operation.fail(over)
        elif inline:
            self._write_inline(frame)

    def _write_inline(self, frame: _Outgoing) -> None:
        done, error = False, None
        try:
            done = frame.write(self._sock, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError as failure:
            error = failure
        with self._work:
            if done or error or self._over:
                self._busy = False
            else:
                self._rest = frame
            if self._queue or self._rest:
                self._work.notify()
        if error is not None:
            self.end(self._lost(error))
        if done:
            mailbox.sent(frame.operation, frame.header)
        elif self._over is not None:
            frame.operation.fail(self._over)
        self._leave()

    def _send_loop(self) -> None:
        while (frame := self._next()) is not None:
            try:
                self._pace(frame)
                while not frame.write(self._sock, 0):
                    pass
                if frame.header.kind == Kind.BYE:
                    self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self.end(self._lost(error))
                assert self._over is not None
                frame.operation.fail(self._over)
                break
            with self._work:
                self._busy = False
            mailbox.sent(frame.operation, frame.header)
        self._leave()

    def _pace(self, frame: _Outgoing) -> None:
        if self._pacer is None:
            return
        if frame.header.kind in _PROBES:
            self._pacer.lift(self._sock)
        elif frame.nbytes > INLINE_NBYTES:
            self._pacer.begins(self._sock)

    def _next(self) -> _Outgoing | None:
        with self._work:
            while self._over is None:
                frame, self._rest = self._rest, None
                if frame is None and self._queue and not self._busy:
                    frame = heapq.heappop(self._queue)[-1]
                if frame is not None:
                    self._busy = True
                    return frame
                self._work.wait()
        return None

    def _receive_loop(self) -> None:
        try:
            while True:
                while (frame := self._reader.next()) is not None:
                    self._take(frame)
                n = self._sock.recv_into(self._reader.wanted())
                if n == 0:
                    raise PeerLost("connection closed" + ("" if self._reader.between else " in the middle of a frame"))
                self._reader.filled(n)
        except CommError as error:
            self.end(type(error)(error.what, peer=peer_name(self.peer), step=error.step, bucket=error.bucket))
        except OSError as error:
            self.end(self._lost(error))
        except Exception as error:
            self.end(CommError(f"its receiver failed here: {error!r}", peer=peer_name(self.peer)))
            raise
        finally:
            self._leave()

    def _take(self, frame: Frame) -> None:
        kind = frame.header.kind
        if self._over is not None:
            raise self._over  # what was read ahead must not mix with a new connection of this peer
        if kind == Kind.BYE:
            raise PeerLost("closed its end")
        if kind in _ONCE:
            raise CorruptFrame(f"{Kind(kind).name} in the middle of a connection")
        self._mailbox.deliver(Message(self.peer, frame.header, frame.body))

    def _lost(self, error: OSError) -> PeerLost:
        return PeerLost(f"connection lost: {error.strerror or error}", peer=peer_name(self.peer))

    def end(self, reason: CommError) -> None:
        """Over, now. Everything under way with this peer fails with `reason`; the first one stays."""
        with self._work:
            if self._over is not None:
                return
            self._over = reason
            frames = [item[-1] for item in self._queue] + ([self._rest] if self._rest else [])
            self._queue, self._rest = [], None
            self._work.notify_all()
        self._mailbox.end(reason, self.peer)
        self._ended(self)  # after the mailbox: from here the peer may connect anew
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes both threads out of their system calls
        except OSError:
            pass  # the other side was faster
        for frame in frames:
            frame.operation.fail(reason)

    def _leave(self) -> None:
        with self._work:
            self._users -= 1
            left = self._users
        if left == 0:
            if self._pacer is not None:
                self._pacer.lift(self._sock)
            drop(self._sock)

    def join(self, deadline: float) -> bool:
        """Whether both threads are through, at the latest at `deadline` of time.monotonic()."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not self.alive()

    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)
