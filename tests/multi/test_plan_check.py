"""Plans that no rank here could run are refused before anything starts, in one line that names the bucket."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.attached import mlp
from support.rank_pool import pool, quick

import commlayer
from commlayer.engine.optimizers import job_of
from commlayer.engine.plan_choice import unsuited
from commlayer.planner import verify, verify_alone
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo

JOB = Job((TensorInfo("a", (64,)),))
GATHERED, REDUCED = "encode@cpu all.allgather decode@cpu", "encode@cpu all.allreduce decode@cpu"
SERVED = "node.reduce encode@cpu net.push net.pull decode@cpu node.broadcast"


def plan(**fields: Any) -> Plan:
    bucket = Bucket(0, (Slice(0, 0, 64),), **{"path": "service"} | fields)
    return Plan(JOB.digest(), (bucket,), servers=1, ranks_per_node=2)


@pytest.mark.parametrize(("fields", "lines"), [
    ({"path": "allreduce", "codec": "topq()"}, "'topq' is unknown"),
    ({"codec": "topk(ratio=0.1)", "down": "topq()"}, "'topq' is unknown"),
    ({"codec": "powersgd(shapes=((3, 3),))"}, "shapes have 9 elements together, but the bucket has 64"),
    ({"by_node": ("int8()",)}, "codecs for 1 nodes, but this job has 2"),
    ({"path": GATHERED, "codec": "randomk()"}, "every rank adds payloads to a dense sum, allowed are codecs of one round"),
    ({"path": GATHERED, "codec": "powersgd()"}, "every rank adds payloads to a dense sum"),
    ({"path": REDUCED, "codec": "topk(ratio=0.1)"}, "an all-reduce, allowed are codecs whose payloads add up"),
    ({"path": REDUCED, "codec": "bf16()"}, "payloads go through an all-reduce"),
    ({"path": GATHERED, "codec": "int8()", "down": "identity()"}, "`down` and `by_node` are for path 'service'"),
    ({"path": GATHERED, "codec": "int8()", "by_node": ("int8()", "int8()")}, "`down` and `by_node` are for path 'service'"),
    ({"path": SERVED}, "must be written as 'service'"),
])
def test_what_cannot_run_is_told(fields: dict[str, Any], lines: str) -> None:
    (line,) = unsuited(plan(**fields), 2, 2)
    assert line.startswith("bucket 0: ")
    assert lines in line
    assert "\n" not in line


@pytest.mark.parametrize("fields", [
    {}, {"codec": "powersgd()"}, {"path": "allreduce"}, {"path": GATHERED, "codec": "int8()"},
    {"path": "all.reduce_scatter all.allgather"},
    {"codec": "topk(ratio=0.5)", "by_node": ("topk(ratio=0.5)", "topk(ratio=0.1)"), "down": "int8()"},
])
def test_what_runs_is_let_through(fields: dict[str, Any]) -> None:
    assert unsuited(plan(**fields), 2, 2) == verify(plan(**fields), JOB) == []


def test_layouts_and_devices() -> None:
    staged = plan(path=GATHERED, codec="int8()")
    assert unsuited(staged, 4, 1) == [
        "the plan was made for 2 ranks per node, but this job has 1: make it again, or set ranks_per_node"]
    assert unsuited(plan(path="allreduce"), 4, 1) == []
    assert unsuited(staged, 2, 2, cuda=True) == []
    assert "added up in host memory alone" in unsuited(plan(path=REDUCED, codec="randomk()"), 2, 2, cuda=True)[0]
    assert unsuited(plan(), 2, 2, cuda=True) == []


@pytest.mark.parametrize(("fields", "lines"), [
    ({"path": "encode@cpu all.allgather"}, "after 'encode@cpu all.allgather': got the end, allowed: decode@cpu"),
    ({"path": "all.allgather"}, "at the beginning: got all.allgather, allowed: "),
    ({"path": "all.allreduce all.allreduce"}, "got all.allreduce, allowed: the end"),
    ({"path": GATHERED, "owner": 2}, "owner 2, the plan has 2 ranks per node"),
])
def test_verify_knows_the_tree(fields: dict[str, Any], lines: str) -> None:
    for problems in (verify(plan(**fields), JOB), verify_alone(plan(**fields))):
        assert len(problems) == 1
        assert lines in problems[0]


def begin(rank: int) -> str:
    model = mlp()
    bad = commlayer.planner.default_plan(job_of(model), codec="randomk()", path="service", servers=1, ranks_per_node=1,
                                         fuse_nbytes=2048, cut_nbytes=4096)
    bad = msgspec.structs.replace(bad, servers=0, buckets=tuple(msgspec.structs.replace(b, path=GATHERED) for b in bad.buckets))
    with pytest.raises(ValueError, match=r"^plan: bucket 0: codec randomk\(.*\(and \d+ more\) \[E-PLAN-REFUSED\]$") as raised:
        commlayer.attach(model, plan=bad, config=quick())
    return str(raised.value)


def test_all_ranks_are_told_at_the_start() -> None:
    first, second = pool(2).call(begin)
    assert first == second
