"""Session reports: counters, observers of steps, wait notices, traces. Real ranks."""

from __future__ import annotations

import functools
import logging
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import rank_pool
from support.attached import (
    Run,
    Setting,
    coordinators,
    data,
    mlp,
    outcome,
    plan_of,
    plan_or_codec,
    play,
    sync_of,
    train_step,
)
from support.components import Calls
from support.coordinators import until
from support.jobs import distributed_job
from support.rank_pool import Servers, pool, quick, ranks_first
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.autotune.quality import policy
from commlayer.engine.components import ComponentOrder
from commlayer.engine.job.job import JobContext
from commlayer.engine.model.model_tensors import describe_model
from commlayer.engine.observers import trace
from commlayer.errors import find_error_code
from commlayer.observe.events import LogEvent, decode
from commlayer.observe.trace_files import read_comparison
from commlayer.planner.inputs import checked_inputs, cluster_from_line
from commlayer.planner.model import Basis
from commlayer.records import Job, Timing

WORLD = 2
STEPS, H = 9, 4
KEYS = ["steps", "exchanges", "sent_nbytes", "received_nbytes", "encode_s", "decode_s", "exposed_s", "exchange_s", "guard_s",
        "noise_scale", "agreement", "reconnects", "resent_nbytes", "kept_nbytes"]

_ranks = ranks_first(WORLD)


def train(rank: int, how: str, address: str) -> dict[str, Any]:
    """STEPS steps of two backward passes each, of which the first gathers."""
    model: Any = mlp()
    nbytes = 4 * sum(p.numel() for p in model.parameters())
    path = {"allreduce": "allreduce", "staged": "all.reduce_scatter all.allgather"}.get(how, "service")
    plan: Any = "identity" if how in ("alone", "no optimizer") else plan_of(model, path=path)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    config = rank_pool.quick(**({"join": address} if address else {}))
    wrapped = DistributedDataParallel(model) if how == "DDP" else model
    session = commlayer.attach(wrapped, None if how == "no optimizer" else optimizer, config=config, **plan_or_codec(plan),
                               sync=sync_of(H if how in ("local steps", "overlapped") else None,
                                            overlap="round" if how == "overlapped" else None))
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            x, y = data(rank, 2 * step + micro)
            with session.no_sync() if micro == 0 and how != "DDP" else wrapped.no_sync() if micro == 0 else torch.enable_grad():
                nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    results = {"stats": session.metrics(), "step": session.step, "nbytes": nbytes}
    session.close()
    return results


@pytest.mark.commit(3)
@pytest.mark.parametrize(("how", "exchanges"), [
    ("service", STEPS), ("allreduce", STEPS), ("staged", STEPS), ("DDP", STEPS), ("local steps", 2), ("overlapped", 1),
])
def test_counters_have_the_same_meaning_in_every_job(how: str, exchanges: int) -> None:
    with Servers(WORLD, 1) as servers:
        address = servers.address if how not in ("allreduce", "staged") else ""
        for results in pool(WORLD).call(train, how, address):
            stats = results["stats"]
            assert list(stats) == KEYS
            assert (stats["steps"], results["step"], stats["exchanges"]) == (STEPS, STEPS, exchanges)
            # With two ranks a ring, too, sends what the gradients have: (2 - 1) / 2 of them, twice.
            begun = exchanges + (how == "overlapped")
            for key in ("sent_nbytes", "received_nbytes"):
                assert 0.94 * exchanges <= stats[key] / results["nbytes"] <= 1.06 * begun


@pytest.mark.parametrize("how", ["alone", "no optimizer"])
def test_single_process_steps_are_counted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    stats = train(0, how, "")["stats"]
    assert list(stats) == KEYS
    assert stats == {name: STEPS * (name == "steps") for name in KEYS}


