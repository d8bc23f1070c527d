"""Prices of paths against hand calculations, and properties that hold for any cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from oracle.fifo import TimedTask as Task
from oracle.fifo import timed
from support.planner import DENSE, PROFILE, SHARED, SPARSE, codec, flat, home, tall

from commlayer.planner.costs import Prices
from commlayer.planner.model import Cluster, LinearCost, Node, Profile
from commlayer.planner.tree import encodes, format_path, usable_paths

N = 1_000_000
DENSE_NBYTES, SPARSE_NBYTES, SHARED_NBYTES = 4 * N + 16, N // 50 + 16, N // 25 + 16


def tasks(
    path: str, numel: int, codec: str, cluster: Cluster, profile: Profile, hosts: Sequence[int] | None = None,
    spread: Sequence[float] = (), **how: Any,
) -> tuple[Task, ...]:
    return timed(Prices(cluster, profile, hosts, spread=spread), path, numel, codec, **how)


def by_op(result: tuple[Task, ...], op: str) -> list[Task]:
    return [task for task in result if task.op == op]


def seconds(result: tuple[Task, ...], lane: str) -> float:
    return sum(s for task in result for name, s in task.lanes if name == lane)


def test_allreduce_between_nodes_of_one_rank() -> None:
    (task,) = tasks("allreduce", N, DENSE, flat(4), PROFILE, hosts=())
    expected = 2 * 3 * 2e-4 + 2 * 3 / 4 * 4 * N * 8 / 1e9
    assert dict(task.lanes) == pytest.approx({"up:n0": expected, "down:n0": expected})
    assert task.after == ()
    assert task.nbytes == 6 * N


def test_collective_runs_at_the_speed_of_its_slowest_member() -> None:
    nodes = flat(3).nodes
    mixed = Cluster((*nodes, Node("slow", 1, "v100", home())))
    (task,) = tasks("allreduce", N, DENSE, mixed, PROFILE, hosts=())
    expected = 6 * (0.01 + 1e-4) + 1.5 * 4 * N * 8 / 20e6
    assert dict(task.lanes) == pytest.approx(dict.fromkeys(["up:n0", "down:n0", "up:slow", "down:slow"], expected))


def test_server_on_one_of_three_sites() -> None:
    """The server's node sends nothing; the two equal other nodes fill its downlink together."""
    cluster = Cluster((Node("a", 1, "cpu", home()), Node("b", 1, "cpu", home()), Node("c", 1, "cpu", home())))
    result = tasks("service", N, SPARSE, cluster, PROFILE, hosts=(0,))
    (push,) = by_op(result, "net.push")
    assert dict(push.lanes) == pytest.approx({"up:b": SPARSE_NBYTES * 8 / 20e6, "down:a": 2 * SPARSE_NBYTES * 8 / 100e6})
    assert (push.latency_s, push.nbytes) == (pytest.approx(0.02), SPARSE_NBYTES)
    own, others = by_op(result, "server.add")
    assert seconds((own,), "server:a") == pytest.approx(2e-6 + 1e-9 * N + 0.1e-9 * SPARSE_NBYTES)
    assert seconds((others,), "server:a") == pytest.approx(2 * (2e-6 + 1e-9 * N + 0.1e-9 * SPARSE_NBYTES))
    assert result.index(own) in others.after, "payloads are added in the members' order"
    (pull,) = by_op(result, "net.pull")
    assert dict(pull.lanes) == pytest.approx({"up:a": 2 * SPARSE_NBYTES * 8 / 20e6, "down:b": SPARSE_NBYTES * 8 / 100e6})
    assert seconds(result, "cpu:a") == pytest.approx(3e-6 + 3e-9 * N)
    assert seconds(result, "cpu:b") == pytest.approx(3e-6 + 3e-9 * N)


def test_different_downlink_codec() -> None:
    result = tasks("service", N, SPARSE, flat(3), PROFILE, down=DENSE)
    assert [t.nbytes for t in by_op(result, "net.push")] == [SPARSE_NBYTES]
    assert [t.nbytes for t in by_op(result, "net.pull")] == [DENSE_NBYTES]
    assert seconds(tuple(by_op(result, "server.emit")), "server:n0") == pytest.approx(1e-6 + 0.5e-9 * N)
    assert seconds(tuple(by_op(result, "decode@cpu")[:1]), "cpu:n0") == pytest.approx(2e-6 + 0.75e-9 * N)


