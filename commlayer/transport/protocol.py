"""Message kinds, the frame header, and handles of messages in progress."""

from __future__ import annotations

import enum
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from commlayer.errors import CommError, DeadlineExceeded, InvalidInput

if TYPE_CHECKING:
    from commlayer.transport.keys.key_folder import PeerCertificate

log = logging.getLogger("commlayer")

SERVER_BASE = 0x8000
"""First peer number of servers. Peer numbers have 16 bits: a worker's number is its rank, and server i has SERVER_BASE + i."""


def peer_name(peer: int) -> str:
    """Returns the peer's name in errors and logs, for example "worker 3" or "server 0"."""
    return f"server {peer - SERVER_BASE}" if peer >= SERVER_BASE else f"worker {peer}"


class Kind(enum.IntEnum):
    """Kind of a frame. A receiver drops a peer that sends an unknown number."""

    HELLO = 1  # first frame of a connection: job, versions, plan hash (msgpack body)
    WELCOME = 2  # the acceptor's decision: msgpack body, with an empty error or the reason of a refusal
    PUSH = 3  # worker -> server: a contribution
    RESULT = 4  # server -> worker: the sum
    STALLED = 5  # server -> worker: the workers that have not contributed yet (msgpack body)
    STATE_GET = 6  # worker -> server: send your codec state of this bucket
    STATE = 7  # server -> worker, or worker -> server to restore it
    STATE_OK = 8  # server -> worker: restored
    DATA = 9  # point to point, for tests and probes
    BYE = 10  # orderly end of a connection: the closing that follows is not a loss
    PROBE = 11  # worker -> server: a body of any bytes; `used` is the size of the answer
    PROBE_OK = 12  # server -> worker: as many zeros as `used` of the PROBE says
    PLAN = 13  # worker -> server, between steps: the plan of the generation that the header names
    PLAN_OK = 14  # server -> worker: the server now sums that plan, or the error (UTF-8 body)
    PACE = 15  # worker -> server on its own node: their link uploads `used` bit/s
    UNDO = 16  # worker -> server, between steps and before PLAN: slices that were not applied, as in `undone` of a PUSH
    CHALLENGE = 17  # the answer to HELLO: msgpack body
    PROOF = 18  # the dialer's answer to CHALLENGE, before WELCOME: msgpack body
    FOLLOW = 19  # worker -> server: send the result of this sum, to which the worker does not contribute
    FOLLOWED = 20  # server -> worker: the result, as in RESULT
    AGAIN = 21  # after a reconnect; worker -> server: has this PUSH arrived? server -> worker: send it again


class Flag:
    """Bits of Header.flags. The flags are plain integers, because they are tested for every frame, and `&` of an enum costs
    microseconds."""

    NONE = 0
    # A worker aborted the step, so there is no sum (PUSH, RESULT, FOLLOWED). The body is the reason (UTF-8). An empty one means
    # that the worker has only withdrawn this contribution.
    ABANDON = 2
    LOST = 4  # the server no longer has the result that a follower requests (FOLLOWED, with ABANDON)
    MEAN = 16  # PUSH: the body counts `weight` times in a mean; the result is the mean, rounded once
    WITHOUT_ZEROS = 32  # PUSH, RESULT: the body is sent without its zero chunks. Set and removed by the transport
    ALL = ABANDON | LOST | MEAN | WITHOUT_ZEROS


KIND_NAMES = {int(kind): kind.name for kind in Kind}
_SENDS = {kind: f"send of {name}" for kind, name in KIND_NAMES.items()}
ANSWERED_BY: dict[int, Kind] = {
    Kind.PUSH: Kind.RESULT, Kind.STATE_GET: Kind.STATE, Kind.STATE: Kind.STATE_OK, Kind.PROBE: Kind.PROBE_OK,
    Kind.PLAN: Kind.PLAN_OK, Kind.FOLLOW: Kind.FOLLOWED,
}
"""Maps each kind of request to the kind of its answer. Frames of all other kinds have no answer."""
MAY_LACK_ZEROS = frozenset((Kind.PUSH, Kind.RESULT, Kind.FOLLOWED))
"""Kinds whose bodies are sent without zero chunks. Gradients of embeddings and experts have zero chunks; probes must keep their
size."""
NUMBERED = frozenset((Kind.STATE_GET, Kind.STATE, Kind.UNDO, Kind.PLAN))
"""Kinds of requests that have a sequence number in `used`, so repeats are recognized. Numbers start at 1 for each worker and
server; 0: no number."""


