"""The demo's simulated links: bytes arrive unchanged, no earlier than a link of that rate and delay delivers them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from commlayer.demo.links import BURST_S, LOOPBACK, LinkDirection, Relay

WAIT_S = 30.0
DATA = bytes(range(256)) * 400
DELAY_S = 0.02


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it receives, at the end of the input."""
    with socket.create_server((LOOPBACK, 0)) as server:
        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection:
                connection.sendall(received(connection))

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def received(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    return data


def sent_and_back(port: int, results: list[bytes]) -> None:
    with socket.create_connection((LOOPBACK, port), WAIT_S) as connection:
        connection.sendall(DATA)
        connection.shutdown(socket.SHUT_WR)
        results.append(received(connection))


@pytest.mark.parametrize("connections", [1, 2])
def test_connections_share_their_links(echo: int, connections: int) -> None:
    up, down, results = LinkDirection(8e6), LinkDirection(80e6), list[bytes]()
    with Relay(DELAY_S) as relay:
        port = relay.listen(lambda: echo, (up,), (down,))
        threads = [threading.Thread(target=sent_and_back, args=(port, results)) for _ in range(connections)]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        took_s = time.monotonic() - begin
    assert results == [DATA] * connections
    assert up.nbytes == down.nbytes == connections * len(DATA)
    assert took_s >= connections * len(DATA) * 8 / 8e6 + len(DATA) * 8 / 80e6 + 2 * DELAY_S - 2 * BURST_S
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port), WAIT_S)


def test_connection_waits_for_an_unknown_target(echo: int) -> None:
    ports, results = [0], list[bytes]()
    with Relay(DELAY_S) as relay:
        port = relay.listen(lambda: ports[0], (LinkDirection(80e6),), (LinkDirection(80e6),))
        thread = threading.Thread(target=sent_and_back, args=(port, results))
        thread.start()
        ports[0] = echo
        thread.join(WAIT_S)
    assert results == [DATA]


def test_first_free_port_is_used(echo: int) -> None:
    with Relay(DELAY_S) as relay:
        first = relay.listen(lambda: echo, (), ())
        assert relay.listen(lambda: echo, (), (), (first, 0)) not in (0, first)


def test_bytes_in_flight_at_the_end_are_dropped(echo: int) -> None:
    with Relay(WAIT_S) as relay:
        connection = socket.create_connection((LOOPBACK, relay.listen(lambda: echo, (LinkDirection(1e3),), ())), WAIT_S)
        connection.sendall(DATA)
    with connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
        connection.sendall(1000 * DATA)
