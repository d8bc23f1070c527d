"""An established connection to one peer: sender and receiver threads, and the priority order of frames on the wire."""

from __future__ import annotations

import heapq
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from commlayer.errors import CommError, CorruptFrame, Damaged, PeerEnded, PeerLost
from commlayer.transport import framing
from commlayer.transport.chunking import Assembly, HeldBody, UnfinishedBodies, prefix_crc, split_parts
from commlayer.transport.crc import crc32c
from commlayer.transport.flow.pacing import Pacer
from commlayer.transport.flow.send_control import SendControl
from commlayer.transport.flow.traffic import TRAFFIC
from commlayer.transport.framing import Frame, Reader
from commlayer.transport.protocol import (
    MAY_LACK_ZEROS,
    NO_SIGNAL,
    ByteChannel,
    Flag,
    Handle,
    Header,
    Key,
    Kind,
    Message,
    clear_traceback,
    closed_by_peer,
    complete_send,
    key,
    peer_certificate,
    peer_name,
    reports_peer_close,
)
from commlayer.transport.zero_chunks import drop_zeros

KEEP_IDLE: int = getattr(socket, "TCP_KEEPIDLE", None) or socket.TCP_KEEPALIVE  # type: ignore[attr-defined]  # of macOS
_LAST = 1 << 32
"""Sort key of BYE. The number is above all step numbers, so BYE is sent last."""
FRAME_NBYTES = 2048
"""Bytes that each queued frame counts in addition to a body that was made for it: the memory of its Python objects."""
SEND = int(NO_SIGNAL)
SEND_NOW = int(NO_SIGNAL | socket.MSG_DONTWAIT)
"""Flags of a system call that sends, as plain integers, since `|` of enums costs microseconds."""
LOOK_S = 1.0
"""Seconds after which a thread that holds a message back looks at the limits again."""
_ONCE = frozenset((Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME))
_PROBES = frozenset((Kind.PROBE, Kind.PROBE_OK))

_sockets: set[socket.socket] = set()
"""All open sockets. A forked child (DataLoader worker) closes its copies; otherwise a dead training process would seem
connected."""


def track(sock: socket.socket) -> socket.socket:
    _sockets.add(sock)
    return sock


def connect_socket(address: tuple[str, int], deadline: float) -> socket.socket:
    return track(socket.create_connection(address, max(0.001, deadline - time.monotonic())))


def close_channel(channel: ByteChannel) -> None:
    if isinstance(channel, socket.socket):
        _sockets.discard(channel)
    channel.close()


def shut_down(channel: ByteChannel) -> None:
    """Ends a connection or a listener, and wakes the threads that are blocked on it."""
    try:
        channel.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # already closed


def tune_socket(sock: socket.socket, keepalive_s: int, user_timeout_s: float) -> None:
    """Disables Nagle's algorithm and lets the kernel close silent connections: see `Settings` in endpoint.py."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, KEEP_IDLE, keepalive_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if user_timeout_s and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * user_timeout_s))


def _close_copies() -> None:
    for sock in _sockets:
        sock.close()  # never shutdown: that would end the parent's connection
    _sockets.clear()


os.register_at_fork(after_in_child=_close_copies)


def _on_one_machine(sock: ByteChannel) -> bool:
    """Returns whether both ends are on one machine, so no link is used. False if unknown."""
    if not isinstance(sock, socket.socket):
        return False
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:  # the peer is gone; the receiver thread reports it
        return True


class Content:
    """A message as bytes. The bytes are computed once, also if several peers get the message."""

    def __init__(self, header: Header, body: memoryview | bytes) -> None:
        self.header = header
        self.held_nbytes = FRAME_NBYTES + (len(body) if isinstance(body, bytes) else 0)
        """Memory that the message occupies while it waits. A memoryview is memory that its owner keeps in any case."""
        self._body = memoryview(body).cast("B")
        self.nbytes = len(self._body)
        self._packed = framing.pack(header, self.nbytes)
        self._final: tuple[Header, memoryview] | None = None
        self._frame: tuple[memoryview, ...] = ()

    @property
    def is_limited(self) -> bool:
        """True: the limit of this process's rate applies. A probe measures the link."""
        return self.nbytes > 0 and self.header.kind not in _PROBES

    def hold_s(self) -> float:
        """Returns the seconds before the message may be sent."""
        return TRAFFIC.gradients.hold_s() if TRAFFIC.gradients.bps and self.is_limited else 0.0

    def count_sent(self, nbytes: int) -> int:
        """Counts bytes that were sent of the message, and returns their number."""
        TRAFFIC.add(nbytes)
        if TRAFFIC.gradients.bps and self.is_limited:
            TRAFFIC.gradients.count(nbytes)
        return nbytes

    def final(self) -> tuple[Header, memoryview]:
        """Returns header and body without the zero chunks. The method may copy the body, so it is called only when the
        message's turn has come."""
        if self._final is None:
            header, body = self.header, self._body
            if header.kind in MAY_LACK_ZEROS and (short := drop_zeros(body)) is not None:
                header, body = header._replace(flags=header.flags | Flag.WITHOUT_ZEROS), memoryview(short)
                self._packed = framing.pack(header, len(body))
            self._final = header, body
        return self._final

    def frame(self) -> tuple[memoryview, ...]:
        """Returns the pieces of the message as one frame."""
        if not self._frame:
            _, body = self.final()
            head = memoryview(framing.seal(self._packed, crc32c(body)))
            self._frame = (head, body) if body else (head,)
        return self._frame