class Header(NamedTuple):
    """The fixed part of a frame. docs/reference/wire.md defines its bytes; only framing.py reads and writes them."""

    kind: int
    generation: int = 0
    step: int = 0
    bucket: int = 0
    part: int = 0
    parts: int = 1
    """Number of frames into which a body is split. 1 in every message outside the transport, which splits bodies and
    reassembles them."""
    round: int = 0
    codec: int = 0
    sender: int = 0
    order: int = 0
    """Priority on the wire within a step: lower numbers are sent first."""
    flags: int = 0
    weight: float = 0.0
    used: int = 0
    """One bit per slice of the bucket: set if the sender has a gradient for that slice. A server combines the bits of all
    workers with OR."""
    total: float = 0.0
    """In a PUSH: the total weight of all workers for which the payload was compressed; 0 if the codec keeps no residual."""
    undone: int = 0
    """One bit per slice of the bucket: set if the last result was not applied to that slice. The server adds that part of the
    result back to its residual."""
    joined: int = 0
    """In a PUSH: number of workers that have joined since the job began and that the sender counts as members of this
    exchange."""


Key = tuple[int, int, int, int, int, int]


def key(h: Header) -> Key:
    """Returns the header fields by which requests and answers match. The fields identify a contribution except for its
    sender."""
    return (h.kind, h.generation, h.step, h.bucket, h.part, h.round)


def answer_key(h: Header) -> Key:
    """Returns the key of the answer to a request."""
    return (ANSWERED_BY[h.kind], h.generation, h.step, h.bucket, h.part, h.round)


class Message(NamedTuple):
    peer: int
    header: Header
    body: memoryview


_NO_BODY = memoryview(b"")


