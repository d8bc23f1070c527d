"""The life of a plan file: created by the command, edited by hand, checked, attached by 2 nodes x 2 ranks, traced, compared."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.attached import data, mlp, plan_of, train_step, weights
from support.jobs import distributed_job
from support.rank_pool import Servers, pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer import records
from commlayer.engine.model.model_tensors import describe_model
from commlayer.planner import default_plan, lower
from commlayer.planner.shards import Shards
from commlayer.records import Bucket, Job, Plan, Slice, Timing

WORLD, PER_NODE, STEPS = 4, 2, 6
TWO_LEVEL = "node.reduce_scatter encode@cpu net.alltoall decode@cpu encode@cpu net.allgather decode@cpu node.allgather"
PATHS = (
    "service", "allreduce", "node.reduce_scatter net.allreduce node.allgather", TWO_LEVEL,
    "encode@cpu all.allgather decode@cpu",
    "node.reduce_scatter encode@cpu net.push net.forward decode@cpu node.allgather",
    "node.reduce encode@cpu net.push net.pull decode@cpu node.broadcast",
)
DENSE = {PATHS[1], PATHS[2]}
"""They code nothing."""


@pytest.fixture(name="call")
def command_called(commlayer: Callable[..., Any]) -> Callable[..., Any]:
    return commlayer


def make(call: Callable[..., Any], nodes: str = "2x2*cpu@10g") -> Plan:
    """As a user makes it, from a job file of the model that is trained here."""
    job = describe_model(mlp())
    times = tuple(1e-3 * (i + 1) for i in range(len(job.tensors)))
    timing = Timing(times[::-1], times, times[-1], times[-1], device="cpu")
    Path("job.json").write_bytes(records.encode(Job(job.tensors, 6, timing, "mlp")))
    code, _, errors = call("plan", "create", "job.json", "--nodes", nodes, "--out", "plan.json")
    assert (code, errors) == (0, "")
    return records.decode(Path("plan.json").read_bytes(), Plan, "plan")


def edited(plan: Plan, codec: str = "identity()", paths: tuple[str, ...] = PATHS) -> Plan:
    """The same model's buckets on one path of each class; the second tensor of weights is cut in two."""
    sizes = [info.numel for info in describe_model(mlp()).tensors]
    parts = [Slice(i, 0, n) for i, n in enumerate(sizes)]
    parts[2:3] = [Slice(2, 0, 1000), Slice(2, 1000, sizes[2])]
    buckets = tuple(
        Bucket(i, (part,), path, codec="identity()" if path in DENSE else codec)
        for i, (part, path) in enumerate(zip(reversed(parts), paths, strict=True))
    )
    return msgspec.structs.replace(plan, buckets=buckets, servers=1, hosts=(0,))


def save(plan: Plan, name: str = "plan.json") -> str:
    Path(name).write_bytes(records.encode(plan))
    return str(Path(name).resolve())


def train(rank: int, parts: list[int], plan: str, config: dict[str, Any] | None, *, traced: str = "") -> dict[str, Any]:
    """The mean over those parts of the batch; attached if a plan is given."""
    logging.getLogger("commlayer").setLevel(logging.INFO)
    model: Any = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = commlayer.attach(model, optimizer, plan=plan, config=config) if plan else None
    try:
        if session is not None and traced:
            session.inspect.trace(traced, steps=2)
        for step in range(STEPS):
            optimizer.zero_grad()
            pairs = [data(part, step) for part in parts]
            torch.stack([nn.functional.mse_loss(model(x), y) for x, y in pairs]).mean().backward()
            optimizer.step()
        report: dict[str, Any] = {"weights": weights(model)}
        if session is not None:
            assert distributed_job(session).uplink is not None
            report |= {"servers": [s.node for s in distributed_job(session).uplink.epoch.servers],
                       "decisions": session.inspect.decisions(), "children": len(distributed_job(session).embedded)}
        return report
    finally:
        if session is not None:
            session.close()


def ranked(rank: int, plan: str, config: dict[str, Any], traced: str = "") -> dict[str, Any]:
    return train(rank, [rank], plan, config, traced=traced)


def settings(**fields: Any) -> dict[str, Any]:
    return quick(ranks_per_node=PER_NODE, **fields)


