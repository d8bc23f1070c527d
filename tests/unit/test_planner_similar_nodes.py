"""Nodes whose links differ by little are planned as a few kinds: how many, what stands for them, and what that costs."""

from __future__ import annotations

import math
import random

import pytest
from msgspec import structs
from support.plans import toy_job

from commlayer.planner import layout_candidate, model, simulation, tables
from commlayer.planner import search as planning
from commlayer.planner.choices import ChoiceFound, Space, search
from commlayer.planner.model import EXACT, FEW, Cluster, Link, Policy, condensed
from commlayer.planner.problem import Problem
from commlayer.planner.search import plan
from commlayer.planner.simulation import Schedule, schedule, simulate


def unequal(nodes: int, low: float, high: float, *, seed: int = 1) -> Cluster:
    draw = random.Random(seed)
    made = [tables.node(f"n{i}", "rtx3060", "fiber-100") for i in range(nodes)]
    links = [Link(draw.uniform(low, high), draw.uniform(low, high), 4e-3) for _ in range(nodes)]
    return Cluster(tuple(structs.replace(node, link=link) for node, link in zip(made, links, strict=True)), False)


def kinds_of(cluster: Cluster) -> set[object]:
    return {structs.replace(node, name="") for node in cluster.nodes}


def test_links_that_differ_by_less_than_their_error_are_one_kind() -> None:
    made = condensed(unequal(32, 98e6, 102e6))
    assert [node.name for node in made.nodes] == [f"n{i}" for i in range(32)]
    (one,) = kinds_of(made)
    assert one.link.up_bps == min(node.link.up_bps for node in unequal(32, 98e6, 102e6).nodes)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("low", "high", "most"), [(95e6, 105e6, FEW), (90e6, 125e6, FEW), (20e6, 900e6, EXACT)])
@pytest.mark.parametrize("nodes", [7, 32, 100])
def test_there_are_few_kinds_and_none_is_faster_than_its_nodes(nodes: int, low: float, high: float, most: int) -> None:
    cluster = unequal(nodes, low, high)
    made = condensed(cluster)
    assert 1 <= len(kinds_of(made)) <= most
    for was, now in zip(cluster.nodes, made.nodes, strict=True):
        assert now.link.up_bps <= was.link.up_bps
        assert now.link.down_bps <= was.link.down_bps


def test_few_nodes_stay_as_they_are_and_unlike_ones_apart() -> None:
    few = unequal(EXACT, 10e6, 900e6)
    assert condensed(few) == few
    mixed = unequal(20, 95e6, 105e6)
    mixed = structs.replace(mixed, nodes=tuple(structs.replace(n, server=i == 0) for i, n in enumerate(mixed.nodes)))
    assert [node.server for node in condensed(mixed).nodes] == [True] + [False] * 19


def test_planning_unequal_nodes_simulates_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in tasks: those of the search grow with the kinds, and only what may be written knows every server."""
    seen: list[Problem] = []
    made_of: list[Schedule] = []

    def counted(problem: Problem) -> Schedule:
        seen.append(problem)
        made_of.append(schedule(problem))
        return made_of[-1]

    monkeypatch.setattr(simulation, "schedule", counted)
    cluster = unequal(32, 90e6, 110e6)
    made = plan(toy_job(), cluster)
    searched = [p for p in seen if len(p.lanes) < 32]
    written = [p for p in seen if len(p.lanes) >= 32]
    assert searched
    assert all(p.nodes <= EXACT for p in searched)
    assert 1 <= len(written) <= 16
    assert sum(len(p.task_line) for p in written) <= 0.6e6
    assert sum(getattr(each, "begun", 0) for each in made_of) <= 0.5e6, "most of what is tried ends early"
    assert made.step_s == pytest.approx(simulate(made, toy_job(), cluster).step_s), "it is predicted for the nodes as they are"


def test_what_a_search_cannot_bring_forward_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the finalists one is so far behind as written that all the search could gain is too little: the plan stays."""
    searched: list[int] = []

    def counted(space: Space, *args: object, **more: object) -> ChoiceFound:
        searched.append(len(space.loss))
        return search(space, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(layout_candidate, "search", counted)
    cluster = unequal(32, 90e6, 110e6)
    by_step = Policy(objective="step")
    made, few = plan(toy_job(), cluster, None, by_step), len(searched)
    monkeypatch.setattr(planning, "CHANCE", math.inf)
    assert plan(toy_job(), cluster, None, by_step) == made
    assert len(searched) - few > few


def test_a_plan_by_kinds_is_nearly_as_short(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = unequal(8, 20e6, 60e6)
    by_kinds = plan(toy_job(), cluster)
    monkeypatch.setattr(model, "EXACT", 8)
    exactly = plan(toy_job(), cluster)
    assert by_kinds.step_s <= exactly.step_s * 1.03
