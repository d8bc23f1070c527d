"""Traces, predictions, stale plans and measured link rates."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from commlayer import planner
from commlayer.autotune import reprobe
from commlayer.autotune.reprobe import ReprobeSchedule
from commlayer.engine.observers.predicted_trace import predict
from commlayer.observe import interface_counters
from commlayer.observe.interface_counters import Direction, InterfaceCounters, Reading, Throughput, throughput
from commlayer.observe.link_monitor import (
    COST_S,
    FACTOR,
    IN_A_ROW,
    MORE,
    PAYLOAD,
    PLENTY,
    SETTLED,
    UNUSUAL,
    USUAL,
    LinkWatch,
    Rates,
    SeenStep,
    differ,
    slower,
)
from commlayer.observe.noise_scale import ENOUGH, HIDDEN, Agreement, NoiseScale
from commlayer.observe.prediction_check import PredictionCheck
from commlayer.observe.step_trace import EXCHANGE, NO_BUCKET, TraceEvent
from commlayer.observe.trace_files import (
    STEP,
    Comparison,
    MeasuredRank,
    by_lane,
    compare_operations,
    read_comparison,
    write_trace,
)
from commlayer.planner.inputs import checked_inputs, parse_nodes
from commlayer.planner.model import Basis, Cluster, Link, Node
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo, Timing

PREDICTED = [
    TraceEvent("encode@cpu", 0, 0.0, 0.002), TraceEvent(EXCHANGE, 0, 0.002, 0.012, 5000), TraceEvent(EXCHANGE, 1, 0.012, 0.02),
    TraceEvent(STEP, NO_BUCKET, 0.0, 0.1),
]
MEASURED = [
    TraceEvent("encode@cpu", 0, 0.001, 0.004), TraceEvent(EXCHANGE, 0, 0.004, 0.024, 5000),
    TraceEvent(EXCHANGE, 1, 0.014, 0.017),
    TraceEvent("decode@cpu", 0, 0.024, 0.025), TraceEvent(STEP, NO_BUCKET, 0.0, 0.12),
]


def compared() -> Comparison:
    return Comparison("abc", 4, 1, 2, 1,
                      compare_operations([MeasuredRank(0, [MEASURED]), MeasuredRank(0, [MEASURED[:1]])], {0: PREDICTED}))


def test_trace_has_a_track_per_process_and_threads_for_overlapping_spans(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_trace(file, {"predicted": by_lane(PREDICTED), "measured": by_lane(MEASURED)}, compared())
    entries = json.loads(file.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in entries if e["name"] == "process_name"] == ["predicted", "measured"]
    threads = [(e["pid"], e["args"]["name"]) for e in entries if e["name"] == "thread_name"]
    assert threads == [
        (0, "encode"), (0, "compute"), (0, "network"),
        (1, "compute"), (1, "encode"), (1, "network"), (1, "network 2"), (1, "decode"),
    ]
    spans = [e for e in entries if e["ph"] == "X"]
    assert len(spans) == 9
    assert [e["name"] for e in spans if e["pid"] == 1][2:4] == [f"{EXCHANGE} 0", f"{EXCHANGE} 1"]
    assert spans[2] == {
        "name": f"{EXCHANGE} 0", "cat": EXCHANGE, "ph": "X", "pid": 0, "tid": 3, "ts": 2000.0, "dur": 10000.0,
        "args": {"bucket": 0, "nbytes": 5000},
    }
    assert list(tmp_path.iterdir()) == [file], "no part is left behind"
    assert read_comparison(file) == compared()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=12))
def test_spans_of_a_thread_do_not_overlap(spans: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "t.json")
        write_trace(file, {"x": by_lane(TraceEvent(EXCHANGE, i, a, a + n) for i, (a, n) in enumerate(spans))})
        drawn = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert sorted(e["args"]["bucket"] for e in drawn) == list(range(len(spans)))
    threads: dict[int, float] = {}
    for e in drawn:
        assert e["ts"] >= threads.get(e["tid"], 0.0)
        threads[e["tid"]] = e["ts"] + e["dur"]


def test_ops_are_compared_over_buckets_ranks_and_nodes() -> None:
    rows = {row.op: row for row in compared().rows}
    assert list(rows) == ["encode@cpu", EXCHANGE, "decode@cpu", STEP]
    assert rows["encode@cpu"].error == pytest.approx(0.5)
    exchange = rows[EXCHANGE]
    assert (exchange.predicted_s, exchange.measured_s) == pytest.approx((0.018, 0.023))
    assert (exchange.buckets, exchange.worst) == (2, 0)
    assert (rows["decode@cpu"].predicted_s, rows["decode@cpu"].error) == (0.0, None), "measured, not predicted"
    assert rows[STEP].error == pytest.approx(0.2)
    alone = compare_operations([MeasuredRank(0, [MEASURED])], {})
    assert {(row.predicted_s, row.error, row.worst) for row in alone} == {(None, None, None)}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"otherData": {}}', '{"otherData": {"commlayer": {"plan": 3}}}'])
def test_invalid_trace_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=r"^trace .*t\.json: [^\n]*\[E-TRACE\]$"):
        read_comparison(tmp_path / "t.json")


def stale_at(times: list[float]) -> list[int]:
    check, steps = PredictionCheck(1.0), []
    for step, seconds in enumerate(times):
        check, event = check.observe(seconds, step)
        steps += [event.step] if event else []
    return steps


@pytest.mark.parametrize(("times", "steps"), [
    ([1.0] * 50, []),
    ([1.2, 0.8] * 25, []),
    ([1.0, 3.0, 1.0, 1.0, 3.0] * 10, []),
    ([1.0] * 5 + [1.5] * 8, [12]),
    ([1.5] * 130, [7, 57, 107]),
    ([0.5] * 2 + [1.5] * 8, [9]),
    ([0.5] * 8, [7]),
    ([1.5, float("nan")] + [1.5] * 7, [8]),
])
def test_plan_is_stale_after_a_persistent_error(times: list[float], steps: list[int]) -> None:
    assert stale_at(times) == steps


def test_empty_prediction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"predicted_s .*\b0\.0, .*E-ARGUMENT"):
        PredictionCheck(0.0)


BIN_S = 0.05


def readings(*pieces: tuple[float, float], period_s: float = BIN_S) -> list[Reading]:
    """Equal in both directions: pieces of (seconds, bit/s)."""
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
    ([(0.2, 9e7), (4.0, 2e6)], 9e7, 0.07),  # waiting for a peer on a slow link
    ([(5.0, 2e4)], 0.0, 0.0),  # control traffic
    ([], 0.0, 0.0),
])
def test_sustained_rate_of_a_link(pieces: list[tuple[float, float]], bps: float, share: float) -> None:
    down = throughput(readings(*pieces)).down
    assert down.bps == pytest.approx(bps, rel=0.01)
    assert down.share == pytest.approx(share, rel=0.15)


@pytest.mark.parametrize(("pieces", "bps"), [
    ([(2.0, 5e6)], 5e6),
    ([(0.05, 2e7), (0.2, 1e6)] * 8, 4.8e6),  # a queue that is filled in bursts
    ([(0.1, 1e8), (1.0, 0.0)], 4e7),  # too short to tell the rate: less than it was, never more
])
def test_upload_rate_is_measured_over_longer_intervals(pieces: list[tuple[float, float]], bps: float) -> None:
    assert throughput(readings(*pieces)).up.bps == pytest.approx(bps, rel=0.01)


@settings(deadline=None)
@given(
    rate=st.floats(2e6, 1e10), bursts=st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 3.0)), min_size=1, max_size=6),
    period_s=st.floats(0.01, 0.05),
)
def test_idle_intervals_have_no_effect(rate: float, bursts: list[tuple[float, float]], period_s: float) -> None:
    pieces = [piece for busy_s, idle_s in bursts for piece in ((busy_s, rate), (idle_s, 0.0))]
    result = throughput(readings(*pieces, period_s=period_s))
    assert result.down.bps == pytest.approx(rate, rel=0.01)
    assert result.up.bps <= 1.01 * rate
    assert 0.0 < result.down.share <= 1.0


@settings(deadline=None)
@example([(0.0, 0, 0), (8.473240597564335e-306, 0, 16384)])
@given(st.lists(st.tuples(st.floats(-1.0, 1e3), st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=12))
def test_link_meter_accepts_any_counter_values(rows: list[tuple[float, int, int]]) -> None:
    for way in throughput([Reading(*row) for row in rows]):
        assert math.isfinite(way.bps)
        assert way.bps >= 0
        assert 0.0 <= way.share <= 1.0


def test_reset_counters_are_ignored() -> None:
    before = readings((1.0, 8e6))
    after = [Reading(one.at_s + 2.0, one.up_nbytes, one.down_nbytes) for one in before]
    assert throughput([*before, *after]).down.bps == pytest.approx(8e6, rel=0.01)


def due(again: ReprobeSchedule, now: float, *, hinted: bool = False, lost: bool = False, largest_gain: float = 1.0) -> bool:
    return again.due(now, hinted=hinted, lost=lost, largest_gain=largest_gain)


def test_probe_interval_grows_until_a_probe_succeeds() -> None:
    assert not due(ReprobeSchedule(), 1e9, hinted=True, lost=True)  # nothing is known yet
    again = ReprobeSchedule(cost_s=0.1).changed(0.0)
    now, gaps = 0.0, []
    for _ in range(8):
        begin = now
        while not due(again, now, lost=True):
            now += 1.0
        gaps.append(now - begin)
        again = again.after_probe(now, 0.1, found=False)
    assert gaps == [15, 30, 60, 120, 240, 480, 600, 600]
    again = again.after_probe(now, 0.1, found=True)
    assert due(again, now + reprobe.FIRST_S, lost=True)


@pytest.mark.parametrize(("largest_gain", "from_s"), [(1.0, 2.0), (0.5, 4.0), (0.1, 20.0), (0.0, math.inf)])
def test_probe_waits_until_faster_links_could_repay_its_cost(largest_gain: float, from_s: float) -> None:
    again = ReprobeSchedule(cost_s=2.0).changed(0.0)
    assert due(again, min(from_s, 1e9), hinted=True, largest_gain=largest_gain) is (from_s < math.inf)
    assert not due(again, 0.99 * min(from_s, 1e9), hinted=True, largest_gain=largest_gain)


@pytest.mark.parametrize(("round_trip_s", "cost_s", "from_s"), [
    (0.01, 0.0, reprobe.EXPECTED_S / reprobe.COST_MOST),
    (0.25, 0.0, 0.25 * reprobe.EXPECTED_TRIPS / reprobe.COST_MOST),
    (0.25, 2.0, 2.0 / reprobe.COST_MOST),
])
def test_first_probe_is_assumed_to_take_many_round_trips(round_trip_s: float, cost_s: float, from_s: float) -> None:
    again = ReprobeSchedule(cost_s=cost_s).changed(0.0)
    seen = [again.due(now, hinted=False, lost=False, largest_gain=1.0, round_trip_s=round_trip_s)
            for now in (0.99 * from_s, 1.01 * from_s)]
    assert seen == [False, True]


def test_meter_returns_bytes_since_the_last_reading() -> None:
    nbytes = [0, 0]
    meter = InterfaceCounters(lambda: (nbytes[0], nbytes[1]), period_s=60.0)
    try:
        nbytes[:] = [1 << 20, 4 << 20]
        first = meter.look()
        assert 0 < first.up.bps < first.down.bps
        assert meter.look() == Throughput(Direction(), Direction())
    finally:
        meter.close()


def test_fastest_download_counts_after_any_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, nbytes = [0.0], [0, 0]
    monkeypatch.setattr(interface_counters.time, "monotonic", lambda: clock[0])  # type: ignore[attr-defined]
    meter = InterfaceCounters(lambda: (nbytes[0], nbytes[1]), period_s=60.0)
    try:
        for bps in (0.0, 1e6, 9.6e7, 9.6e7, 9.6e7, 0.0, 4e8, 0.0, 0.0):  # 400 Mb/s for 50 ms: packets that were held back
            clock[0] += BIN_S
            nbytes[1] += int(bps * BIN_S / 8)
            meter.read()
        assert 9.6e7 <= meter.fastest_down_bps() <= 4e8 / 2
        meter.look()
        assert meter.fastest_down_bps() == 0.0
    finally:
        meter.close()


PLANNED = (Rates(95e6, 95e6),) * 3
COMPUTE_S = 0.3
"""Of each step; the rest all wait."""
QUICK = Throughput(Direction(6e7, 0.1), Direction(7e7, 0.1))
FULL = Throughput(Direction(5e6, 0.9), Direction(5e6, 0.9))
NARROW = Rates(PAYLOAD * 5e6, 95e6)
"""What a link shows that carries FULL: data arrive as fast as they are sent, so only the upload is known to be slower."""


def seen(step_s: float, nodes: list[Throughput], waited_s: float | None = None) -> SeenStep:
    return SeenStep(step_s, step_s - COMPUTE_S if waited_s is None else waited_s, tuple(nodes))


def after(links: LinkWatch, step: SeenStep, times: int = 1) -> LinkWatch:
    """That many steps, which give no reason to plan again."""
    for _ in range(times):
        links, result = links.observe(step)
        assert result is None
    return links


def settled(planned: tuple[Rates, ...] = PLANNED) -> LinkWatch:
    return after(LinkWatch(planned), seen(0.4, [QUICK] * len(planned)), SETTLED)


@pytest.mark.parametrize(("up", "down", "confirmed"), [
    (0.9, 0.9, True), (0.9, 1.1, True), (0.2, 0.9, True), (0.9, 0.2, False), (0.7, 0.7, False), (0.0, 0.0, False),
    (1.4, 0.9, False)])  # an upload is sent at up to 1.5 times the planned rate
def test_traffic_at_the_planned_rates_confirms_them(up: float, down: float, confirmed: bool) -> None:
    """`up`, `down`: fractions of the planned rates at the node that carries least."""
    node = Throughput(*(Direction(part * rate / PAYLOAD, 0.3) for part, rate in zip((up, down), PLANNED[0], strict=True)))
    full = Throughput(*(Direction(rate / PAYLOAD, 0.3) for rate in PLANNED[0]))
    step = seen(0.4, [full, node, full])
    assert after(LinkWatch(PLANNED), step, SETTLED).confirmed is confirmed
    assert not after(LinkWatch(PLANNED), step, SETTLED - 1).confirmed, "too few steps"


def reported(links: LinkWatch, step: SeenStep, most: int = 50) -> tuple[int, tuple[Rates, ...] | None]:
    """The number of such steps until other links are reported, and these links."""
    for count in range(1, most + 1):
        links, result = links.observe(step)
        if result is not None:
            return count, result
    return most, None


@pytest.mark.parametrize(("step_s", "steps"), [
    (60.0, 1), (0.4 + PLENTY * COST_S, 1), (0.3 + PLENTY * COST_S, 2), (2.0, IN_A_ROW),
    (0.4 + COST_S / 4, 4),  # until they have cost as much as a change of plans
])
def test_all_links_become_slower(step_s: float, steps: int) -> None:
    assert reported(settled(), seen(step_s, [FULL] * 3)) == (steps, (NARROW,) * 3)


@pytest.mark.parametrize(("every", "exchanges"), [(1, 2), (2, 1)])
def test_the_delay_of_all_steps_of_an_exchange_counts(every: int, exchanges: int) -> None:
    links = after(LinkWatch(PLANNED, steps=every), seen(0.4, [QUICK] * 3), SETTLED)
    slow = seen(0.4 + 0.6 * PLENTY * COST_S, [FULL] * 3)
    assert (slow.step_s > links.decisive_s) == (exchanges == 1)
    assert reported(links, slow) == (exchanges, (NARROW,) * 3)


@pytest.mark.parametrize(("step_s", "waited_s", "part", "steps"), [
    (0.4 + PLENTY * COST_S, 5.0, 0.2, 1), (0.41 * UNUSUAL, 1.0, 0.2, IN_A_ROW),
    (0.4 + PLENTY * COST_S, 5.0, 0.3, None),  # predictions are no more accurate than that
    (0.4 + PLENTY * COST_S, 2.0, 0.2, None),  # a rank evaluates
    (0.39 * UNUSUAL, 1.0, 0.2, IN_A_ROW + 1),  # after one more step usual values are known
])
def test_links_that_collapse_in_the_first_steps_under_a_plan(
    step_s: float, waited_s: float, part: float, steps: int | None,
) -> None:
    """`part`: of the planned rates that links carry."""
    full = Throughput(*(Direction(part * rate / PAYLOAD, 0.9) for rate in PLANNED[0]))
    links = after(LinkWatch(PLANNED, 0.4), seen(0.4, [QUICK] * 3), SETTLED - 1)
    count, result = reported(links, seen(step_s, [full] * 3, waited_s), most=USUAL)
    assert (None if result is None else count) == steps


def test_ranks_wait_for_reports_only_in_steps_that_can_reveal_slower_links() -> None:
    links = settled()
    for slow in range(IN_A_ROW):
        whole_s = 0.4 + PLENTY * COST_S - slow * (2.0 - 0.4)
        assert links.decisive_s == pytest.approx(links.slow_s if slow == IN_A_ROW - 1 else whole_s)
        links, _ = links.observe(seen(2.0, [FULL] * 3))


@pytest.mark.parametrize(("sent_bps", "slower"), [(19e6, True), (7.6e6, True), (7.4e6, False), (5e6, False)])
def test_slow_download_counts_only_if_senders_are_clearly_faster(sent_bps: float, slower: bool) -> None:
    """Busy machines send slowly, so all receive slowly over unchanged links."""
    links = settled((Rates(19e6, 95e6),) * 3)
    slow = Throughput(Direction(sent_bps, 0.1), Direction(5e6, 0.9))
    result = reported(links, seen(2.0, [slow] * 3))[1]
    assert result == ((Rates(19e6, PAYLOAD * 5e6),) * 3 if slower else None)


def test_only_the_slower_link_is_blamed() -> None:
    waiting = Throughput(Direction(6e7, 0.02), Direction(7e7, 0.02))
    assert reported(settled(), seen(2.0, [waiting, FULL, waiting]))[1] == (PLANNED[0], NARROW, PLANNED[2])


EMPTY = Throughput(Direction(), Direction())
DISK = Throughput(Direction(1.5e7, 0.95), QUICK.down)
LOADED = Throughput(Direction(2e7, 0.2), Direction(2e7, 0.2))
SCRIPT = {
    "all ranks evaluate": seen(6.4, [QUICK] * 3, 0.1),
    "rank 0 evaluates, the others wait": seen(6.4, [QUICK] * 3, 0.1),
    "rank 0 saves to a disk across its link, the others wait": seen(6.4, [DISK, QUICK, QUICK], 0.1),
    "all save to a disk across their links": seen(6.4, [DISK] * 3, 0.1),
    "a rank's data stall": seen(1.4, [QUICK, Throughput(QUICK.up, Direction(8e6, 0.8)), QUICK], 0.1),
    "all ranks pause in a collective of the script's own": seen(6.4, [FULL] * 3, 0.1),
    "a pause in which all wait: links carry as ever": seen(6.4, [QUICK] * 3),
    "slow computing, links idle": seen(6.4, [Throughput(Direction(5e6, 0.1), Direction(5e6, 0.1))] * 3),
    "a busy machine: transfers take longer, but computing more so": seen(2.0, [LOADED] * 3, 0.6),
    "little is carried, and no step is slower for it": seen(0.42, [FULL] * 3),
    "no counters are read there": seen(6.4, [EMPTY] * 3),
}


@pytest.mark.parametrize("step", SCRIPT.values(), ids=SCRIPT)
@pytest.mark.parametrize("every", [1, 2, 10])
def test_unchanged_links_raise_no_alarm(step: SeenStep, every: int) -> None:
    """However often the event occurs."""
    links = settled()
    for number in range(10 * USUAL):
        links = after(links, seen(0.4, [QUICK] * 3) if number % every else step)


def carrying(down: float, sent: float = 1.0) -> list[Throughput]:
    """Nodes that receive that times what is planned for, and together send `sent` times as much."""
    bps = down * PLANNED[0].down_bps / PAYLOAD
    return [Throughput(Direction(bps, 0.1 * sent), Direction(bps, 0.1))] * 3


@pytest.mark.parametrize(("down", "sent", "counts"), [
    (0.99 * MORE, 1.0, False), (1.01 * MORE, 1.0, True),
    (10.0, 0.5, False), (10.0, 2.0, False),  # a disk in the same house, or lost data
])
def test_received_rate_is_a_lower_bound_of_the_link(down: float, sent: float, counts: bool) -> None:
    count, result = reported(LinkWatch(PLANNED), seen(0.4, carrying(down, sent)))
    assert result == ((PLANNED[0]._replace(down_bps=pytest.approx(down * 95e6)),) * 3 if counts else None)
    assert count == SETTLED or not counts


def steps(draw: random.Random, wire_s: float, times: float = 1.0) -> Iterator[SeenStep]:
    """On links that are full for `wire_s` of a step where they carry what is planned for, and `times` times as long as that:
    jitter of up to a fifth, and in one of twenty steps something takes five times as long, be it computing or the network."""
    while True:
        jitter, busy_s = draw.uniform(0.8, 1.2), wire_s * times
        whole_s, longer_s, busy = (COMPUTE_S + busy_s) * jitter, 0.0, busy_s
        bps = [95e6 / PAYLOAD / times * draw.uniform(0.8, 1.2) for _ in PLANNED]
        odd = draw.random() < 0.05
        if odd:
            longer_s = 4 * whole_s
        networks = odd and draw.random() < 0.5
        if networks and draw.random() < 0.5:  # all of it went at a fifth of the rate, or else halted
            bps, busy = [each / 5 for each in bps], busy + longer_s
        step_s = whole_s + longer_s
        share = min(1.0, busy / step_s)
        yield SeenStep(step_s, max(0.0, whole_s - COMPUTE_S) + (longer_s if networks else 0.0),
                       tuple(Throughput(Direction(each, share), Direction(each, share)) for each in bps))


@pytest.mark.parametrize("wire_s", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_noise_on_unchanged_links_raises_no_alarm(wire_s: float, seed: int) -> None:
    links, result = LinkWatch(PLANNED), steps(random.Random(seed), wire_s)
    for _ in range(10_000):
        links, results = links.observe(next(result))
        if results is not None:
            assert not slower(results, links.planned)
            links = structs.replace(links, planned=results)
    assert not differ(links.planned, PLANNED), "nor does it creep up so far that another plan is looked for"


WITHIN = 40
"""Steps."""


@pytest.mark.parametrize("wire_s", [0.3, 0.6, 0.9])
def test_halved_links_are_detected_in_the_same_noise(wire_s: float) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        links, before, behind = LinkWatch(PLANNED), steps(draw, wire_s), steps(draw, wire_s, 2.0)
        for _ in range(50):
            links, _ = links.observe(next(before))
        result = None
        for _ in range(WITHIN):
            links, result = links.observe(next(behind))
            if result is not None and slower(result, PLANNED):
                break
        assert result is not None, seed


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1e-3, 10.0), st.floats(0, 1e9), st.floats(0, 1), st.floats(0, 10.0)), max_size=40))
def test_slower_links_are_reported_by_at_least_the_factor(looks: list[tuple[float, float, float, float]]) -> None:
    links = LinkWatch(PLANNED[:1])
    for step_s, bps, share, waited_s in looks:
        links, result = links.observe(seen(step_s, [Throughput(Direction(bps, share), Direction(bps, share))], waited_s))
        if result is not None:
            (rates,) = result
            assert result != PLANNED[:1]
            assert all(rate == 95e6 or 0 < FACTOR * rate < 95e6 or rate > MORE * 95e6 for rate in rates)


JOB = Job((TensorInfo("a", (5000,)), TensorInfo("b", (300,))), timing=Timing((2e-3, 1e-3), (0.0, 1e-3), 2e-3, 1e-3))
LAB = Node("lab", 2, "rtx3060", Link(5e8, 5e8, 1e-3), intra_bps=1e10, speed=0.5)
HOMES = tuple(structs.replace(n, ranks=2, intra_bps=1e10, server=False) for n in parse_nodes("2xrtx3060@100/20Mb"))


def events(path: str, cluster: Cluster, hosts: tuple[int, ...], codec: str = "topk(ratio=0.1)") -> dict[int, list[TraceEvent]]:
    buckets = (Bucket(0, (Slice(1, 0, 300),), path, codec), Bucket(1, (Slice(0, 0, 5000),), path, codec))
    plan = Plan(JOB.digest(), buckets, servers=len(hosts), hosts=hosts, ranks_per_node=2)
    result = predict(Basis(plan, checked_inputs(JOB, cluster)))
    results = planner.simulate(plan, JOB, cluster)
    for mine in result.by_node.values():
        assert [e for e in mine if e.op == STEP] == [TraceEvent(STEP, NO_BUCKET, 0.0, results.step_s)]
        assert all(0 <= e.start_s <= e.end_s for e in mine)
    return result.by_node


def of_bucket(results: list[TraceEvent], bucket: int) -> list[str]:
    return [e.op for e in sorted(results, key=lambda e: e.start_s) if e.bucket == bucket]


SERVED = "node.reduce_scatter encode@cpu net.push net.pull decode@cpu node.allgather"
AS_RUN = ["node.reduce", "encode@cpu", EXCHANGE, "decode@cpu", "node.broadcast"]


def test_spans_between_push_and_result_form_one_exchange() -> None:
    nodes = events(SERVED, Cluster((LAB, *HOMES), reachable=False), (0,))
    assert sorted(nodes) == [0, 1, 2]
    assert nodes[1] == nodes[2], "equal nodes"
    for node, mine in nodes.items():
        for bucket in (0, 1):
            assert of_bucket(mine, bucket) == AS_RUN
        sent = [e.nbytes for e in mine if e.op == EXCHANGE]
        assert all(sent) if node else not any(sent), "the host's own payload takes no wire"
    lab, home = ({e.op: e for e in nodes[n] if e.bucket == 1} for n in (0, 1))
    assert lab["encode@cpu"].end_s == lab[EXCHANGE].start_s
    assert home[EXCHANGE].end_s > lab[EXCHANGE].end_s > home[EXCHANGE].start_s, "the host waits for the homes' payloads"


@pytest.mark.parametrize("truth", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("workers", [2, 4])
def test_noise_scale_is_estimated_from_squared_norms(truth: float, workers: int) -> None:
    draw, known = np.random.default_rng(1), NoiseScale()
    for step in range(60):
        assert (known.known == 0.0) == (step < ENOUGH)
        gradients = 1 + truth**0.5 * draw.standard_normal((workers, 4000))
        known = known.plus([float((g**2).sum()) for g in gradients], float((gradients.mean(0) ** 2).sum()))
    assert known.batches == pytest.approx(truth, rel=0.3)


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 5), (3, 0, 1), (0, 0, 1), (1e-3, 10, 1)])
def test_agreement_is_the_weighted_mean_cosine_of_pairs(weights: tuple[float, ...]) -> None:
    draw, known = np.random.default_rng(1), Agreement()
    each = [[1], [2], [0.5]] * (1 + draw.standard_normal((3, 500)))
    mean = np.average(each, axis=0, weights=weights)
    known = known.plus([(w, float((v**2).sum())) for w, v in zip(weights, each, strict=True)], float((mean**2).sum()))
    scaled = [w * v for w, v in zip(weights, each, strict=True) if w]
    pairs = [(a, b) for i, a in enumerate(scaled) for j, b in enumerate(scaled) if i != j]
    most = sum(float(np.linalg.norm(a) * np.linalg.norm(b)) for a, b in pairs)
    assert known.cosine == pytest.approx(sum(float(a @ b) for a, b in pairs) / most if pairs else 0.0, rel=1e-6, abs=1e-9)
    assert known.exchanges == (len(scaled) > 1)


@pytest.mark.parametrize(("rows", "mean", "agreement"), [
    ([(1, 4.0), (1, 4.0)], 4.0, 1.0), ([(1, 4.0), (1, 4.0)], 2.0, 0.0), ([(1, 4.0), (1, 4.0)], 0.0, -1.0),
    ([(1, float("inf")), (1, 4.0)], 4.0, 0.0), ([(1, 0.0), (1, 0.0)], 0.0, 0.0), ([], 0.0, 0.0), ([(1, 4.0)], 4.0, 0.0),
    ([(0, float("nan")), (1, 4.0), (1, 4.0)], 4.0, 1.0),
])
def test_agreement_of_few_and_degenerate_vectors(rows: list[tuple[float, float]], mean: float, agreement: float) -> None:
    assert Agreement().plus(rows, mean).cosine == pytest.approx(agreement)


def test_equal_gradients_have_no_noise_and_buried_signals_a_finite_scale() -> None:
    known, hidden = NoiseScale(), NoiseScale()
    for _ in range(ENOUGH):
        known, hidden = known.plus([2.0, 2.0], 2.0), hidden.plus([2.0, 2.0], 1.0)
    assert known.batches == 0.0
    assert 10 < hidden.batches <= 2 / HIDDEN + 1e-6