def test_codecs_by_node() -> None:
    cluster = Cluster((*flat(2).nodes, Node("far", 1, "v100", home())))
    result = tasks("service", N, DENSE, cluster, PROFILE, by_node=(DENSE, DENSE, SPARSE))
    sent = {task.lanes[0][0]: task.nbytes for task in by_op(result, "net.push")}
    assert sent == {"up:n1": DENSE_NBYTES, "up:far": SPARSE_NBYTES}
    with pytest.raises(ValueError, match=r"by_node: identity\(\), topk.*E-PLAN-INPUT"):
        tasks("service", N, DENSE, flat(3), PROFILE, by_node=(DENSE, DENSE, SPARSE))
    with pytest.raises(ValueError, match=r"by_node: got 1\b.* 3 .*E-PLAN-INPUT"):
        tasks("service", N, DENSE, flat(3), PROFILE, by_node=(DENSE,))


@pytest.mark.parametrize(("name", "members", "nbytes"), [
    (SPARSE, 3, 3 * SPARSE_NBYTES),
    (SHARED, 3, SHARED_NBYTES),
    (SPARSE, 300, 4 * N),
])
def test_forwarded_sum_is_the_smallest_of_payloads_their_sum_and_floats(
    name: str, members: int, nbytes: int
) -> None:
    result = tasks("encode@cpu net.push net.forward decode@cpu", N, name, flat(members), PROFILE)
    assert by_op(result, "server.emit") == []
    assert by_op(result, "net.forward")[0].nbytes == pytest.approx(nbytes, rel=1e-3)


def test_servers_on_all_nodes_form_one_group() -> None:
    """Each of n nodes sends (n-1)/n of its payload and receives the same amount for its own server, as the halves of a ring do.
    """
    result = tasks("service", N, DENSE, flat(4), PROFILE, hosts=range(4), spread=(0.25,) * 4)
    (push,), (pull,) = by_op(result, "net.push"), by_op(result, "net.pull")
    assert dict(push.lanes) == pytest.approx(dict.fromkeys(["up:n0", "down:n0"], 0.75 * DENSE_NBYTES * 8 / 1e9))
    assert dict(pull.lanes) == pytest.approx(dict(push.lanes))
    added = seconds(tuple(by_op(result, "server.add")), "server:n0")
    assert added == pytest.approx(4 * 2e-6 + 0.75e-9 * N + 0.1e-9 * DENSE_NBYTES)


def test_hierarchical_divisible_path_by_hand() -> None:
    """2 nodes x 4 ranks: each rank has a quarter, encoded; its halves are exchanged, added, encoded again and collected."""
    path = "node.reduce_scatter encode@gpu net.alltoall decode@gpu encode@gpu net.allgather decode@gpu node.allgather"
    result = tasks(path, N, SPARSE, tall(2, 4), PROFILE, hosts=())
    assert [t.op for t in result] == path.split()
    assert [t.after for t in result] == [(), *((i,) for i in range(7))]
    quarter, eighth = N / 4, N / 8
    payload, half = 16 + 0.02 * quarter, 16 + 0.02 * eighth
    expected = {
        "node.reduce_scatter": 3e-5 + 0.75 * 4 * N * 8 / 100e9,
        "net.alltoall": 2e-4 + 4 * payload / 2 * 8 / 1e9,
        "net.allgather": 2e-4 + 4 * half * 8 / 1e9,
        "node.allgather": 3e-5 + 3 * 4 * quarter * 8 / 100e9,
    }
    for op, value in expected.items():
        assert by_op(result, op)[0].lanes[0][1] == pytest.approx(value), op
    first, last = by_op(result, "decode@gpu")
    assert first.lanes == (("compute:n0", pytest.approx(2 * 2e-6 + 2 * 0.125e-9 * eighth)),)
    assert last.lanes == first.lanes, "two payloads of an eighth each, both times"


