"""Credit, pacing and addresses of connections."""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.internals import connections_of, socket_of
from support.mailbox import InboxTransport

from commlayer.engine.start.rendezvous import RankRow, _own_address
from commlayer.transport import own_address
from commlayer.transport.flow import credit as flow_credit
from commlayer.transport.flow import pacing, send_control
from commlayer.transport.flow.credit import MIN_PART_NBYTES, SETTLE_READINGS, WINDOWS, Credit, LinkSample
from commlayer.transport.flow.pacing import SLACK, SO_MAX_PACING_RATE, UNLIMITED, Pacer
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Header, Kind

MEGABIT = 1e6 / 8


def settled(rate: float, round_trip_s: float) -> Credit:
    credit = Credit()
    for i in range(1 + SETTLE_READINGS):
        credit.update(float(i), LinkSample(rate, round_trip_s))
    return credit


def test_no_limit_while_the_rate_grows_or_is_unknown() -> None:
    credit = Credit()
    assert credit.wait_s(1 << 30) == 0.0
    for i in range(10):
        credit.update(float(i), LinkSample(MEGABIT * 2**i, 0.03))
        assert credit.wait_s(1 << 30) == 0.0
    for i in range(SETTLE_READINGS):
        credit.update(10.0 + i, LinkSample(MEGABIT * 2**9, 0.03))
    assert credit.wait_s(1 << 30) > 0.0


@pytest.mark.parametrize("rate", [1 * MEGABIT, 10 * MEGABIT, 100 * MEGABIT, 1000 * MEGABIT])
@pytest.mark.parametrize("round_trip_s", [0.001, 0.03, 0.2])
def test_limit_is_the_bandwidth_delay_product_plus_a_short_queue(rate: float, round_trip_s: float) -> None:
    result = settled(rate, round_trip_s)
    holds = rate * round_trip_s
    queue = max(flow_credit.QUEUE_S * rate, holds / 3, 2 * MIN_PART_NBYTES)
    assert holds < result.nbytes <= holds + queue + 1
    assert result.wait_s(int(result.nbytes)) == 0.0
    assert result.wait_s(int(result.nbytes + rate)) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("round_trip_s", [0.001, 0.03, 0.2])
@pytest.mark.parametrize("start", [0.01, 0.9])
def test_low_limit_rises_to_the_link_rate(round_trip_s: float, start: float) -> None:
    """Bytes in flight arrive once per round trip, so the limit bounds the observed rate and the rate determines the limit."""
    link = 100 * MEGABIT
    result = settled(start * link, round_trip_s)
    for i in range(60):
        rate = min(link, result.nbytes / round_trip_s) if result.settled else link
        result.update(10.0 + i, LinkSample(rate, round_trip_s))
    assert result.nbytes >= link * round_trip_s


@pytest.mark.parametrize("round_trip_s", [0.001, 0.03, 0.2])
def test_kernel_rate_follows_the_credit_and_is_unlimited_before(round_trip_s: float) -> None:
    rate, credit = 100 * MEGABIT, Credit()
    assert credit.nbytes_s == 0.0
    for i in range(1 + SETTLE_READINGS):
        assert credit.nbytes_s == 0.0
        credit.update(float(i), LinkSample(rate, round_trip_s))
    assert credit.nbytes_s == pytest.approx(credit.nbytes / round_trip_s)
    assert credit.nbytes_s > 1.25 * rate, "room to find that the link has become faster"
    credit.update(10.0, LinkSample(2 * rate, round_trip_s))
    assert credit.nbytes_s == 0.0, "a rate that grows has no limit"


def test_late_senders_get_a_longer_queue_until_they_are_on_time() -> None:
    rate, round_trip_s = 100 * MEGABIT, 0.03
    result = settled(rate, round_trip_s)
    short = result.nbytes
    for _ in range(20):
        assert result.wait_s(int(2 * result.nbytes)) > 0.0
        result.idle()
        result.wait_s(0)  # there was nothing to send
    assert result.nbytes == short
    for _ in range(20):
        assert result.wait_s(int(2 * result.nbytes)) > 0.0
        result.wait_s(0)  # and nothing is in flight any more
    longest = result.nbytes
    assert longest > 2 * short
    assert longest == pytest.approx(rate * (round_trip_s + flow_credit.MAX_QUEUE_S), rel=0.01)
    for _ in range(5):
        result.wait_s(0)  # it fills the link again: that counts once
    assert result.nbytes == longest
    for _ in range(5000):
        assert result.wait_s(int(2 * result.nbytes)) > 0.0
    assert result.nbytes == short


