"""Carrier selection: the configured one, else the first that connects; one port is enough for a job."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from support.attached import assert_refused, outcome
from support.coordinators import WAIT_S, Failures, quick, until
from support.internals import connections_of, socket_of
from support.mailbox import InboxTransport
from support.meshes import WIRES, exchange_pair, keys, soon

from commlayer import records
from commlayer.cluster.calls import messages
from commlayer.cluster.membership import client
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.servers import dialing, worker_client
from commlayer.cluster.servers.data_server import DataServer
from commlayer.config import host_port
from commlayer.errors import PeerLost, Refused
from commlayer.planner import default_plan
from commlayer.records import Job, ServerInfo, TensorInfo
from commlayer.transport.endpoint import Settings
from commlayer.transport.grpc import stream
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE

JOB = Job((TensorInfo("weight", (100,)),))
PLAN = default_plan(JOB, codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=4096, cut_nbytes=4096)


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


class Server:
    """A coordinator with a server in its process, or a separate server, until the test ends."""

    def __init__(self, opened: contextlib.ExitStack, *, beside: bool = True, **fields: Any) -> None:
        self.opened, self.colocated, self.config = opened, beside, quick(**fields)
        self.coordinator = Coordinator(self.config, servers=1)
        opened.callback(self.coordinator.close)
        self.serving = DataServer("127.0.0.1", 0, self.config, self.coordinator if beside else None)
        opened.callback(self.serving.close)

    def worker(self, *, joined: str = "", data: str = "", **fields: Any) -> worker_client.WorkerClient:
        """A worker that joins by that address and learns that TCP is offered."""
        address = joined or self.coordinator.address
        with ThreadPoolExecutor(2) as pool:
            request = messages.server_request(data or self.serving.address, colocated=self.colocated,
                                              streams=self.serving.streams)
            seat = pool.submit(client.join, self.coordinator.address, request, self.config, Failures())
            mine = messages.worker_request(PLAN.job, 0, 1, plan=records.encode(PLAN))
            up = pool.submit(worker_client.connect, address, mine, quick(**fields))
            member = seat.result(WAIT_S)
            self.opened.enter_context(contextlib.closing(SimpleNamespace(close=member.leave)))
            self.serving.start(member.epoch, member.plan, member.rank)
            connected = up.result(WAIT_S)
        self.opened.callback(connected.close)
        return connected


def channel(up: Any) -> str:
    (one,) = up.transport._carrier._connections.values()
    return type(socket_of(one)).__name__


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


@contextlib.contextmanager
def answering(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """An address where connections are handled by that function, in sequence."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def loop() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = listener.accept()
                    threading.Thread(target=serve, args=(one,), daemon=True).start()

        threading.Thread(target=loop, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def web_server(sock: socket.socket) -> None:
    with sock:
        sock.recv(1000)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def swallow(sock: socket.socket) -> None:
    sock.recv(1000)
    threading.Event().wait(WAIT_S)


def http2_only(target: str) -> Callable[[socket.socket], None]:
    """A proxy before `target` that closes connections that do not start as HTTP/2."""

    def serve(sock: socket.socket) -> None:
        first = sock.recv(1 << 16)
        if not first.startswith(b"PRI * HTTP/2.0"):
            sock.close()
            return
        inner = socket.create_connection(host_port(target))
        inner.sendall(first)
        for source, sink in ((sock, inner), (inner, sock)):
            threading.Thread(target=pump, args=(source, sink), daemon=True).start()

    return serve


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_RDWR)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if " at " in r.getMessage() and "over" in r.getMessage()]


def test_first_working_carrier_is_used_and_logged(opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "commlayer")
    server = Server(opened)
    assert channel(server.worker()) == "socket"
    (line,) = said(caplog)
    assert f"server 0 over TCP at {server.serving.address}" in line


