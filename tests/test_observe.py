"""Events, traces and drift: what is written can be read, what is off costs nothing, one slow step is no trend."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from commlayer.observe import Drift, Event, Recorder, compare, write_trace

PREDICTED = [
    Event("encode", "cpu", 0, 0.0, 0.002), Event("send", "up", 0, 0.002, 0.012, 5000), Event("send", "up", 1, 0.012, 0.02),
]
MEASURED = [
    Event("encode", "cpu", 0, 0.001, 0.004), Event("send", "up", 0, 0.004, 0.024, 5000), Event("send", "up", 7, 0.03, 0.04),
]


def test_a_trace_has_a_track_for_each_side_and_a_lane_for_each_lane(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_trace(file, {"predicted": PREDICTED, "measured": MEASURED})
    entries = json.loads(file.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in entries if e["name"] == "process_name"] == ["predicted", "measured"]
    spans = [e for e in entries if e["ph"] == "X"]
    assert len(spans) == 6
    assert spans[1] == {
        "name": "send 0", "cat": "send", "ph": "X", "pid": 0, "tid": 2, "ts": 2000.0, "dur": 10000.0,
        "args": {"bucket": 0, "nbytes": 5000},
    }
    assert list(tmp_path.iterdir()) == [file], "no part is left behind"


def test_ops_are_compared_where_both_have_them() -> None:
    assert compare(PREDICTED, MEASURED) == pytest.approx({"encode": 1.5, "send": 2.0})


def test_a_recorder_keeps_whole_steps_and_only_while_on() -> None:
    recorder = Recorder()
    recorder.add("encode", "cpu", 0, time.perf_counter())
    recorder.tensor(3)
    recorder.next()
    assert recorder.events() == []
    assert recorder.steps == []
    recorder.switch(on=True)
    recorder.tensor(1)  # of a step whose beginning was not seen
    recorder.next()
    threads = [threading.Thread(target=lambda: [recorder.add("x", "lane", i, time.perf_counter()) for i in range(500)])
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
    drift = Drift(1.0, limit=0.25, patience=3, quiet=10)
    return [step for step, seconds in enumerate(times) if drift.observe(seconds)]


@pytest.mark.parametrize(("times", "said"), [
    ([1.0] * 50, []),
    ([1.2, 0.8] * 25, []),
    ([1.0, 3.0, 1.0, 1.0, 3.0] * 10, []),
    ([1.0] * 5 + [1.5] * 3, [7]),
    ([1.5] * 30, [2, 12, 22]),
    ([0.5, 0.5, 1.5, 1.5, 1.5], [4]),
    ([0.5] * 3, [2]),
    ([1.5, float("nan"), 1.5, 1.5], [3]),
])
def test_a_plan_is_stale_when_its_error_stays(times: list[float], said: list[int]) -> None:
    assert stale_at(times) == said


def test_a_prediction_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="predicted_s is 0"):
        Drift(0.0)
