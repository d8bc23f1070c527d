"""A gRPC stream as a byte channel, for networks that allow only HTTP/2.

At each end at most one message is buffered in addition to gRPC's own buffers. Beyond that, HTTP/2 flow control blocks the
writer until the reader reads. Client and server use the same code, since gRPC's call and context objects have the same methods.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from commlayer.transport.flow.credit import LinkSample
from commlayer.transport.grpc.library import grpc
from commlayer.transport.keys.key_folder import PeerCertificate

MESSAGE_NBYTES = 256 << 10
"""Largest message of a stream. All other calls to the same port have the same limit."""
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

    # The methods below run on the event loop. Their coroutines end when the gRPC call ends.

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
