"""The controller of real ranks under every schedule of local steps, and with a policy that fails on one rank only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from msgspec import structs
from support.attached import Run, Setting, coordinators, mlp, parameters, plan_of, play, same, train_step
from support.rank_pool import pool, ranks_first

from commlayer.autotune import job_actions, plan_policy
from commlayer.autotune.controller import ShareMover, TuningController
from commlayer.autotune.measure import probes
from commlayer.autotune.quality.guard import QualityGuard
from commlayer.autotune.shares.policy import WorkerTime
from commlayer.autotune.state import MEASURED_STEPS, WARM_STEPS, Measured, Phase
from commlayer.engine.epochs.plan_switch import switch
from commlayer.engine.guards.parameter_drift import ParameterDrift
from commlayer.observe.events import LogEvent, decode
from commlayer.observe.link_monitor import LinkWatch
from commlayer.records import Plan

WORLD = 2
_ranks = ranks_first(WORLD)
SCHEDULES = [*itertools.product((8,), (1, 2, 4, 8), ("", "round")), (16, 4, ""), (16, 8, "round")]
"""Local steps per exchange, fragments, and overlap."""
FEW = [(8, 1, ""), (8, 2, "round"), (8, 8, ""), (16, 8, "round")]
EXCHANGES = MEASURED_STEPS + 6
"""Exchanges under each schedule: they suffice for measuring and two reports."""


@contextmanager
def quick_measuring() -> Iterator[None]:
    """Probes take 20 ms, and no search finds a plan."""
    def search(*_: object) -> None:
        raise RuntimeError("nothing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_actions, "PROBE_S", 0.02)
        patch.setattr(job_actions, "PROBE_AGAIN_S", 0.02)
        patch.setattr(job_actions.JobActions, "search", search)
        yield


def tuned(run: Run) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, TuningController]:
    """A model, its optimizer, its session, and a controller that also moves shares."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.wrap(model, optimizer=optimizer, sync="auto")
    session = run.sessions[0]
    (controller,) = session.inspect.components.of(TuningController)
    controller.shares = ShareMover(WorkerTime, lambda _rows, _step_s: None)
    return model, optimizer, session, controller


def scheduled(model: torch.nn.Module, every: int, fragments: int, overlap: str) -> Plan:
    plan = plan_of(model, "int8(block=32)", nbytes=(128, 256))
    return structs.replace(plan, local_steps=every, codes="updates", fragments=fragments, overlap=overlap)


def failures(session: Any) -> list[LogEvent]:
    events = [decode(line) for line in session.inspect.context.stream.log.since(0).lines]
    return [event for event in events if isinstance(event, LogEvent) and event.code == "E-OBSERVER"]


