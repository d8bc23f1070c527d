"""What becomes of a plan that a running job went over to: kept, or left again where steps take longer than before."""

from __future__ import annotations

import pytest
from msgspec import structs

from commlayer.job.autoplan.driver import PLAIN, WORSE, AutoPlan
from commlayer.job.autoplan.replan import Replan
from commlayer.job.start import Connection
from commlayer.planner import builtin, default_plan
from commlayer.planner.model.cluster import Basis, Cluster, PlanInputs

JOB = builtin("lstm")


@pytest.mark.parametrize(("takes_s", "back"), [(0.8, False), (1.0 + WORSE / 2, False), (1.0 + 2 * WORSE, True)])
def test_a_plan_under_which_steps_take_longer_is_left_again(takes_s: float, back: bool) -> None:
    plan = structs.replace(default_plan(JOB, codec="fp16()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1 << 20,
                                        cut_nbytes=1 << 21), step_s=0.5)
    connection = Connection()
    connection.plan = plan
    auto = AutoPlan(connection, JOB)
    before = Replan(Basis(plan, PlanInputs(JOB, Cluster(()))), plan, plan, 0.5, 0.5, (0.1, 0.0), (0.1, 0.0), 0.01)
    auto._before, auto._before_s = before, 1.0
    auto._came_of_it(takes_s)
    assert auto._found is (before if back else None)
    assert auto._before is None, "a plan is tried once"
    assert ("back to that" in connection.decisions[-1]) is back


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("plain_s", "tried"), [(0.7, True), (0.7 * (1 + PLAIN) + 0.01, False)])
def test_what_is_near_without_compression_is_tried_and_must_be_faster(kept: bool, plain_s: float, tried: bool) -> None:
    made = default_plan(JOB, codec="fp16()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1 << 20,
                        cut_nbytes=1 << 21)
    plain = structs.replace(made, step_s=plain_s)
    connection = Connection()
    connection.plan, connection.basis = structs.replace(made, step_s=0.5), Basis(made, PlanInputs(JOB, Cluster(())))
    auto = AutoPlan(connection, JOB)
    auto._plain = Replan(Basis(plain, PlanInputs(JOB, Cluster(()))), plain, plain, 0.5, 0.5, (0.1, 0.0), (0.1, 0.0), 0.01)
    auto._kept, auto._before_s = kept, 1.0
    auto._came_of_it(0.7)
    assert (auto._found is not None) is tried
    if auto._found is not None:
        assert auto._found.answer is plain
        assert auto._found.present is made, "what all go back to is what is in force"
        assert auto._before_s == 0.7
        before, auto._found = auto._found._replace(answer=made), None
        auto._before, connection.plan = before, plain
        auto._came_of_it(0.701)
        assert auto._found is before, "it must be the faster one to stay"


def test_a_plan_that_took_longer_than_predicted_makes_the_next_prediction_count_longer() -> None:
    connection = Connection()
    connection.plan = structs.replace(default_plan(JOB, codec="fp16()", path="service", servers=1, ranks_per_node=1,
                                                   fuse_nbytes=1 << 20, cut_nbytes=1 << 21), step_s=0.5)
    auto = AutoPlan(connection, JOB)
    auto._before_s = 1.0
    auto._came_of_it(0.9)
    for predicted_s, worth in ((0.8, False), (0.4, True)):
        plan = structs.replace(connection.plan, step_s=predicted_s)
        found = Replan(Basis(plan, PlanInputs(JOB, Cluster(()))), plan, connection.plan, 1.0, 1.0, (0.1, 0.0), (0.1, 0.0), 0.01)
        auto._found, auto._result = None, (connection.plan, 1.0, found, "")
        auto._take_result()
        assert (auto._found is found) is worth, "0.9 for 0.5 makes 1.44 of 0.8, and 0.72 of 0.4"


def test_a_plan_that_was_kept_is_followed_at_the_pace_it_has() -> None:
    auto = AutoPlan(Connection(), JOB)
    auto._connection.plan = default_plan(JOB, codec="fp16()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1 << 20,
                                         cut_nbytes=1 << 21)
    auto._kept = True
    auto._came_of_it(0.7)
    assert auto._found is None
    assert auto._drift is not None
    assert auto._drift.predicted_s == 0.7