@pytest.mark.parametrize(("how", "why"), [
    ("closed", "cannot reach .*refused"), ("web", "probably an HTTP server|connection lost"), ("swallow", "no CHALLENGE"),
])
def test_grpc_is_used_if_tcp_is_blocked(
    how: str, why: str, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialing, "TCP_S", 0.3)
    caplog.set_level(logging.INFO, "commlayer")
    server = Server(opened)
    present = {"closed": closed_port, "web": lambda: opened.enter_context(answering(web_server)),
               "swallow": lambda: opened.enter_context(answering(swallow))}[how]()
    up = server.worker(data=present)
    assert channel(up) == "GrpcStream"
    (line,) = said(caplog)
    assert f"server 0 over gRPC at {server.coordinator.address}, because TCP failed: " in line
    assert re.search(why, line)


def test_http2_only_proxy_with_one_port_is_enough(opened: contextlib.ExitStack) -> None:
    """The worker knows only the proxy's address; all others are blocked for it."""
    server = Server(opened)
    proxy = opened.enter_context(answering(http2_only(server.coordinator.address)))
    assert channel(server.worker(joined=proxy, data=closed_port())) == "GrpcStream"


def test_streams_only_server_opens_no_other_port(opened: contextlib.ExitStack) -> None:
    server = Server(opened, carrier="grpc")
    assert server.serving.address == server.serving.streams == server.coordinator.address
    assert channel(server.worker()) == "GrpcStream"


@pytest.mark.parametrize("secured", [False, True])
def test_separate_server_accepts_streams_at_its_own_port(secured: bool, opened: contextlib.ExitStack) -> None:
    fields = {"keys": str(keys().folder)} if secured else {}
    server = Server(opened, beside=False, **fields)
    assert len({server.serving.address, server.serving.streams, server.coordinator.address}) == 3
    assert channel(server.worker(carrier="grpc", **fields)) == "GrpcStream"


@pytest.mark.parametrize(("local", "present", "line"), [
    ("grpc", "tcp", "server 0: .*accepts no gRPC .*carrier.*E-SETTING"),
    ("tcp", "grpc", "server 0: accepts only gRPC .*carrier.*E-SETTING"),
])
def test_incompatible_carrier_settings_are_reported(local: str, present: str, line: str, opened: contextlib.ExitStack) -> None:
    with pytest.raises(Refused, match=line):
        Server(opened, carrier=present).worker(carrier=local)


def test_both_carriers_blocked_reports_both_reasons(opened: contextlib.ExitStack) -> None:
    """Both reasons, in order of the attempts."""
    server = Server(opened, beside=False)
    server.serving.streams = closed_port()
    with pytest.raises(PeerLost, match=r"server 0: .*; nor over gRPC: .*E-PEER-LOST") as caught:
        server.worker(data=closed_port())
    assert "\n" not in str(caught.value)


def test_coordinator_without_a_server_accepts_no_streams(opened: contextlib.ExitStack) -> None:
    coordinator = Coordinator(quick(), workers=1)
    opened.callback(coordinator.close)
    worker = InboxTransport(Hello("job", 0))
    opened.callback(worker.close)
    line = outcome(lambda: dialing.dial_grpc(worker, SERVER_BASE, host_port(coordinator.address), None, soon()))
    assert_refused(line, "E-ADDRESS", "server 0: ", "accepts no gRPC ")


def test_stream_that_comes_before_its_server_is_ready_is_dialed_again(opened: contextlib.ExitStack) -> None:
    """A process that is started again listens before its summation server does."""
    coordinator = Coordinator(quick(), workers=1, streams=True)
    opened.callback(coordinator.close)
    early, refuse = threading.Event(), coordinator._port.accept
    assert refuse is not None

    def refused(*stream: Any) -> bool:
        early.set()
        return refuse(*stream)

    coordinator.serve_streams(refused)
    worker, server = (InboxTransport(Hello("job", rank)) for rank in (0, SERVER_BASE))
    opened.callback(worker.close)
    opened.callback(server.close)
    with ThreadPoolExecutor(1) as pool:
        dialed = pool.submit(dialing.dial_grpc, worker, SERVER_BASE, host_port(coordinator.address), None, soon())
        assert early.wait(WAIT_S)
        coordinator.serve_streams(server.take)
        dialed.result(WAIT_S)
    until(lambda: bool(connections_of(server)), "the server has the connection, too")