@pytest.mark.parametrize("burst_nbytes", [1e4, 1e5, 3e5])
def test_bursts_shorter_than_a_round_trip_do_not_limit_the_rate(burst_nbytes: float) -> None:
    """A burst of N bytes is measured as N bytes per round trip. As a limit, this rate would slow down the next burst."""
    credit, round_trip_s = Credit(), 0.09
    for i in range(20):
        credit.update(float(i), LinkSample(burst_nbytes / round_trip_s, round_trip_s))
        credit.idle()
    assert not credit.settled
    assert credit.wait_s(1 << 30) == credit.nbytes_s == 0.0
    known = settled(100 * MEGABIT, round_trip_s)
    limit = known.nbytes
    for i in range(2 * WINDOWS):
        known.idle()
        known.update(10.0 + i, LinkSample(burst_nbytes / round_trip_s, round_trip_s))
    assert known.nbytes == limit
    known.idle()
    known.update(50.0, LinkSample(110 * MEGABIT, round_trip_s))
    assert known.nbytes == pytest.approx(1.1 * limit), "the link can carry the rate of a burst"
    known.idle()
    known.update(60.0, LinkSample(200 * MEGABIT, round_trip_s))
    assert not known.settled, "a burst that was faster shows that the link is"


def test_slower_link_is_detected_within_a_number_of_samples() -> None:
    result = settled(100 * MEGABIT, 0.03)
    before = result.nbytes
    for i in range(WINDOWS):
        result.update(10.0 + i, LinkSample(10 * MEGABIT, 0.03))
    assert result.nbytes == pytest.approx(before / 10, rel=0.01)


@pytest.mark.parametrize(("part", "forgotten"), [(0.01, True), (0.1, True), (0.2, False), (1.0, False), (math.inf, False)])
def test_pacing_far_below_the_known_rate_counts_as_forgotten(part: float, forgotten: bool) -> None:
    rate = 10 * MEGABIT
    assert settled(rate, 0.03).forgotten(LinkSample(0.01 * rate, 0.03, part * rate)) == forgotten
    assert not Credit().forgotten(LinkSample(0.01 * rate, 0.03, part * rate)), "no rate is known"


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs = listener.accept()[0]
        with theirs:
            yield ours, theirs


def congestion_control(sock: socket.socket, name: bytes = b"") -> bytes:
    if name:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, flow_credit.MAX_NAME_NBYTES).rstrip(b"\0")


