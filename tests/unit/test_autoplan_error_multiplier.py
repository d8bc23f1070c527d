"""Where compression costs a model more steps than the table says: what is counted dearer, and when that matters."""

from __future__ import annotations

from typing import Any

from msgspec import structs
from support.autotuning import JOB, LINKS, Rank, candidate, pick, plan_of, said, trying

from commlayer.autotune.plan.policy import MULTIPLIER_RISE, TRIED
from commlayer.autotune.plan.replanner import harder_by
from commlayer.autotune.plan.state import Events, PlanningDone, StartPlanning, StepDone
from commlayer.compressors import parse
from commlayer.engine import plan_choice
from commlayer.planner.convergence import LearningRow, Recipe, excess
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Policy
from commlayer.planner.search import plan as planned
from commlayer.planner.tables import profile_from_tables
from commlayer.planner.tables import rows as shipped_rows

BY_PACE = TRIED + 1
"""Steps from a change of plans to the word on it."""

def harder(rank: Rank, times: float) -> list[Any]:
    return rank.feed(StepDone(rank.state.step + 1, 0.5, Events(rank.in_force, (), times)))


def test_a_model_of_which_codecs_lose_more_than_usual_is_planned_for_anew() -> None:
    rank = trying(candidate(plan_of(0.5)))
    assert not pick(harder(rank, 2.0), StartPlanning), "a plan that is tried is judged first"
    rank.step(0.5, times=BY_PACE)
    assert not pick(harder(rank, MULTIPLIER_RISE), StartPlanning)
    actions = harder(rank, 2.0)
    (order,) = pick(actions, StartPlanning)
    assert order == StartPlanning(rank.in_force.plan, rank.in_force.plan, LINKS, 0.5), "with the links as they are known"
    assert "2.00 times" in said(actions)
    rank.step(0.5, PlanningDone(order, None, "no reason"))
    rank.step(0.5, times=BY_PACE)
    assert not pick(harder(rank, 2.0 * MULTIPLIER_RISE), StartPlanning), "that is known"
    assert pick(harder(rank, 2.1 * MULTIPLIER_RISE), StartPlanning)


def test_what_is_harder_for_a_model_makes_a_finer_plan() -> None:
    """On links where topk pays by the table, and for a model to which it costs three times as many steps more it does not."""
    row = LearningRow("adam", "gradients", "int4()", 1, "", False, 0, 1.01, 1.02, 0.0, 0.0, 5, 5)
    rows = (row, *(structs.replace(row, codec=f"topk(ratio={ratio})", steps=steps, steps_high=steps + 0.1)
                   for ratio, steps in ((0.1, 1.1), (0.01, 1.4), (0.001, 2.0))))
    cluster, policy = cluster_from_line("2xrtx3060@20/20Mb"), Policy(devices=("cpu",), optimizer="adam")
    levels = []
    for times in (1.0, 3.0):
        profile = structs.replace(profile_from_tables(cluster), learning=harder_by(rows, times))
        made = planned(JOB, cluster, profile, policy)
        levels.append(sum(plan_choice.level(parse(b.codec)) * b.numel for b in made.buckets))
    assert levels[1] > levels[0]
    assert harder_by(rows, 0.5) == rows, "nothing is made easier"


def test_what_was_not_looked_at_is_no_harder() -> None:
    """Cosines are told of topk: what four bits and local steps cost stays as it is, so that they remain a way out of it."""
    rows = shipped_rows()
    made = harder_by(rows, 2.0)
    for recipe in (Recipe(every=every, overlap=overlap) for every in (1, 2, 4, 8, 16, 64) for overlap in ("", "round")):
        for codec in ("int4()", "int8()", "identity()"):
            assert excess(made, codec, recipe) == excess(rows, codec, recipe)
    plain, harder = (excess(table, "topk(ratio=0.01)").steps for table in (rows, made))
    assert harder >= 2 * plain * (1 - 1e-9)
    assert excess(made, "block_threshold(ratio=0.01)").steps >= harder * (1 - 1e-9), "unmeasured: no better than its relatives"
