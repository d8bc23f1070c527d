"""What rank 0 takes the plan in force for: how it really steps, and how fast it is since links have changed."""

from __future__ import annotations

import pytest
from msgspec import structs
from support.autotuning import (
    FIRST_PLANNING,
    JOB,
    LINKS,
    START,
    Rank,
    candidate,
    pick,
    plan_of,
    proposing,
    row,
)

from commlayer.autotune.plan.actions import Describe, StartPlanning, Word
from commlayer.autotune.plan.decide_rank0 import TRIED
from commlayer.autotune.plan.facts import Measured, Planned
from commlayer.autotune.plan.state import Planning
from commlayer.observe.link_monitor import IN_A_ROW
from commlayer.planner.model.cluster import Basis, PlanInputs, Policy
from commlayer.planner.model.learning import LearningRow
from commlayer.planner.tables.machines import profile_from_tables
from commlayer.planner.verbs.text_formats import cluster_from_line


@pytest.mark.parametrize("back", [True, False])
def test_what_runs_in_place_of_a_plan_is_what_is_known_and_counted(back: bool) -> None:
    """Behind local steps a plan of gradients goes on in updates, which need other numbers of steps."""
    cluster = cluster_from_line("2xrtx3060@100/20Mb")
    costly = tuple(LearningRow("adam", codes, "int4()", 1, "", False, 0, steps, steps, 0.0, 0.0, 5, 5)
                   for codes, steps in (("gradients", 1.0), ("updates", 1.5)))
    profile = structs.replace(profile_from_tables(cluster), learning=costly)
    made_from = PlanInputs(JOB, cluster, profile, Policy(optimizer="adam"))
    found = candidate(plan_of(0.5, "int4()"))
    rank = proposing(found._replace(basis=Basis(found.plan, made_from)))
    (switch,) = rank.hear(row(word=Word.SWITCH), row())
    if back:
        rank.switched(found.runnable)
        rank.step(1.5, times=TRIED + 1)
        (switch,) = rank.hear(row(word=Word.SWITCH), row())
        assert switch.candidate.runnable == START
    runs = structs.replace(switch.candidate.runnable, codes="updates", step_s=0.0)
    actions = rank.switched(runs)
    lead = rank.state.lead
    assert lead.steps == pytest.approx(1.5)
    assert lead.known == (runs, structs.replace(switch.candidate.plan, codes="updates", step_s=0.0))
    (described,) = pick(actions, Describe)
    assert described.basis.plan == lead.known[1]
    assert lead.check is None, "of what runs nothing was predicted"


@pytest.mark.parametrize(("slow_steps", "pace_s"), [(0, 1.0), (1, 2.0), (2, 2.0), (TRIED, 2.0)])
def test_after_a_link_has_dropped_the_plan_in_force_is_as_fast_as_its_steps_since(slow_steps: int, pace_s: float) -> None:
    """A row is the mean of steps, some of which may have been before the drop."""
    rank = Rank()
    rank.step(1.0, times=FIRST_PLANNING)
    (order,) = pick(rank.feed(Measured(LINKS, 1.0)), StartPlanning)
    rank.step(0.4, Planned(order, None, "no reason"))
    for _ in range(4):
        rank.step(0.4)
        rank.hear(*[row(0.4, bps=6e7, share=0.1)] * 2)
    if slow_steps:
        rank.step(2.0, times=slow_steps)
    slow = [row(1.0, bps=5e6, share=0.9)] * 2
    (order,) = pick([action for _ in range(IN_A_ROW) for action in rank.hear(*slow)], StartPlanning)
    assert order.step_s == 1.0, "as all ranks know it"
    assert isinstance(rank.state.lead.phase, Planning)
    assert rank.state.lead.pace_s == pace_s