@pytest.mark.skipif(not flow_credit.SUPPORTED, reason="asks a Linux kernel")
def test_only_bbr_starts_again(connected: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = connected
    congestion_control(ours, flow_credit.RENO)
    assert not flow_credit.restart_bbr(ours)
    assert congestion_control(ours) == flow_credit.RENO
    if flow_credit.BBR not in Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_bytes().split():
        return  # a process of this machine cannot have BBR
    congestion_control(ours, flow_credit.BBR)
    assert flow_credit.restart_bbr(ours)
    assert congestion_control(ours) == flow_credit.BBR


@pytest.mark.skipif(not flow_credit.SUPPORTED, reason="asks a Linux kernel")
def test_a_limit_of_ours_is_no_forgotten_rate(connected: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = connected

    def paced(limit: int) -> float:
        ours.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, limit)
        ours.sendall(bytes(10_000))
        theirs.recv(10_000, socket.MSG_WAITALL)
        return flow_credit.sample_link(ours).paced

    assert 0 < paced(UNLIMITED) < math.inf
    assert paced(100_000) == math.inf


@pytest.mark.skipif(not flow_credit.SUPPORTED, reason="asks a Linux kernel")
def test_kernel_tcp_info() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs = listener.accept()[0]
        with theirs:
            for _ in range(100):
                ours.sendall(bytes(10_000))
                left = 10_000
                while left:
                    left -= len(theirs.recv(left))
            seen = flow_credit.sample_link(ours)
            flow_credit.bound_unsent(ours, 1000)
            assert ours.getsockopt(socket.IPPROTO_TCP, flow_credit.TCP_NOTSENT_LOWAT) == flow_credit.UNSENT_PARTS * 1000
    assert seen.rate > 1e6
    assert 0.0 < seen.round_trip_s < 1.0
    assert flow_credit.waiting_nbytes(ours) == 0


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


def test_no_cap_before_a_rate_is_known(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    before, pacer = cap(pairs[0][0]), Pacer()
    pacer.begin_share(pairs[0][0])
    assert cap(pairs[0][0]) == before


def test_concurrent_senders_share_the_rate_and_a_single_one_has_all(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (a, _), (b, _), (c, _) = pairs
    pacer = Pacer()
    pacer.follow(BPS)
    pacer.begin_share(a)
    assert cap(a) == part(1)
    pacer.begin_share(b)
    assert cap(b) == part(1), "nothing waits at a"
    stuff(a)
    stuff(b)
    pacer.begin_share(c)
    assert [cap(sock) for sock in (a, b, c)] == [part(3)] * 3
    pacer.end_share(c)
    assert cap(c) == UNLIMITED
    pacer.begin_share(b)
    assert (cap(a), cap(b)) == (part(2), part(2))
    pacer.follow(0.0)
    assert {cap(sock) for sock in (a, b, c)} == {UNLIMITED}
    pacer.begin_share(a)
    assert cap(a) == UNLIMITED


def test_lower_of_share_and_credit_is_the_cap(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (a, _), (b, _), _ = pairs
    pacer = Pacer()
    pacer.bound(a, 2e6)
    assert (cap(a), cap(b)) == (2_000_000, UNLIMITED), "a credit needs no rate of the link"
    pacer.follow(BPS)
    pacer.begin_share(a)
    assert cap(a) == 2_000_000
    pacer.bound(a, 1e9)
    assert cap(a) == part(1)
    pacer.bound(a, 3e6)
    pacer.end_share(a)
    assert cap(a) == 3_000_000, "a probe is bound by its credit"
    pacer.begin_share(a)
    pacer.bound(a, 0.0)
    assert cap(a) == part(1)
    pacer.follow(0.0)
    assert cap(a) == UNLIMITED
    pacer.bound(a, 1.0)
    assert cap(a) == pacing.MIN_RATE, "0 would stop it"


def test_data_without_flow_control_get_only_a_part_of_the_link(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (ours, theirs), *_ = pairs
    pacer = Pacer()
    control = send_control.SendControl(ours, pacer)
    most = send_control.INLINE_NBYTES
    assert send_control.SendControl(ours, None).inline_nbytes == most, "both ends are on one machine"
    assert control.inline_nbytes == flow_credit.MIN_PART_NBYTES, "nothing is known of the connection"
    for _ in range(8):
        ours.sendall(MUCH[:most])
        received(theirs, most)
    control.hold_s(most)
    assert control.inline_nbytes == most, "loopback is fast"
    pacer.follow(4e6)
    assert control.inline_nbytes == flow_credit.MIN_PART_NBYTES
    pacer.follow(80e6)
    assert control.inline_nbytes == int(80e6 / 8 * flow_credit.PART_S)


def received(sock: socket.socket, nbytes: int) -> None:
    while nbytes:
        nbytes -= len(sock.recv(nbytes))


def test_closed_connection_takes_no_share(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (a, _), (b, _), _ = pairs
    pacer = Pacer()
    pacer.follow(BPS)
    stuff(a)
    pacer.begin_share(a)
    a.close()
    pacer.begin_share(b)
    assert cap(b) == part(1)


@pytest.mark.parametrize(("host", "away"), [("127.0.0.2", True), ("127.0.0.1", False)])
def test_large_remote_frames_are_paced_and_probes_are_not(host: str, away: bool) -> None:
    ours, theirs = InboxTransport(Hello("job", 0)), InboxTransport(Hello("job", SERVER_BASE))
    try:
        deadline = time.monotonic() + 20.0
        ours.dial(SERVER_BASE, theirs.listen(host), deadline)
        sock = socket_of(connections_of(ours)[SERVER_BASE])
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


def test_address_of_this_machine_routes_to_itself() -> None:
    own = own_address.default_address()
    if own:
        assert own_address.address_to(own) == own
        assert own_address.find_interface(own) in {name for _, name in socket.if_nameindex()}


def test_remote_address_is_preferred_for_a_name_with_several(monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_address.default_address()
    if not own or ":" in own:
        pytest.skip("no default route")
    results = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, 9)) for address in ("127.0.1.1", own)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: results)
    assert own_address.address_to("this-machine") == own


def test_loopback_master_uses_the_route_to_another_machine() -> None:
    own = own_address.default_address()
    mine = RankRow("a", "a", address="127.0.0.1")
    if own:
        assert _own_address(mine, [mine, RankRow("b", "b", address=own)]) == own
    assert _own_address(mine, [mine]) == ""
