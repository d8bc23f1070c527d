"""lint reports all errors of a plan that was edited by hand at once, by bucket and rule."""

from __future__ import annotations

import pytest
from msgspec import structs
from support.plans import cluster, toy_job

from commlayer.compressors.plan_codecs import parse
from commlayer.planner import tables
from commlayer.planner.plan_lint import lint
from commlayer.planner.search import plan
from commlayer.records import Plan, TensorInfo

HOMES = cluster(3, "home-100/20", reachable=False)
PLAN = plan(toy_job(), HOMES)


def edited(bucket: int, **fields: object) -> Plan:
    buckets = list(PLAN.buckets)
    buckets[bucket] = structs.replace(buckets[bucket], **fields)
    return structs.replace(PLAN, buckets=tuple(buckets))


def spelled(codec: str) -> str:
    try:
        parse(codec)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "encode@tpu net.push net.pull decode@cpu"}, "'encode@tpu' is on no device"),
        ({"path": "encode@cpu net.push decode@cpu"}, "after 'encode@cpu net.push': got decode@cpu, allowed: net.forward"),
        ({"path": "encode@cpu net.push net.pull"}, "after 'encode@cpu net.push net.pull': got the end, allowed: decode@cpu"),
        ({"path": "allreduce"}, "a collective crosses nodes, which cannot reach each other here"),
        ({"path": "node.reduce encode@cpu net.push net.pull decode@cpu node.broadcast"}, "every node has one rank"),
        ({"codec": "topkk(ratio=0.01)"}, "'topkk' is unknown"),
        ({"codec": "topk(ratio=0.5)"}, "has no cost in profile 'tables'"),
        ({"down": "nothing"}, "'nothing' is unknown"),
        ({"by_node": ("fp16()",)}, "by_node has 1 codecs for 3 nodes with ranks"),
        ({"by_node": ("fp16()", "int8()", "fp16()")}, "by_node mixes fp16, int8"),
        ({"server": 17}, "server 17, the plan has"),
    ],
)
def test_a_broken_bucket_is_named_with_the_rule(fields: dict[str, object], message: str) -> None:
    problems = lint(edited(1, **fields), toy_job(), HOMES, tables.profile_from_tables(HOMES), spelled)
    assert any(line.startswith("bucket 1: ") and message in line for line in problems), problems
    assert all(line.startswith("bucket 1: ") for line in problems), "and nothing else is blamed"


def test_a_sound_plan_has_no_problems() -> None:
    assert lint(PLAN, toy_job(), HOMES, tables.profile_from_tables(HOMES), spelled) == []
    assert lint(PLAN) == []


def test_buffers_go_as_they_are() -> None:
    job = toy_job(2)
    job = structs.replace(job, tensors=(job.tensors[0], TensorInfo("running", (500_000,), buffer=True)))
    result = plan(job, HOMES)
    assert lint(result, job, HOMES) == []
    last = structs.replace(result.buckets[-1], codec="fp16()", stale=True)
    problems = lint(structs.replace(result, buckets=(*result.buckets[:-1], last)), job)
    assert [line.partition(": ")[2] for line in problems] == [
        "holds buffers, which are averaged as they are: codec 'identity()', not 'fp16()'",
        "holds buffers, which are never a step late",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema": 1}, "plan has schema 1, this commlayer reads"),
        ({"job": "0" * 16}, "this plan was made for another model"),
        ({"hosts": (0,)}, "hosts names 1 nodes for 3 servers"),
        ({"hosts": (0, 1, 9)}, "hosts: node 9, the cluster has 3"),
        ({"ranks_per_node": 2}, "ranks_per_node is 2, the cluster's nodes have 1"),
    ],
)
def test_what_is_wrong_with_the_whole_plan(fields: dict[str, object], message: str) -> None:
    problems = lint(structs.replace(PLAN, **fields), toy_job(), HOMES)
    assert any(message in line for line in problems), problems
