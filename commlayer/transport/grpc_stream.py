"""A gRPC stream as a byte channel, for networks that allow only HTTP/2.

At each end at most one message is buffered in addition to gRPC's own buffers. Beyond that, HTTP/2 flow control blocks the
writer until the reader reads. Client and server use the same code, since gRPC's call and context objects have the same methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from commlayer.errors import CommError, DeadlineExceeded, PeerLost, Refused, one_line
from commlayer.transport.backoff import Backoff
from commlayer.transport.flow.credit import LinkSample
from commlayer.transport.grpc_library import grpc
from commlayer.transport.key_folder import PeerCertificate

MESSAGE_NBYTES = 256 << 10
"""Largest message of a stream. Other calls to the same port have the same limit."""
FRAME_OPTION = ("grpc.http2.max_frame_size", 2 * MESSAGE_NBYTES)
"""gRPC option for both ends that makes each message one HTTP/2 frame. With the default of 16 KiB the throughput was a third
lower."""
IDLE_S = 20.0
"""Seconds of silence after which an empty message is sent, because proxies close streams that are silent for a minute."""
ENDED = "the gRPC stream has ended"


class StreamCall(NamedTuple):
    """The operations of a gRPC call, which run on the event loop. `finish` ends the writing side, `cancel` ends the call."""

    read: Callable[[], Awaitable[Any]]
    write: Callable[[bytes], Awaitable[Any]]
    finish: Callable[[], Awaitable[Any]]
    cancel: Callable[[], Any]


class _WriteRate:
    """Measures the rate at which gRPC accepts bytes, in place of the kernel's tcp_info of a socket."""

    def __init__(self) -> None:
        self.last_s = time.monotonic()
        """Time at which the last write ended, by time.monotonic()."""
        self._nbytes, self._seconds, self._rate = 0, 0.0, 0.0

    def add(self, nbytes: int, begin_s: float) -> None:
        self.last_s = time.monotonic()
        self._nbytes += nbytes
        self._seconds += self.last_s - begin_s

    def sample(self) -> LinkSample:
        """Returns the rate since the previous call: bytes accepted per second of writing. The round trip is 0, unknown."""
        if self._seconds > 0:
            self._rate = self._nbytes / self._seconds
        self._nbytes, self._seconds = 0, 0.0
        return LinkSample(self._rate, 0.0)


