"""The planner's simulator as the balancer's price of communication."""

from __future__ import annotations

import pytest
from support.planner import PROFILE, flat, home

from commlayer import planner
from commlayer.autotune.search import price_of
from commlayer.balance import Communication
from commlayer.planner.model import Link, PlanInputs, Policy
from commlayer.planner.tables import published

JOB = published("resnet50")
POLICY = Policy(devices=("cpu",))


@pytest.mark.parametrize("link", [Link(1e9, 1e9, 1e-4), Link(20e6, 20e6, 0.01), home()])
def test_the_price_is_what_the_simulator_predicts(link: Link) -> None:
    inputs = PlanInputs(JOB, flat(3, link), PROFILE, POLICY)
    plan = planner.plan(JOB, inputs.cluster, PROFILE, POLICY)
    line = planner.simulate(plan, inputs.job, inputs.cluster, PROFILE, POLICY)
    comm_s, overlap = price_of(plan, inputs)
    assert 0 <= overlap <= 1
    price = Communication(comm_s, overlap)
    assert price.exposed_s(line.compute_s) == pytest.approx(line.exposed_s, rel=1e-6, abs=1e-9)