def test_copies_between_gpu_and_host_and_the_buckets_own_cost() -> None:
    profile = Profile(PROFILE.codecs, PROFILE.server, bucket_s=1e-4, copy=LinearCost(1e-5, 1e-10))
    on_cpu = tasks("service", N, SPARSE, flat(2), profile)
    assert seconds(on_cpu[:1], "cpu:n0") == pytest.approx(1e-4 + 1e-6 + 2e-9 * N + 1e-5 + 4e-10 * N)
    assert on_cpu[-1].lanes[0][1] == pytest.approx(2e-6 + 1e-9 * N + 1e-5 + 4e-10 * N)
    on_gpu = tasks("encode@gpu net.push net.pull decode@gpu", N, SPARSE, flat(2), profile)
    assert by_op(on_gpu, "net.push")[0].latency_s == pytest.approx(2e-4 + 1e-5 + 1e-10 * SPARSE_NBYTES)
    no_gpu = tasks("service", N, SPARSE, flat(2, device="cpu"), profile)
    assert seconds(no_gpu[:1], "cpu:n0") == pytest.approx(1e-4 + 1e-6 + 2e-9 * N)


def test_codecs_of_several_rounds_pay_the_latency_per_round() -> None:
    profile = Profile((*PROFILE.codecs, codec("powersgd(rank=4)", "cpu", 1, 1, 0.01, rounds=2, sums=True)), PROFILE.server)
    once, twice = (tasks("service", N, name, flat(2), profile) for name in (SPARSE, "powersgd(rank=4)"))
    assert by_op(twice, "net.push")[0].latency_s == 2 * by_op(once, "net.push")[0].latency_s
    path = "encode@cpu all.allreduce decode@cpu"
    once, twice = (tasks(path, 0, name, flat(4), profile, hosts=()) for name in (SHARED, "powersgd(rank=4)"))
    assert twice[1].lanes[0][1] - once[1].lanes[0][1] == pytest.approx(6 * 2e-4)


@pytest.mark.parametrize(("cluster", "path", "name", "message"), [
    (flat(2), "service", "int4()", r"int4\(\) on cpu.*E-PLAN-CODEC-COST"),
    (flat(2, device="cpu"), "encode@gpu net.push net.pull decode@cpu", SPARSE, "node n0 .*E-PLAN-PATH"),
])
def test_paths_without_a_price_are_refused(cluster: Cluster, path: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks(path, N, name, cluster, PROFILE)


def test_ranks_of_one_node_use_no_link() -> None:
    (task,) = tasks("allreduce", N, DENSE, tall(1, 4), PROFILE, hosts=())
    assert task.lanes == (("intra:n0", pytest.approx(6 * 1e-5 + 1.5 * 4 * N * 8 / 100e9)),)
    assert tasks("allreduce", N, DENSE, flat(1), PROFILE, hosts=()) == ()


@pytest.mark.parametrize("cluster", [flat(5), tall(3, 4), Cluster((*tall(1, 4).nodes, *tall(2, 2).nodes))])
def test_every_path_delivers_the_whole_bucket_to_all_ranks(cluster: Cluster) -> None:
    """Follows what each rank holds through all operations: at the end every rank has everything, and every pair of operations
    is complete.
    """
    prices = Prices(cluster, PROFILE)
    paths = usable_paths(cluster, mixed=True, sums=True)
    for path in paths[:: 1 + len(paths) // 400]:
        walk = prices.walk(path, SHARED if encodes(path) else DENSE)
        for held in walk.held.values():
            assert (held.part, held.pieces, held.split) == (pytest.approx(1), 0, {}), format_path(path)
        assert all(line.floor_s >= 0 and line.slope_s >= 0 for task in walk.tasks for _, line in task.lanes)
        assert all(i < place for place, task in enumerate(walk.tasks) for i in task.after)


@pytest.mark.parametrize("path", ["allreduce", "service", "encode@gpu all.allgather decode@gpu"])
def test_more_bandwidth_never_raises_the_price_and_bytes_stay_equal(path: str) -> None:
    slow, fast = (tasks(path, N, SPARSE if "encode" in path else DENSE, flat(4, home(up, 1e8)), PROFILE) for up in (1e7, 3e7))
    assert [t.nbytes for t in slow] == [t.nbytes for t in fast]
    assert all(a >= b for s, f in zip(slow, fast, strict=True) for (_, a), (_, b) in zip(s.lanes, f.lanes, strict=True))
