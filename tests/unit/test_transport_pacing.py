"""What the pacer tells the kernel, and that frames and caps go together on real connections."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator

import pytest

from commlayer.transport import flow_control
from commlayer.transport.endpoint import StreamTransport
from commlayer.transport.flow_control import SLACK, SO_MAX_PACING_RATE, UNLIMITED, Pacer
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Header, Kind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are paced on Linux only")
BPS = 80e6
MUCH = bytes(1 << 20)


def cap(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE)


def part(n: int) -> int:
    return int(SLACK * BPS / 8 / n)


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Three connections over TCP: our end, and one that reads nothing."""
    results = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(3):
            ours = socket.create_connection(listener.getsockname())
            results.append((ours, listener.accept()[0]))
    yield results
    for pair in results:
        for sock in pair:
            sock.close()


def stuff(sock: socket.socket) -> None:
    """Fills both ends' buffers, so that much waits."""
    sock.setblocking(False)
    while True:
        try:
            sock.send(MUCH)
        except BlockingIOError:
            return


def test_nothing_is_capped_before_a_rate_is_known(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    before, pacer = cap(pairs[0][0]), Pacer()
    pacer.begins(pairs[0][0])
    assert cap(pairs[0][0]) == before


def test_who_sends_at_once_shares_and_who_is_alone_has_all(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (a, _), (b, _), (c, _) = pairs
    pacer = Pacer()
    pacer.follow(BPS)
    pacer.begins(a)
    assert cap(a) == part(1)
    pacer.begins(b)
    assert cap(b) == part(1), "nothing waits at a"
    stuff(a)
    stuff(b)
    pacer.begins(c)
    assert [cap(sock) for sock in (a, b, c)] == [part(3)] * 3
    pacer.lift(c)
    assert cap(c) == UNLIMITED
    pacer.begins(b)
    assert (cap(a), cap(b)) == (part(2), part(2))
    pacer.follow(0.0)
    assert {cap(sock) for sock in (a, b, c)} == {UNLIMITED}
    pacer.begins(a)
    assert cap(a) == UNLIMITED


def test_the_lower_of_a_share_and_a_credit_holds_and_either_alone(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (a, _), (b, _), _ = pairs
    pacer = Pacer()
    pacer.bound(a, 2e6)
    assert (cap(a), cap(b)) == (2_000_000, UNLIMITED), "a credit needs no rate of the link"
    pacer.follow(BPS)
    pacer.begins(a)
    assert cap(a) == 2_000_000
    pacer.bound(a, 1e9)
    assert cap(a) == part(1)
    pacer.bound(a, 3e6)
    pacer.lift(a)
    assert cap(a) == 3_000_000, "a probe is bound by its credit"
    pacer.begins(a)
    pacer.bound(a, 0.0)
    assert cap(a) == part(1)
    pacer.follow(0.0)
    assert cap(a) == UNLIMITED
    pacer.bound(a, 1.0)
    assert cap(a) == flow_control.MIN_RATE, "0 would stop it"


def control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize(("bps", "left", "leaves"), [
    (flow_control.SLOW_BPS / 2, True, True), (flow_control.SLOW_BPS * 2, True, False),
    (flow_control.SLOW_BPS / 2, False, False)])
def test_on_slow_links_a_control_that_forgets_the_rate_is_left(
    pairs: list[tuple[socket.socket, socket.socket]], monkeypatch: pytest.MonkeyPatch, bps: float, left: bool, leaves: bool,
) -> None:
    """The machine's own stands for BBR, which not every kernel has; every kernel has Reno."""
    (sock, _), (other, _), _ = pairs
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    used, pacer = control(sock), Pacer()
    monkeypatch.setattr(flow_control, "BBR", (used,) if left else ())
    monkeypatch.setattr(flow_control, "INSTEAD_OF_BBR", (b"none of this name", b"reno"))
    pacer.follow(bps)
    for one in (sock, other):
        pacer.sends(one)
    assert (control(sock), control(other)) == (b"reno" if leaves else used, b"reno")
    pacer.begins(sock)
    assert cap(sock) == int(SLACK * bps / 8), "it is paced all the same"


def test_a_connection_that_is_gone_takes_no_part(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (a, _), (b, _), _ = pairs
    pacer = Pacer()
    pacer.follow(BPS)
    stuff(a)
    pacer.begins(a)
    a.close()
    pacer.begins(b)
    assert cap(b) == part(1)


@pytest.mark.parametrize(("host", "away"), [("127.0.0.2", True), ("127.0.0.1", False)])
def test_large_frames_to_other_machines_are_paced_and_probes_are_not(host: str, away: bool) -> None:
    ours, theirs = StreamTransport(Hello("job", 0)), StreamTransport(Hello("job", SERVER_BASE))
    try:
        deadline = time.monotonic() + 20.0
        ours.dial(SERVER_BASE, theirs.listen(host), deadline)
        sock = ours._connections[SERVER_BASE]._sock
        unpaced = cap(sock)
        ours.pace(BPS)
        for kind, nbytes, expected in (
            (Kind.DATA, 1000, unpaced), (Kind.DATA, len(MUCH), part(1)),
            (Kind.PROBE, len(MUCH), UNLIMITED), (Kind.DATA, len(MUCH), part(1)),
        ):
            sent = ours.send(SERVER_BASE, Header(kind), MUCH[:nbytes])
            ours.wait(sent, deadline)
            assert len(theirs.wait(theirs.recv(0), deadline).body) == nbytes
            assert cap(sock) == (expected if away else unpaced), kind
    finally:
        ours.close()
        theirs.close()
