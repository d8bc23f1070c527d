"""Who hosts servers and how much each sums: parts as links ask for, kept by what is written, and taken where they pay."""

from __future__ import annotations

import pytest
from msgspec import structs
from support.planner import DENSE
from support.plans import closed_form, toy_job

from commlayer.planner import buckets, tables
from commlayer.planner.costs import Prices
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.model import Cluster, Policy
from commlayer.planner.options import Catalog, options
from commlayer.planner.placement import host_sets, parts
from commlayer.planner.search import plan

DENSE_ONLY = Policy(codecs=(DENSE,))


def machines(*links: str, servers: str = "", device: str = "rtx3060") -> Cluster:
    """Nodes that train, and `servers` of this link beside them."""
    trained = [tables.node(f"n{i}", device, link) for i, link in enumerate(links)]
    return Cluster((*trained, *(tables.node(f"s{i}", "cpu", link, ranks=0) for i, link in enumerate(servers.split()))), False)


def test_servers_beside_training_nodes_sum_as_the_closed_form_has_it() -> None:
    other, own, _ = closed_form(4, 2)
    _, fitted, _ = host_sets(machines(*["10g"] * 4, servers="10g 10g"))
    assert fitted.parts == pytest.approx([own] * 4 + [other] * 2)


def test_what_is_written_keeps_the_parts() -> None:
    job, cluster = toy_job(), machines(*["fiber-100"] * 3, "fiber-150")
    profile, policy, _ = checked_inputs(job, cluster, None, DENSE_ONLY)
    fitted = next(hosts for hosts in host_sets(cluster) if len(set(hosts.parts)) > 1)
    prices = Prices(cluster, profile, fitted.places, spread=fitted.parts)
    catalog = Catalog(prices, options(prices, policy))
    groups = buckets.groups(job, buckets.limits(job)[0])
    placed = parts(job, groups, [0] * len(groups), catalog, 4, fragments=1, ranks_per_node=1)
    for server, part in enumerate(fitted.parts):
        assert sum(each.numel for each in placed if each.server == server) == pytest.approx(part * job.numel, rel=0.02)


def test_two_fast_links_share_what_one_could_not_carry() -> None:
    """14 nodes of 100 Mb/s: one server of 1 Gb/s sends 15 times what is sent to it, two are as fast as the others' links."""
    cluster = machines(*["fiber-100"] * 14, *["fiber-1000"] * 2)
    result = plan(toy_job(), cluster, None, DENSE_ONLY)
    assert result.hosts == (14, 15)
    alone = Cluster(tuple(structs.replace(node, server=node.name == "n14") for node in cluster.nodes), False)
    even = Cluster(tuple(structs.replace(node, link=tables.link("fiber-100")) for node in cluster.nodes), False)
    assert result.step_s < 0.7 * plan(toy_job(), alone, None, DENSE_ONLY).step_s
    assert result.step_s < 0.7 * plan(toy_job(), even, None, DENSE_ONLY).step_s


@pytest.mark.nightly
@pytest.mark.parametrize("cluster", [
    machines(*["fiber-1000"] * 50),
    Cluster(tuple(tables.node(f"n{i}", "v100", "100g", ranks=8, intra="nvlink") for i in range(64))),
], ids=["50 homes", "64 x 8 v100"])
def test_many_equal_hosts_can_be_planned_for(cluster: Cluster) -> None:
    result = plan(toy_job(4), cluster)
    assert result.step_s > 0
    assert {bucket.server for bucket in result.buckets} <= {*range(max(result.servers, 1))}
