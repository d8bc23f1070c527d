"""The planner's simulator as the balancer's price of communication: for all workers as simulated, for fewer as what is left."""

from __future__ import annotations

import pytest
from support.planner import PROFILE, flat, home

from commlayer import planner
from commlayer.autotune.shares.comm_cost import communication
from commlayer.planner.model import Cluster, Link, Policy
from commlayer.planner.tables import published
from commlayer.records import Job, Plan

JOB = published("resnet50")
FAST = Link(1e9, 1e9, 1e-4)
SLOW = Link(20e6, 20e6, 0.01)
POLICY = Policy(devices=("cpu",))


def made(cluster: Cluster) -> tuple[Plan, Job]:
    return planner.plan(JOB, cluster, PROFILE, POLICY), JOB


@pytest.mark.parametrize("link", [FAST, SLOW, home()])
def test_for_all_workers_it_says_what_the_simulator_says(link: Link) -> None:
    cluster = flat(3, link)
    plan, job = made(cluster)
    line = planner.simulate(plan, job, cluster, PROFILE, POLICY)
    price = communication(plan, job, cluster, PROFILE, POLICY)
    assert 0 <= price.overlap <= 1
    assert price.exposed_s((0, 1, 2), line.compute_s) == pytest.approx(line.exposed_s, rel=1e-6, abs=1e-9)
    assert price.seconds((0, 1, 2)) >= line.exposed_s - 1e-9


def test_without_the_slow_link_it_is_cheaper() -> None:
    nodes = (*flat(3).nodes, *(n for n in flat(4, Link(2e6, 2e6, 0.05)).nodes[3:]))
    cluster = Cluster(nodes)
    plan, job = made(cluster)
    price = communication(plan, job, cluster, PROFILE, POLICY)
    assert price.seconds((0, 1, 2)) < 0.5 * price.seconds((0, 1, 2, 3))
