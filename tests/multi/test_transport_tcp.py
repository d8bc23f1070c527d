"""What only sockets can do wrong: addresses, strangers, forks, and what outlives an end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.attached import assert_refused, outcome
from support.meshes import PATIENCE_S, connect_all, data, exchange_pair, frame, raw_peer, soon

from commlayer.errors import CommError, PeerLost
from commlayer.transport import connection
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE


@pytest.fixture
def pair() -> Iterator[tuple[StreamTransport, StreamTransport]]:
    ends = StreamTransport(Hello("test", 0)), StreamTransport(Hello("test", 1))
    connect_all(list(ends))
    yield ends
    for end in ends:
        end.close()


# ---- addresses


def test_port_in_use(pair: tuple[StreamTransport, StreamTransport]) -> None:
    host, port = pair[0].listen()
    line = outcome(lambda: StreamTransport(Hello("test", 0)).listen(host, port))
    assert_refused(line, "E-ADDRESS", f"{host}:{port}: ", "in use")


def test_an_address_of_another_machine() -> None:
    line = outcome(lambda: StreamTransport(Hello("test", 0)).listen("192.0.2.1", 0))
    assert_refused(line, "E-ADDRESS", "192.0.2.1:0: ", "machine")


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = sock.getsockname()
    with pytest.raises(PeerLost, match=rf"server 0: .*127\.0\.0\.1:{address[1]}\b.*refused.*E-PEER-LOST"):
        StreamTransport(Hello("test", 0)).dial(SERVER_BASE, address, soon())


def test_somebody_there_who_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        begin = time.monotonic()
        line = outcome(lambda: StreamTransport(Hello("test", 0)).dial(SERVER_BASE, sock.getsockname(), begin + 0.2))
        assert_refused(line, "E-DEADLINE", "DeadlineExceeded: ", "server 0: ", "CHALLENGE")
        assert time.monotonic() - begin >= 0.2


def test_a_web_server_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        def answer() -> None:
            client, _ = sock.accept()
            client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            client.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(CommError, match="server 0: .*(HTTP server.*E-ADDRESS|E-PEER-LOST)"):
            StreamTransport(Hello("test", 0)).dial(SERVER_BASE, sock.getsockname(), soon())
        thread.join(PATIENCE_S)


# ---- ends


def test_a_forked_child_holds_no_connection_open(pair: tuple[StreamTransport, StreamTransport]) -> None:
    """The child lives on; the connection must end with the parent's end of it."""
    a, b = pair
    assert connection._sockets
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent has seen the loss
        os._exit(0 if not connection._sockets else 3)
    os.close(read)
    try:
        assert exchange_pair(a, b)  # the child's closing did not end ours
        a.abort(CommError("the end"))
        assert_refused(outcome(lambda: b.wait(b.recv(0), soon())), "E-PEER-LOST", "PeerLost: ", "worker 0: ")
    finally:
        os.close(write)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_peer_that_does_not_read_holds_close_up_no_longer_than_the_flush_time() -> None:
    end = StreamTransport(Hello("test", SERVER_BASE), settings=Settings(flush_s=0.2, buffer_nbytes=64 << 10))
    with raw_peer(end.listen(), 7) as sock:
        sock.sendall(frame(data(7)))
        end.wait(end.recv(7), soon())
        handles = [end.send(7, data(SERVER_BASE), bytes(1 << 20)) for _ in range(8)]
        begin = time.monotonic()
        end.close()
        assert time.monotonic() - begin < PATIENCE_S
        for handle in handles:
            assert_refused(outcome(lambda handle=handle: end.wait(handle, soon())), "E-SESSION-CLOSED")


def test_no_thread_and_no_socket_outlives_close() -> None:
    before, held = set(threading.enumerate()), set(connection._sockets)
    ends = [StreamTransport(Hello("test", rank)) for rank in range(3)]
    connect_all(ends)
    for end in ends:
        end.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name
    assert set(connection._sockets) <= held


def test_the_kernel_is_told_how_long_data_may_be_unacknowledged() -> None:
    """So that a path which swallows what is sent is not tried for a quarter of an hour."""
    ends = [StreamTransport(Hello("test", rank), settings=Settings(user_timeout_s=7.5)) for rank in range(2)]
    connect_all(ends)
    results = [one for end in ends for one in end._connections.values()]
    assert [one._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for one in results] == [7500, 7500]
    for end in ends:
        end.close()


def test_received_bodies_lie_in_the_pool(pair: tuple[StreamTransport, StreamTransport]) -> None:
    a, b = pair
    seen = set()
    for i in range(4):
        a.send(1, data(0, bucket=i), bytes([i]) * 200_000)
        body = b.wait(b.recv(0), soon()).body
        assert bytes(body) == bytes([i]) * 200_000
        seen.add(id(body.obj))
        b.pool.give(body)
    assert len(seen) == 1
