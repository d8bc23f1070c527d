"""Bandwidth from what links carried, and when a link is probed again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commlayer.observe import link_monitor
from commlayer.observe.link_monitor import (
    Direction,
    InterfaceCounters,
    Reading,
    ReprobeSchedule,
    Throughput,
    counters_of,
    throughput,
)

BIN_S = 0.05


def readings(*pieces: tuple[float, float], period_s: float = BIN_S) -> list[Reading]:
    """Both ways alike: pieces of (seconds, bit/s)."""
    results, at_s, nbytes = [Reading(0.0, 0, 0)], 0.0, 0.0
    for seconds, bps in pieces:
        for _ in range(round(seconds / period_s)):
            at_s, nbytes = at_s + period_s, nbytes + bps * period_s / 8
            results.append(Reading(at_s, int(nbytes), int(nbytes)))
    return results


@pytest.mark.parametrize(("pieces", "bps", "share"), [
    ([(2.0, 5e6)], 5e6, 1.0),  # full all the time
    ([(0.5, 0.0), (2.0, 5e6), (0.5, 0.0)], 5e6, 2 / 3),  # computing before and after
    ([(3.0, 0.0), (0.1, 1e8), (3.0, 0.0)], 1e8, 0.1 / 6.1),  # a short burst on a fast link
    ([(0.05, 5e7), (2.0, 5e6)], 5e6, 1.0),  # the first bytes fill a queue
    ([(0.2, 9e7), (4.0, 2e6)], 9e7, 0.07),  # waiting for a peer behind a slow link
    ([(5.0, 2e4)], 0.0, 0.0),  # control traffic
    ([], 0.0, 0.0),
])
def test_what_a_link_sustained(pieces: list[tuple[float, float]], bps: float, share: float) -> None:
    down = throughput(readings(*pieces)).down
    assert down.bps == pytest.approx(bps, rel=0.01)
    assert down.share == pytest.approx(share, rel=0.15)


@pytest.mark.parametrize(("pieces", "bps"), [
    ([(2.0, 5e6)], 5e6),
    ([(0.05, 2e7), (0.2, 1e6)] * 8, 4.8e6),  # a queue that is filled in bursts
    ([(0.1, 1e8), (1.0, 0.0)], 4e7),  # too short to tell the rate: less than it was, never more
])
def test_what_went_out_is_told_over_longer_stretches(pieces: list[tuple[float, float]], bps: float) -> None:
    assert throughput(readings(*pieces)).up.bps == pytest.approx(bps, rel=0.01)


@settings(deadline=None)
@given(
    rate=st.floats(2e6, 1e10), bursts=st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 3.0)), min_size=1, max_size=6),
    period_s=st.floats(0.01, 0.05),
)
def test_idle_stretches_change_nothing(rate: float, bursts: list[tuple[float, float]], period_s: float) -> None:
    pieces = [piece for busy_s, idle_s in bursts for piece in ((busy_s, rate), (idle_s, 0.0))]
    result = throughput(readings(*pieces, period_s=period_s))
    assert result.down.bps == pytest.approx(rate, rel=0.01)
    assert result.up.bps <= 1.01 * rate
    assert 0.0 < result.down.share <= 1.0


@settings(deadline=None)
@example([(0.0, 0, 0), (8.473240597564335e-306, 0, 16384)])
@given(st.lists(st.tuples(st.floats(-1.0, 1e3), st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=12))
def test_no_readings_break_it(rows: list[tuple[float, int, int]]) -> None:
    for way in throughput([Reading(*row) for row in rows]):
        assert math.isfinite(way.bps)
        assert way.bps >= 0
        assert 0.0 <= way.share <= 1.0


def test_counters_that_are_set_back_say_nothing() -> None:
    before = readings((1.0, 8e6))
    after = [Reading(one.at_s + 2.0, one.up_nbytes, one.down_nbytes) for one in before]
    assert throughput([*before, *after]).down.bps == pytest.approx(8e6, rel=0.01)


# ---- when to probe again


def due(again: ReprobeSchedule, now: float, *, hinted: bool = False, lost: bool = False, to_win: float = 1.0) -> bool:
    return again.due(now, hinted=hinted, lost=lost, to_win=to_win)


def test_gaps_between_probes_grow_until_one_finds_something() -> None:
    assert not due(ReprobeSchedule(), 1e9, hinted=True, lost=True)  # nothing is known yet
    again = ReprobeSchedule(cost_s=0.1).changed(0.0)
    now, gaps = 0.0, []
    for _ in range(8):
        begin = now
        while not due(again, now, lost=True):
            now += 1.0
        gaps.append(now - begin)
        again = again.probed(now, 0.1, found=False)
    assert gaps == [15, 30, 60, 120, 240, 480, 600, 600]
    again = again.probed(now, 0.1, found=True)
    assert due(again, now + link_monitor.FIRST_S, lost=True)


def test_links_that_were_never_known_to_be_faster_may_have_been_taken_for_slower_than_they_are() -> None:
    first = ReprobeSchedule().changed(0.0)
    from_s = link_monitor.EXPECTED_S / link_monitor.COST_MOST
    assert not due(first, 0.99 * from_s)
    assert due(first, from_s)
    assert not due(first, from_s, to_win=0.0)
    assert not due(first.probed(from_s, 1.0, found=False), from_s + 49.0)
    assert due(first.probed(from_s, 1.0, found=False), from_s + 50.0)


def test_a_hint_comes_soon_and_wears_off() -> None:
    again = ReprobeSchedule(cost_s=0.1).changed(0.0)
    assert due(again, 1.0, hinted=True)
    again = again.probed(1.0, 0.1, found=False)
    assert not due(again, 2.0, hinted=True)
    assert due(again, 5.0, hinted=True)


def test_a_dear_probe_waits_until_it_is_a_small_part_of_the_time() -> None:
    again = ReprobeSchedule().changed(0.0).probed(0.0, 2.0, found=False)
    assert not due(again, 99.0, lost=True)
    assert due(again, 100.0, lost=True)


@pytest.mark.parametrize(("to_win", "from_s"), [(1.0, 2.0), (0.5, 4.0), (0.1, 20.0), (0.0, math.inf)])
def test_no_probe_comes_before_faster_links_could_have_won_what_it_takes(to_win: float, from_s: float) -> None:
    again = ReprobeSchedule(cost_s=2.0).changed(0.0)
    assert due(again, min(from_s, 1e9), hinted=True, to_win=to_win) is (from_s < math.inf)
    assert not due(again, 0.99 * min(from_s, 1e9), hinted=True, to_win=to_win)


# ---- counters

def test_a_meter_tells_what_came_between_two_looks() -> None:
    nbytes = [0, 0]
    meter = InterfaceCounters(lambda: (nbytes[0], nbytes[1]), period_s=60.0)
    try:
        nbytes[:] = [1 << 20, 4 << 20]
        first = meter.look()
        assert 0 < first.up.bps < first.down.bps
        assert meter.look() == Throughput(Direction(), Direction())
    finally:
        meter.close()


def test_an_interface_that_goes_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> tuple[int, int]:
        raise ValueError("no interface")

    meter = InterfaceCounters(gone, period_s=60.0)
    try:
        assert meter.look() == Throughput(Direction(), Direction())
    finally:
        meter.close()


def test_counters_need_an_interface_and_linuxs_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert counters_of("") is None
    monkeypatch.setattr(link_monitor, "COUNTERS", tmp_path / "dev")
    assert counters_of("lo") is None


@pytest.mark.skipif(not link_monitor.COUNTERS.exists(), reason="needs Linux's /proc")
def test_counters_of_an_interface() -> None:
    up, down = link_monitor._counters("lo")
    assert up == down >= 0
    with pytest.raises(ValueError, match="nothere.*E-ARGUMENT"):
        link_monitor._counters("nothere")
