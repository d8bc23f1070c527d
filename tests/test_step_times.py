"""What plan "auto" takes for a step's time: from the end of one backward pass to the next, wherever it looks at steps."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pool_kit
import pytest
import torch
from attach_kit import Run, Setting, data, mlp, play
from autoplan_kit import JOB, START
from pool_kit import pool
from torch import nn

import commlayer
from commlayer.job.autoplan.driver import AutoPlan
from commlayer.job.autoplan.facts import Fact, StepOver
from commlayer.job.connection import Connection
from commlayer.job.observers import Observer, Place

WORLD = 2


def passes(run: Run, overlap: str | None) -> dict[str, Any]:
    """When each backward pass began and ended, and what an observer was told of its end: of some steps it looks at sums."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = commlayer.attach(model, optimizer, plan="fp16()", overlap=overlap, config=pool_kit.quick(servers="each"))
    run.sessions.append(session)
    made, times, told = session.inspect.connection, list[tuple[float, float]](), list[float]()

    def after_step() -> None:
        told.append(made.passed_s)

    session.inspect.observers.add(Observer(Place.OTHER, None, after_step=after_step, looks=lambda: len(times) % 3 == 2))
    for step in range(9):
        x, y = data(run.rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        begin = time.perf_counter()
        loss.backward()
        times.append((begin, time.perf_counter()))
        optimizer.step()
    return {"times": times, "told": told}


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_a_step_ends_with_its_backward_pass_whenever_it_is_looked_at(overlap: str | None) -> None:
    for result in pool(WORLD).call(play, WORLD, passes, Setting("module", servers=2), overlap):
        assert len(result["told"]) >= len(result["times"]) - 1, "the last may still be on its way"
        for (begin, end), told in zip(result["times"], result["told"], strict=False):
            assert begin <= told <= end


class Clock:
    """perf_counter, as the test has it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_what_decisions_take_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ends behind its backward pass, is looked at 0.03 s into the next one, and one look takes 5 s."""
    clock, seconds, connection = Clock(), list[float](), Connection()
    monkeypatch.setattr("commlayer.job.autoplan.driver.time", SimpleNamespace(
        perf_counter=clock.perf_counter, monotonic=clock.perf_counter))
    monkeypatch.setattr("commlayer.job.connection.time", clock)
    connection.plan, connection.terms.auto = START, True
    connection.worker = SimpleNamespace(step=10, plan=START, counters=SimpleNamespace(exposed_s=0.0, steps=0))  # type: ignore[assignment]
    auto = AutoPlan(connection, JOB)

    def feed(fact: Fact) -> None:
        assert isinstance(fact, StepOver)
        seconds.append(fact.seconds)
        clock.now += 5.0 if len(seconds) == 3 else 0.0

    monkeypatch.setattr(auto, "_feed", feed)
    for late in (True, True, True, False, False, True):  # the fourth is waited for, as somebody looks at its sums
        clock.now += 0.27
        connection.passed()
        clock.now += 0.13 if late else 0.0
        auto.after_step()
        clock.now += 0.0 if late else 0.13
    assert seconds == pytest.approx([0.0, *[0.4] * 5])
