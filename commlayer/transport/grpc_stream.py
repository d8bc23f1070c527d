"""A gRPC stream as a byte channel, for networks that pass only HTTP/2.

At each end at most one message waits in addition to gRPC's own. Beyond that, HTTP/2 flow control blocks the writer until
the reader reads. Client and server use the same code, since a call and a context have the same methods.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from commlayer import config as settings
from commlayer.transport.credit import Seen
from commlayer.transport.key_folder import Certified

settings.quiet_grpc()
import grpc  # noqa: E402  (after quiet_grpc(): grpc reads its settings once)
import grpc.aio  # noqa: E402

MESSAGE_NBYTES = 256 << 10
"""Largest message. Other calls to the same port have the same limit."""
FRAME_OPTION = ("grpc.http2.max_frame_size", 2 * MESSAGE_NBYTES)
"""For both ends: each message is one HTTP/2 frame. With the default of 16 KiB the throughput was two thirds."""
IDLE_S = 20.0
"""After this silence an empty message is sent, because proxies end streams that are silent for a minute."""
GONE = "the gRPC stream has ended"


class GrpcStream:
    """A ByteChannel. `channel` and `peer` are as in TlsSocket. Cannot be used after a TimeoutError."""

    tells_ends = False
    """False: gRPC ends a call in the same way for a cut link, a proxy's timeout and a killed process."""

    def __init__(
        self, read: Callable[[], Awaitable[Any]], write: Callable[[bytes], Awaitable[Any]],
        finish: Callable[[], Awaitable[Any]], cancel: Callable[[], Any], *, channel: bytes = b"", peer: Certified | None = None,
    ) -> None:
        """Called on the loop, as are `finish`, which ends the writing side, and `cancel`, which ends the call."""
        self.channel, self.peer = channel, peer
        self._read, self._write, self._finish, self._cancel = read, write, finish, cancel
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop does not keep tasks alive
        self._changed = threading.Condition()
        self._over = False
        self._limit_s: float | None = None
        # Incoming: the rest of the current message, the next message, and whether the stream has ended.
        self._rest, self._ahead = memoryview(b""), b""
        self._reading = self._ended = False
        # Outgoing: pieces of the next message, and whether the writing side ends after them.
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._writing = self._finishing = False
        self._broken: OSError | None = None
        self._wrote_nbytes, self._wrote_in_s, self._rate, self._wrote_s = 0, 0.0, 0.0, time.monotonic()
        self._silence = self._loop.call_later(IDLE_S, self._idle)

    # ---- socket interface

    def settimeout(self, value: float | None, /) -> None:
        self._limit_s = value

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        """Like a socket, it reads 0 bytes if the peer is gone."""
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
        """The next message; empty at end of stream."""
        with self._changed:
            if not (self._reading or self._ahead):
                self._ask()
            self._wait(lambda: bool(self._ahead) or self._ended)
            data, self._ahead = self._ahead, b""
            if data:
                self._ask()
            return data

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, /) -> int:
        with self._changed:
            if flags & socket.MSG_DONTWAIT and self._nbytes >= MESSAGE_NBYTES:
                raise BlockingIOError(errno.EAGAIN, "a whole message waits to go out")
            self._wait(lambda: self._nbytes < MESSAGE_NBYTES or self._broken is not None)
            if self._broken is not None or self._over or self._finishing:
                raise self._broken or BrokenPipeError(errno.EPIPE, GONE)
            piece = _joined(buffers, MESSAGE_NBYTES - self._nbytes)
            self._pieces.append(piece)
            self._nbytes += len(piece)
            self._drain()
        return len(piece)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """On return gRPC has accepted all bytes, so that an end of stream comes after them."""
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
        self._loop.call_soon_threadsafe(self._ends)

    # ---- replaces the kernel's tcp_info of a socket

    def seen(self) -> Seen:
        """The rate is bytes accepted by gRPC per second of writing. The round trip is unknown."""
        with self._changed:
            if self._wrote_in_s > 0:
                self._rate = self._wrote_nbytes / self._wrote_in_s
            self._wrote_nbytes, self._wrote_in_s = 0, 0.0
            return Seen(self._rate, 0.0)

    # ---- on the event loop; these coroutines end with the call

    def spawn(self, what: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ends(self) -> None:
        """Releases the call and its connection, also if a reference to the stream remains."""
        self._silence.cancel()
        self._cancel()
        self._read = self._finish = self._write = self._cancel = _gone

    def _ask(self) -> None:
        if not (self._reading or self._ended):
            self._reading = True
            self._loop.call_soon_threadsafe(lambda: self.spawn(self._reads()))

    def _drain(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.call_soon_threadsafe(lambda: self.spawn(self._writes()))

    async def _reads(self) -> None:
        data = b""
        try:
            # Empty messages are keepalives.
            while not data and data is not grpc.aio.EOF:
                data = await self._read()
        except (Exception, asyncio.CancelledError):
            data = b""
        with self._changed:
            self._reading, self._ahead, self._ended = False, data or b"", not data
            self._changed.notify_all()

    async def _writes(self) -> None:
        while True:
            with self._changed:
                data, finishing = b"".join(self._pieces), self._finishing
                self._pieces, self._nbytes = [], 0
                self._writing = bool(data) and self._broken is None
                self._changed.notify_all()
                if not self._writing:
                    break
            await self._writes_one(data)
        if finishing:
            try:
                await self._finish()
            except (Exception, asyncio.CancelledError):
                pass  # the call has ended

    async def _writes_one(self, data: bytes) -> None:
        begin, broken = time.monotonic(), None
        try:
            await self._write(data)
        except (Exception, asyncio.CancelledError) as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else ""
            broken = BrokenPipeError(errno.EPIPE, details or GONE)
        with self._changed:
            self._broken, self._wrote_s = broken, time.monotonic()
            self._wrote_nbytes += len(data)
            self._wrote_in_s += self._wrote_s - begin

    def _idle(self) -> None:
        with self._changed:
            if self._over or self._finishing or self._broken:
                return
            if not self._writing and time.monotonic() - self._wrote_s > IDLE_S / 2:
                self._writing = True
                self.spawn(self._says_nothing())
        self._silence = self._loop.call_later(IDLE_S, self._idle)

    async def _says_nothing(self) -> None:
        await self._writes_one(b"")
        await self._writes()


async def _gone(*_: Any) -> None:
    raise BrokenPipeError(errno.EPIPE, GONE)


def _joined(buffers: Any, nbytes: int) -> bytes:
    """The first `nbytes` of the buffers. gRPC needs bytes: this is the only copy on the sending side."""
    pieces, room = [], nbytes
    for one in buffers:
        piece = memoryview(one).cast("B")[:room]
        pieces.append(piece)
        room -= len(piece)
    return b"".join(pieces)
