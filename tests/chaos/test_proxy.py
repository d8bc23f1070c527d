"""What is seen of frames from outside, and the proxy that delays, cuts and damages connections."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from msgspec import msgpack

from commlayer.cluster.servers.gather import ROW_BUCKET
from commlayer.transport import framing
from commlayer.transport.crc import crc32c
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import Header, Kind
from tests.chaos.proxy import DOWN, UP, Link, Proxy, end
from tests.chaos.wire import Seen, Stretch, digits, weights


def framed(header: Header, body: bytes) -> bytes:
    return framing.encode(header, len(body), crc32c(body) if body else 0) + body


def test_weight_of_a_result_identifies_its_contributions() -> None:
    assert digits(sum(weights(3)), 3) == [1, 1, 1]
    seen = Seen(2)
    stretch = Stretch(seen)
    hello = msgpack.encode(Hello("job", 1))
    push, result = Header(Kind.PUSH, 1, 4, 2, sender=1), Header(Kind.RESULT, 1, 4, 2, sender=0x8000, weight=5.0)
    data = framed(Header(Kind.HELLO, sender=1), hello) + framed(push, b"payload") * 2
    for at in range(len(data)):
        stretch.feed(UP, data[at : at + 1])
    assert stretch.rank == 1
    stretch.feed(DOWN, framed(result, b"sum") + framed(result, b"sum"))
    assert (seen.contributions, seen.repeats, seen.faults) == (2, 1, [])
    stretch.feed(UP, framed(push, b"another"))
    stretch.feed(DOWN, framed(result, b"other") + framed(result._replace(step=5, weight=9.0), b"sum"))
    assert [fault.kind for fault in seen.faults] == ["payload", "payload", "contributions"]
    assert [fault.line for fault in seen.faults] == [
        "worker 1 sent another payload than before for generation 1, step 4, bucket 2, round 0",
        "worker 1 was told another sum than before for generation 1, step 4, bucket 2, round 0",
        "the sum of generation 1, step 5, bucket 2, round 0 has contributions [1, 2], allowed: one of each worker"]


def test_result_of_rows_identifies_its_senders() -> None:
    def faults(*senders: int) -> list[str]:
        seen = Seen(2)
        body = msgpack.encode([(sender, b"row") for sender in senders])
        Stretch(seen).feed(DOWN, framed(Header(Kind.RESULT, 1, 4, ROW_BUCKET, sender=0x8000), body))
        assert seen.contributions == 0, "rows are not counted: their number is not the same in each run"
        return [fault.line.partition(" has ")[2] for fault in seen.faults]

    assert faults(0, 1) == []
    assert faults(0) == ["contributions [1, 0], allowed: one of each worker"]
    assert faults(0, 1, 1) == ["contributions [1, 2], allowed: one of each worker"]


class Echo:
    """A server that sends back what it gets, behind a proxy; `local_address` is a connection through it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.ended = threading.Event()
        """The end of the server, and its reason."""
        threading.Thread(target=self._serve, daemon=True).start()
        self.link = Link(random.Random(3))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = free.getsockname()
        self.proxy = Proxy(address, self.listener.getsockname(), [self.link], Seen(1), rank=0)
        self.local_address = socket.create_connection(address, 5.0)

    def _serve(self) -> None:
        while True:
            try:
                one, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(one,), daemon=True).start()

    def _echo(self, one: socket.socket) -> None:
        with one, contextlib.suppress(OSError):
            while data := one.recv(1000):
                one.sendall(data)
        self.ended.set()

    def asked(self, data: bytes) -> bytes:
        self.local_address.sendall(data)
        return self.local_address.recv(1000)

    def close(self) -> None:
        self.local_address.close()
        self.link.close()
        self.proxy.close()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    result = Echo()
    yield result
    result.close()


def test_bytes_are_forwarded_flipped_and_held(echo: Echo) -> None:
    assert echo.asked(b"hello") == b"hello"
    assert echo.link.shots == 0
    echo.link.ways[UP].flips = 1
    (bits,) = {bin(a ^ b).count("1") for a, b in zip(b"x", echo.asked(b"x"), strict=True)}
    assert (bits, echo.asked(b"y"), echo.link.shots) == (1, b"y", 1)
    echo.link.ways[DOWN].hold()
    echo.local_address.settimeout(0.2)
    with pytest.raises(TimeoutError):
        echo.asked(b"late")
    echo.link.ways[DOWN].release()
    echo.local_address.settimeout(5.0)
    assert (echo.local_address.recv(1000), echo.link.shots) == (b"late", 2)


def test_connection_that_ends_in_its_greeting_ends_at_both_ends() -> None:
    """Whose it is has become known on one way, while the other waits."""
    links = [Link(random.Random(3)) for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
        free.close()
        proxy = Proxy(address, server.getsockname(), links, Seen(2))
        hello = framed(Header(Kind.HELLO, sender=1), msgpack.encode(Hello("job", 1)))
        with socket.create_connection(address, 5.0) as near:
            near.sendall(hello)
            far, _ = server.accept()
            assert far.recv(1000) == hello
            end(far, reset=True)
            with pytest.raises(ConnectionError):
                near.recv(1000) or (_ for _ in ()).throw(ConnectionResetError)
        proxy.close()


@pytest.mark.parametrize("halves", [False, True])
def test_cut_ends_open_connections_and_half_a_cut_reaches_one_end(echo: Echo, halves: bool) -> None:
    assert echo.asked(b"hello") == b"hello"
    assert echo.link.cut(reset=True, halves=halves) == 1
    with pytest.raises(ConnectionError):
        echo.local_address.recv(1000) or (_ for _ in ()).throw(ConnectionResetError)
    assert echo.ended.wait(0.2 if halves else 5.0) == (not halves)
    assert echo.link.cut(reset=True) == 0


def test_ended_connection_is_not_cut(echo: Echo) -> None:
    assert echo.asked(b"hello") == b"hello"
    echo.local_address.shutdown(socket.SHUT_WR)
    assert echo.local_address.recv(1000) == b""
    until = time.monotonic() + 5.0
    while echo.link.open and time.monotonic() < until:
        time.sleep(0.01)
    assert echo.link.cut(reset=True) == 0
