"""The sync mode is a part of the plan: arguments of attach() change it, and a plan with a sync mode runs with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs
from support import rank_pool
from support.arguments import sync_of
from support.attached import assert_refused, data, mlp, outcome
from support.rank_pool import Servers, pool

import commlayer
from commlayer import plan_file, records
from commlayer.engine.optimizers import job_of
from commlayer.engine.sync_modes import LocalSteps, modes_of, requested_modes, with_modes
from commlayer.planner import default_plan, diff, verify_alone
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo

_ranks = rank_pool.ranks_first(2)
JOB = Job((TensorInfo("a", (64,)), TensorInfo("b", (64,))))


def plan(*, stale: bool = False, **fields: Any) -> Plan:
    buckets = tuple(Bucket(n, (Slice(n, 0, 64),), "service", stale=stale) for n in range(2))
    return Plan(JOB.digest(), buckets, servers=1, step_s=0.5, **fields)


@pytest.mark.parametrize(("planned", "requested", "wanted"), [
    ({}, {}, {}),
    ({}, {"every": 4, "overlap": "round", "fragments": 2}, {"local_steps": 4, "overlap": "round", "fragments": 2}),
    ({}, {"codes": "updates"}, {"codes": "updates"}),
    ({}, {"overlap": "forward"}, {"overlap": "forward"}),
    ({"local_steps": 4}, {"every": 4, "overlap": "round"}, {"local_steps": 4, "overlap": "round"}),
    ({"overlap": "forward"}, {"overlap": "forward"}, {"overlap": "forward"}),
    ({}, {"every": 4, "fragments": 4}, {"local_steps": 4, "fragments": 2}),
])
def test_arguments_are_laid_into_the_plan(planned: dict[str, Any], requested: dict[str, Any], wanted: dict[str, Any]) -> None:
    laid = with_modes(plan(**planned), requested_modes(sync_of(**requested)))
    as_planned = structs.replace(laid, step_s=0.5) == plan(**planned)
    assert laid == structs.replace(plan(**wanted), step_s=0.5 if as_planned else 0.0)
    assert verify_alone(laid) == []


@pytest.mark.parametrize(("planned", "requested", "lines"), [
    ({"local_steps": 8}, LocalSteps(4), r"every=4\b.* 8 local.*E-SYNC-PLAN"),
    ({"codes": "updates"}, "step", "sync='step'.* weight changes.*E-SYNC-PLAN"),
    ({"codes": "updates"}, "forward", "sync='forward'.* weight changes.*E-SYNC-PLAN"),
    ({"local_steps": 8}, "step", "sync='step'.* 8 local.*E-SYNC-PLAN"),
    ({"stale": True}, "step", "sync='step'.* late.*E-SYNC-PLAN"),
    ({"overlap": "forward"}, LocalSteps(4), "LocalSteps.*overlap='forward'.*E-SYNC-PLAN"),
    ({"local_steps": 4, "overlap": "round"}, LocalSteps(4, overlap=False), "overlap=False.*overlap='round'.*E-SYNC-PLAN"),
    ({"local_steps": 4, "fragments": 2}, LocalSteps(4, False, 1), r"fragments=1\b.* 2 fragments.*E-SYNC-PLAN"),
    ({"stale": True}, LocalSteps(1), "late.* weight changes.*E-SYNC-MODE"),
])
def test_arguments_that_contradict_the_plan_are_one_line(planned: dict[str, Any], requested: Any, lines: str) -> None:
    with pytest.raises(ValueError, match=lines) as caught:
        with_modes(plan(**planned), requested_modes(requested))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("fields", "lines"), [
    ({"overlap": "round"}, "allowed: local_steps of 2 or more"),
    ({"overlap": "forward", "local_steps": 4}, "has 4 local steps, and overlap='forward'"),
    ({"overlap": "forward", "codes": "updates"}, "has coded updates, and overlap='forward'"),
    ({"overlap": "forward", "stale": True}, "has results that are a step late, and overlap='forward'"),
    ({"codes": "updates", "stale": True}, "of coded updates, which ranks step on, and results that are a step late"),
    ({"local_steps": 4, "fragments": 3}, "of 4 local steps, and fragments=3"),
    ({"fragments": 0}, "fragments is 0, allowed: at least 1"),
])
def test_ways_that_exclude_each_other_are_told(fields: dict[str, Any], lines: str) -> None:
    (line,) = verify_alone(plan(**fields))
    assert lines in line


def test_a_plan_names_its_ways() -> None:
    assert [mode for mode, _ in modes_of(plan(local_steps=4, overlap="round"))] == ["local", "round"]
    assert [mode for mode, _ in modes_of(plan(codes="updates"))] == ["updates"]
    assert [mode for mode, _ in modes_of(plan(overlap="forward"))] == ["forward"]
    assert modes_of(plan()) == []


def test_plan_files_from_before_still_load_and_new_ones_keep_the_fields(tmp_path: Path) -> None:
    old = msgspec.json.decode(records.encode(plan(local_steps=4)))
    for name in ("codes", "overlap", "fragments"):
        del old[name]
    (tmp_path / "old.json").write_bytes(msgspec.json.encode(old))
    assert plan_file.plan_in(tmp_path / "old.json") == plan(local_steps=4)
    new = plan(local_steps=4, overlap="round", fragments=2)
    (tmp_path / "new.json").write_bytes(records.encode(new))
    assert plan_file.plan_in(tmp_path / "new.json") == new
    assert [name for name, *_ in diff(plan(local_steps=4), new).fields] == ["overlap", "fragments"]
    (tmp_path / "bad.json").write_bytes(records.encode(structs.replace(new, overlap="always")))  # type: ignore[arg-type]
    assert_refused(outcome(lambda: plan_file.plan_in(tmp_path / "bad.json")), "E-PLAN-FILE", "bad.json", "overlap")


WAYS: dict[str, dict[str, Any]] = {
    "round": {"every": 4, "overlap": "round", "fragments": 2}, "updates": {"codes": "updates"},
    "forward": {"overlap": "forward"},
}


def follow(rank: int, address: str, planned: Plan, how: dict[str, Any]) -> dict[str, Any]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = commlayer.attach(model, optimizer, plan=planned, config=rank_pool.quick(join=address),
                               sync=sync_of(**how))
    for step in range(9):
        optimizer.zero_grad()
        x, y = data(rank, step)
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    session.flush()
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    results = {"plan": session.inspect.plan, "weights": weights, "stats": session.metrics()}
    session.close()
    return results


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_runs_as_the_arguments_would(way: str) -> None:
    layout = default_plan(job_of(mlp()), codec="int8(block=32)", path="service", servers=1, ranks_per_node=1, fuse_nbytes=2048,
                        cut_nbytes=4096)
    report = WAYS[way]
    laid = with_modes(layout, requested_modes(sync_of(**report)))
    runs = []
    for planned, how in ((layout, report), (laid, {})):
        with Servers(2, 1) as servers:
            runs.append(pool(2).call(follow, servers.address, planned, how))
    lines, by_plan = runs
    assert lines[0]["plan"] == by_plan[0]["plan"] == laid
    for key in ("steps", "sent_nbytes"):
        assert lines[0]["stats"][key] == by_plan[0]["stats"][key]
    assert all(torch.equal(r["weights"], lines[0]["weights"]) for r in (*lines, *by_plan))
