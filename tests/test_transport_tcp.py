"""What only sockets can do wrong: greetings, addresses, broken bytes, forks, and ends of every kind."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from transport_kit import PATIENCE_S, connect_all, data, exchange_pair, frame, raw_peer, soon

from commlayer.errors import CommError, CorruptFrame, DeadlineExceeded, PeerLost, Refused
from commlayer.transport import connection
from commlayer.transport.framing import HEADER_NBYTES, VERSION
from commlayer.transport.hello import Hello
from commlayer.transport.protocol import SERVER_BASE, Header, Kind
from commlayer.transport.tcp import Settings, TcpTransport


@pytest.fixture
def pair() -> Iterator[tuple[TcpTransport, TcpTransport]]:
    ends = TcpTransport(Hello("test", 0)), TcpTransport(Hello("test", 1))
    connect_all(list(ends))
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def server() -> Iterator[TcpTransport]:
    end = TcpTransport(Hello("test", SERVER_BASE, plan="p1", version="0.1.0"), settings=Settings(max_nbytes=1 << 20))
    yield end
    end.close()


def dialler(hello: Hello, end: TcpTransport, peer: int | None = None) -> None:
    transport = TcpTransport(hello)
    try:
        transport.dial(end.rank if peer is None else peer, end.listen(), soon())
    finally:
        transport.close()


@pytest.mark.parametrize(("hello", "reason"), [
    (Hello("other", 0), "server 0: is of another job: start all with the same model and job id"),
    (Hello("test", 0, plan="p2"), "server 0: follows another plan: start all with the same plan"),
    (Hello("test", 0, version="9.9", protocol=9), rf"speaks protocol 9 \(commlayer 9.9\), here {VERSION} \(commlayer 0.1.0\)"),
    (Hello("test", SERVER_BASE), "server 0: server 0 is this end itself"),
    (Hello("test", 1), "server 0: worker 1 is connected already"),
])
def test_a_refusal_reaches_the_dialler_in_one_line(server: TcpTransport, hello: Hello, reason: str) -> None:
    first = TcpTransport(Hello("test", 1))
    first.dial(SERVER_BASE, server.listen(), soon())
    with pytest.raises(Refused, match=reason) as caught:
        dialler(hello, server)
    assert "\n" not in str(caught.value)
    assert exchange_pair(first, server)
    first.close()


def test_a_plan_that_only_one_side_has_is_no_reason(server: TcpTransport) -> None:
    dialler(Hello("test", 3), server)


def test_who_admits_may_be_handed_in() -> None:
    end = TcpTransport(Hello("test", SERVER_BASE), admit=lambda hello: f"not today, rank {hello.rank}")
    with pytest.raises(Refused, match="server 0: not today, rank 4"):
        dialler(Hello("whatever", 4), end)
    end.close()


def test_another_one_at_the_address(server: TcpTransport) -> None:
    with pytest.raises(Refused, match="server 1: server 0 answered in its place: check the address"):
        dialler(Hello("test", 0), server, peer=SERVER_BASE + 1)


def test_the_dialler_may_come_back_after_either_side_ended(server: TcpTransport) -> None:
    worker, address = TcpTransport(Hello("test", 2)), server.listen()
    gone = [server.recv(2, (Kind.BYE, 0, 0, 0, 0, 0))]
    worker.dial(SERVER_BASE, address, soon())
    worker.abort(CommError("a new start"), SERVER_BASE)
    with pytest.raises(PeerLost, match="worker 2: connection closed"):
        server.wait(gone[0], soon())
    worker.dial(SERVER_BASE, address, soon())
    assert exchange_pair(worker, server)
    assert exchange_pair(server, worker)
    server.abort(CommError("heartbeats stopped", peer="worker 2"), 2)
    with pytest.raises(PeerLost, match="server 0: connection closed"):
        worker.wait(worker.recv(SERVER_BASE), soon())
    worker.dial(SERVER_BASE, address, soon())
    assert exchange_pair(worker, server)
    worker.close()


# ---- addresses


def test_port_in_use(server: TcpTransport) -> None:
    host, port = server.listen()
    with pytest.raises(ValueError, match=f"cannot listen on {host}:{port}: the port is in use: stop the process"):
        TcpTransport(Hello("test", 0)).listen(host, port)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ValueError, match="not of this machine"):
        TcpTransport(Hello("test", 0)).listen("192.0.2.1", 0)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = sock.getsockname()
    with pytest.raises(PeerLost, match=rf"server 0: cannot reach 127.0.0.1:{address[1]} \(deadline .* s\): .*refused: check"):
        TcpTransport(Hello("test", 0)).dial(SERVER_BASE, address, soon())


def test_somebody_there_who_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="server 0: no CHALLENGE before the deadline"):
            TcpTransport(Hello("test", 0)).dial(SERVER_BASE, sock.getsockname(), begin + 0.2)
        assert time.monotonic() - begin >= 0.2


def test_a_web_server_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        def answer() -> None:
            client, _ = sock.accept()
            client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            client.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(CommError, match=r"server 0: (wrong magic .* probably an HTTP server|connection lost)"):
            TcpTransport(Hello("test", 0)).dial(SERVER_BASE, sock.getsockname(), soon())
        thread.join(PATIENCE_S)


# ---- broken bytes


BAD_BODY = bytearray(frame(data(7), b"payload"))
BAD_BODY[-1] ^= 1


@pytest.mark.parametrize(("bytes_", "error", "message"), [
    (b"\0" * HEADER_NBYTES, CorruptFrame, "wrong magic"),
    (bytes(range(200)), CorruptFrame, "wrong magic"),
    (frame(data(7), bytes((1 << 20) + 1))[:HEADER_NBYTES], CorruptFrame, "announces a body of 1048577 bytes, allowed 1048576"),
    (bytes(BAD_BODY), CorruptFrame, "checksum of a body"),
    (frame(Header(Kind.HELLO, sender=7)), CorruptFrame, "HELLO in the middle"),
    (frame(data(7), bytes(1000))[:-1], PeerLost, "connection closed in the middle of a frame"),
    (frame(data(7))[:10], PeerLost, "connection closed in the middle of a frame"),
    (b"", PeerLost, "connection closed"),
], ids=["zeros", "noise", "oversized", "body", "hello", "cut body", "cut header", "closed"])
def test_a_peer_that_breaks_the_format_is_dropped_by_name_and_others_go_on(
    server: TcpTransport, bytes_: bytes, error: type[CommError], message: str,
) -> None:
    address = server.listen()
    good = TcpTransport(Hello("test", 1))
    good.dial(SERVER_BASE, address, soon())
    waiting, other = server.recv(7), server.recv(1)
    with raw_peer(address, 7) as bad:
        bad.sendall(frame(data(7), b"good so far"))
        assert bytes(server.wait(waiting, soon()).body) == b"good so far"
        waiting = server.recv(7)
        bad.sendall(bytes_)
        with contextlib.suppress(OSError):  # dropped already
            bad.shutdown(socket.SHUT_WR)
        with pytest.raises(error, match=f"worker 7: .*{message}"):
            server.wait(waiting, soon())
        with pytest.raises(error):
            server.wait(server.send(7, data(SERVER_BASE)), soon())
    good.send(SERVER_BASE, data(1), b"unharmed")
    assert bytes(server.wait(other, soon()).body) == b"unharmed"
    assert exchange_pair(server, good)
    assert server.peers == (1,)
    good.close()


@pytest.mark.parametrize("greeting", [
    b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: health-check/1.0 (probe)\r\n\r\n",
    frame(data(7)),
    frame(Header(Kind.HELLO), b"\x80"),
    frame(Header(Kind.HELLO), b"\x81\xa3pwn\xc0"),
    frame(Header(Kind.HELLO), bytes(5000)),
    frame(Header(Kind.HELLO), Hello("test", 0).job.encode()),
], ids=["http", "data first", "empty map", "unknown field", "huge", "no msgpack"])
def test_who_does_not_greet_is_dropped_and_takes_no_rank(server: TcpTransport, greeting: bytes) -> None:
    address = server.listen()
    with socket.create_connection(address, PATIENCE_S) as sock:
        sock.sendall(greeting)
        try:
            assert sock.recv(1) == b""
        except ConnectionResetError:
            pass  # it closed with our bytes unread
    assert server.peers == ()
    dialler(Hello("test", 0), server)


def test_a_body_above_the_cap_is_our_bug(server: TcpTransport) -> None:
    with pytest.raises(ValueError, match="1048577 bytes for worker 1, allowed 1048576"):
        server.send(1, data(SERVER_BASE), bytes((1 << 20) + 1))


# ---- ends


def test_a_forked_child_holds_no_connection_open(pair: tuple[TcpTransport, TcpTransport]) -> None:
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
        with pytest.raises(PeerLost, match="worker 0: connection closed"):
            b.wait(b.recv(0), soon())
    finally:
        os.close(write)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_peer_that_does_not_read_holds_close_up_no_longer_than_the_flush_time() -> None:
    end = TcpTransport(Hello("test", SERVER_BASE), settings=Settings(flush_s=0.2, buffer_nbytes=64 << 10))
    with raw_peer(end.listen(), 7) as sock:
        sock.sendall(frame(data(7)))
        end.wait(end.recv(7), soon())
        handles = [end.send(7, data(SERVER_BASE), bytes(1 << 20)) for _ in range(8)]
        begin = time.monotonic()
        end.close()
        assert time.monotonic() - begin < PATIENCE_S
        for handle in handles:
            with pytest.raises(CommError, match="this end of the transport was closed"):
                end.wait(handle, soon())


def test_no_thread_and_no_socket_outlives_close() -> None:
    before, held = set(threading.enumerate()), set(connection._sockets)
    ends = [TcpTransport(Hello("test", rank)) for rank in range(3)]
    connect_all(ends)
    for end in ends:
        end.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name
    assert set(connection._sockets) <= held


def test_the_kernel_is_told_how_long_data_may_be_unacknowledged() -> None:
    """So that a path which swallows what is sent is not tried for a quarter of an hour."""
    ends = [TcpTransport(Hello("test", rank), settings=Settings(user_timeout_s=7.5)) for rank in range(2)]
    connect_all(ends)
    found = [one for end in ends for one in end._connections.values()]
    assert [one._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for one in found] == [7500, 7500]
    for end in ends:
        end.close()


def test_received_bodies_lie_in_the_pool(pair: tuple[TcpTransport, TcpTransport]) -> None:
    a, b = pair
    seen = set()
    for i in range(4):
        a.send(1, data(0, bucket=i), bytes([i]) * 200_000)
        body = b.wait(b.recv(0), soon()).body
        assert bytes(body) == bytes([i]) * 200_000
        seen.add(id(body.obj))
        b.pool.give(body)
    assert len(seen) == 1