def test_plan_of_many_path_classes_trains_like_a_single_process_and_is_traced(call: Callable[..., Any]) -> None:
    plan = save(edited(make(call)))
    assert call("plan", "lint", "plan.json") == (0, "plan.json: nothing wrong\n", "")
    first, second = str(Path("first.json").resolve()), str(Path("second.json").resolve())
    ranks = pool(WORLD)
    ranks.ready(__name__)
    with Servers(WORLD) as servers:
        results = ranks.call(ranked, plan, settings(join=servers.address, trace=first), second)
    alone = train(0, [*range(WORLD)], "", None)
    for result in results:
        torch.testing.assert_close(result["weights"], alone["weights"])
        assert all(torch.equal(w, results[0]["weights"][name]) for name, w in result["weights"].items())
    assert [r["decisions"] for r in results] == [[]] * WORLD
    # one by session.inspect.trace() before the first step, which has no recorded begin; one by the setting, when steps are warm
    for file, begins in ((second, 1), (first, 2)):
        code, _, errors = call("trace", file, "--json", "told.json")
        assert (code, errors) == (0, "")
        report = json.loads(Path("told.json").read_text())
        assert (report["ranks"], report["nodes"], report["first_step"], report["note"]) == (WORLD, 2, begins, "")
        # the file's, not that of what it is lowered to
        assert report["plan"] == records.digest(records.decode(Path(plan).read_bytes(), Plan, "plan"))
        ops = {row["op"]: row for row in report["rows"]}
        assert {"forward", "backward", "node.reduce", "encode@cpu", "exchange", "decode@cpu", "node.broadcast", "all.allreduce",
                "node.reduce_scatter", "net.allreduce", "net.alltoall", "net.allgather", "all.allgather", "node.allgather",
                "step"} == set(ops)
        assert all(row["predicted_s"] > 0 and row["measured_s"] > 0 for row in ops.values())
        assert ops["exchange"]["buckets"] == 3
        assert ops["encode@cpu"]["buckets"] == 5
        assert all(row["worst"] is None or 0 <= row["worst"] < len(PATHS) for row in ops.values())
    tracks = [e["args"]["name"] for e in json.loads(Path(second).read_text())["traceEvents"] if e["name"] == "process_name"]
    assert tracks == [
        "predicted, node 0", "measured, rank 0 on node 0", "measured, rank 1 on node 0",
        "predicted, node 1", "measured, rank 2 on node 1", "measured, rank 3 on node 1", "predicted, lanes",
    ]
    code, out, _ = call("trace", "second.json")
    assert code == 0
    assert "net.alltoall" in out
    assert max(map(len, out.splitlines())) <= 120


def test_servers_start_on_planned_nodes_and_no_inputs_means_no_prediction(call: Callable[..., Any]) -> None:
    plan = make(call)
    call("plan", "create", "lstm", "--nodes", "2x2*cpu@10g", "--out", "lstm.json")
    Path("lstm.inputs.json").replace("plan.inputs.json")
    served = edited(plan, paths=("service",) * len(PATHS))
    buckets = tuple(msgspec.structs.replace(b, server=b.id % 2) for b in served.buckets)
    file = save(msgspec.structs.replace(served, buckets=buckets, servers=2, hosts=(1, 0)))
    trace = str(Path("trace.json").resolve())
    results = pool(WORLD).call(ranked, file, settings(), trace)
    assert [r["servers"] for r in results] == [[1, 0]] * WORLD
    # The coordinator goes ahead, then a server starts on each node.
    assert [r["children"] for r in results] == [2, 0, 1, 0]
    (line,) = results[0]["decisions"]
    assert re.fullmatch(r"step 0: the plan has no predictions, .*plan.inputs.json .*plan.json.* \[E-PLAN-FILE\]", line)
    code, out, _ = call("trace", trace)
    assert code == 0
    assert "no prediction: the inputs of the plan are not known" in out
    assert call("trace", trace, "--json", "told.json")[0] == 0
    assert {row["predicted_s"] for row in json.loads(Path("told.json").read_text())["rows"]} == {None}