def noisy(rank: int, address: str, noise: float) -> list[float]:
    """Trains on gradients of ones with noise of this standard deviation, so that the noise scale is its square in batches."""
    policy.TIME_PART = 1e9  # type: ignore[attr-defined]
    model = nn.Linear(16384, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    generator, found = torch.Generator().manual_seed(rank), []
    with commlayer.attach(model, optimizer, compression="topk(ratio=0.3)",
                          config=quick(join=address, guard="warn", max_loss=0.5)) as session:
        for _ in range(120):
            optimizer.zero_grad()
            model(1 + noise * torch.randn(1, 16384, generator=generator)).sum().backward()
            optimizer.step()
            found.append(session.metrics()["noise_scale"])
    return found


@pytest.mark.commit(1)
@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_gradient_noise_scale_is_a_metric(noise: float) -> None:
    """Within 30 % of the truth and equal on all ranks; 0 until enough steps were compared."""
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(noisy, servers.address, noise)
    assert first == second
    assert first[0] == 0.0
    assert first[-1] == pytest.approx(noise**2, rel=0.3)


def agreeing(rank: int, address: str, codec: str, overlap: bool) -> tuple[list[float], int]:
    """Trains on gradients that are equal on both ranks in three quarters of the elements and opposite in the others."""
    signs = torch.ones(1, 4096)
    signs[:, 3072:] = 1 - 2 * rank
    model = nn.Linear(4096, 1, bias=False)
    optimizer, found, lines = torch.optim.Adam(model.parameters(), lr=1e-3), [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("commlayer")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with commlayer.attach(model, optimizer, compression=codec, config=quick(join=address),
                              sync=commlayer.LocalSteps(H, overlap=overlap)) as session:
            for _ in range(3 * H):
                optimizer.zero_grad()
                model(signs).sum().backward()
                optimizer.step()
                found.append(session.metrics()["agreement"])
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return found, sum("a mean cosine of" in line for line in lines)


@pytest.mark.commit(1)
@pytest.mark.parametrize(("codec", "overlap"), [("identity", False), ("int4", False), ("int4", True)])
def test_agreement_of_deltas_is_a_metric_and_logged_once(codec: str, overlap: bool) -> None:
    with Servers(WORLD, 1) as servers:
        (first, lines), (second, _) = pool(WORLD).call(agreeing, servers.address, codec, overlap)
    assert first == second
    begun = H * (1 + overlap)
    assert first[: begun - 1] == [0.0] * (begun - 1)
    assert first[begun:] == pytest.approx([0.5] * (3 * H - begun), abs=0.05)
    assert lines == 1


def late(rank: int, address: str, ratio: float) -> list[str]:
    """Starts with a plan whose results are one step late."""
    model = mlp()
    plan = plan_of(model, codec=f"error_feedback(topk(ratio={ratio}))", bucket={"stale": True})
    with commlayer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, config=quick(join=address)) as session:
        return [code for line in session.inspect.decisions() if (code := find_error_code(line))]


@pytest.mark.parametrize(("ratio", "codes"), [(0.1, []), (0.001, ["E-PLAN-LATE"])])
def test_plan_with_stale_sparse_results_is_reported_once(ratio: float, codes: list[str]) -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(late, servers.address, ratio)
    assert (first, second) == (codes, [])


PLACES = (ComponentOrder.CONTROLLER, ComponentOrder.TRACE, ComponentOrder.OTHER)


def watched(run: Run) -> list[tuple[str, int, int]]:
    """Which observers were called in the second step, when, and how many steps were committed then.

    Rank 1 adds its observers in reverse order.
    """
    model = mlp()
    wrapped = run.wrap(model)
    session = run.sessions[0]
    wrapped(torch.ones(2, 12)).sum().backward()
    seen: list[tuple[str, int, int]] = []

    def note(moment: str, place: ComponentOrder) -> None:
        seen.append((moment, place, session.inspect.context.exchanges))

    for place in sorted(PLACES, reverse=run.rank == 1):
        moments = ("sums_arrived", "end_step", "end_exchange")
        session.inspect.components.add(
            Calls(place, **{moment: functools.partial(note, moment, place) for moment in moments}))
    wrapped(torch.ones(2, 12)).sum().backward()
    return seen


@pytest.mark.commit(1)
@pytest.mark.parametrize("how", ["module", "ddp"])
def test_observers_are_called_in_order_before_and_after_the_commit(how: str) -> None:
    with coordinators(1, WORLD, 1) as jobs:
        seen = pool(WORLD).call(play, WORLD, watched, Setting(how, (jobs[0].address,)))
    assert seen == [[("sums_arrived", place, 1) for place in PLACES] + [("end_step", place, 2) for place in PLACES]] * WORLD


SLEPT_S = 0.1


def recorded(rank: int, sync: str) -> list[tuple[float, float]]:
    """For each recorded step, its seconds by the clock and by the recorder, while an observer sleeps after each step."""
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slept: list[float] = []

    def sleep() -> None:
        slept.append(time.perf_counter())
        time.sleep(SLEPT_S)

    with commlayer.attach(model, optimizer, sync=sync, config=quick(servers="each")) as session:
        recorder = distributed_job(session).worker.recorder
        recorder.switch(on=True)
        session.inspect.components.add(Calls(end_step=sleep))
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        by_clock_s = [after - before for before, after in pairwise(slept)]
        return list(zip(by_clock_s, [step.marks["end"] for step in recorder.steps], strict=False))


@pytest.mark.commit(1)
@pytest.mark.parametrize("sync", ["step", "forward"])
def test_recorded_step_times_exclude_observers(sync: str) -> None:
    for steps in pool(WORLD).call(recorded, sync):
        assert len(steps) >= 2
        assert sum(clock_s - recorded_s for clock_s, recorded_s in steps) >= 0.5 * SLEPT_S * len(steps)


def compared(rank: int, fails: bool) -> tuple[list[float], list[str]]:
    """Gradients after two steps whose sums an observer has seen, and the codes and tracebacks of errors in the event stream."""
    model = torch.nn.Linear(2, 1, bias=False)

    def broken() -> None:
        if fails:
            raise ValueError("it does not compare")

    with commlayer.attach(model, config=quick(ranks_per_node=WORLD)) as session:
        session.inspect.components.add(Calls(sums_arrived=broken))
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 2), 1.0 + 2 * rank)).sum().backward()
        events = [decode(line) for line in session.inspect.context.stream.log.since(0).lines]
    assert model.weight.grad is not None
    errors = [f"{event.code} {event.traceback.partition(' < ')[0]}" for event in events
              if isinstance(event, LogEvent) and event.traceback]
    return model.weight.grad.view(-1).tolist(), errors


