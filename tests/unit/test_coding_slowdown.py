"""How much longer coding takes beside training: made-up steps against made-up costs."""

from __future__ import annotations

import pytest

from commlayer.autotune.measure.calibration import CodingLoad, load_of, under
from commlayer.observe.step_trace import Event, RecordedStep
from commlayer.planner.model import CodecCost, Line
from commlayer.records import Bucket, Plan, Slice

COST = CodecCost("fp16()", "cpu", Line(1.0, 0.5), Line(2.0, 0.25), Line(0.0, 2.0))
"""Of 8 elements: 5 s to encode, 4 s to decode."""


def plan(path: str = "service", codec: str = "fp16()") -> Plan:
    return Plan("job", tuple(Bucket(i, (Slice(i, 0, 8),), path, codec, 0) for i in range(2)), 1)


def step(encode_s: float, decode_s: float, where: str = "cpu") -> RecordedStep:
    events = [Event(f"encode@{where}", i, 0.0, encode_s) for i in range(2)]
    return RecordedStep({}, {}, events + [Event(f"decode@{where}", i, 0.0, decode_s) for i in range(2)])


@pytest.mark.parametrize(
    ("steps", "result", "expected"),
    [
        ([step(5.0, 4.0)], plan(), CodingLoad()),
        ([step(13.0, 8.0)], plan(), CodingLoad(1.0, 0.5)),
        ([step(7.0, 4.0), step(500.0, 400.0), step(7.0, 6.0)], plan(), CodingLoad(0.25, 0.25)),  # one long step is no load
        ([step(1.0, 1.0)], plan(), CodingLoad()),  # faster than alone: nothing that could be counted upon
        ([step(13.0, 8.0, "gpu")], plan(), CodingLoad()),
        ([step(13.0, 8.0)], plan("allreduce"), CodingLoad()),
        ([step(13.0, 8.0)], plan(codec="int8()"), CodingLoad()),
        ([], plan(), CodingLoad()),
    ],
)
def test_a_load_is_what_steps_took_more_than_coding_takes_alone(
    steps: list[RecordedStep], result: Plan, expected: CodingLoad,
) -> None:
    assert load_of(steps, result, [COST]) == pytest.approx(expected)


def test_a_load_is_added_to_times_and_not_to_payloads() -> None:
    cost = under(CodingLoad(1.0, 0.5), COST)
    assert (cost.encode(8), cost.decode(8), cost.nbytes(8)) == (13.0, 8.0, 16.0)
