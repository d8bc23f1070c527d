"""The tree of paths, and its paths in the runtime's notation."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from support.planner import flat, home, tall

from commlayer.planner import default_plan, lower, verify
from commlayer.planner.buckets import cut_slices
from commlayer.planner.model import Cluster, Node
from commlayer.planner.plan_rules import shard_groups
from commlayer.planner.tree import (
    KINDS,
    Kind,
    Op,
    Path,
    encodes,
    format_path,
    parse,
    path_problems,
    paths_of_kind,
    sums_payloads,
    usable_paths,
    uses_server,
)
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo, over_server

UNEVEN = Cluster((*tall(1, 4).nodes, *tall(1, 2).nodes))


def test_path_counts_equal_those_of_espresso() -> None:
    flat, two_level = paths_of_kind("flat"), paths_of_kind("two-level")
    assert (len(flat), len(two_level)) == (63, 4278)
    assert Counter(map(encodes, flat))[0] == 3
    assert len(set(flat + two_level)) == 4341
    by_encodes = Counter(encodes(path) for path in flat + two_level)
    assert by_encodes == {0: 9, 1: 236, 2: 1152, 3: 1920, 4: 1024}
    first_coded = [path for path in two_level if path[0].name == "encode"]
    assert (len(two_level) - len(first_coded), len(first_coded)) == (734, 3544)
    assert sum(path[0].name != "encode" for path in flat) == 11


def test_gpu_path_counts_equal_those_of_espresso() -> None:
    paths = paths_of_kind("flat", ("gpu",)) + paths_of_kind("two-level", ("gpu",))
    assert Counter(encodes(path) == 0 for path in paths) == {True: 9, False: 165}
    assert len(paths_of_kind("flat", ("gpu",))) == 12


def test_paths_beyond_espresso() -> None:
    service, sums = paths_of_kind("service"), paths_of_kind("sum")
    assert len(service) == 8 + 2 * 2 * 2 * 2
    assert len(sums) == 4 + 2 * 2 * 2
    assert all(uses_server(path) for path in service)
    assert all(sums_payloads(path) for path in sums)
    every = paths_of_kind("flat") + paths_of_kind("two-level") + service + sums
    assert len(set(every)) == len(every) == 4341 + 24 + 12


def test_spelling_is_one_to_one() -> None:
    every = paths_of_kind("flat") + paths_of_kind("two-level") + paths_of_kind("service") + paths_of_kind("sum")
    assert len({format_path(path) for path in every}) == len(every)
    assert all(parse(format_path(path)) == path for path in every)


def test_spelling_marks_server_paths() -> None:
    every = paths_of_kind("flat") + paths_of_kind("two-level") + paths_of_kind("service") + paths_of_kind("sum")
    assert {over_server(format_path(path)) for path in every} == {True, False}
    assert all(over_server(format_path(path)) == uses_server(path) for path in every)
    assert [over_server(name) == uses_server(parse(name)) for name in ("allreduce", "service")] == [True, True]


def texts(paths: tuple[Path, ...]) -> set[str]:
    return {format_path(path) for path in paths}


def test_internet_sites_have_only_server_paths() -> None:
    homes = Cluster(flat(3, home()).nodes, reachable=False)
    assert texts(usable_paths(homes)) == {
        f"encode@{d} net.push net.{back} decode@{d}" for d in ("gpu", "cpu") for back in ("pull", "forward")}
    assert texts(usable_paths(Cluster(flat(3, home(), "cpu").nodes, reachable=False))) == {
        f"encode@cpu net.push net.{back} decode@cpu" for back in ("pull", "forward")}


@pytest.mark.parametrize(("given", "count"), [
    ({}, 3 + 2 * 9 + 4),
    ({"mixed": True}, 63 + 8),
    ({"mixed": True, "sums": True}, 63 + 8 + 4),
    ({"servers": False, "mixed": True, "dense": False}, 60),
    ({"devices": ("gpu",), "servers": False}, 12),
    ({"max_encodes": 0}, 3),
    ({"kinds": ("service",)}, 4),
])
def test_options_among_nodes_of_one_rank(given: dict[str, Any], count: int) -> None:
    assert len(usable_paths(flat(4), **given)) == count


def test_options_among_nodes_of_several_ranks() -> None:
    assert len(usable_paths(tall(2, 4), mixed=True, servers=False)) == 4341
    assert len(usable_paths(tall(2, 4), servers=False)) == 174 + 165
    assert len(usable_paths(tall(2, 4), devices=("gpu",), servers=False)) == 174
    assert all(op.where != "net" or op.name in ("push", "pull", "forward") for p in usable_paths(tall(1, 4)) for op in p)


def test_uneven_nodes_sum_onto_one_rank_before_collectives_between_them() -> None:
    result = usable_paths(UNEVEN)
    assert any(uses_server(p) and p[0].name == "reduce_scatter" for p in result), "a server meets all pieces"
    assert not any(p[0] == Op("reduce_scatter", "node") and not uses_server(p) for p in result)


@pytest.mark.parametrize("name", ["flat", "two-level", "service", "sum"])
def test_tree_obeys_every_rule(name: Kind) -> None:
    assert [format_path(path) for path in paths_of_kind(name) if path_problems(path)] == []


@pytest.mark.parametrize(("text", "rule"), [
    ("encode@cpu all.allreduce", "after 'encode@cpu all.allreduce': got the end, allowed: decode@cpu, decode@gpu"),
    ("decode@cpu", "at the beginning: got decode@cpu, allowed: all.allreduce, "),
    ("encode@cpu net.push decode@cpu", "after 'encode@cpu net.push': got decode@cpu, allowed: net.forward, net.pull"),
    ("all.reduce_scatter", "after 'all.reduce_scatter': got the end, allowed: all.allgather, "),
    ("all.allreduce all.allreduce", "after 'all.allreduce': got all.allreduce, allowed: the end"),
    ("net.allreduce", "at the beginning: got net.allreduce, allowed: all.allreduce, all.reduce, all.reduce_scatter, "),
])
def test_invalid_path_names_the_rule(text: str, rule: str) -> None:
    assert any(line.startswith(rule) for line in path_problems(parse(text))), path_problems(parse(text))


def test_paths_outside_the_tree_are_refused() -> None:
    """Paths with one operation removed, doubled or replaced are in the tree or refused."""
    every = {path for name in KINDS for path in paths_of_kind(name)}
    ops = sorted({op for path in every for op in path})
    sample = random.Random(7).sample(sorted(every), 50)
    for path in sample:
        for place in range(len(path)):
            for changed in (path[:place] + path[place + 1 :], path[: place + 1] + path[place:],
                            path[:place] + (ops[(place * 5 + len(path)) % len(ops)],) + path[place + 1 :]):
                assert (changed in every) == (not path_problems(changed)), format_path(changed)


@pytest.mark.parametrize(("text", "cluster", "rule"), [
    ("allreduce", Cluster(flat(2).nodes, reachable=False), "a collective crosses nodes, but"),
    ("node.reduce net.allreduce node.broadcast", flat(2), "an exchange inside nodes (node.*), but every node has one rank"),
    ("node.reduce net.allreduce node.broadcast", tall(1, 2), "an exchange between nodes (net.*), but the cluster has one node"),
    ("encode@cpu net.push net.pull decode@cpu", tall(2, 2), "every rank would push separately"),
    ("node.reduce_scatter net.allreduce node.allgather", UNEVEN, "nodes have 2, 4 ranks"),
    ("encode@gpu net.push net.pull decode@gpu", flat(2, device="cpu"), "on a GPU, but node n0 has none"),
    ("service", Cluster((Node("n0", 1, "cpu", home(), server=False),)), "a server is needed, but no node can host one"),
])
def test_path_that_a_cluster_cannot_run_is_refused(text: str, cluster: Cluster, rule: str) -> None:
    assert [line for line in path_problems(parse(text), cluster) if rule in line]
    assert parse(text) not in usable_paths(cluster)


JOB = Job((TensorInfo("a", (50, 33)), TensorInfo("b", (7,)), TensorInfo("c", (1,)), TensorInfo("d", (4001,))))


def plan(path: str, ranks_per_node: int, codec: str = "topk(ratio=0.01)") -> Plan:
    result = default_plan(JOB, codec=codec, path="service", servers=1, ranks_per_node=ranks_per_node,
                          fuse_nbytes=1 << 13, cut_nbytes=1 << 13)
    return msgspec.structs.replace(result, buckets=tuple(msgspec.structs.replace(b, path=path) for b in result.buckets))


@pytest.mark.parametrize("path", [p for p in paths_of_kind("service", ("cpu",)) if p[0].where != "node"])
def test_servers_of_single_ranks(path: tuple[object, ...]) -> None:
    lowered = lower(plan(format_path(path), 1))  # type: ignore[arg-type]
    assert {b.path for b in lowered.buckets} == {"service"}
    forwarded = "net.forward" in format_path(path)  # type: ignore[arg-type]
    assert {b.down for b in lowered.buckets} == ({"topk(ratio=1.0, values='int8')"} if forwarded else {""})
    assert verify(lowered, JOB) == []


@pytest.mark.parametrize("path", [format_path(p) for p in paths_of_kind("service", ("gpu",)) if p[0].where == "node"])
def test_servers_of_several_ranks(path: str) -> None:
    before = plan(path, 3)
    lowered = lower(before)
    assert verify(lowered, JOB) == []
    assert {(b.path, b.coder) for b in lowered.buckets} == {("service", "gpu")}
    scattered = path.startswith("node.reduce_scatter")
    numel = sum(b.numel for b in before.buckets)
    assert sum(b.numel for b in lowered.buckets) == numel
    loads = [sum(b.numel for b in lowered.buckets if b.owner == rank) for rank in range(3)]
    if scattered:
        assert max(loads) - min(loads) <= len(before.buckets)
    else:
        assert len(lowered.buckets) == len(before.buckets)


def test_bucket_is_encoded_at_one_place() -> None:
    with pytest.raises(ValueError, match="bucket 0: path 'encode@gpu .*E-PLAN-PATH"):
        lower(Plan("", (Bucket(0, (), "encode@gpu net.push net.pull decode@cpu"),)))


Shard = tuple[int, int, int, int]
"""Owner, tensor, start, stop."""


def buckets(*shards: Shard) -> list[Bucket]:
    return [Bucket(i, (Slice(tensor, start, stop),), "service", owner=owner)
            for i, (owner, tensor, start, stop) in enumerate(shards)]


@pytest.mark.parametrize(("shards", "runs"), [
    ([(0, 0, 0, 5), (1, 0, 5, 10)], [(0, 1)]),
    ([(0, 0, 0, 5), (1, 0, 5, 11), (0, 0, 11, 16), (1, 0, 16, 21)], [(0, 1), (2, 3)]),
    ([(1, 0, 0, 5), (0, 0, 5, 10), (1, 0, 10, 15)], [(0,), (1, 2)]),
    ([(0, 0, 0, 5), (1, 1, 0, 5)], [(0,), (1,)]),
    ([(0, 0, 0, 5), (1, 0, 6, 11)], [(0,), (1,)]),
    ([(0, 0, 0, 5), (1, 0, 5, 12)], [(0,), (1,)]),
    ([(0, 0, 0, 5)], [(0,)]),
], ids=["two halves", "twice", "owners one after the other, from 0", "two tensors", "a gap", "unlike sizes", "one alone"])
def test_shards_are_contiguous(shards: list[Shard], runs: list[tuple[int, ...]]) -> None:
    assert [tuple(run) for run in shard_groups(buckets(*shards), 2)] == runs


def test_buckets_of_single_rank_nodes_are_not_fused() -> None:
    assert [*map(len, shard_groups(buckets((0, 0, 0, 5), (0, 0, 5, 10)), 1))] == [1, 1]


def test_fused_bucket_is_cut_into_runs_of_equal_size() -> None:
    parts = cut_slices((Slice(3, 0, 4), Slice(2, 10, 17)), (3, 7))
    assert parts == [(Slice(3, 0, 3),), (Slice(3, 3, 4), Slice(2, 10, 13)), (Slice(2, 13, 17),)]
    results = [Bucket(i, part, "service", owner=i) for i, part in enumerate(parts)]
    assert [*map(len, shard_groups(results, 3))] == [3]