class GrpcStream:
    """A gRPC stream as a ByteChannel. `channel`: bytes that bind a proof to this stream; `peer`: the other end's certificate,
    or None. The stream cannot be used after a TimeoutError."""

    tells_ends = False
    """True would mean: an end of stream shows that the peer's machine closed the stream. Always False, since gRPC ends a call
    in the same way for a broken link, a proxy's timeout and a killed process."""

    def __init__(self, call: StreamCall, *, channel: bytes = b"", peer: PeerCertificate | None = None) -> None:
        """Creates the stream's state. Must be called on the event loop."""
        self.channel, self.peer = channel, peer
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop does not keep tasks alive
        self._changed = threading.Condition()
        self._over = False
        self._limit_s: float | None = None
        # Incoming: the rest of the current message, the next message, and whether the stream has ended
        self._rest, self._ahead = memoryview(b""), b""
        self._reading = self._ended = False
        # Outgoing: pieces of the next message, and whether the writing side ends after them.
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._writing = self._finishing = False
        self._broken: OSError | None = None
        self._rate = _WriteRate()
        self._silence = self._loop.call_later(IDLE_S, self._idle)

    # ---- socket interface

    def settimeout(self, value: float | None, /) -> None:
        self._limit_s = value

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        """Reads like a socket: blocks until at least one byte has arrived; returns 0 if the stream has ended."""
        room = memoryview(buffer)
        if nbytes:
            room = room[:nbytes]
        if not self._rest:
            self._rest = memoryview(self._next())
        n = min(len(room), len(self._rest))
        room[:n] = self._rest[:n]
        self._rest = self._rest[n:]
        return n

    def _next(self) -> bytes:
        """Returns the next message; b"" at the end of the stream."""
        with self._changed:
            if not (self._reading or self._ahead):
                self._request_read()
            self._wait(lambda: bool(self._ahead) or self._ended)
            data, self._ahead = self._ahead, b""
            if data:
                self._request_read()
            return data

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, /) -> int:
        with self._changed:
            if flags & socket.MSG_DONTWAIT and self._nbytes >= MESSAGE_NBYTES:
                raise BlockingIOError(errno.EAGAIN, "a complete message is waiting to be sent")
            self._wait(lambda: self._nbytes < MESSAGE_NBYTES or self._broken is not None)
            if self._broken is not None or self._over or self._finishing:
                raise self._broken or BrokenPipeError(errno.EPIPE, ENDED)
            piece = _joined(buffers, MESSAGE_NBYTES - self._nbytes)
            self._pieces.append(piece)
            self._nbytes += len(piece)
            self._drain()
        return len(piece)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """Sends all bytes. When it returns gRPC has accepted them, so an end of stream is sent after them."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.sendmsg([rest], (), flags) :]
        with self._changed:
            self._wait(lambda: not self._writing)
            if self._broken is not None:
                raise self._broken

    def _wait(self, until: Callable[[], bool]) -> None:
        if not self._changed.wait_for(lambda: self._over or until(), self._limit_s):
            raise TimeoutError

    def shutdown(self, how: int, /) -> None:
        if how != socket.SHUT_WR:
            self.close()
            return
        with self._changed:
            if not self._finishing:
                self._finishing = True
                self._drain()

    def close(self) -> None:
        with self._changed:
            if self._over:
                return
            self._over = self._ended = True
            self._changed.notify_all()
        self._loop.call_soon_threadsafe(self._release)

    def seen(self) -> LinkSample:
        with self._changed:
            return self._rate.sample()

    # ---- on the event loop; these coroutines end with the call

    def spawn(self, what: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _release(self) -> None:
        """Releases the call and its connection, even if a reference to the stream remains."""
        self._silence.cancel()
        self._call.cancel()
        self._call = StreamCall(_raise_ended, _raise_ended, _raise_ended, _raise_ended)

    def _request_read(self) -> None:
        if not (self._reading or self._ended):
            self._reading = True
            self._loop.call_soon_threadsafe(lambda: self.spawn(self._read_next()))

    def _drain(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.call_soon_threadsafe(lambda: self.spawn(self._write_all()))

    async def _read_next(self) -> None:
        data = b""
        try:
            # Empty messages are keepalives.
            while not data and data is not grpc.aio.EOF:
                data = await self._call.read()
        except (Exception, asyncio.CancelledError):
            data = b""
        with self._changed:
            self._reading, self._ahead, self._ended = False, data or b"", not data
            self._changed.notify_all()

    async def _write_all(self) -> None:
        while True:
            with self._changed:
                data, finishing = b"".join(self._pieces), self._finishing
                self._pieces, self._nbytes = [], 0
                self._writing = bool(data) and self._broken is None
                self._changed.notify_all()
                if not self._writing:
                    break
            await self._write_one(data)
        if finishing:
            try:
                await self._call.finish()
            except (Exception, asyncio.CancelledError):
                pass  # the call has ended

    async def _write_one(self, data: bytes) -> None:
        begin, broken = time.monotonic(), None
        try:
            await self._call.write(data)
        except (Exception, asyncio.CancelledError) as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else ""
            broken = BrokenPipeError(errno.EPIPE, details or ENDED)
        with self._changed:
            self._broken = broken
            self._rate.add(len(data), begin)

    def _idle(self) -> None:
        with self._changed:
            if self._over or self._finishing or self._broken:
                return
            if not self._writing and time.monotonic() - self._rate.last_s > IDLE_S / 2:
                self._writing = True
                self.spawn(self._send_keepalive())
        self._silence = self._loop.call_later(IDLE_S, self._idle)

    async def _send_keepalive(self) -> None:
        await self._write_one(b"")
        await self._write_all()


async def _raise_ended(*_: Any) -> None:
    raise BrokenPipeError(errno.EPIPE, ENDED)


def _joined(buffers: Any, nbytes: int) -> bytes:
    """Copies the first `nbytes` of the buffers to one bytes object, as gRPC needs. This is the only copy on the sending
    side."""
    pieces, room = [], nbytes
    for one in buffers:
        piece = memoryview(one).cast("B")[:room]
        pieces.append(piece)
        room -= len(piece)
    return b"".join(pieces)


# ---- The two ends of a stream: the server's handler and the client's dial.

class TlsCredentials(NamedTuple):
    """TLS credentials of a gRPC client, in PEM: CA, this node's certificate and its key. `name`: a name that every
    coordinator's certificate contains."""

    ca: str
    certificate: str
    key: str
    name: str


