"""Events, traces and drift: what is written can be read, what is off costs nothing, one slow step is no trend."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.observe.prediction_check import PredictionCheck
from commlayer.observe.step_trace import (
    EXCHANGE,
    NO_BUCKET,
    STEP,
    Comparison,
    Event,
    Recorder,
    Seen,
    by_lane,
    read_comparison,
    rows_of,
    write_trace,
)

PREDICTED = [
    Event("encode@cpu", 0, 0.0, 0.002), Event(EXCHANGE, 0, 0.002, 0.012, 5000), Event(EXCHANGE, 1, 0.012, 0.02),
    Event(STEP, NO_BUCKET, 0.0, 0.1),
]
MEASURED = [
    Event("encode@cpu", 0, 0.001, 0.004), Event(EXCHANGE, 0, 0.004, 0.024, 5000), Event(EXCHANGE, 1, 0.014, 0.017),
    Event("decode@cpu", 0, 0.024, 0.025), Event(STEP, NO_BUCKET, 0.0, 0.12),
]


def compared() -> Comparison:
    return Comparison("abc", 4, 1, 2, 1, rows_of([Seen(0, [MEASURED]), Seen(0, [MEASURED[:1]])], {0: PREDICTED}))


def test_a_trace_has_a_track_for_each_side_and_a_thread_for_all_that_nests_nowhere(tmp_path: Path) -> None:
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
def test_nothing_in_a_thread_lies_over_another(spans: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "t.json")
        write_trace(file, {"x": by_lane(Event(EXCHANGE, i, a, a + n) for i, (a, n) in enumerate(spans))})
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
    alone = rows_of([Seen(0, [MEASURED])], {})
    assert {(row.predicted_s, row.error, row.worst) for row in alone} == {(None, None, None)}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"otherData": {}}', '{"otherData": {"commlayer": {"plan": 3}}}'])
def test_a_file_that_is_no_trace_is_told_in_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=r"^trace .*t\.json: [^\n]*\[E-TRACE\]$"):
        read_comparison(tmp_path / "t.json")


def test_a_recorder_keeps_whole_steps_and_only_while_on() -> None:
    recorder = Recorder()
    recorder.add("encode@cpu", 0, time.perf_counter())
    recorder.tensor(3)
    recorder.next()
    assert recorder.events() == []
    assert recorder.steps == []
    recorder.switch(on=True)
    recorder.tensor(1)  # of a step whose beginning was not seen
    recorder.next()
    threads = [threading.Thread(target=lambda: [recorder.add("x", i, time.perf_counter()) for i in range(500)])
               for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.tensor(3)
    recorder.mark("backward")
    recorder.next()
    (step,) = recorder.steps
    assert len(step.events) == 2000
    assert list(step.ready) == [3]
    assert step.ready[3] <= step.marks["backward"] <= step.marks["end"]
    assert all(0 <= e.start_s <= e.end_s <= step.marks["end"] for e in step.events)
    assert recorder.events() == []
    recorder.switch(on=True)
    assert recorder.steps == []


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
def test_a_plan_is_stale_when_its_error_stays(times: list[float], steps: list[int]) -> None:
    assert stale_at(times) == steps


def test_a_prediction_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"predicted_s .*\b0\.0, .*E-ARGUMENT"):
        PredictionCheck(0.0)
