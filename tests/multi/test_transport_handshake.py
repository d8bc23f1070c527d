"""Carriers between processes: greetings, corrupt bytes, slow readers and closes; faults that only sockets have."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.attached import assert_refused, outcome
from support.internals import connections_of, open_sockets, socket_of
from support.mailbox import InboxTransport
from support.meshes import PATIENCE_S, WIRES, Wire, connect_all, data, exchange_pair, frame, raw_peer, soon

from commlayer.errors import CommError, CorruptFrame, PeerLost, Refused
from commlayer.transport import endpoint
from commlayer.transport.endpoint import Settings
from commlayer.transport.framing import HEADER_NBYTES, VERSION
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Header, Kind


@pytest.fixture(params=["tcp", "tls", "grpc", "grpc+tls"])
def wire(request: pytest.FixtureRequest) -> Wire:
    return WIRES[request.param]


@pytest.fixture
def server(wire: Wire) -> Iterator[InboxTransport]:
    end = wire.end(Hello("test", SERVER_BASE, plan="p1", version="0.1.0"), settings=Settings(max_nbytes=1 << 20))
    yield end
    end.close()


def dialler(wire: Wire, hello: Hello, end: InboxTransport, peer: int | None = None) -> None:
    transport = wire.end(hello)
    try:
        transport.dial(end.rank if peer is None else peer, end.listen(), soon())
    finally:
        transport.close()


@pytest.mark.parametrize(("hello", "reason"), [
    (Hello("other", 0), "server 0: .*job.*E-RANKS-DIFFER"),
    (Hello("test", 0, plan="p2"), "server 0: .*plan.*E-RANKS-DIFFER"),
    (Hello("test", 0, version="9.9", protocol=99), rf"server 0: .*\b99 .*9\.9\b.*\b{VERSION} .*E-VERSION"),
    (Hello("test", SERVER_BASE), r"server 0: server 0 .*E-RANK\]"),
    (Hello("test", 1), r"server 0: worker 1 .*E-RANK\]"),
])
def test_refusal_reaches_the_client_in_one_line(
    wire: Wire, server: InboxTransport, hello: Hello, reason: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "FORMER_END_S", 0.05)
    first = wire.end(Hello("test", 1))
    first.dial(SERVER_BASE, server.listen(), soon())
    with pytest.raises(Refused, match=reason) as caught:
        dialler(wire, hello, server)
    assert "\n" not in str(caught.value)
    assert exchange_pair(first, server)
    first.close()


def test_plan_on_one_side_only_is_no_refusal(wire: Wire, server: InboxTransport) -> None:
    transport = wire.end(Hello("test", 3))
    transport.dial(server.rank, server.listen(), soon())
    assert exchange_pair(transport, server)
    transport.close()


def test_admission_can_be_customized(wire: Wire) -> None:
    end = wire.end(Hello("test", SERVER_BASE), admit=lambda hello: f"not today, rank {hello.rank}")
    assert_refused(outcome(lambda: dialler(wire, Hello("whatever", 4), end)), "E-REFUSED", "server 0: not today, rank 4")
    end.close()


def test_wrong_server_at_the_address_is_named(wire: Wire, server: InboxTransport) -> None:
    line = outcome(lambda: dialler(wire, Hello("test", 0), server, peer=SERVER_BASE + 1))
    assert_refused(line, "E-ADDRESS", "server 1: server 0 ")


def test_client_may_reconnect_after_either_side_closed(wire: Wire, server: InboxTransport) -> None:
    worker, address = wire.end(Hello("test", 2)), server.listen()
    gone = [server.recv(2, (Kind.BYE, 0, 0, 0, 0, 0))]
    worker.dial(SERVER_BASE, address, soon())
    worker.abort(CommError("a new start"), SERVER_BASE)
    assert_refused(outcome(lambda: server.wait(gone[0], soon())), "E-PEER-LOST", "PeerLost: ", "worker 2: ")
    worker.dial(SERVER_BASE, address, soon())
    assert exchange_pair(worker, server)
    assert exchange_pair(server, worker)
    server.abort(CommError("heartbeats stopped", peer="worker 2"), 2)
    assert_refused(outcome(lambda: worker.wait(worker.recv(SERVER_BASE), soon())), "E-PEER-LOST", "PeerLost: ", "server 0: ")
    worker.dial(SERVER_BASE, address, soon())
    assert exchange_pair(worker, server)
    worker.close()


BAD_BODY = bytearray(frame(data(7), b"payload"))
BAD_BODY[-1] ^= 1


@pytest.mark.parametrize(("bytes_", "error", "message"), [
    (b"\0" * HEADER_NBYTES, CorruptFrame, "magic.*E-CHECKSUM"),
    (bytes(range(200)), CorruptFrame, "magic.*E-CHECKSUM"),
    (frame(data(7), bytes((1 << 20) + 1))[:HEADER_NBYTES], CorruptFrame, r"\b1048577 .*\b1048576\b.*E-FRAME"),
    (bytes(BAD_BODY), CorruptFrame, "body.*E-CHECKSUM"),
    (frame(Header(Kind.HELLO, sender=7)), CorruptFrame, "HELLO.*E-FRAME"),
    (frame(data(7), bytes(1000))[:-1], PeerLost, "middle of a frame.*E-PEER-LOST"),
    (frame(data(7))[:10], PeerLost, "middle of a frame.*E-PEER-LOST"),
    (b"", PeerLost, r"connection closed( \(.*\))? \[E-PEER-LOST"),
], ids=["zeros", "noise", "oversized", "body", "hello", "cut body", "cut header", "closed"])
def test_peer_that_violates_the_format_is_evicted_and_others_continue(
    wire: Wire, server: InboxTransport, bytes_: bytes, error: type[CommError], message: str,
) -> None:
    address = server.listen()
    good = wire.end(Hello("test", 1))
    good.dial(SERVER_BASE, address, soon())
    waiting, other = server.recv(7), server.recv(1)
    with contextlib.closing(raw_peer(address, 7, wire=wire)) as bad:
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
    frame(Header(Kind.HELLO), b"\x82\xa3job\xa1\xff\xa4rank\x00"),
    frame(Header(Kind.HELLO), bytes(5000)),
    frame(Header(Kind.HELLO), Hello("test", 0).job.encode()),
], ids=["http", "data first", "empty map", "unknown field", "no text", "huge", "no msgpack"])
def test_client_without_a_greeting_is_dropped_and_takes_no_rank(wire: Wire, server: InboxTransport, greeting: bytes) -> None:
    address = server.listen()
    with contextlib.closing(wire.raw(address)) as channel:
        channel.sendall(greeting)
        with contextlib.suppress(ConnectionResetError):  # it closed with our bytes unread
            assert channel.recv_into(bytearray(1)) == 0
    assert server.peers == ()
    dialler(wire, Hello("test", 0), server)


def test_close_without_goodbye_is_a_failure(wire: Wire, server: InboxTransport) -> None:
    """Data sent before it count."""
    with contextlib.closing(raw_peer(server.listen(), 7, wire=wire)) as channel:
        channel.sendall(frame(data(7), b"the last word"))
        channel.shutdown(socket.SHUT_WR)
        line = outcome(lambda: server.wait(server.recv(7, (Kind.BYE, 0, 0, 0, 0, 0)), soon()))
        assert_refused(line, "E-PEER-LOST", "PeerLost: ", "worker 7: ")
        assert bytes(server.wait(server.recv(7), soon()).body) == b"the last word"


def test_stalled_reader_blocks_the_writer(wire: Wire, server: InboxTransport) -> None:
    """No carrier queues without a bound; a wait names the peer."""
    with contextlib.closing(raw_peer(server.listen(), 7, wire=wire)) as channel:
        channel.sendall(frame(data(7)))
        server.wait(server.recv(7), soon())
        body = bytes(1 << 20)
        sent = [server.send(7, data(SERVER_BASE, bucket), body) for bucket in range(64)]
        line = outcome(lambda: server.wait(sent[-1], time.monotonic() + 0.2))
        assert_refused(line, "E-DEADLINE", "DeadlineExceeded: ", "worker 7: ", "DATA")
        assert sum(handle.done() for handle in sent) < 32
        server.abort(CommError("enough", peer="worker 7"), 7)
        for handle in sent[-2:]:
            assert_refused(outcome(lambda handle=handle: server.wait(handle, soon())), "E-COMM", "worker 7: enough")


@pytest.fixture
def pair() -> Iterator[tuple[InboxTransport, InboxTransport]]:
    ends = InboxTransport(Hello("test", 0)), InboxTransport(Hello("test", 1))
    connect_all(list(ends))
    yield ends
    for end in ends:
        end.close()


def test_port_in_use(pair: tuple[InboxTransport, InboxTransport]) -> None:
    host, port = pair[0].listen()
    line = outcome(lambda: InboxTransport(Hello("test", 0)).listen(host, port))
    assert_refused(line, "E-ADDRESS", f"{host}:{port} ", "in use")


def test_address_of_another_machine_is_refused() -> None:
    line = outcome(lambda: InboxTransport(Hello("test", 0)).listen("192.0.2.1", 0))
    assert_refused(line, "E-ADDRESS", "192.0.2.1:0: ", "machine")


def test_closed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = sock.getsockname()
    with pytest.raises(PeerLost, match=rf"server 0: .*127\.0\.0\.1:{address[1]}\b.*refused.*E-PEER-LOST"):
        InboxTransport(Hello("test", 0)).dial(SERVER_BASE, address, soon())


def test_listener_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        begin = time.monotonic()
        line = outcome(lambda: InboxTransport(Hello("test", 0)).dial(SERVER_BASE, sock.getsockname(), begin + 0.2))
        assert_refused(line, "E-DEADLINE", "DeadlineExceeded: ", "server 0: ", "CHALLENGE")
        assert time.monotonic() - begin >= 0.2


def test_web_server_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        def answer() -> None:
            client, _ = sock.accept()
            client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            client.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(CommError, match="server 0: .*(HTTP server.*E-ADDRESS|E-PEER-LOST)"):
            InboxTransport(Hello("test", 0)).dial(SERVER_BASE, sock.getsockname(), soon())
        thread.join(PATIENCE_S)


def test_forked_child_keeps_no_connection_open(pair: tuple[InboxTransport, InboxTransport]) -> None:
    """The child lives on; the connection must end with the parent's end of it."""
    a, b = pair
    assert open_sockets()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent has seen the loss
        os._exit(0 if not open_sockets() else 3)
    os.close(read)
    try:
        assert exchange_pair(a, b)  # the child's closing did not end ours
        a.abort(CommError("the end"))
        assert_refused(outcome(lambda: b.wait(b.recv(0), soon())), "E-PEER-LOST", "PeerLost: ", "worker 0: ")
    finally:
        os.close(write)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_stalled_peer_delays_close_by_at_most_the_flush_time() -> None:
    end = InboxTransport(Hello("test", SERVER_BASE), settings=Settings(flush_s=0.2, buffer_nbytes=64 << 10))
    with contextlib.closing(raw_peer(end.listen(), 7)) as sock:
        sock.sendall(frame(data(7)))
        end.wait(end.recv(7), soon())
        handles = [end.send(7, data(SERVER_BASE), bytes(1 << 20)) for _ in range(8)]
        begin = time.monotonic()
        end.close()
        assert time.monotonic() - begin < PATIENCE_S
        for handle in handles:
            assert_refused(outcome(lambda handle=handle: end.wait(handle, soon())), "E-SESSION-CLOSED")


def test_no_thread_and_no_socket_outlives_close() -> None:
    before, held = set(threading.enumerate()), open_sockets()
    ends = [InboxTransport(Hello("test", rank)) for rank in range(3)]
    connect_all(ends)
    for end in ends:
        end.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name
    assert open_sockets() <= held


def test_kernel_limits_the_time_of_unacknowledged_data() -> None:
    """Otherwise the kernel would retry a path that drops all data for a quarter of an hour."""
    ends = [InboxTransport(Hello("test", rank), settings=Settings(user_timeout_s=7.5)) for rank in range(2)]
    connect_all(ends)
    results = [one for end in ends for one in connections_of(end).values()]
    assert [socket_of(one).getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for one in results] == [7500, 7500]
    for end in ends:
        end.close()