class Handle:
    """A send, or a request that waits for its answer. The operation ends once, by complete() or fail(); later calls have no
    effect. Callbacks run in the thread that completes it, and must not block."""

    __slots__ = ("_callbacks", "_error", "_event", "_lock", "_message", "_what", "bucket", "peer", "step")

    def __init__(self, what: str, peer: int, step: int | None = None, bucket: int | None = None) -> None:
        self._what, self.peer, self.step, self.bucket = what, peer, step, bucket
        self._lock = threading.Lock()
        self._message: Message | None = None
        self._error: CommError | None = None
        self._callbacks: list[Callable[[Handle], None]] | None = []
        self._event: threading.Event | None = None

    def done(self) -> bool:
        return self._message is not None or self._error is not None

    def error(self) -> CommError | None:
        return self._error

    def message(self) -> Message:
        if self._error is not None:
            # otherwise each raise adds frames to the traceback, which keep their locals alive
            raise self._error.with_traceback(None)
        if self._message is None:
            raise InvalidInput("E-TRANSPORT-USE", f"{self._what} with {peer_name(self.peer)} is still in progress: wait for it "
                                                  "first")
        return self._message

    def on_done(self, callback: Callable[[Handle], None]) -> None:
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        _call(callback, self)

    def complete(self, message: Message) -> None:
        self._end(message, None)

    def fail(self, error: CommError) -> None:
        self._end(None, error)

    def _end(self, message: Message | None, error: CommError | None) -> None:
        with self._lock:
            if self._callbacks is None:
                return
            self._message, self._error = message, error
            callbacks, self._callbacks = self._callbacks, None
            if self._event is not None:
                self._event.set()
        for callback in callbacks:
            _call(callback, self)

    def wait(self, deadline: float) -> Message:
        with self._lock:
            if self._event is None and self._callbacks is not None:
                self._event = threading.Event()
        if self._event is not None and not self._event.wait(max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded(f"{self._what} did not complete before the deadline", peer=peer_name(self.peer),
                                   step=self.step, bucket=self.bucket)
        return self.message()


def _call(callback: Callable[[Handle], None], handle: Handle) -> None:
    try:
        callback(handle)
    except Exception:
        log.exception("a callback of a transport operation raised an error (callbacks must not raise); "
                      "the connection to %s continues", peer_name(handle.peer))


def make_send_handle(peer: int, header: Header) -> Handle:
    """Creates the handle of a send."""
    return Handle(_SENDS[header.kind], peer, header.step, header.bucket)


def complete_send(operation: Handle, header: Header) -> None:
    """Completes the handle of a send."""
    operation.complete(Message(operation.peer, header, _NO_BODY))


def clear_traceback(error: CommError) -> CommError:
    """Clears the traceback and context of an error that is stored for later. Their frames would keep message bodies and
    connections in memory."""
    error.__traceback__ = error.__context__ = None
    return error


class ByteChannel(Protocol):
    """A byte stream to one peer: a socket, or an object with these methods of a stream socket (TlsSocket, GrpcStream). One
    thread at a time may read and one may write; any thread may shut it down.

    Buffering is bounded: a writer that is faster than the peer's reader blocks, or gets BlockingIOError.
    """

    def recv_into(self, buffer: Any, nbytes: int = ..., flags: int = ..., /) -> int:
        """Reads at least one byte; returns 0 at the end of the stream. After a TimeoutError (see settimeout) the channel cannot
        be used."""
        ...

    def sendmsg(self, buffers: Any, ancdata: Any = ..., flags: int = ..., /) -> int:
        """Writes bytes and returns how many were accepted. After 0 the caller must pass the same bytes again. Raises OSError if
        the peer is gone.

        With MSG_DONTWAIT in `flags`, raises BlockingIOError instead of blocking.
        """
        ...

    def sendall(self, data: Any, flags: int = ..., /) -> None: ...

    def settimeout(self, value: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None:
        """SHUT_WR: ends the stream after the written bytes. SHUT_RDWR: ends the channel now and wakes blocked threads."""
        ...

    def close(self) -> None: ...


def limit_wait(channel: ByteChannel, deadline: float) -> None:
    """Sets the channel's timeout to the time that is left. Raises TimeoutError after the deadline, even if single bytes keep
    arriving."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    channel.settimeout(left_s)


def channel_binding(channel: ByteChannel) -> bytes:
    """Returns the bytes that bind a proof to this channel; b"" without TLS."""
    bound: bytes = getattr(channel, "channel", b"")
    return bound


def reports_peer_close(channel: ByteChannel) -> bool:
    """Returns whether an end of stream without BYE shows that the peer's machine closed the connection. If False, the link may
    have failed."""
    value: bool = getattr(channel, "tells_ends", True)
    return value


NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
"""Flag with which sending on a closed connection raises no signal; Python ignores that signal where there is no such flag."""
CLOSE_WAIT = 8
"""State of a TCP connection, in tcp_info, whose other end was closed."""


def closed_by_peer(channel: ByteChannel) -> bool:
    """Returns whether the end of a stream comes from the peer's machine. After an error, which only one thread receives, there
    is an end of the stream, too: a machine whose packets are lost has closed nothing."""
    if not reports_peer_close(channel):
        return False
    if sys.platform != "linux" or not isinstance(channel, socket.socket):
        return True
    try:
        return channel.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSE_WAIT
    except OSError:
        return True  # another kind of socket


def peer_certificate(channel: ByteChannel) -> PeerCertificate | None:
    """Returns the certificate that the peer used in the TLS handshake; None without TLS."""
    peer: PeerCertificate | None = getattr(channel, "peer", None)
    return peer