def test_failing_observer_is_reported_once_and_training_continues() -> None:
    ranks = pool(WORLD)
    assert ranks.call(compared, False) == [([2.0, 2.0], [])] * WORLD
    for averages, (error,) in ranks.call(compared, True):
        assert averages == [2.0, 2.0]
        assert re.fullmatch(r"E-OBSERVER test_session_reports\.py:\d+ broken", error)


def broken(rank: int) -> str:
    model = torch.nn.Linear(2, 1, bias=False)

    def fail() -> None:
        raise ValueError("it does not find lost members")

    with commlayer.attach(model, config=quick(ranks_per_node=WORLD)) as session:
        session.inspect.components.add(Calls(ComponentOrder.JOB, end_step=fail))
        return outcome(model(torch.ones(1, 2)).sum().backward)


def test_error_of_a_part_that_finds_lost_members_ends_the_step() -> None:
    assert pool(WORLD).call(broken) == ["ValueError: it does not find lost members"] * WORLD


def test_components_added_or_removed_during_a_call_count_from_the_next() -> None:
    context, called = JobContext(), list[str]()
    later = Calls(ComponentOrder.CONTROLLER, end_step=lambda: called.append("later"))

    def first() -> None:
        called.append("first")
        context.components.remove(earlier)
        context.components.add(later)

    earlier = Calls(ComponentOrder.TRACE, end_step=first)
    context.components.add(earlier)
    for _ in range(2):
        context.components.end_step(lambda _: None)
    assert called == ["first", "later"]
    assert context.components.of(Calls) == [later]


def test_session_attributes_are_few_and_the_rest_is_under_inspect() -> None:
    session = commlayer.attach(mlp())
    public = {name for name in {*dir(session), *vars(session)} if not name.startswith("_")}
    assert len(public) <= 19  # two of them are those of a Stateful of torch
    assert {"no_sync", "synchronize", "weight", "checkpoint", "resume", "metrics", "close",
            "inspect"} <= public
    rest = {name for name in dir(session.inspect) if not name.startswith("_")}
    assert rest == {"plan", "context", "components", "decisions", "events", "laps", "trace", "members", "may_leave",
                    "own", "exchanged_steps", "confirmed", "steps_at_exit", "catch_up", "followers", "joined_state",
                    "steps_locally"}
    session.close()


LIMIT_S = 60.0


def waited(rank: int, where: str, folder: str) -> list[str]:
    """Rank 0's wait notices. Rank 1 starts once rank 0 has logged one."""
    lines: list[str] = []
    seen = Path(folder) / "seen"

    def emit(record: logging.LogRecord) -> None:
        if "waiting for" in record.getMessage():
            lines.append(record.getMessage())
            seen.touch()

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    log = logging.getLogger("commlayer")
    log.addHandler(handler)
    try:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = quick(ranks_per_node=1, deadline_s=LIMIT_S)
        with commlayer.attach(model, optimizer, compression="identity()", config=config) as session:
            model(data(rank, 0)[0]).sum().backward()
            if where == "join":
                with session.join():
                    if rank == 1:
                        until(seen.exists, "rank 0 has logged its wait", LIMIT_S)
            else:
                if rank == 1:
                    until(seen.exists, "rank 0 has logged its wait", LIMIT_S)
                session.checkpoint(folder, model=False)
            if rank == 0:
                until(lambda: len(lines) > 1, "the end of the wait is logged", LIMIT_S)
    finally:
        log.removeHandler(handler)
    return lines


