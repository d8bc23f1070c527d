"""Costs besides codecs: measured on real sockets and process groups, fitted, and their effect on prices."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs
from oracle.fifo import timed
from support.planner import DENSE, PROFILE, SHARED, flat, tall
from support.rank_pool import pool

from commlayer.autotune.measure import calibration
from commlayer.cluster.processes.collectives import Groups
from commlayer.planner.costs import Prices, collective_traffic
from commlayer.planner.model import ZERO, LinearCost, Profile

BUDGET_S = 0.2


def measured(rank: int, per_node: int, budget_s: float) -> calibration.CollectiveCosts:
    groups = Groups(per_node, 30.0, torch.device("cpu"))
    try:
        return calibration.measure_collectives(groups, budget_s)
    finally:
        groups.close()


@pytest.mark.parametrize(("world", "per_node", "inside", "across"), [
    (2, 2, True, False), (2, 1, False, True), (4, 2, True, True),
])
def test_collective_times_are_equal_on_all_ranks(world: int, per_node: int, inside: bool, across: bool) -> None:
    results = pool(world).call(measured, per_node, BUDGET_S)
    assert all(rows == results[0] for rows in results)
    for line, present in zip(results[0], (inside, across), strict=True):
        assert (line.slope_s > 0) == present
        assert line == ZERO or line.floor_s < 1.0, "a message inside a machine takes no second"


def test_one_collective_gives_the_latency_if_time_is_short() -> None:
    line = pool(2).call(measured, 1, 0.0)[0].across
    assert line.floor_s > 0
    assert (line.slope_s, line.error) == (calibration.LEAST_BYTE_S, 0.0)


def seconds(profile: Profile, path: str, codec: str = DENSE, *, tall_nodes: bool = True, numel: int = 1 << 20) -> float:
    """Of the bucket's tasks one after the other."""
    cluster = tall(2, 4) if tall_nodes else flat(4)
    tasks = timed(Prices(cluster, profile), path, numel, codec)
    return sum(max(s for _, s in task.lanes) + task.latency_s for task in tasks)


def test_measured_intra_node_rates_override_declared_ones() -> None:
    path = "node.reduce net.allreduce node.broadcast"
    slower = structs.replace(PROFILE, inside=LinearCost(1e-3, 1e-9))
    lines = seconds(PROFILE, path)
    # Two nodes, each with a reduce and a broadcast of two messages in a row.
    assert seconds(slower, path) - lines == pytest.approx(2 * 2 * (2 * (1e-3 - 1e-5) + 4 * (1 << 20) * (1e-9 - 8 / 100e9)))


def test_no_collective_between_nodes_is_faster_than_its_links() -> None:
    path = "allreduce"
    lines = seconds(PROFILE, path, tall_nodes=False)
    quick, slow = (structs.replace(PROFILE, across=line) for line in (LinearCost(1e-9, 1e-12), LinearCost(5e-3, 20e-9)))
    assert seconds(quick, path, tall_nodes=False) == lines
    traffic = collective_traffic("allreduce", 4)
    expected_s = traffic.messages * 5e-3 + traffic.passes * 4 * (1 << 20) * 20e-9
    assert seconds(slow, path, tall_nodes=False) == pytest.approx(expected_s)


def test_allreduce_sum_is_priced_by_its_own_bytes() -> None:
    """Not by the bytes of the payloads sent to a server."""
    wider = structs.replace(PROFILE, codecs=tuple(structs.replace(c, reduced=LinearCost(8, 2.0)) if c.codec == SHARED else c
                                                  for c in PROFILE.codecs))
    summed, served = "encode@cpu all.allreduce decode@cpu", "encode@cpu net.push net.pull decode@cpu"
    passes = collective_traffic("allreduce", 4).passes
    more_nbytes = passes * ((2.0 - 0.04) * (1 << 20) + 8 - 16)
    assert (seconds(wider, summed, SHARED, tall_nodes=False) - seconds(PROFILE, summed, SHARED, tall_nodes=False)
            == pytest.approx(more_nbytes * 8 / 1e9))
    assert seconds(wider, served, SHARED, tall_nodes=False) == seconds(PROFILE, served, SHARED, tall_nodes=False)
