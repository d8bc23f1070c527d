"""Plans for a running job: the cluster as measured, and servers by the numbers of those that run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commlayer import planner
from commlayer.autotune.measure import calibration
from commlayer.autotune.measuring import RankMeasurement, server_nodes_of
from commlayer.autotune.replanner import cluster_of
from commlayer.autotune.search import on_servers
from commlayer.engine.plan_choice import unsuited
from commlayer.planner.model import Line, Link, Policy, Profile
from commlayer.planner.tables import profile_from_tables, published
from commlayer.records import ServerInfo, View

LINKS = [Link(1e8, 1e8, 0.01)] * 3
ROWS = [RankMeasurement(0.1 * (1 + rank), 0.2, 1e8, 1e8, 0.01) for rank in range(3)]
INSIDE = calibration.CollectiveCosts(calibration.NO_COLLECTIVES, calibration.NO_COLLECTIVES)
JOB = published("resnet50")


def costs() -> Profile:
    """The host's, as a job measures them."""
    profile = profile_from_tables(cluster_of(LINKS, ROWS, INSIDE, [0]))
    kept = tuple(cost for cost in profile.codecs if cost.device == "cpu")
    return Profile(kept, profile.server, profile.bucket_s, Line(0.0, 1e-10), source="measured")


@pytest.mark.parametrize("bps", [1e8, 1e9, 1e10])
@pytest.mark.parametrize("cuda", [False, True])
def test_what_is_found_for_a_model_on_gpus_runs_there(bps: float, cuda: bool) -> None:
    links = [Link(bps, bps, 0.001)] * 3
    cluster = cluster_of(links, ROWS, INSIDE, [0, 1, 2], cuda=cuda)
    plan = planner.plan(JOB, cluster, costs(), Policy(devices=("cpu",)))
    assert unsuited(planner.lower(plan), 3, 1, cuda=cuda) == []


@pytest.mark.parametrize("world", [2, 3])
def test_servers_of_homes_are_counted_behind_the_homes_that_there_are(world: int) -> None:
    """Three met, so servers got the numbers behind theirs; since then one is gone, or another has come in its place."""
    view = View(5, (), (ServerInfo(0, "a", 3), ServerInfo(1, "b", 4), ServerInfo(2, "b", 4)))
    simple_namespace: Any = SimpleNamespace(uplink=SimpleNamespace(view=view), members=SimpleNamespace(), world=world)
    nodes = server_nodes_of(simple_namespace)
    assert nodes == [world, world + 1, world + 1]
    cluster = cluster_of(LINKS[:world], ROWS[:world], INSIDE, nodes)
    assert [node.server for node in cluster.nodes] == [False] * world + [True] * 2
    plan = planner.plan(JOB, cluster, costs(), Policy(devices=("cpu",)))
    assert on_servers(plan, nodes).servers == (3 if plan.servers else 0)
    simple_namespace.members = None
    assert server_nodes_of(simple_namespace) == [3, 4, 4], "all must stay, so nodes are those of the beginning"


@pytest.mark.parametrize(("order", "speeds"), [((0, 1, 2), (1.0, 1 / 2, 1 / 3)), ((2, 0, 1), (1.0, 3.0, 1.5))])
def test_speeds_are_against_rank_0_whose_times_are_planned_with(order: tuple[int, ...], speeds: tuple[float, ...]) -> None:
    cluster = cluster_of(LINKS, [ROWS[rank] for rank in order], INSIDE, [0])
    assert [node.speed for node in cluster.nodes] == pytest.approx(speeds)


def test_where_homes_reach_a_server_alone_no_collective_is_found_or_let_through() -> None:
    links = [Link(1e10, 1e10, 0.0001)] * 3  # so fast that collectives would win
    apart, together = (cluster_of(links, ROWS, INSIDE, [3], reachable=reachable) for reachable in (False, True))
    plan = planner.lower(planner.plan(JOB, apart, costs(), Policy(devices=("cpu",))))
    assert {b.path for b in plan.buckets} == {"service"}
    assert unsuited(plan, 3, 1, reachable=False) == []
    other = planner.lower(planner.plan(JOB, together, costs(), Policy(devices=("cpu",))))
    assert "service" not in {b.path for b in other.buckets}
    assert "has a collective between nodes that can reach only a server" in unsuited(other, 3, 1, reachable=False)[0]
    assert unsuited(other, 3, 1) == []
