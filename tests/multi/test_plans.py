"""Plans given to a job: their sync mode and arguments of attach(), plans that cannot run, and predictions that are missed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs
from support import rank_pool
from support.attached import assert_refused, mlp, outcome, plan_of, sync_of, train_step
from support.jobs import FakeJob
from support.rank_pool import Servers, pool, quick

import commlayer
from commlayer import plan_file, records
from commlayer.engine.job.plan_checks import node_problems
from commlayer.engine.observers import stale_plan
from commlayer.engine.start.plan_choice import with_server_nodes
from commlayer.engine.sync.sync_modes import LocalSteps, requested_modes, used_sync_modes, with_modes
from commlayer.observe.prediction_check import PATIENCE, StalePlan
from commlayer.planner import builtin, diff, verify, verify_alone
from commlayer.planner.inputs import checked_inputs, cluster_from_line
from commlayer.planner.model import Basis, Policy
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo

_ranks = rank_pool.ranks_first(2)
JOB = Job((TensorInfo("a", (64,)), TensorInfo("b", (64,))))


def plan(*, stale: bool = False, **fields: Any) -> Plan:
    buckets = tuple(Bucket(n, (Slice(n, 0, 64),), "service", stale=stale) for n in range(2))
    return Plan(JOB.digest(), buckets, servers=1, step_s=0.5, **fields)


@pytest.mark.parametrize(("planned", "requested", "wanted"), [
    ({}, {}, {}), ({"local_steps": 4}, {}, {"local_steps": 4}),
    ({}, {"every": 4, "overlap": "round", "fragments": 2}, {"local_steps": 4, "overlap": "round", "fragments": 2}),
    ({}, {"codes": "updates"}, {"codes": "updates"}),
    ({}, {"overlap": "forward"}, {"overlap": "forward"}),
    ({"local_steps": 4}, {"every": 4, "overlap": "round"}, {"local_steps": 4, "overlap": "round"}),
    ({"overlap": "forward"}, {"overlap": "forward"}, {"overlap": "forward"}),
    ({}, {"every": 4, "fragments": 4}, {"local_steps": 4, "fragments": 2}),
])
def test_arguments_are_merged_into_the_plan(planned: dict[str, Any], requested: dict[str, Any], wanted: dict[str, Any]) -> None:
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
    ({"overlap": "forward", "local_steps": 4}, "has 4 local steps, which excludes overlap='forward'"),
    ({"overlap": "forward", "codes": "updates"}, "has compressed updates, which excludes overlap='forward'"),
    ({"overlap": "forward", "stale": True}, "has stale buckets (applied one step late), which excludes overlap='forward'"),
    ({"codes": "updates", "stale": True}, "has compressed updates, which excludes stale buckets"),
    ({"local_steps": 4, "fragments": 3}, "local_steps is 4, and fragments=3"),
    ({"fragments": 0}, "fragments is 0, allowed: at least 1"),
])
def test_exclusive_sync_modes_are_refused(fields: dict[str, Any], lines: str) -> None:
    (line,) = verify_alone(plan(**fields))
    assert lines in line


def test_plan_names_its_sync_mode() -> None:
    assert [mode for mode, _ in used_sync_modes(plan(local_steps=4, overlap="round"))] == ["local", "round"]
    assert [mode for mode, _ in used_sync_modes(plan(codes="updates"))] == ["updates"]
    assert [mode for mode, _ in used_sync_modes(plan(overlap="forward"))] == ["forward"]
    assert used_sync_modes(plan()) == []


def test_old_plan_files_load_and_new_ones_keep_all_fields(tmp_path: Path) -> None:
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
        train_step(model, optimizer, rank, step)
    session.flush()
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    results = {"plan": session.inspect.plan, "weights": weights, "stats": session.metrics()}
    session.close()
    return results


@pytest.mark.parametrize("way", WAYS)
def test_plan_runs_like_the_equivalent_arguments(way: str) -> None:
    layout = plan_of(mlp(), "int8(block=32)")
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


ONE_TENSOR = Job((TensorInfo("a", (64,)),))
GATHERED, REDUCED = "encode@cpu all.allgather decode@cpu", "encode@cpu all.allreduce decode@cpu"
SERVED = "node.reduce encode@cpu net.push net.pull decode@cpu node.broadcast"


def of_one_bucket(**fields: Any) -> Plan:
    bucket = Bucket(0, (Slice(0, 0, 64),), **{"path": "service"} | fields)
    return Plan(ONE_TENSOR.digest(), (bucket,), servers=1, ranks_per_node=2)


@pytest.mark.parametrize(("fields", "lines"), [
    ({"codec": "topk(ratio=0.1)", "down": "topq()"}, "'topq' is unknown"),
    ({"codec": "powersgd(shapes=((3, 3),))"}, "shapes have 9 elements together, but the bucket has 64"),
    ({"by_node": ("int8()",)}, "codecs for 1 nodes, but this job has 2"),
    ({"path": GATHERED, "codec": "powersgd()"}, "every rank adds payloads to a dense sum: codecs must need one exchange"),
    ({"path": REDUCED, "codec": "topk(ratio=0.1)"}, "an all-reduce adds payloads"),
    ({"path": GATHERED, "codec": "int8()", "by_node": ("int8()", "int8()")}, "`down` and `by_node` are for path 'service'"),
    ({"path": SERVED}, "must be written as 'service'"),
])
def test_plans_that_cannot_run_are_refused(fields: dict[str, Any], lines: str) -> None:
    (line,) = node_problems(of_one_bucket(**fields), 2, 2)
    assert line.startswith("bucket 0: ")
    assert lines in line
    assert "\n" not in line


@pytest.mark.parametrize("fields", [
    {}, {"codec": "powersgd()"}, {"path": "allreduce"}, {"path": GATHERED, "codec": "int8()"},
    {"path": "all.reduce_scatter all.allgather"},
    {"codec": "topk(ratio=0.5)", "by_node": ("topk(ratio=0.5)", "topk(ratio=0.1)"), "down": "int8()"},
])
def test_plans_that_can_run_are_accepted(fields: dict[str, Any]) -> None:
    assert node_problems(of_one_bucket(**fields), 2, 2) == verify(of_one_bucket(**fields), ONE_TENSOR) == []


def test_layouts_and_devices() -> None:
    staged = of_one_bucket(path=GATHERED, codec="int8()")
    assert node_problems(staged, 4, 1) == [
        "the plan was made for 2 ranks per node, but this job has 1: make it again, or set ranks_per_node"]
    assert node_problems(of_one_bucket(path="allreduce"), 4, 1) == []
    assert node_problems(staged, 2, 2, cuda=True) == []
    assert "only in host memory" in node_problems(of_one_bucket(path=REDUCED, codec="randomk()"), 2, 2, cuda=True)[0]
    assert node_problems(of_one_bucket(), 2, 2, cuda=True) == []


LONGEST_S, SHORTEST_S = 1e6, 1e-9
"""Predictions that no step comes near."""
BEGIN = stale_plan.StaleState()


def planned(predicted_s: float) -> Plan:
    return Plan("", (), step_s=predicted_s)


def after(
    steps: list[tuple[Plan | None, float]], state: stale_plan.StaleState = BEGIN, *, first: int = 1,
) -> tuple[stale_plan.StaleState, list[StalePlan]]:
    """The state after these steps, and its decisions."""
    lines = []
    for number, (requested, seconds) in enumerate(steps, first):
        state, stale = stale_plan.decide(state, requested, number, seconds)
        lines += [stale] if stale else []
    return state, lines


@pytest.mark.parametrize("seconds", [1.26, 0.74])
def test_missed_prediction_is_logged_once(seconds: float) -> None:
    requested = planned(1.0)
    state, lines = after([(requested, 9.0)] + [(requested, seconds)] * (PATIENCE - 1))
    assert lines == [], "the first step is partly another plan's, and a few others are no trend"
    state, lines = after([(requested, seconds)], state, first=PATIENCE + 1)
    assert lines == [StalePlan(PATIENCE + 1, 1.0, seconds, PATIENCE)]
    state, lines = after([(requested, seconds)] * 200, state)
    assert lines == [], "from then on the new time is expected"
    _, lines = after([(requested, 2 * seconds)] * (PATIENCE + 2), state)
    assert [event.usual for event in lines] == [True]


@pytest.mark.parametrize("seconds", [1.25, 0.75])
def test_prediction_missed_by_exactly_the_limit_is_accepted(seconds: float) -> None:
    assert after([(planned(1.0), seconds)] * 100)[1] == []


def test_plans_without_a_prediction_or_with_a_controller_are_not_watched() -> None:
    unpredicted = planned(0.0)
    assert after([(unpredicted, 9.0)] * 100)[1] == []
    assert after([(None, 9.0)] * 100)[1] == []


def test_new_plan_resets_the_watch() -> None:
    first, other = planned(1.0), planned(5.0)
    state, lines = after([(first, 9.0)] * PATIENCE + [(other, 9.0)] * PATIENCE)
    assert lines == []
    assert [event.predicted_s for event in after([(other, 9.0)], state)[1]] == [5.0]
    state, _ = after([(None, 9.0)], state)
    assert after([(other, 9.0)] * PATIENCE, state)[1] == [], "a plan that was found meanwhile is another, too"


@pytest.mark.parametrize(("predicted_s", "level"), [(SHORTEST_S, logging.WARNING), (LONGEST_S, logging.INFO)])
def test_stale_plan_is_an_event_and_a_log_line(predicted_s: float, level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "commlayer")
    context = FakeJob(SimpleNamespace(step=0), planned(predicted_s))
    watch = stale_plan.StalePlanWatch(context)
    for _ in range(PATIENCE + 1):
        assert (context.events, context.decisions) == ([], [])
        watch.end_step()
    (line,) = context.decisions
    slower = level == logging.WARNING
    assert [(e.predicted_s, e.lasted, e.usual) for e in context.events] == [(predicted_s, PATIENCE, False)] * slower
    assert ("stale" in line) == slower
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(level, line)]


def test_plan_for_other_machines_is_reported() -> None:
    job, machines = builtin("lstm"), cluster_from_line("3xrtx3060@fiber-1000")
    lines: list[str] = []
    basis = Basis(commlayer.planner.plan(job, machines, policy=Policy(objective="step")), checked_inputs(job, machines))
    with_server_nodes(basis.plan, basis, 2, lines.append)
    assert lines[0] == "the plan was made for 3 nodes, but this job has 2: its predictions do not apply"
    assert "no rank trains on node 2; to run servers on other machines, start `commlayer serve`" in lines[1]
    lines.clear()
    with_server_nodes(basis.plan, basis, 3, lines.append)
    assert lines == []


def train(rank: int, address: str, predicted_s: float) -> tuple[list[StalePlan], list[str]]:
    model = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.attach(model, optimizer, plan=plan_of(model, nbytes=(1 << 20, 1 << 20), step_s=predicted_s),
                          config=quick(join=address)) as session:
        for step in range(PATIENCE + 1):
            train_step(model, optimizer, rank, step)
        return session.inspect.events(), session.inspect.decisions()


def test_missed_prediction_is_logged_on_rank_0() -> None:
    ranks = pool(2)
    ranks.ready(__name__)
    with Servers(2) as servers:
        (events, decisions), other = ranks.call(train, servers.address, SHORTEST_S)
    assert other == ([], [])
    assert [event.predicted_s for event in events] == [SHORTEST_S]
    assert len(decisions) == 1
    assert "plan is stale" in decisions[0]
