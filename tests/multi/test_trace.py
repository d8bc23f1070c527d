"""A trace is recorded once the plan is final, on all ranks at one step, and again after a change of plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.attached import assert_refused, data, mlp, outcome
from support.rank_pool import Servers, pool, quick
from torch import nn

import commlayer
from commlayer.engine import trace
from commlayer.engine.connection import JobContext
from commlayer.engine.observers import ObserverOrder, Observers
from commlayer.engine.optimizers import job_of
from commlayer.errors import code_of
from commlayer.observe.step_trace import read_comparison
from commlayer.planner import default_plan
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Basis, PlanInputs
from commlayer.records import Job, Timing

WORLD = 2


def basis_of(session: Any, nodes: str = "2xcpu@10g") -> Basis:
    job = job_of(mlp())
    zeros = (0.0,) * len(job.tensors)
    timed = Job(job.tensors, timing=Timing(zeros, zeros, 1e-3, 1e-3))
    return Basis(session.inspect.plan, PlanInputs(timed, cluster_from_line(nodes)))


def train(rank: int, address: str, file: str, changes: dict[int, str], steps: int) -> int:
    """`changes`: what happens after that many steps. Returns how many were done when the file was there."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.attach(model, optimizer, compression="identity", config=quick(join=address)) as session:
        session.inspect.connection.terms.auto = True  # as if the controller were searching
        trace.trace_once(session.inspect.connection, session.inspect.observers, file, planning=True)
        for done in range(steps):
            what = changes.get(done)
            if what == "basis" and rank == 0:
                session.inspect.connection.terms.basis = basis_of(session)
            if what == "basis of three" and rank == 0:
                session.inspect.connection.terms.basis = basis_of(session, "3xcpu@10g")
            if what == "switch":
                assert session.inspect.plan is not None
                session.switch(msgspec.structs.replace(session.inspect.plan, step_s=1.0))
            optimizer.zero_grad()
            x, y = data(rank, done)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if not session.inspect.observers.at(ObserverOrder.TRACE):
                return done + 1
    return 0


@pytest.mark.parametrize(("changes", "done", "first", "note"), [
    # It asks after 2, 4, 8, 16 steps; what has begun when it asks has its first whole step one later.
    ({5: "basis"}, 12, 9, ""),
    ({5: "basis", 10: "switch"}, 14, 11, "no prediction: the inputs of the plan are not known"),
    ({1: "basis of three"}, 6, 3, "no prediction: the plan was made for 3 nodes, but this job has 2"),
    ({3: "switch"}, 8, 5, "no prediction: the inputs of the plan are not known"),
])
def test_it_waits_for_a_plan_and_begins_anew_with_another(
    tmp_path: Path, changes: dict[int, str], done: int, first: int, note: str,
) -> None:
    file = tmp_path / "trace.json"
    ranks = pool(WORLD)
    ranks.ready(__name__)
    with Servers(WORLD) as servers:
        assert ranks.call(train, servers.address, str(file), changes, 20) == [done] * WORLD
    report = read_comparison(file)
    assert (report.first_step, report.steps, report.ranks, report.note) == (first, trace.STEPS, WORLD, note)
    assert {row.predicted_s is None for row in report.rows} == {bool(note)}


def test_a_file_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    ranks = pool(WORLD)
    ranks.ready(__name__)
    with Servers(WORLD) as servers:
        assert ranks.call(train, servers.address, str(tmp_path / "absent" / "t.json"), {1: "basis"}, 20) == [6] * WORLD


def test_who_trains_alone_has_nothing_to_trace(tmp_path: Path) -> None:
    with commlayer.attach(mlp()) as session:
        assert_refused(outcome(lambda: session.inspect.trace(tmp_path / "t.json")), "E-TRACE", "alone")
        assert_refused(outcome(lambda: session.inspect.trace(tmp_path / "t.json", steps=0)), "E-TRACE", "steps: got 0")


def refused(rank: int, address: str, file: str) -> str:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plan = default_plan(job_of(model), codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1 << 20,
                        cut_nbytes=1 << 20)
    with commlayer.attach(model, optimizer, plan=msgspec.structs.replace(plan, local_steps=4),
                          config=quick(join=address, trace=file)) as session:
        try:
            session.inspect.trace(file)
        except ValueError as error:
            return str(error)
        finally:
            session.flush()
    return "nothing"


def test_local_steps_have_nothing_to_trace(tmp_path: Path) -> None:
    ranks = pool(WORLD)
    ranks.ready(__name__)
    with Servers(WORLD) as servers:
        lines = ranks.call(refused, servers.address, str(tmp_path / "t.json"))
    assert [code_of(line) for line in lines] == ["E-TRACE"] * WORLD
    assert all("local steps" in line for line in lines)


def test_a_job_that_ends_too_soon_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = str(tmp_path / "t.json")
    with commlayer.attach(mlp(), config={"trace": file}):
        assert caplog.messages == [f"no trace in {file}: this process trains alone"]
    connection = JobContext()
    trace.Tracer(connection, Observers(), Path(file), 3, planning=False, warm=2)
    connection.close()
    assert caplog.messages[1:] == [f"no trace in {file}: the job ended after 0 steps, before 3 steps were recorded"]
