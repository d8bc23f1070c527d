"""A tunnel between homes and the server's port, as SSH, cloudflared and such programs make them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from commlayer.demo.links import CHUNK_NBYTES, LinkDirection, Relay

BUFFER_NBYTES = 1 << 20
LOOK_S = 0.02


class Tunnel(Relay):
    """Forwards one port of this machine to another one. All connections share one rate. The server sees all homes at one
    address, and each connection comes from a new port. Bytes of a connection wait in a buffer, as in the relays of data
    centers. While it is broken, the tunnel accepts connections and closes them again."""

    def __init__(self, target: int, bps: float, delay_s: float = 0.01) -> None:
        super().__init__(delay_s)
        self._port, self.links = target, (LinkDirection(bps), LinkDirection(bps))
        self.cuts, self._whole = 0, True

    def __enter__(self) -> Tunnel:
        super().__enter__()
        self.port = self.listen(self._target, *([link] for link in self.links))
        return self

    def _target(self) -> int:
        if not self._whole:
            raise ConnectionAbortedError
        return self._port

    @property
    def nbytes(self) -> int:
        return sum(link.nbytes for link in self.links)

    @contextlib.contextmanager
    def cut_every(self, nbytes: int, broken_s: float) -> Iterator[None]:
        """Ends all connections whenever so many bytes have passed, and is broken for a time then."""
        over, due = threading.Event(), self.nbytes + nbytes

        def run() -> None:
            nonlocal due
            while not over.wait(LOOK_S):
                if self.nbytes < due:
                    continue
                due += nbytes
                self._whole = False
                self._run(self._cut())
                self.cuts += 1
                over.wait(broken_s)
                self._whole = True

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    async def _cut(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _carry(self, reader: Any, writer: asyncio.StreamWriter, links: Sequence[LinkDirection]) -> None:
        buffered = _Buffered()
        async with asyncio.TaskGroup() as group:
            group.create_task(buffered.fill(reader))
            await super()._carry(buffered, writer, links)  # type: ignore[arg-type]


class _Buffered:
    """The part of a StreamReader that Relay uses, with more bytes between both ends."""

    def __init__(self) -> None:
        self._queue = asyncio.Queue[bytes](BUFFER_NBYTES // CHUNK_NBYTES)

    async def fill(self, reader: asyncio.StreamReader) -> None:
        data = b"-"
        while data:
            data = await reader.read(CHUNK_NBYTES)
            await self._queue.put(data)

    async def read(self, _: int) -> bytes:
        return await self._queue.get()
