"""A requested plan is watched: if its prediction does not hold, rank 0 logs it once and keeps the plan."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from msgspec import structs
from support.attached import data, mlp
from support.rank_pool import Servers, pool, quick
from torch import nn

import commlayer
from commlayer.engine import observers
from commlayer.engine.connection import JobContext
from commlayer.engine.optimizers import job_of
from commlayer.engine.plan_choice import with_server_nodes
from commlayer.observe.prediction_check import PATIENCE, StalePlan
from commlayer.planner import builtin, plan
from commlayer.planner.buckets import default_plan
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Basis, PlanInputs, Policy
from commlayer.records import Plan

LONGEST_S, SHORTEST_S = 1e6, 1e-9
"""Predictions that no step comes near."""
BEGIN = observers.StaleState()


def planned(predicted_s: float) -> Plan:
    return Plan("", (), step_s=predicted_s)


def after(
    steps: list[tuple[Plan | None, float]], state: observers.StaleState = BEGIN, *, first: int = 1,
) -> tuple[observers.StaleState, list[StalePlan]]:
    """The state behind these steps, and its decisions."""
    lines = []
    for number, (requested, seconds) in enumerate(steps, first):
        state, stale = observers.decide(state, requested, number, seconds)
        lines += [stale] if stale else []
    return state, lines


@pytest.mark.parametrize("seconds", [1.26, 0.74])
def test_a_prediction_that_does_not_hold_is_said_once(seconds: float) -> None:
    requested = planned(1.0)
    state, lines = after([(requested, 9.0)] + [(requested, seconds)] * (PATIENCE - 1))
    assert lines == [], "the first step is partly another plan's, and a few others are no trend"
    state, lines = after([(requested, seconds)], state, first=PATIENCE + 1)
    assert lines == [StalePlan(PATIENCE + 1, 1.0, seconds, PATIENCE)]
    state, lines = after([(requested, seconds)] * 200, state)
    assert lines == [], "from then on that is what is expected"
    _, lines = after([(requested, 2 * seconds)] * (PATIENCE + 2), state)
    assert [event.usual for event in lines] == [True]


@pytest.mark.parametrize("seconds", [1.25, 0.75])
def test_a_prediction_that_is_missed_by_the_limit_holds(seconds: float) -> None:
    assert after([(planned(1.0), seconds)] * 100)[1] == []


def test_what_is_not_predicted_or_watched_by_others_is_left_alone() -> None:
    unpredicted = planned(0.0)
    assert after([(unpredicted, 9.0)] * 100)[1] == []
    assert after([(None, 9.0)] * 100)[1] == []


def test_another_plan_begins_anew() -> None:
    first, other = planned(1.0), planned(5.0)
    state, lines = after([(first, 9.0)] * PATIENCE + [(other, 9.0)] * PATIENCE)
    assert lines == []
    assert [event.predicted_s for event in after([(other, 9.0)], state)[1]] == [5.0]
    state, _ = after([(None, 9.0)], state)
    assert after([(other, 9.0)] * PATIENCE, state)[1] == [], "a plan that was found meanwhile is another, too"


@pytest.mark.parametrize(("predicted_s", "level"), [(SHORTEST_S, logging.WARNING), (LONGEST_S, logging.INFO)])
def test_a_stale_plan_is_an_event_and_a_line(predicted_s: float, level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "commlayer")
    context = JobContext()
    context.plan = planned(predicted_s)
    watch = observers.StalePlanWatch(context)
    for _ in range(PATIENCE + 1):
        assert (context.events, context.decisions) == ([], [])
        watch()
    (line,) = context.decisions
    slower = level == logging.WARNING
    assert [(e.predicted_s, e.lasted, e.usual) for e in context.events] == [(predicted_s, PATIENCE, False)] * slower
    assert ("stale" in line, "it is kept" in line) == (slower, slower)
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(level, line)]


def test_a_plan_for_other_machines_says_so() -> None:
    job, machines = builtin("lstm"), cluster_from_line("3xrtx3060@fiber-1000")
    lines: list[str] = []
    basis = Basis(plan(job, machines, policy=Policy(objective="step")), PlanInputs(job, machines))
    with_server_nodes(basis.plan, basis, 2, lines.append)
    assert lines[0] == "the plan was made for 3 nodes, but this job has 2: its predictions do not apply"
    assert "no rank trains on node 2; to run servers on other machines, start `commlayer serve`" in lines[1]
    lines.clear()
    with_server_nodes(basis.plan, basis, 3, lines.append)
    assert lines == []


def train(rank: int, address: str, predicted_s: float) -> tuple[list[StalePlan], list[str]]:
    model = mlp()
    plan = default_plan(job_of(model), codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1 << 20,
                         cut_nbytes=1 << 20)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.attach(model, optimizer, plan=structs.replace(plan, step_s=predicted_s),
                          config=quick(join=address)) as session:
        for step in range(PATIENCE + 1):
            optimizer.zero_grad()
            x, y = data(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return session.inspect.events(), session.inspect.decisions()


def test_a_session_tells_it_on_rank_0() -> None:
    ranks = pool(2)
    ranks.ready(__name__)
    with Servers(2) as servers:
        (events, decisions), other = ranks.call(train, servers.address, SHORTEST_S)
    assert other == ([], [])
    assert [event.predicted_s for event in events] == [SHORTEST_S]
    assert len(decisions) == 1
    assert "plan is stale" in decisions[0]
