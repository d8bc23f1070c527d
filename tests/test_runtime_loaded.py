"""How much longer coding takes beside training: made-up steps against made-up costs."""

from __future__ import annotations

import pytest

from commlayer.observe import Event, Step
from commlayer.planner.model import CodecCost, Line
from commlayer.records import Bucket, Plan, Slice
from commlayer.runtime.loaded import Load, load_of, under

COST = CodecCost("fp16()", "cpu", Line(1.0, 0.5), Line(2.0, 0.25), Line(0.0, 2.0))


def plan(path: str = "service", codec: str = "fp16()") -> Plan:
    return Plan("job", tuple(Bucket(i, (Slice(i, 0, 8),), path, codec, 0) for i in range(2)), 1)


def step(encode_s: float, decode_s: float, where: str = "cpu") -> Step:
    events = [Event(f"encode@{where}", i, 0.0, encode_s) for i in range(2)]
    return Step({}, {}, events + [Event(f"decode@{where}", i, 0.0, decode_s) for i in range(2)])


@pytest.mark.parametrize(
    ("steps", "made", "expected"),
    [
        ([step(5.0, 4.0)], plan(), Load()),
        ([step(15.0, 8.0)], plan(), Load(3.0, 2.0)),
        ([step(10.0, 4.0), step(500.0, 400.0), step(10.0, 6.0)], plan(), Load(2.0, 1.5)),  # one long step is no load
        ([step(1.0, 1.0)], plan(), Load()),  # faster than alone: nothing that could be counted upon
        ([step(15.0, 8.0, "gpu")], plan(), Load()),
        ([step(15.0, 8.0)], plan("allreduce"), Load()),
        ([step(15.0, 8.0)], plan(codec="int8()"), Load()),
        ([], plan(), Load()),
    ],
)
def test_a_load_is_what_steps_took_over_what_coding_takes_alone(steps: list[Step], made: Plan, expected: Load) -> None:
    assert load_of(steps, made, [COST]) == pytest.approx(expected)


def test_under_a_load_times_are_longer_and_payloads_are_not() -> None:
    cost = under(Load(3.0, 2.0), COST)
    assert (cost.encode(8), cost.decode(8), cost.nbytes(8)) == (15.0, 8.0, 16.0)
