"""What becomes of a plan that a running job went over to: kept, or left again where steps take longer than before."""

from __future__ import annotations

import pytest
from msgspec import structs

from commlayer.auto import WORSE, Auto
from commlayer.connect import Connection
from commlayer.finding import Found
from commlayer.planner import builtin, default_plan
from commlayer.planner.model import Basis, Cluster, Inputs

JOB = builtin("lstm")


@pytest.mark.parametrize(("takes_s", "back"), [(0.8, False), (1.0 + WORSE / 2, False), (1.0 + 2 * WORSE, True)])
def test_a_plan_under_which_steps_take_longer_is_left_again(takes_s: float, back: bool) -> None:
    plan = structs.replace(default_plan(JOB, codec="fp16()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1 << 20,
                                        cut_nbytes=1 << 21), step_s=0.5)
    connection = Connection()
    connection.plan = plan
    auto = Auto(connection, JOB)
    before = Found(Basis(plan, Inputs(JOB, Cluster(()))), plan, plan, 0.5, (0.1, 0.0), (0.1, 0.0), 0.01)
    auto._before, auto._before_s = before, 1.0
    auto._came_of_it(takes_s)
    assert auto._found is (before if back else None)
    assert auto._before is None, "a plan is tried once"
    assert ("back to that" in connection.decisions[-1]) is back


def test_a_plan_that_was_kept_is_followed_at_the_pace_it_has() -> None:
    auto = Auto(Connection(), JOB)
    auto._connection.plan = default_plan(JOB, codec="fp16()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1 << 20,
                                         cut_nbytes=1 << 21)
    auto._kept = True
    auto._came_of_it(0.7)
    assert auto._found is None
    assert auto._drift is not None
    assert auto._drift.predicted_s == 0.7