def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def under_ddp(rank: int, plan: str, address: str) -> dict[str, Any]:
    model = DistributedDataParallel(normed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.attach(model, optimizer, plan=plan, config=quick(join=address)) as session:
        for step in range(3):
            train_step(model, optimizer, rank, step)
        assert session.inspect.plan is not None
        return {"weights": weights(model), "slices": [len(b.slices) for b in session.inspect.plan.buckets]}


def test_ddp_runs_the_plan_of_the_wrapped_module(call: Callable[..., Any]) -> None:
    job = describe_model(normed())
    assert sum(info.buffer for info in job.tensors) == 2
    plan = default_plan(job, codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=200, cut_nbytes=4096)
    file = save(plan)
    ranks = pool(2)
    ranks.ready(__name__)
    with Servers(2) as servers:
        results = ranks.call(under_ddp, file, servers.address)
    first, second = (r["weights"] for r in results)
    assert all(torch.equal(w, second[name]) for name, w in first.items())
    assert results[0]["slices"] == [len(b.slices) for b in plan.buckets]


def refused(rank: int, cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The error of attach() for each."""
    lines = []
    for plan, config in cases:
        try:
            commlayer.attach(mlp(), plan=plan, config=config).close()
        except ValueError as error:
            lines.append(str(error))
        else:
            lines.append("attached")
    return lines


def test_unrunnable_plan_is_refused_by_every_rank_and_reported_by_lint(call: Callable[..., Any]) -> None:
    plan = edited(make(call))
    job = records.decode(Path("job.json").read_bytes(), Job, "job")
    other = msgspec.structs.replace(plan, job=Job(job.tensors[:-1]).digest())
    old = msgspec.structs.replace(plan, schema=1)
    broken = [msgspec.structs.replace(plan.buckets[0], path="net.pull decode@cpu"),
              msgspec.structs.replace(plan.buckets[1], codec="topk(ratio=2)", path="service"),
              msgspec.structs.replace(plan.buckets[2], slices=(Slice(3, 0, 39),))]
    bad = msgspec.structs.replace(plan, buckets=(*broken, *plan.buckets[3:]))
    typo = Path("typo.json")
    typo.write_text(records.encode(plan).decode().replace('"servers"', '"server"'))
    cases = [
        (save(other, "other.json"), settings(), r"plan: .*[0-9a-f]{16}.*[0-9a-f]{16}.*\[E-PLAN-REFUSED\]"),
        (save(old, "old.json"), settings(), r"plan: .*schema 1, .* 4\b.*\[E-PLAN-REFUSED\]"),
        (save(bad, "bad.json"), settings(),
         r"plan: bucket 0: path 'net.pull decode@cpu': .* \(and \d+ more\) \[E-PLAN-(REFUSED|PATH)\]"),
        (save(plan, "nodes.json"), quick(ranks_per_node=1),
         r"plan: .* 2 ranks per node, .* 1: .*\[E-PLAN-REFUSED\]"),
        (str(typo.resolve()), settings(), r"(rank 0: )?plan .*typo.json: .*`server`.*\[E-PLAN-FILE\]"),
        (str(Path("absent.json").resolve()), settings(), r"(rank 0: )?plan .*absent.json: .*\[E-PLAN-FILE\]"),
    ]
    results = pool(WORLD).call(refused, [(file, config) for file, config, _ in cases])
    for text in results:
        assert len(text) == len(cases)
        for line, (_, _, expected) in zip(text, cases, strict=True):
            assert "\n" not in line
            assert re.fullmatch(expected, line), line
    Path("bad.inputs.json").write_bytes(Path("plan.inputs.json").read_bytes())
    code, out, errors = call("plan", "lint", "bad.json")
    assert (code, errors) == (2, "")
    lines = out.splitlines()
    for start in ("bucket 0: path 'net.pull", "bucket 1: topk: ratio is 2", "2.bias: elements 39..40 are in no bucket"):
        assert any(line.startswith(start) for line in lines), lines
    for name in ("old", "typo", "absent"):
        code, _, errors = call("plan", "explain", "0", "--plan", f"{name}.json")
        assert (code, errors.count("\n")) == (2, 1), errors


def test_running_plan_maps_each_bucket_to_its_origin() -> None:
    from commlayer.engine.observers.predicted_trace import origins

    job = describe_model(mlp())
    plan = edited(Plan("", (), ranks_per_node=PER_NODE))
    shards = Shards(PER_NODE, 0, frozenset(range(len(job.tensors))))
    for source, running in ((plan, lower(plan)), (other := plan_of(mlp()), shards.cut(other, job))):
        assert len(running.buckets) > len(source.buckets)
        for bucket, old in zip(running.buckets, origins(source, running), strict=True):
            whole = {of.tensor: of for of in source.buckets[old].slices}
            assert all(whole[s.tensor].start <= s.start < s.stop <= whole[s.tensor].stop for s in bucket.slices)
