"""Meshes of every carrier, and what tests of connections begin with."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from commlayer.cluster.calls.coordinator_channel import fingerprint
from commlayer.cluster.calls.grpc_port import GrpcPort, open_stream_port
from commlayer.cluster.servers import dialing
from commlayer.transport import framing, handshake
from commlayer.transport.crc import crc32c
from commlayer.transport.endpoint import Address, Settings
from commlayer.transport.grpc import stream_ends
from commlayer.transport.handshake import Admit, Hello
from commlayer.transport.keys import tls
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import ByteChannel, Header, Kind, channel_binding, key
from support.loopback import Hub, Loopback
from support.mailbox import InboxTransport

PATIENCE_S = 30.0
"""Longer than anything takes that works: only failures wait for it."""
SMALL_BUFFERS = Settings(buffer_nbytes=64 << 10)
T = TypeVar("T")
End = InboxTransport | Loopback
Mesh = Callable[[int], contextlib.AbstractContextManager[list[End]]]


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def data(sender: int, bucket: int = 0, step: int = 0, order: int = 0) -> Header:
    return Header(Kind.DATA, step=step, bucket=bucket, sender=sender, order=order)


@contextlib.contextmanager
def closing(transports: list[End]) -> Iterator[list[End]]:
    try:
        yield transports
    finally:
        in_threads(transports, lambda t: t.close())


def loopback_mesh(n: int) -> contextlib.AbstractContextManager[list[End]]:
    return closing(list(Hub().mesh(range(n))))


FAR = "127.0.0.2"
"""Both ends of a connection consider the other one remote."""


def connect_all(transports: list[InboxTransport], host: str = "127.0.0.1") -> None:
    """Every pair, the lower rank dialling; both ends are ready when it returns."""
    ready = Header(Kind.DATA, bucket=2**32 - 1)
    for i, dialler in enumerate(transports):
        for acceptor in transports[i + 1 :]:
            dialler.dial(acceptor.rank, acceptor.listen(host), soon())
            dialler.send(acceptor.rank, ready)
            acceptor.wait(acceptor.recv(dialler.rank, key(ready)), soon())


class GrpcEnd(InboxTransport):
    """Listens and dials by gRPC streams, as `commlayer serve` and its workers do with carrier="grpc"."""

    def __init__(self, hello: Hello, admit: Admit | None = None, settings: Settings = Settings()) -> None:
        super().__init__(hello, admit, settings)
        self._ports: list[GrpcPort] = []

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        self._ports.append(open_stream_port(self._settings.keys, host, port, self.take, self._settings.refused))
        return host, self._ports[-1].number

    def dial(self, peer: int, address: Address, deadline: float, answer_by: float = math.inf) -> None:
        dialing.dial_grpc(self, peer, address, self._settings.keys, deadline)

    def close(self, flush_s: float | None = None) -> None:
        super().close(flush_s)
        for port in self._ports:
            port.close()


class Wire(NamedTuple):
    """A carrier between processes."""

    kind: type[InboxTransport] = InboxTransport
    secured: bool = False
    host: str = "127.0.0.1"

    def end(self, hello: Hello, admit: Admit | None = None, settings: Settings = Settings()) -> InboxTransport:
        return self.kind(hello, admit, settings._replace(keys=keys()) if self.secured else settings)

    def raw(self, address: Address) -> ByteChannel:
        """A channel to that end before any byte was sent."""
        mine = keys() if self.secured else None
        if self.kind is GrpcEnd:
            where = f"{address[0]}:{address[1]}"
            opened = functools.partial(stream_ends.open_channel, where, stream_ends.OPTIONS, mine, on_loop=True)
            return stream_ends.dial(opened, *address, soon(), fingerprint(mine))
        sock = socket.create_connection(address, PATIENCE_S)
        if mine is None:
            return sock
        secured = tls.TlsSocket(sock, mine, tls.DATA, server=False)
        secured.handshake(soon())
        secured.settimeout(PATIENCE_S)
        return secured

    @contextlib.contextmanager
    def mesh(self, n: int) -> Iterator[list[End]]:
        transports = [self.end(Hello("test", rank), settings=SMALL_BUFFERS) for rank in range(n)]
        with closing(list(transports)) as mesh:
            connect_all(transports, self.host)
            yield mesh


WIRES = {
    "tcp": Wire(), "tls": Wire(secured=True), "grpc": Wire(GrpcEnd), "grpc+tls": Wire(GrpcEnd, secured=True),
    # Between machines: large bodies are chunked, and bytes in flight are limited.
    "far": Wire(host=FAR), "far tls": Wire(secured=True, host=FAR),
}


@functools.cache
def keys() -> Keys:
    """A node's, made once."""
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    from commlayer.cluster.keys import authority

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    authority.init(Path(folder.name))
    return Keys(authority.add(Path(folder.name), "gpu-1"))


MESHES: dict[str, Mesh] = {
    "loopback": loopback_mesh,
    **{name: wire.mesh for name, wire in WIRES.items()},
}


def in_threads(transports: list[End], work: Callable[[End], T]) -> list[T]:
    """One thread per rank, as if each were a process. Raises the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = work(transports[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(transports))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(transports))]


def raw_peer(address: Address, rank: int, job: str = "test", *, wire: Wire = WIRES["tcp"], secret: str = "",
             peer: int = 0x8000) -> ByteChannel:
    """A channel that was welcomed as that worker and may now send any bytes."""
    channel = wire.raw(address)
    handshake.dial_handshake(channel, framing.Reader(), Hello(job, rank), secret, peer, soon(), channel_binding(channel))
    channel.settimeout(PATIENCE_S)
    return channel


@contextlib.contextmanager
def far_pair() -> Iterator[tuple[InboxTransport, InboxTransport]]:
    """Two ends that consider each other remote, so that bodies are chunked."""
    ends = InboxTransport(Hello("test", 0), settings=SMALL_BUFFERS), InboxTransport(Hello("test", 1), settings=SMALL_BUFFERS)
    connect_all(list(ends), FAR)
    yield ends
    for end in ends:
        end.close()


def frame(header: Header, body: bytes = b"") -> bytes:
    return framing.encode(header, len(body), crc32c(body)) + body


def exchange_pair(x: End, y: End) -> bool:
    x.send(y.rank, data(x.rank, bucket=77), b"ping")
    return bytes(y.wait(y.recv(x.rank, key(data(x.rank, bucket=77))), soon()).body) == b"ping"
