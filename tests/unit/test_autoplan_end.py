"""What plan="auto" leaves behind the end of a session: no thread of it."""

from __future__ import annotations

from support.autotuning import JOB, LINKS, START

from commlayer.autotune.measure.calibration import Grouped
from commlayer.autotune.plan.actions import StartPlanning
from commlayer.autotune.plan.driver import AutoPlan
from commlayer.autotune.plan.measuring import Measurements
from commlayer.engine.connection import Connection
from commlayer.planner.model.cluster import Line


def test_nobody_plans_on_behind_the_end_of_a_session() -> None:
    """A thread inside a codec's native code when the interpreter ends takes the process down."""
    connection = Connection()
    connection.plan = START
    auto = AutoPlan(connection, JOB)
    auto._replanner.measured(Measurements(JOB, [], [], Grouped(Line(0.0), Line(0.0))))
    auto.carry_out(StartPlanning(START, None, LINKS, 1.0))
    assert auto._thread is not None
    assert auto._thread.is_alive(), "it measures what codecs cost here"
    connection.close()
    assert not auto._thread.is_alive()
    (found,) = auto._news
    assert "the session is over" in getattr(found, "why", "")
