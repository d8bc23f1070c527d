"""A short storm: whatever strikes, all survivors end with equal weights."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from bench.storms import command, storm
from bench.storms.homes import Job
from bench.storms.reports import LOCAL, SYNC, Work
from bench.storms.storm import KILL, LEAVE

PATIENT = {"heartbeat_s": 0.2, "dead_after_s": 30.0, "reconnect_s": 30.0, "deadline_s": 60.0}
RATE, SECONDS, SCALE = 300.0, 5.0, 15.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["local", "sync"])
def test_survivors_of_a_storm_end_with_equal_weights(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm, "KINDS", (KILL, LEAVE))  # what the others do depends on how fast the machine is
    work = Work({"local": LOCAL, "sync": SYNC}[mode], 0.05)
    with ExitStack() as stack:
        jobs = {rate: stack.enter_context(Job(4, work, PATIENT)) for rate in (0.0, RATE)}
        records = storm.run(jobs, SECONDS, SCALE, 1)
    assert [record.errors for record in records.values()] == [[], []]
    assert {strike.kind for strike in records[RATE].strikes} <= {KILL, LEAVE}
    assert records[RATE].strikes
    runs = command.Runs("commlayer", 4, mode, records[0.0], {RATE: records[RATE]})
    result = command.result([runs], SECONDS, SCALE)
    assert {"scale", "kept_300", "recovery_p50_s", "recovery_p95_s", "errors", "void_rows"} < result["summary"].keys()
    assert result["code"] == 0
