"""Bandwidth from what links carried, when a plan's links count as changed, and when a link is probed again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from commlayer.observe import Direction, LinkWatch, Rates, ReprobeSchedule, Throughput, differ
from commlayer.observe import interface_counters as meter_module
from commlayer.observe import reprobe_schedule as again_module
from commlayer.observe.interface_counters import InterfaceCounters, counters_towards
from commlayer.observe.link_throughput import Reading, throughput
from commlayer.observe.link_watch import FACTOR, PAYLOAD, SETTLED, USUAL

BIN_S = 0.05


def readings(*pieces: tuple[float, float], period_s: float = BIN_S) -> list[Reading]:
    """Both ways alike: pieces of (seconds, bit/s)."""
    made, at_s, nbytes = [Reading(0.0, 0, 0)], 0.0, 0.0
    for seconds, bps in pieces:
        for _ in range(round(seconds / period_s)):
            at_s, nbytes = at_s + period_s, nbytes + bps * period_s / 8
            made.append(Reading(at_s, int(nbytes), int(nbytes)))
    return made


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
    found = throughput(readings(*pieces)).down
    assert found.bps == pytest.approx(bps, rel=0.01)
    assert found.share == pytest.approx(share, rel=0.15)


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
    found = throughput(readings(*pieces, period_s=period_s))
    assert found.down.bps == pytest.approx(rate, rel=0.01)
    assert found.up.bps <= 1.01 * rate
    assert 0.0 < found.down.share <= 1.0


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


# ---- whether links have changed

PLANNED = (Rates(95e6, 95e6),) * 3
QUICK = Throughput(Direction(6e7, 0.1), Direction(7e7, 0.1))
FULL = Throughput(Direction(5e6, 0.9), Direction(5e6, 0.9))
NARROW = Rates(PAYLOAD * 5e6, PAYLOAD * 5e6)


def after(links: LinkWatch, step_s: float, seen: list[Throughput], times: int = 1) -> LinkWatch:
    """So many rows that give no reason to plan anew."""
    for _ in range(times):
        links, found = links.observe(step_s, seen)
        assert found is None
    return links


def settled() -> LinkWatch:
    return after(LinkWatch(PLANNED), 0.4, [QUICK] * 3, 4)


def test_all_links_become_slower() -> None:
    assert settled().observe(2.0, [FULL] * 3)[1] == (NARROW,) * 3


def test_one_link_becomes_slower_and_no_other_is_blamed() -> None:
    waiting = Throughput(Direction(6e7, 0.02), Direction(7e7, 0.02))
    assert settled().observe(2.0, [waiting, FULL, waiting])[1] == (PLANNED[0], NARROW, PLANNED[2])


def test_the_same_watch_gives_the_same_answer_again() -> None:
    links = settled()
    assert links.observe(2.0, [FULL] * 3) == links.observe(2.0, [FULL] * 3)


@pytest.mark.parametrize(("step_s", "seen"), [
    (2.0, QUICK),  # a pause: links carry as ever
    (2.0, Throughput(Direction(5e6, 0.1), Direction(5e6, 0.1))),  # slow computing: they idle
    (2.0, Throughput(Direction(2e7, 0.4), Direction(2e7, 0.4))),  # a busy machine: transfers take longer, but computing more so
    (0.42, FULL),  # no step is slower for it
    (2.0, Throughput(Direction(), Direction())),  # nobody reads counters there
])
def test_what_is_no_change(step_s: float, seen: Throughput) -> None:
    after(settled(), step_s, [seen] * 3, USUAL)


def test_a_short_slow_step_must_come_twice() -> None:
    links = after(after(after(settled(), 0.8, [FULL] * 3), 0.4, [QUICK] * 3), 0.8, [FULL] * 3)
    assert links.observe(0.8, [FULL] * 3)[1] == (NARROW,) * 3


def test_what_stays_slow_becomes_usual() -> None:
    links = settled()
    assert links.slow_s < 2.0
    assert after(links, 2.0, [QUICK] * 3, USUAL).slow_s < 2.0
    assert after(links, 2.0, [QUICK] * 3, USUAL + 1).slow_s == math.inf, "what was usual is forgotten"
    assert after(links, 2.0, [QUICK] * 3, USUAL + 2).slow_s == FACTOR * 2.0


def test_what_was_usual_counts_on_where_other_rates_are_planned_for() -> None:
    links = structs.replace(settled(), planned=(Rates(3e7, 3e7),) * 3)
    links, found = links.observe(2.0, [FULL] * 3)
    assert found == (NARROW,) * 3
    assert structs.replace(links, planned=found).observe(2.0, [FULL] * 3)[1] is None, "that is known"


@pytest.mark.parametrize(("step_s", "seen", "faster"), [
    (0.4, FULL, False), (0.2, FULL, True), (0.4, Throughput(Direction(6e6, 0.5), Direction(9e6, 0.2)), True),
])
def test_hints_of_a_faster_link(step_s: float, seen: Throughput, faster: bool) -> None:
    links = LinkWatch((NARROW,) * 3)
    for _ in range(SETTLED):
        links = after(links, 0.4, [FULL] * 3)
        assert not links.faster
    assert after(links, step_s, [seen] * 3).faster is faster


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1e-3, 10.0), st.floats(0, 1e9), st.floats(0, 1)), max_size=40))
def test_never_to_a_faster_link_and_never_by_less_than_the_factor(looks: list[tuple[float, float, float]]) -> None:
    links = LinkWatch(PLANNED[:1])
    for step_s, bps, share in looks:
        links, found = links.observe(step_s, [Throughput(Direction(bps, share), Direction(bps, share))])
        if found is not None:
            assert differ(found, PLANNED[:1])
            assert all(0 < rate < 95e6 for rate in found[0])


# ---- when to probe again

def test_gaps_between_probes_grow_until_one_finds_something() -> None:
    assert not ReprobeSchedule().due(1e9, hinted=True, lost=True)  # nothing is known yet
    again = ReprobeSchedule().changed(0.0)
    now, gaps = 0.0, []
    for _ in range(8):
        begin = now
        while not again.due(now, hinted=False, lost=True):
            now += 1.0
        gaps.append(now - begin)
        again = again.probed(now, 0.1, found=False)
    assert gaps == [15, 30, 60, 120, 240, 480, 600, 600]
    again = again.probed(now, 0.1, found=True)
    assert again.due(now + again_module.FIRST_S, hinted=False, lost=True)
    assert not again.due(now + 1e6, hinted=False, lost=False)  # nothing to win back


def test_a_hint_comes_soon_and_wears_off() -> None:
    again = ReprobeSchedule().changed(0.0)
    assert again.due(1.0, hinted=True, lost=False)
    again = again.probed(1.0, 0.1, found=False)
    assert not again.due(2.0, hinted=True, lost=False)
    assert again.due(5.0, hinted=True, lost=False)


def test_a_dear_probe_waits_until_it_is_a_small_part_of_the_time() -> None:
    again = ReprobeSchedule().changed(0.0).probed(0.0, 2.0, found=False)
    assert not again.due(99.0, hinted=False, lost=True)
    assert again.due(100.0, hinted=False, lost=True)


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


def test_nothing_is_read_for_peers_on_this_machine() -> None:
    assert counters_towards([("127.0.0.1", 1), ("::1", 1)]) is None
    assert counters_towards([]) is None


def test_without_linuxs_files_no_interface_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reads(address: str) -> str:
        raise FileNotFoundError("/proc/net/if_inet6")

    monkeypatch.setattr(meter_module, "COUNTERS", tmp_path / "dev")
    monkeypatch.setattr(meter_module, "_source", lambda host, port: host)
    monkeypatch.setattr(meter_module, "_interface", reads)
    assert counters_towards([("2001:db8::1", 1)]) is None


@pytest.mark.skipif(not meter_module.COUNTERS.exists(), reason="needs Linux's /proc")
def test_counters_of_an_interface_are_found_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "_source", lambda host, port: host)
    assert meter_module._interface("127.0.0.1") == "lo"
    up, down = meter_module._counters("lo")
    assert up == down >= 0
    with pytest.raises(ValueError, match="no interface nothere"):
        meter_module._counters("nothere")