class _Outgoing:
    """A message that waits or is partly sent to one peer. `begin` prepares it for sending. A large message is sent in several
    parts; `cut` sets their size."""

    def __init__(self, operation: Handle, content: Content) -> None:
        self.operation, self.content, self.header = operation, content, content.header
        self.nbytes = content.nbytes
        """Size of the body; after `begin` as sent, without the zero chunks that are left out."""
        self._parts = [(0, self.nbytes)]
        self._next = 0
        self._left: list[memoryview] = []
        """Bytes of the current part that are not sent yet; empty before its first system call."""
        self.instead: Content | None = None
        """The message that is sent instead of the parts after the current one."""

    def resume(self, sent_nbytes: int) -> None:
        """Continues a frame of which a system call has already sent `sent_nbytes`, possibly 0."""
        self._left = [*self.content.frame()]
        self._advance(sent_nbytes)

    def begin(self, held: HeldBody | None) -> None:
        """Leaves out zero chunks, and the parts that the peer has of the same body."""
        header, body = self.content.final()
        if len(body) != self.nbytes:
            self.nbytes, self._parts = len(body), [(0, len(body))]
        if held is not None and held.part < len(parts := split_parts(self.nbytes, held.part_nbytes)) \
                and held.crc == prefix_crc(header._replace(parts=len(parts)), body[: parts[held.part][0]]):
            self._parts, self._next = parts, held.part

    @property
    def all_sent(self) -> bool:
        return self.parts_left == 0

    @property
    def parts_left(self) -> int:
        return len(self._parts) - self._next

    @property
    def left_nbytes(self) -> int:
        place = self._next  # another thread may increase it
        return self.nbytes - self._parts[place][0] if place < len(self._parts) and self.instead is None else 0

    def cut(self, part_nbytes: int) -> None:
        """Splits the body into parts of at most this size. Called before every part; only the call before the first part has
        an effect."""
        if self._next == 0 and not self._left:
            self._parts = split_parts(self.nbytes, part_nbytes)

    def part_nbytes(self) -> int:
        start, stop = self._parts[self._next]
        return stop - start

    def write(self, sock: ByteChannel) -> bool:
        """Makes one system call that sends bytes of the current part. Returns whether the part has been sent completely."""
        if not self._left:
            self._left = self._pieces()
        self._advance(self.content.count_sent(sock.sendmsg(self._left, [], SEND)))
        if self._left:
            return False
        self._next += 1
        return True

    def _advance(self, n: int) -> None:
        while self._left and n >= len(self._left[0]):
            n -= len(self._left.pop(0))
        if self._left:
            self._left[0] = self._left[0][n:]

    def _pieces(self) -> list[memoryview]:
        if len(self._parts) == 1:
            return [*self.content.frame()]
        header, body = self.content.final()
        start, stop = self._parts[self._next]
        part = body[start:stop]
        header = header._replace(part=self._next, parts=len(self._parts))
        return [memoryview(framing.encode(header, len(part), crc32c(part))), part]