def test_refusal_is_not_retried_over_another_carrier(opened: contextlib.ExitStack) -> None:
    """A server's refusal is valid for every carrier."""
    seen: list[str] = []
    end = InboxTransport(Hello("job", SERVER_BASE), admit=lambda hello: seen.append(hello.job) or "not today")
    opened.callback(end.close)
    worker = InboxTransport(Hello("job", 0))
    opened.callback(worker.close)
    host, port = end.listen()
    present = ServerInfo(0, f"{host}:{port}", streams=closed_port())
    line = outcome(lambda: dialing.make_dial(worker, present, "", quick(), None)(soon()))
    assert_refused(line, "E-REFUSED", "server 0: not today")
    assert seen == ["job"]


def test_worker_waits_for_a_server_without_a_plan(opened: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handshake has started, so TCP works. A working carrier is dialled again, and no other."""
    monkeypatch.setattr(dialing, "TCP_S", 0.2)
    late = threading.Event()
    threading.Timer(0.5, late.set).start()
    end = InboxTransport(Hello("job", SERVER_BASE), admit=lambda _: "" if late.wait(WAIT_S) else "no plan")
    opened.callback(end.close)
    worker = InboxTransport(Hello("job", 0))
    opened.callback(worker.close)
    host, port = end.listen()
    dial = dialing.make_dial(worker, ServerInfo(0, f"{host}:{port}", streams=closed_port()), "", quick(), None)
    dial(soon())
    assert exchange_pair(worker, end)
    end.close()
    worker.abort(PeerLost("gone", peer="server 0"), SERVER_BASE)
    with pytest.raises(PeerLost, match=r"cannot reach (?!.*over gRPC).*E-PEER-LOST"):
        dial(soon())


def test_idle_streams_send_empty_messages(
    opened: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They keep proxies from closing a stream between two steps."""
    monkeypatch.setattr(stream, "IDLE_S", 0.02)
    ends: list[Any] = opened.enter_context(WIRES["grpc"].mesh(2))
    for end, other in (ends, reversed(ends)):
        (one,) = connections_of(end).values()
        last_s = socket_of(one)._rate.last_s
        until(lambda one=one, last_s=last_s: socket_of(one)._rate.last_s > last_s, "an empty message has arrived")
        assert exchange_pair(end, other)


def test_silent_stream_is_replaced_and_logged(opened: contextlib.ExitStack) -> None:
    refused: list[str] = []
    settings = Settings(hello_s=0.1, refused=lambda where, why: refused.append(why))
    end = WIRES["grpc"].end(Hello("test", SERVER_BASE), settings=settings)
    opened.callback(end.close)
    with contextlib.closing(WIRES["grpc"].raw(end.listen())) as silent:
        assert silent.recv_into(bytearray(1)) == 0
    assert "no HELLO before the deadline" in refused[0]


@pytest.mark.parametrize(("carrier", "missed"), [("tcp", ("worker 0",)), ("grpc", ())])
def test_only_sockets_distinguish_a_cut_from_a_death(
        carrier: str, missed: tuple[str, ...], opened: contextlib.ExitStack) -> None:
    """A worker that a server misses is dead long before reconnect_s; gRPC also ends streams on a cut link."""
    end = WIRES[carrier].end(Hello("test", SERVER_BASE), settings=Settings(resume=True))
    opened.callback(end.close)
    broken = threading.Event()
    end.broken = lambda *_: broken.set()
    worker = WIRES[carrier].end(Hello("test", 0, session=b"s" * 16), settings=Settings(resume=True))
    opened.callback(worker.close)
    worker.dial(SERVER_BASE, end.listen(), soon())
    begin_s = time.monotonic()
    assert exchange_pair(worker, end)
    assert end.heard_since(begin_s) == ("worker 0",)
    assert end.heard_since(time.monotonic()) == ()
    (one,) = connections_of(worker).values()
    socket_of(one).close() if carrier == "grpc" else socket_of(one).shutdown(socket.SHUT_RDWR)
    assert broken.wait(WAIT_S)
    assert end.disconnected_peers() == missed


def test_closed_stream_closes_its_connection() -> None:
    """Not only when its next empty message would be due."""
    with WIRES["grpc"].mesh(2):
        held = len(os.listdir("/proc/self/fd"))
    until(lambda: len(os.listdir("/proc/self/fd")) <= held - 3, "its two ends and the listener are closed")