def open_channel(
    address: str, options: list[tuple[str, Any]], credentials: TlsCredentials | None, *, on_loop: bool = False,
) -> Any:
    """Opens a gRPC channel, with TLS if there are credentials. `on_loop`: a grpc.aio channel on the running event loop."""
    kind: Any = grpc.aio if on_loop else grpc
    if credentials is None:
        return kind.insecure_channel(address, options=options)
    ca, certificate, key = (part.encode() for part in credentials[:3])
    # Certificates name nodes instead of addresses, so the address is not compared with the certificate.
    options = [*options, ("grpc.ssl_target_name_override", credentials.name)]
    return kind.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=options)


SERVICE, METHOD = "commlayer.Data", "Frames"
ACCEPTED = ("commlayer-frames", "1")
"""Initial metadata with which a server accepts a stream. A client must wait for it before it writes, or it would not receive
the reason of a refusal."""
OPTIONS = [
    FRAME_OPTION,
    ("grpc.max_receive_message_length", MESSAGE_NBYTES), ("grpc.max_send_message_length", MESSAGE_NBYTES),
    ("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 20_000), ("grpc.http2.max_pings_without_data", 0),
    # Otherwise the stream would share the connection of the control calls to the same address, and delay those calls.
    ("grpc.use_local_subchannel_pool", 1),
]
"""gRPC options of a client's channel for streams."""


class Caller(NamedTuple):
    """The other end of a gRPC call. `address`: its host and port; `source`: see FairShare."""

    address: str
    source: str
    certificate: PeerCertificate | None


AcceptStream = Callable[[GrpcStream, str, str], bool]
"""Accepts a stream with its address and its source. Returns False if the source opens too many. Raises LookupError if the
process accepts no streams."""

_dialed: set[tuple[str, int]] = set()
"""Addresses that this process has dialed. A forked child (a DataLoader worker) closes its copies of these connections' sockets.
gRPC does not expose the sockets, so the child finds them by address. Otherwise a dead training process would seem connected to
its peers."""


def handler(take: AcceptStream, identify: Callable[[Any], Awaitable[Caller]]) -> grpc.GenericRpcHandler:
    """Returns the server's handler of streams. `identify` returns the caller for gRPC's context of a call, or ends the call."""

    async def frames(_: Any, context: Any) -> None:
        caller = await identify(context)
        over, answered = asyncio.Event(), asyncio.Event()

        async def finish() -> None:
            over.set()

        async def write(data: bytes) -> None:
            await answered.wait()  # a message written before the initial metadata would end the stream
            await context.write(data)

        call = StreamCall(context.read, write, finish, over.set)
        certificate = caller.certificate
        stream = GrpcStream(call, channel=certificate.fingerprint if certificate else b"", peer=certificate)
        try:
            try:
                admitted = take(stream, f"{caller.address} (gRPC)", caller.source)
            except LookupError as error:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
            if not admitted:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many new streams: retry later")
            await context.send_initial_metadata((ACCEPTED,))
            answered.set()
            await over.wait()  # or cancelled: the peer is gone
        finally:
            stream.close()

    calls = {METHOD: grpc.stream_stream_rpc_method_handler(frames)}
    return grpc.method_handlers_generic_handler(SERVICE, calls)


def dial(opened: Callable[[], Any], host: str, port: int, deadline: float, channel: bytes = b"") -> GrpcStream:
    """Opens a stream over the grpc.aio channel that `opened` returns. Raises Refused, PeerLost or DeadlineExceeded with the
    address."""
    begin, where = time.monotonic(), f"{host}:{port} over gRPC"

    async def made() -> GrpcStream:
        link = opened()
        call = link.stream_stream(f"/{SERVICE}/{METHOD}")()
        try:
            async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                await call.wait_for_connection()
                if ACCEPTED not in ((key, value) for key, value in await call.initial_metadata()):
                    await call.read()  # raises the server's reason
                    raise Refused(f"{where} answers, but is not a commlayer server: check the address", code="E-ADDRESS")
        except BaseException:
            call.cancel()
            await link.close()
            raise
        stream = GrpcStream(StreamCall(call.read, call.write, call.done_writing, lambda: stream.spawn(end())), channel=channel)

        async def end() -> None:
            call.cancel()
            await link.close()

        return stream

    with contextlib.suppress(OSError):
        _dialed.update(info[4][:2] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # type: ignore[misc]
    refusal: CommError | None = None
    backoff = Backoff(deadline)
    while True:
        try:
            stream: GrpcStream = run_on_loop(made(), deadline - begin + 5.0)
            return stream
        except TimeoutError:
            # A reason from the server is more useful than the timeout of a later attempt.
            raise refusal or DeadlineExceeded(
                f"{where} did not answer within {deadline - begin:.1f} s: check the address, that a server runs "
                "there, and firewalls") from None
        except grpc.aio.AioRpcError as error:
            refusal = _refusal(error, f"{where} (deadline {deadline - begin:.1f} s)")
            # Retried if the server counted too many new streams or calls, since it forgets them soon.
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or not backoff.wait():
                raise refusal from None


def _refusal(error: Any, where: str) -> CommError:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Refused("the server at this address accepts no gRPC streams: check the address, and the setting carrier on its "
                       "machine",
                       code="E-ADDRESS")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return Refused(f"refused the stream: {one_line(error.details())}")
    return PeerLost(f"cannot reach {where}: {one_line(error.details())}: check the address and that a server runs there")


def _close_copies() -> None:
    """Closes copies of the parent's sockets in a forked child, where gRPC is not used."""
    for name in os.listdir("/proc/self/fd") if _dialed and os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError, ValueError):
            copy = socket.socket(fileno=int(name))
            address = None
            with contextlib.suppress(OSError):
                address = copy.getpeername()
            # gRPC uses IPv6 sockets for IPv4 as well.
            if isinstance(address, tuple) and (address[0].removeprefix("::ffff:"), address[1]) in _dialed:
                copy.close()
            else:
                copy.detach()
    _dialed.clear()


os.register_at_fork(after_in_child=_close_copies)


# ---- The process's event loop for gRPC servers and streams, on a separate thread. There is a single loop, because grpc.aio
# wakes all loops for the events of each.

_lock = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def event_loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if not _loops:
            # Not epoll: forked children would share it and remove its entries when they exit.
            loop = asyncio.SelectorEventLoop(selectors.PollSelector())
            threading.Thread(target=loop.run_forever, name="commlayer-grpc", daemon=True).start()
            _loops.append(loop)
        return _loops[0]


def run_on_loop(what: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """Runs a coroutine on the event loop and returns its result. Must not be called on the loop itself."""
    return asyncio.run_coroutine_threadsafe(what, event_loop()).result(timeout_s)


os.register_at_fork(after_in_child=_loops.clear)  # the thread exists only in the parent
