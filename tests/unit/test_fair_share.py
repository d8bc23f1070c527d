"""Limits shared by sources: one source gets half, a new source always finds space, and tables are bounded."""

from __future__ import annotations

import socket

import pytest

from commlayer.transport.flow.fair_share import ConnectionTable, FairShare, address_source
from commlayer.transport.handshake import MAX_BEGUN, PendingHandshakes


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("sources", [1, 2, 9, 49])
def test_greedy_sources_get_equal_shares_and_one_share_stays_free(sources: int) -> None:
    share, limit = FairShare(1000), 1000
    taken = dict.fromkeys(map(str, range(sources)), 0)
    for _ in range(limit):
        for source in taken:
            taken[source] += share.take(source)
    for count in taken.values():
        assert count == pytest.approx(limit / (sources + 1), abs=1)
    new = 0
    while share.take("new"):
        new += 1
    assert new == pytest.approx(limit / (sources + 1) / 2, abs=1), "a new source immediately gets half of the free units"


def test_released_units_can_be_acquired_again() -> None:
    share = FairShare(10)
    for _ in range(3):
        assert [share.take("one") for _ in range(6)] == [True] * 5 + [False]
        for _ in range(5):
            share.give("one")
    assert share.sources == 0


def test_decay_limits_the_rate_over_any_time() -> None:
    clock = Clock()
    share, taken = FairShare(1000, forget_s=10.0, clock=clock), 0
    for tick in range(100_000):
        clock.now_s = tick / 100  # 1000 s, in which the unit is scaled back
        taken += share.take("flood")
        if tick % 10_000 == 5000:
            assert [share.take("member") for _ in range(100)] == [True] * 100, "whatever the flood does"
    assert taken == pytest.approx(500 + 1000 * 500 / 10.0, rel=0.05)


def test_authenticated_connections_count_against_their_member_first() -> None:
    pending, sock = PendingHandshakes(), socket.socket()
    with sock:
        opened = 0
        while pending.admit("192.0.2.7") and pending.add(sock, "192.0.2.7"):
            pending.prove(sock, "gpu-1")
            opened += 1
            assert opened < 2 * MAX_BEGUN, "a member that floods is not limited"
        assert opened == pytest.approx(MAX_BEGUN, rel=0.2), "half of a limit, twice"
        assert pending.admit("192.0.2.8")


def test_idle_sources_are_dropped() -> None:
    clock = Clock()
    share = FairShare(1000, forget_s=10.0, clock=clock)
    for tick in range(50_000):
        clock.now_s = tick / 50
        share.take(str(tick))
    assert share.sources < 3000


def test_source_can_take_its_share_after_any_pause() -> None:
    clock = Clock()
    share = FairShare(4, forget_s=10.0, clock=clock)
    for pause_s in (0.0, 5 * 3600.0, 1e9):
        clock.now_s += pause_s
        assert [share.take("a") for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(("host", "source"), [
    ("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
    ("2001:db8:1:2::9", "2001:db8:1:2::/64"), ("2001:db8:1:3::9", "2001:db8:1:3::/64"), ("fe80::1%eth0", "fe80::/64"),
    ("::1", "::/64"),
])
def test_addresses_of_one_machine_are_one_source(host: str, source: str) -> None:
    assert address_source(host) == source


def test_full_table_evicts_the_oldest_connection_of_the_largest_source() -> None:
    pairs = [socket.socketpair() for _ in range(6)]
    socks = [near for near, _ in pairs]
    table = ConnectionTable(4)
    for sock, source in zip(socks, ["quiet", "flood", "flood", "other", "flood", "flood"], strict=True):
        assert table.add(sock, source)
    assert [sock in table for sock in socks] == [True, False, False, True, True, True]
    assert [far.recv(1) for _, far in pairs[1:3]] == [b"", b""], "their threads wake"
    table.close()
    assert not table.add(socks[0], "quiet")
    for pair in pairs:
        for sock in pair:
            sock.close()
