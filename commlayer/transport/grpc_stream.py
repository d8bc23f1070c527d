"""A gRPC stream as a channel of bytes, whose messages are pieces of them. Knows bytes and calls; no frames, no addresses.

For networks that pass HTTP/2 alone. One message waits at each end behind the one that gRPC has: beyond that HTTP/2's own flow
control holds the writer until the reader reads. Both ends are the same code; a call and a context have the same verbs.
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
import grpc  # noqa: E402  (after its settings, which it reads once)
import grpc.aio  # noqa: E402

MESSAGE_NBYTES = 256 << 10
"""Of a message at most. Calls of strangers to the same port have the same limit."""
FRAME_OPTION = ("grpc.http2.max_frame_size", 2 * MESSAGE_NBYTES)
"""For both ends: a message is one frame of HTTP/2 then. In frames of 16 KiB, the default, two thirds as much got through."""
IDLE_S = 20.0
"""After so long without a word an empty message goes out: proxies end streams that are silent for a minute."""
GONE = "the gRPC stream has ended"


class GrpcStream:
    """A ByteChannel. `channel` and `peer` as of a TlsSocket; after a TimeoutError it is of no more use."""

    tells_ends = False
    """gRPC ends a call for a cut link, and for a proxy's reasons, as it does for a process that was killed."""

    def __init__(
        self, read: Callable[[], Awaitable[Any]], write: Callable[[bytes], Awaitable[Any]],
        finish: Callable[[], Awaitable[Any]], cancel: Callable[[], Any], *, channel: bytes = b"", peer: Certified | None = None,
    ) -> None:
        """On the loop. `finish` says that no more is written, `cancel` ends the call; both are called there."""
        self.channel, self.peer = channel, peer
        self._read, self._write, self._finish, self._cancel = read, write, finish, cancel
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself keeps none alive
        self._changed = threading.Condition()
        self._over = False
        self._limit_s: float | None = None
        # What comes in: the rest of a message, the one behind it, and how it ended.
        self._rest, self._ahead = memoryview(b""), b""
        self._reading = self._ended = False
        # What goes out: pieces of the next message, and whether there is an end behind it.
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._writing = self._finishing = False
        self._broken: OSError | None = None
        self._wrote_nbytes, self._wrote_in_s, self._rate, self._wrote_s = 0, 0.0, 0.0, time.monotonic()
        self._silence = self._loop.call_later(IDLE_S, self._idle)

    # ---- as of a socket

    def settimeout(self, value: float | None, /) -> None:
        self._limit_s = value

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        """As with sockets a peer that is gone without a word is an end of the stream."""
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
        """A message; empty at the end."""
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
        """On return gRPC has taken all of it: an end that follows comes behind it."""
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

    # ---- what a connection asks of the kernel about a socket

    def seen(self) -> Seen:
        """Of the rate: what gRPC took in the time that something waited for it. Of the round trip nothing is known."""
        with self._changed:
            if self._wrote_in_s > 0:
                self._rate = self._wrote_nbytes / self._wrote_in_s
            self._wrote_nbytes, self._wrote_in_s = 0, 0.0
            return Seen(self._rate, 0.0)

    # ---- on the loop; what these wait for ends when the call does

    def spawn(self, what: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ends(self) -> None:
        """Whoever keeps the stream, or would have called back, keeps neither the call nor its connection."""
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
            # Empty ones only say that the other end is there.
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
                pass  # the call is over already

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
    """The beginning of them. gRPC takes bytes: this is the one copy that is made of what is sent."""
    pieces, room = [], nbytes
    for one in buffers:
        piece = memoryview(one).cast("B")[:room]
        pieces.append(piece)
        room -= len(piece)
    return b"".join(pieces)