def all_schedules(run: Run, schedules: list[tuple[int, int, str]]) -> dict[str, Any]:
    with quick_measuring():
        model, optimizer, session, controller = tuned(run)
        connection, number = session.inspect.context, itertools.count()
        measure, times = controller._do.measure, list[int]()

        def counted(steps_s: Sequence[float]) -> Measured:
            times.append(len(steps_s))
            return measure(steps_s)

        controller._do.measure = counted
        for every, fragments, overlap in schedules:
            switch(connection, scheduled(model, every, fragments, overlap) if run.rank == 0 else None, by_itself=True)
            times.clear()
            for exchange in range(EXCHANGES):
                for _ in range(every // fragments):
                    train_step(model, optimizer, run.rank, next(number))
                state = controller.state
                if exchange == 1 and state.phase is Phase.WATCHING:  # as if rank 0 had requested to measure again
                    controller.state = structs.replace(state, phase=Phase.WARMING, until=state.step + 1)
            session.flush()
            # Before links are known, the first exchanges are enough.
            soon = [WARM_STEPS - 1] if (every, fragments, overlap) == SCHEDULES[0] else []
            assert times == [*soon, MEASURED_STEPS + 1], (every, fragments, overlap)
        return {"failures": [event.text for event in failures(session)], "paused": controller.paused, "plan": connection.plan,
                "weights": parameters(model)}


@pytest.mark.parametrize("schedules", [FEW, pytest.param(SCHEDULES, marks=pytest.mark.nightly)], ids=["few", "all"])
def test_every_schedule_of_local_steps_is_measured_and_watched(schedules: list[tuple[int, int, str]]) -> None:
    with coordinators(1, WORLD, 1) as jobs:
        setting = Setting("module", (jobs[0].address,), plan="auto")
        first, second = pool(WORLD).call(play, WORLD, all_schedules, setting, schedules)
    assert first["failures"] == second["failures"] == []
    assert not first["paused"]
    assert first["plan"].fragments == schedules[-1][1]
    assert same(first["weights"], second["weights"])


FAILING: dict[str, tuple[int, Any, str]] = {
    "plan": (0, plan_policy, "record_step_time"),
    "search": (0, plan_policy, "begin_search"),
    "request": (0, plan_policy, "next_request"),
    "quality": (1, QualityGuard, "decide"),
    "comparison": (1, QualityGuard, "prepare"),
    "links": (1, LinkWatch, "observe"),
    "steps": (1, job_actions, "median_timing"),
    "probe": (1, probes.link_rates, "rate"),  # type: ignore[attr-defined]
    "drift": (1, ParameterDrift, "_settings"),
}
"""Which rank fails where. "shares": rank 1, when it receives the times of all ranks."""
LENGTH = 60


def failing(run: Run, what: str, schedule: tuple[int, int, str]) -> dict[str, Any]:
    def fail(*_: object, **__: object) -> Any:
        raise ZeroDivisionError(f"{what} fails")

    every, fragments, _ = schedule
    with quick_measuring(), pytest.MonkeyPatch.context() as patch:
        model, optimizer, session, controller = tuned(run)
        connection = session.inspect.context
        controller._do._link = None  # so that links are probed again
        # Uncompressed gradients have no quality to check.
        lossy = scheduled(model, *schedule) if every > 1 else plan_of(model, "error_feedback(int4())")
        switch(connection, lossy if run.rank == 0 else None, by_itself=True)
        rank, place, name = FAILING.get(what, (1, None, ""))
        if run.rank == rank and place is not None:
            patch.setattr(place, name, fail)
        elif run.rank == rank:
            controller.shares = ShareMover(WorkerTime, fail)
        for number in range(LENGTH * every // fragments):
            train_step(model, optimizer, run.rank, number)
        session.flush()
        return {"traces": [event.traceback for event in failures(session)], "paused": controller.paused,
                "plan": connection.plan, "weights": parameters(model), "said": session.inspect.decisions()}


EACH_STEP, IN_ROUNDS = (1, 1, ""), (8, 4, "round")


@pytest.mark.parametrize(("what", "schedule"), [
    *((what, EACH_STEP) for what in ("plan", "search", "quality", "links", "drift", "shares")), ("steps", IN_ROUNDS),
    *(pytest.param(what, EACH_STEP, marks=pytest.mark.nightly) for what in ("request", "comparison", "steps", "probe")),
    *(pytest.param(what, IN_ROUNDS, marks=pytest.mark.nightly) for what in ("plan", "request", "links")),
])
def test_policy_error_on_one_rank_pauses_all_controllers(what: str, schedule: tuple[int, int, str]) -> None:
    with coordinators(1, WORLD, 1) as jobs:
        results = pool(WORLD).call(play, WORLD, failing, Setting("module", (jobs[0].address,), plan="auto"), what, schedule)
    rank = FAILING.get(what, (1, None, ""))[0]
    assert [len(r["traces"]) for r in results] == [1 if place == rank else 0 for place in range(WORLD)], results
    assert results[rank]["traces"][0].startswith("test_tuning_errors.py:")
    assert [r["paused"] for r in results] == [what != "drift"] * WORLD
    assert same(results[0]["weights"], results[1]["weights"])
    assert results[0]["plan"] == results[1]["plan"]