@pytest.mark.commit(1)
@pytest.mark.parametrize(("where", "peers"), [("save", "other ranks"), ("join", "worker 1")])
def test_wait_between_two_steps_is_logged(where: str, peers: str, tmp_path: Path) -> None:
    """A collective names no peer; a server names the workers that a row waits for."""
    waits, _ = pool(WORLD).call(waited, where, str(tmp_path))
    assert waits[0].startswith(f"waiting for {peers}: ")
    assert waits[-1].startswith("continues after ")


def basis_of(session: Any, nodes: str = "2xcpu@10g") -> Basis:
    job = describe_model(mlp())
    zeros = (0.0,) * len(job.tensors)
    timed = Job(job.tensors, timing=Timing(zeros, zeros, 1e-3, 1e-3))
    return Basis(session.inspect.plan, checked_inputs(timed, cluster_from_line(nodes)))


def traced(rank: int, address: str, file: str, changes: dict[int, str], steps: int) -> int:
    """`changes`: events after a number of steps. Returns how many steps were done when the file existed."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.attach(model, optimizer, compression="identity", config=quick(join=address)) as session:
        session.inspect.context.terms.auto = True  # as if the controller were searching
        trace.trace_once(session.inspect.context, file, planning=True)
        for done in range(steps):
            what = changes.get(done)
            if what == "basis" and rank == 0:
                session.inspect.context.terms.basis = basis_of(session)
            if what == "basis of three" and rank == 0:
                session.inspect.context.terms.basis = basis_of(session, "3xcpu@10g")
            if what == "switch":
                assert session.inspect.plan is not None
                session.switch(msgspec.structs.replace(session.inspect.plan, step_s=1.0))
            train_step(model, optimizer, rank, done)
            if not session.inspect.components.of(trace.Tracer):
                return done + 1
    return 0


@pytest.mark.commit(2)
@pytest.mark.parametrize(("changes", "done", "first", "note"), [
    # It asks after 2, 4, 8, 16 steps; what has begun when it asks has its first whole step one later.
    ({5: "basis"}, 12, 9, ""),
    ({5: "basis", 10: "switch"}, 14, 11, "no prediction: the inputs of the plan are not known"),
    ({1: "basis of three"}, 6, 3, "no prediction: the plan was made for 3 nodes, but this job has 2"),
    ({3: "switch"}, 8, 5, "no prediction: the inputs of the plan are not known"),
])
def test_trace_waits_for_a_plan_and_restarts_with_a_new_one(
    tmp_path: Path, changes: dict[int, str], done: int, first: int, note: str,
) -> None:
    file = tmp_path / "trace.json"
    ranks = pool(WORLD)
    ranks.ready(__name__)
    with Servers(WORLD) as servers:
        assert ranks.call(traced, servers.address, str(file), changes, 20) == [done] * WORLD
    report = read_comparison(file)
    assert (report.first_step, report.steps, report.ranks, report.note) == (first, trace.STEPS, WORLD, note)
    assert {row.predicted_s is None for row in report.rows} == {bool(note)}


def test_unwritable_trace_file_does_not_end_training(tmp_path: Path) -> None:
    ranks = pool(WORLD)
    ranks.ready(__name__)
    with Servers(WORLD) as servers:
        assert ranks.call(traced, servers.address, str(tmp_path / "absent" / "t.json"), {1: "basis"}, 20) == [6] * WORLD


def refused_to_trace(rank: int, address: str, file: str) -> str:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.attach(model, optimizer, plan=plan_of(model, local_steps=4),
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
        lines = ranks.call(refused_to_trace, servers.address, str(tmp_path / "t.json"))
    assert [find_error_code(line) for line in lines] == ["E-TRACE"] * WORLD
    assert all("local steps" in line for line in lines)


def traced_in_join(rank: int, address: str, file: str) -> list[int]:
    """Steps after which the trace of four steps is there. In the first epoch rank 1 has two batches, rank 0 six."""
    model, written = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # A scaler of an earlier test can still be in this process, and join() would refuse it.
    with commlayer.attach(model, optimizer, compression="identity", config=quick(join=address),
                          grad_scaler=torch.amp.GradScaler("cpu", enabled=False)) as session:
        session.inspect.trace(file, steps=4)
        for batches in ((6, 2), (5, 5)):
            with session.join():
                for step in range(batches[rank]):
                    train_step(model, optimizer, rank, step)
                    written += [session.step] * Path(file).exists()
    return written


def test_trace_has_the_steps_in_which_all_ranks_had_batches(tmp_path: Path) -> None:
    """Steps 2, 7, 8 and 9: a record begins at the end of the previous step."""
    file = tmp_path / "trace.json"
    with Servers(WORLD) as servers:
        assert pool(WORLD).call(traced_in_join, servers.address, str(file))[0] == [9, 10, 11]
    report = read_comparison(file)
    assert (report.steps, report.ranks) == (4, WORLD)
