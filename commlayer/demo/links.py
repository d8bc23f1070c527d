"""Simulates the links of homes without root: a TCP relay on loopback through which all bytes of a run pass.

Each home has an uplink and a downlink, which its connections share. A chunk of bytes waits for both links on its way, then for
the delay. The relay's receive buffers are small, so a sender that is faster than its link is held up as by a real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any

from commlayer.errors import CommError

LOOPBACK = "127.0.0.1"
CHUNK_NBYTES = 8 << 10
"""Connections of one link take turns after this many bytes."""
BUFFER_NBYTES = 64 << 10
"""Receive buffer of a relayed connection, which the kernel doubles: a queue of some 50 ms at 20 Mb/s."""
IDLE_PASSES = 10
"""After this many passes of the event loop without a task, no accepted connection starts one any more."""
BURST_S = 0.01
"""Seconds of its rate that a link makes up for after the relay woke too late."""

Target = Callable[[], int]
"""Returns the port on loopback to which a connection is relayed; 0: not known yet."""


class LinkDirection:
    """One direction (upload or download) of a home's Internet connection."""

    def __init__(self, bps: float) -> None:
        self._bps, self._free_s = bps, 0.0
        self.nbytes = 0
        """Bytes that have passed, those of TLS and heartbeats included."""

    async def carry(self, nbytes: int) -> None:
        """Returns when the link has sent `nbytes`, after what was queued before."""
        now = asyncio.get_running_loop().time()
        self._free_s = max(self._free_s, now - BURST_S) + nbytes * 8 / self._bps
        self.nbytes += nbytes
        await asyncio.sleep(self._free_s - now)


class Relay:
    """Relays connections in a thread of its own, from `with` to its end."""

    def __init__(self, delay_s: float) -> None:
        """`delay_s`: one way, between any two ends."""
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="demo links", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen(self, target: Target, out: Sequence[LinkDirection], back: Sequence[LinkDirection],
               ports: Iterable[int] = (0,)) -> int:
        """Relays the connections to the first of these ports on loopback that is free, and returns it; 0 is any free port.
        `out`: the links from the end that connects to the target, `back`: those on the way back."""
        for port in ports:
            with contextlib.suppress(OSError):
                listener = socket.create_server((LOOPBACK, port))
                break
        else:
            raise CommError(f"no port is free of {ports}", peer="the demo's links")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_NBYTES)

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers = [writer]
            try:
                while not (port := target()):
                    await asyncio.sleep(self._delay_s)
                far_reader, far_writer = await asyncio.open_connection(LOOPBACK, port, limit=CHUNK_NBYTES)
                writers.append(far_writer)
                far_writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_NBYTES)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._carry(reader, far_writer, out))
                    both.create_task(self._carry(far_reader, writer, back))
            except* (OSError, asyncio.CancelledError):
                pass  # an end has gone, or the relay ends
            finally:
                for end in writers:
                    end.close()

        self._servers.append(self._run(asyncio.start_server(relay, sock=listener, limit=CHUNK_NBYTES)))
        return int(listener.getsockname()[1])

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, links: Sequence[LinkDirection]) -> None:
        """Carries one direction of a connection until its end."""
        flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            data = b"-"
            while data:
                due, data = await flying.get()
                await asyncio.sleep(due - self._loop.time())
                writer.write(data)
                await writer.drain()
            writer.write_eof()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            data = b"-"
            while data:
                data = await reader.read(CHUNK_NBYTES)
                for link in links:
                    await link.carry(len(data))
                flying.put_nowait((self._loop.time() + self._delay_s, data))

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        idle = 0
        while idle < IDLE_PASSES:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)
            idle = 0 if tasks else idle + 1

    def _run(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()
