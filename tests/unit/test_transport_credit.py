"""What may be under way on a connection: over links that are arithmetic, and what a real kernel says."""

from __future__ import annotations

import socket

import pytest

from commlayer.transport import flow_control
from commlayer.transport.flow_control import (
    MIN_PART_NBYTES,
    SETTLE_READINGS,
    WINDOWS,
    Credit,
    LinkSample,
)

MEGABIT = 1e6 / 8


def settled(rate: float, round_trip_s: float) -> Credit:
    credit = Credit()
    for i in range(1 + SETTLE_READINGS):
        credit.update(float(i), LinkSample(rate, round_trip_s))
    return credit


def test_there_is_no_limit_while_the_rate_grows_or_before_anything_is_known() -> None:
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
def test_the_limit_is_what_the_link_holds_and_a_short_queue(rate: float, round_trip_s: float) -> None:
    result = settled(rate, round_trip_s)
    holds = rate * round_trip_s
    queue = max(flow_control.QUEUE_S * rate, holds / 3, 2 * MIN_PART_NBYTES)
    assert holds < result.nbytes <= holds + queue + 1
    assert result.wait_s(int(result.nbytes)) == 0.0
    assert result.wait_s(int(result.nbytes + rate)) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("round_trip_s", [0.001, 0.03, 0.2])
@pytest.mark.parametrize("start", [0.01, 0.9])
def test_a_limit_that_is_too_low_rises_to_the_links_rate(round_trip_s: float, start: float) -> None:
    """What is under way arrives once a round trip, so a limit bounds the rate that is seen and the rate makes the limit."""
    link = 100 * MEGABIT
    result = settled(start * link, round_trip_s)
    for i in range(60):
        rate = min(link, result.nbytes / round_trip_s) if result.settled else link
        result.update(10.0 + i, LinkSample(rate, round_trip_s))
    assert result.nbytes >= link * round_trip_s


def test_a_link_that_becomes_slower_is_seen_in_so_many_looks() -> None:
    result = settled(100 * MEGABIT, 0.03)
    before = result.nbytes
    for i in range(WINDOWS):
        result.update(10.0 + i, LinkSample(10 * MEGABIT, 0.03))
    assert result.nbytes == pytest.approx(before / 10, rel=0.01)


@pytest.mark.skipif(not flow_control.SUPPORTED, reason="asks a Linux kernel")
def test_what_the_kernel_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs = listener.accept()[0]
        with theirs:
            for _ in range(100):
                ours.sendall(bytes(10_000))
                left = 10_000
                while left:
                    left -= len(theirs.recv(left))
            seen = flow_control.sample_link(ours)
            flow_control.bound_unsent(ours, 1000)
            assert ours.getsockopt(socket.IPPROTO_TCP, flow_control.TCP_NOTSENT_LOWAT) == flow_control.UNSENT_PARTS * 1000
    assert seen.rate > 1e6
    assert 0.0 < seen.round_trip_s < 1.0
    assert flow_control.waiting_nbytes(ours) == 0
