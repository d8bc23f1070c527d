"""The split of a model among servers, and which nodes host them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.planner import DENSE
from support.plans import closed_form, toy_job

from commlayer.planner import buckets
from commlayer.planner.buckets import assign
from commlayer.planner.costs import Prices
from commlayer.planner.data import tables
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.model import Cluster, Link, Node, Policy
from commlayer.planner.search.options import Catalog, options
from commlayer.planner.search.placement import cut_and_place, host_sets, link_shares
from commlayer.planner.search.plan_search import plan

M, BPS = 100e6, 10e9
RATES = st.floats(1e7, 1e10)


def cluster(gpus: list[float], cpus: list[float], hosting: bool = True) -> Cluster:
    return Cluster((*(Node(f"g{i}", 1, "v100", Link(b, b), server=hosting) for i, b in enumerate(gpus)),
                    *(Node(f"c{i}", 0, "cpu", Link(b, b)) for i, b in enumerate(cpus))))


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_bisection_reproduces_the_closed_form(n: int) -> None:
    for k in range(n + 1):
        nodes = cluster([BPS] * n, [BPS] * k)
        shares = link_shares(nodes)
        other, own, passes = closed_form(n, k)
        assert busy_s(nodes, shares) == pytest.approx(passes * 8 * M / BPS, rel=1e-9), (n, k)
        if n > 2:
            assert shares == pytest.approx([own] * n + [other] * k, abs=1e-9)
        assert n * own + k * other == pytest.approx(1)


@pytest.mark.parametrize(("n", "k", "passes"), [(4, 0, 1.5), (4, 2, 1.2), (8, 2, 1.474), (8, 4, 1.273), (8, 8, 1.0)])
def test_published_examples(n: int, k: int, passes: float) -> None:
    assert closed_form(n, k)[2] == pytest.approx(passes, abs=5e-4)


def busy_s(nodes: Cluster, owned: Sequence[float]) -> float:
    """By the definition, node by node."""
    n = sum(1 for node in nodes.nodes if node.ranks)
    times = []
    for node, share in zip(nodes.nodes, owned, strict=True):
        passes = (1 - share) + share * (n - 1) if node.ranks else share * n
        times.append(passes * 8 * M / min(node.link.up_bps, node.link.down_bps))
    return max(times)


@settings(max_examples=60, deadline=None)
@given(st.lists(RATES, min_size=3, max_size=6), st.lists(RATES, max_size=4), st.integers(0, 2**32))
def test_no_other_split_is_faster(gpus: list[float], cpus: list[float], seed: int) -> None:
    nodes = cluster(gpus, cpus)
    shares = link_shares(nodes)
    assert sum(shares) == pytest.approx(1)
    seconds = busy_s(nodes, shares)
    assert seconds >= 8 * M / min(gpus) * (1 - 1e-9), "a training node sends all that it does not own"
    draw = random.Random(seed)
    for _ in range(30):
        moved = [max(0.0, s + draw.gauss(0, 0.1) * draw.choice((0, 1))) for s in shares]
        if total := sum(moved):
            assert busy_s(nodes, [s / total for s in moved]) >= seconds * (1 - 1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.lists(st.floats(0, 1), min_size=1, max_size=6))
@example([1, 1], [0.75, 0.25, 0.25, 0.375])  # the first server takes both, 2 over 0.75 being less than 1 over 0.375
def test_buckets_follow_the_shares(sizes: list[int], weights: list[float]) -> None:
    weights = [round(w, 3) for w in weights]
    if not any(weights):
        weights[0] = 1.0
    chosen = assign(sizes, weights)
    loads = [sum(s for s, c in zip(sizes, chosen, strict=True) if c == server) for server in range(len(weights))]
    assert sum(loads) == sum(sizes)
    for load, weight in zip(loads, weights, strict=True):
        assert load <= weight / sum(weights) * (sum(sizes) + (sum(w > 0 for w in weights) - 1) * max(sizes)) + 1e-6
    assert chosen == assign(sizes, weights)


DENSE_ONLY = Policy(codecs=(DENSE,))


def machines(*links: str, servers: str = "", device: str = "rtx3060") -> Cluster:
    """Nodes that train, and `servers` of this link in addition."""
    trained = [tables.node(f"n{i}", device, link) for i, link in enumerate(links)]
    return Cluster((*trained, *(tables.node(f"s{i}", "cpu", link, ranks=0) for i, link in enumerate(servers.split()))), False)


def test_servers_beside_training_nodes_match_the_closed_form() -> None:
    other, own, _ = closed_form(4, 2)
    _, fitted, _ = host_sets(machines(*["10g"] * 4, servers="10g 10g"))
    assert fitted.parts == pytest.approx([own] * 4 + [other] * 2)


def test_written_placement_keeps_the_parts() -> None:
    job, cluster = toy_job(), machines(*["fiber-100"] * 3, "fiber-150")
    _, _, profile, policy = checked_inputs(job, cluster, None, DENSE_ONLY)
    fitted = next(hosts for hosts in host_sets(cluster) if len(set(hosts.parts)) > 1)
    prices = Prices(cluster, profile, fitted.places, spread=fitted.parts)
    catalog = Catalog(prices, options(prices, policy))
    groups = buckets.groups(job, buckets.limits(job)[0])
    placed = cut_and_place(job, groups, [0] * len(groups), catalog, 4, fragments=1, ranks_per_node=1, last_first=True,
                           least_nbytes=buckets.least_spread_nbytes(fine=False))
    for server, part in enumerate(fitted.parts):
        assert sum(each.numel for each in placed if each.server == server) == pytest.approx(part * job.numel, rel=0.02)


def test_two_fast_links_share_the_load_of_one() -> None:
    """14 nodes of 100 Mb/s: one server of 1 Gb/s sends 15 times what it receives; two servers are as fast as the nodes' links.
    """
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
def test_placement_scales_to_many_equal_hosts(cluster: Cluster) -> None:
    result = plan(toy_job(4), cluster)
    assert result.step_s > 0
    assert {bucket.server for bucket in result.buckets} <= {*range(max(result.servers, 1))}