class SizeLimits(NamedTuple):
    """Limits on the memory and messages that one peer may cause at this end."""

    body_nbytes: Mapping[int, int] | None = None
    """Maps a kind of message to the size of its largest body; other kinds have no body. None: only the transport's limit."""
    unfinished_nbytes: int = 4 << 30
    """Largest size of all partly received bodies together."""
    messages: float = math.inf
    """Number of messages from the peer that may be partly received. Also the number of messages without a body that may wait to
    be sent to the peer: while these use more memory, nothing is taken from the peer."""


_Item = tuple[int, int, int, _Outgoing]
"""A queued frame with its sort keys: step, order, sequence number, frame."""


CAUSE_S = 0.2
"""How long a thread that does not know why a connection was lost waits for the other one."""


class Connection:
    """A connection whose handshake is complete. start() starts its threads; `ended` is called once, when the connection has
    ended."""

    def __init__(
        self, sock: ByteChannel, peer: int, arrived: Callable[[Message], None], reader: Reader,
        ended: Callable[[Connection], None], pacer: Pacer, session: bytes, *, resumes: bool,
        limits: Callable[[], SizeLimits], former: UnfinishedBodies, held: tuple[HeldBody, ...],
    ) -> None:
        """`arrived`: takes each message; may raise CorruptFrame. `session`: random bytes from the dialer's hello that identify
        its process; b"" at the dialer's end. `resumes`: True: the peer may reconnect after a lost
        connection. `limits`: returns what the peer may cause. `former`: what the peer's former connection left unfinished;
        `held`: what the peer has of messages that this end did not send completely."""
        self.peer, self.session = peer, session
        self.broken = False
        """True: the connection was lost without a BYE, abort or close(), so it may be re-established."""
        self.by_peer = False
        """True: the peer's machine closed the connection, so the peer's process may have died. Always False for a gRPC
        stream."""
        self.heard_s = time.monotonic()
        """When bytes last arrived from the peer, by time.monotonic()."""
        self._resumes = resumes
        self.certified = peer_certificate(sock)
        self._control = SendControl(sock, None if _on_one_machine(sock) else pacer)
        self._sock, self._arrived, self._reader, self._ended = sock, arrived, reader, ended
        self._limits = limits
        self._assembly = Assembly(reader.allocate, self._most_nbytes, lambda: limits().unfinished_nbytes,
                                  lambda: limits().messages, former)
        self.at_peer: dict[Key, HeldBody] = {one.key: one for one in held}
        """What the peer has of messages that are not sent again yet."""
        reader.place = self._assembly.place
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        """Notified when a frame has been sent, while `_awaits_room`."""
        self._awaits_room = False
        self._unsent_nbytes = 0
        self._queue: list[_Item] = []
        self._seq = 0
        self._busy = False  # a thread is writing a frame
        self._writing: _Outgoing | None = None  # what the sender thread is writing
        self._rest: _Item | None = None  # a frame that a caller's thread began to write and the sender thread must finish
        self._sent_bye = False  # the end of the stream is the peer's answer to it
        self._users = 2  # threads that may be in a system call on the socket; the last one closes the socket
        self.error: CommError | None = None
        """The error that ended the connection. The value is None while the connection is open."""
        name = peer_name(peer)
        self._threads = [
            threading.Thread(target=self._send_loop, name=f"send to {name}", daemon=True),
            threading.Thread(target=self._receive_loop, name=f"receive from {name}", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send(self, operation: Handle, content: Content, *, last: bool = False) -> None:
        with self._lock:
            error = self.error
            inline = error is None and not (self._busy or self._queue) and not last \
                and content.nbytes <= self._control.inline_nbytes and not content.hold_s() \
                and not (self.at_peer and key(content.header) in self.at_peer)
            if error is None:
                self._unsent_nbytes += content.held_nbytes
            if inline:
                self._busy = True
                self._users += 1
            elif error is None:
                heapq.heappush(self._queue, self._item(_Outgoing(operation, content), last=last))
                if not self._busy:
                    self._work.notify()
        if error is not None:
            operation.fail(error)
        elif inline:
            self._write_inline(operation, content)

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of messages that wait to be sent."""
        with self._lock:
            frames = [item[-1] for item in self._queue] + ([] if self._writing is None else [self._writing])
            return sum(frame.left_nbytes for frame in frames)

    def replace(self, operation: Handle, header: Header) -> bool:
        """Sends a message without a body instead of one that is not sent completely. Returns False if this connection has sent
        or is sending the last part of that one."""
        content = Content(header, b"")
        with self._lock:
            for place, (step, order, number, frame) in enumerate(self._queue):
                if frame.operation is operation:
                    self._queue[place] = step, order, number, self._replaced(frame, content)
                    return True
            if (writing := self._writing) is not None and writing.operation is operation and writing.parts_left > 1:
                writing.instead = content
                return True
        return False

    def _replaced(self, frame: _Outgoing, content: Content) -> _Outgoing:
        self._sent(frame.content)
        self._unsent_nbytes += content.held_nbytes
        return _Outgoing(frame.operation, content)

    def _item(self, frame: _Outgoing, *, last: bool = False) -> _Item:
        self._seq += 1
        return _LAST if last else frame.header.step, frame.header.order, self._seq, frame

    def _write_inline(self, operation: Handle, content: Content) -> None:
        n, frame, error = 0, content.frame(), None
        try:
            n = content.count_sent(self._sock.sendmsg(frame, [], SEND_NOW))
        except BlockingIOError:
            pass
        except OSError as failure:
            error = failure
        done = n == sum(map(len, frame))
        with self._lock:
            if done or error or self.error:
                self._busy = False
                self._sent(content)
            else:
                rest = _Outgoing(operation, content)
                rest.resume(n)
                self._rest = self._item(rest)
            if self._queue or self._rest:
                self._work.notify()
            if error is None:
                self._users -= 1
            remaining = self._users
        if error is not None:
            self._end_broken(error)
        if done:
            complete_send(operation, content.header)
        elif self.error is not None:
            operation.fail(self.error)
        if error is not None:
            self._leave()
        elif remaining == 0:
            self._close()

    def _sent(self, content: Content) -> None:
        """Frees the room of a message that waits no longer. Called with the lock."""
        self._unsent_nbytes -= content.held_nbytes
        if self._awaits_room:
            self._room.notify()

    def _send_loop(self) -> None:
        while (item := self._next()) is not None:
            frame = item[-1]
            try:
                frame.begin(self.at_peer.pop(key(frame.header), None) if self.at_peer else None)
                self._control.begin(frame.nbytes, probe=frame.header.kind in _PROBES)
                part_nbytes = min(self._control.part_nbytes or math.inf, TRAFFIC.gradients.part_nbytes)
                if part_nbytes < math.inf:
                    frame.cut(int(part_nbytes))
                while not frame.write(self._sock):
                    pass
                if frame.header.kind == Kind.BYE:
                    self._sent_bye = True
                    self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                frame.operation.fail(self._end_broken(error))
                break
            with self._lock:
                self._busy, self._writing = False, None
                ended = self.error
                if frame.all_sent:
                    self._sent(frame.content)
                elif ended is None:
                    step, order, number, _ = item
                    heapq.heappush(self._queue, item if frame.instead is None else
                                   (step, order, number, self._replaced(frame, frame.instead)))
            if frame.all_sent:
                complete_send(frame.operation, frame.header)
            elif ended is not None:
                frame.operation.fail(ended)
        self._leave()

    def _probe_past_limit(self) -> _Item | None:
        """Takes the first probe from the queue if the message before it must wait for the limit of this process's rate."""
        if self._queue[0][-1].content.hold_s():
            for place, item in enumerate(self._queue):
                if item[-1].header.kind in _PROBES:
                    self._queue[place] = self._queue[-1]
                    self._queue.pop()
                    heapq.heapify(self._queue)
                    return item
        return None

    def _next(self) -> _Item | None:
        with self._work:
            while self.error is None:
                if self._rest is not None:
                    item, self._rest = self._rest, None
                    self._busy = True
                    return item
                if self._busy or not self._queue:
                    if not self._queue:
                        self._control.idle()
                    self._work.wait()
                elif probe := self._probe_past_limit():
                    self._busy = True
                    return probe
                elif hold_s := max(self._control.hold_s((first := self._queue[0][-1]).nbytes), first.content.hold_s()):
                    self._work.wait(min(hold_s, LOOK_S))  # limits can change
                else:
                    self._busy = True
                    item = heapq.heappop(self._queue)
                    self._writing = item[-1]
                    return item
        return None

    def _receive_loop(self) -> None:
        try:
            while True:
                while (frame := self._reader.next()) is not None:
                    if (assembled := self._assembly.whole(frame)) is not None:
                        if self._unsent_nbytes:
                            self._await_room()
                        self._take(assembled)
                n = self._sock.recv_into(self._reader.wanted())
                TRAFFIC.add(0, n)
                if n == 0:
                    between = self._reader.at_frame_boundary and self._assembly.at_message_boundary
                    how = "connection closed" + ("" if between else " in the middle of a frame")
                    self._end_lost(PeerLost(how + self._name, peer=peer_name(self.peer)), closed_by_peer(self._sock))
                    return
                self.heard_s = time.monotonic()
                self._reader.filled(n)
        except CommError as error:
            named = error.located(what=error.what + self._name, peer=peer_name(self.peer))
            self.end(named, broken=isinstance(error, Damaged))
            clear_traceback(error)  # `error` may be the reason that is kept after this thread ends
        except OSError as error:
            self._end_broken(error)
        except Exception as error:
            self.end(CommError(f"the receive thread of this process failed: {error!r}", peer=peer_name(self.peer)))
            raise
        finally:
            self._leave()

    def _await_room(self) -> None:
        """Waits, at most until the connection ends, while more than the allowed bytes wait to be sent to the peer. A peer that
        does not read its replies thus cannot send further requests."""
        def is_ready() -> bool:
            return self._unsent_nbytes <= self._limits().messages * FRAME_NBYTES or self.error is not None

        if not is_ready():
            with self._lock:
                self._awaits_room = True
                self._room.wait_for(is_ready)
                self._awaits_room = False

    def _most_nbytes(self, header: Header) -> int:
        by_kind = self._limits().body_nbytes
        return self._reader.max_nbytes if by_kind is None else min(self._reader.max_nbytes, by_kind.get(header.kind, 0))

    def _take(self, frame: Frame) -> None:
        kind = frame.header.kind
        if self.error is not None:
            raise self.error  # buffered frames must not mix with a new connection of this peer
        if kind == Kind.BYE:
            raise PeerEnded("closed its connection in order")
        if kind in _ONCE:
            raise CorruptFrame(f"sent a {Kind(kind).name} frame after the handshake")
        self._arrived(Message(self.peer, frame.header, frame.body))

    def _end_broken(self, error: OSError) -> CommError:
        """Ends the connection because of an error of its socket. Returns the error that ended it."""
        lost = PeerLost(f"connection lost: {error.strerror or error}{self._name}", peer=peer_name(self.peer))
        self._end_lost(lost, reports_peer_close(self._sock) and isinstance(error, ConnectionResetError))
        return self.error or lost

    def _end_lost(self, lost: PeerLost, by_peer: bool) -> None:
        """Ends a connection that was lost. The kernel reports the cause only to the first of both threads that asks. The other
        thread sees the end of the stream or a broken pipe, so it waits until the first one has recorded the cause."""
        if not (by_peer or self._sent_bye):
            with self._work:
                self._work.wait_for(lambda: self.error is not None, CAUSE_S)
        self.end(lost, broken=True, by_peer=by_peer)

    @property
    def _name(self) -> str:
        return f" ({self.certified.name})" if self.certified else ""

    def end(self, reason: CommError, *, broken: bool = False, by_peer: bool = False) -> None:
        """Ends the connection. All sends in progress fail with `reason`. `broken`: True: the connection may be re-established
        if `resumes`. Only the first call has an effect."""
        with self._work:
            if self.error is not None:
                return
            self.error, self.broken, self.by_peer = reason, broken and self._resumes, by_peer
            frames = [item[-1] for item in (*self._queue, *([self._rest] if self._rest else []))]
            self._queue, self._rest = [], None
            self._work.notify_all()
            self._room.notify_all()
        self._ended(self)
        shut_down(self._sock)
        for frame in frames:
            frame.operation.fail(reason)

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            remaining = self._users
        if remaining == 0:
            self._close()

    def _close(self) -> None:
        self._control.end()
        close_channel(self._sock)

    def join(self, deadline: float) -> bool:
        """Waits until `deadline` (time.monotonic()) for both threads to end. Returns whether they have ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not self.alive()

    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def unfinished(self, deadline: float) -> UnfinishedBodies:
        """Returns what this connection, which has ended, leaves to the peer's next one: nothing if bytes can still arrive after
        `deadline`."""
        receiver = self._threads[1]
        receiver.join(max(0.0, deadline - time.monotonic()))
        return {} if receiver.is_alive() else self._assembly.unfinished()
