"""Lowering: every path of the tree in the runtime's terms, summing the same elements once."""

from __future__ import annotations

import msgspec
import pytest

from commlayer.planner import default_plan, lower, verify
from commlayer.planner.tree import kind, spell
from commlayer.records import Bucket, Job, Plan, TensorInfo

JOB = Job((TensorInfo("a", (50, 33)), TensorInfo("b", (7,)), TensorInfo("c", (1,)), TensorInfo("d", (4001,))))


def plan(path: str, ranks_per_node: int, codec: str = "topk(ratio=0.01)") -> Plan:
    result = default_plan(JOB, codec=codec, path="service", servers=1, ranks_per_node=ranks_per_node,
                        fuse_nbytes=1 << 13, cut_nbytes=1 << 13)
    return msgspec.structs.replace(result, buckets=tuple(msgspec.structs.replace(b, path=path) for b in result.buckets))


@pytest.mark.parametrize("path", [p for p in kind("service", ("cpu",)) if p[0].where != "node"])
def test_servers_of_single_ranks(path: tuple[object, ...]) -> None:
    lowered = lower(plan(spell(path), 1))  # type: ignore[arg-type]
    assert {b.path for b in lowered.buckets} == {"service"}
    forwarded = "net.forward" in spell(path)  # type: ignore[arg-type]
    assert {b.down for b in lowered.buckets} == ({"topk(ratio=1.0, values='int8')"} if forwarded else {""})
    assert verify(lowered, JOB) == []


@pytest.mark.parametrize("path", [spell(p) for p in kind("service", ("gpu",)) if p[0].where == "node"])
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


def test_one_place_to_code() -> None:
    with pytest.raises(ValueError, match="bucket 0: path 'encode@gpu .*E-PLAN-PATH"):
        lower(Plan("", (Bucket(0, (), "encode@gpu net.push net.pull decode@cpu"),)))
