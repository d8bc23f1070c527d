"""What plan "auto" takes as the time of a step: from the end of one backward pass to the next, for every measurement."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
from support import rank_pool
from support.attached import Run, Setting, data, mlp, play, sync_of
from support.autotuning import FIRST_PLANNING
from support.components import Calls
from support.jobs import distributed_job
from support.rank_pool import pool
from torch import nn

import commlayer
from bench.planner import PricingActions
from commlayer.autotune.controller import TuningController
from commlayer.autotune.report import Reports

WORLD = 2


def passes(run: Run, overlap: str | None) -> dict[str, Any]:
    """When each backward pass began and ended, and the end that an observer records. In some steps it reads sums."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = commlayer.attach(model, optimizer, compression="fp16()", sync=overlap, config=rank_pool.quick(servers="each"))
    run.sessions.append(session)
    connection, times, lines = session.inspect.context, list[tuple[float, float]](), list[float]()

    def after_step() -> None:
        lines.append(connection.passed_s)

    session.inspect.components.add(Calls(end_step=after_step, reads_sums=lambda: len(times) % 3 == 2))
    for step in range(9):
        x, y = data(run.rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        begin = time.perf_counter()
        loss.backward()
        times.append((begin, time.perf_counter()))
        optimizer.step()
    return {"times": times, "told": lines}


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_step_ends_with_its_backward_pass_in_every_measurement(overlap: str | None) -> None:
    for result in pool(WORLD).call(play, WORLD, passes, Setting("module", servers=2), overlap):
        assert len(result["told"]) >= len(result["times"]) - 1, "the last may still be in flight"
        for (begin, end), report in zip(result["times"], result["told"], strict=False):
            assert begin <= report <= end


SLEEP_S, EVERY = 0.02, 4


def priced(run: Run, overlap: str | None) -> tuple[list[dict[str, float]], float]:
    """Step time that rank 0 plans with under local steps of SLEEP_S each; and the time of an outer step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = commlayer.attach(model, optimizer, compression="fp16()", sync=sync_of(EVERY, overlap=overlap),
                               config=rank_pool.quick(servers="each"))
    run.sessions.append(session)
    connection = distributed_job(session)
    actions = PricingActions(connection, 0.2)
    auto = TuningController(connection, actions, Reports(connection.rows.section("measurements")))
    session.inspect.context.terms.auto = True
    session.inspect.components.add(auto)
    times = []
    for step in range((FIRST_PLANNING + 2) * EVERY):
        if step % EVERY == 0:
            times.append(time.perf_counter())
        if step == EVERY:  # after the first exchange, as after one in which members have changed
            auto.start()
        x, y = data(run.rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        time.sleep(SLEEP_S)
        loss.backward()
        optimizer.step()
    auto.settle(60.0)
    return actions.prices, median(after - before for before, after in pairwise(times))


@pytest.mark.parametrize("overlap", [None, "round"])
def test_local_step_is_measured_as_one_step(overlap: str | None) -> None:
    ((price, *_), round_s), (others, _) = pool(WORLD).call(play, WORLD, priced, Setting("module", servers=2), overlap)
    assert others == []
    assert SLEEP_S <= price["measured_s"] < 0.7 * round_s, "no whole round"
    assert price["priced_s"] >= SLEEP_S
    assert price["found_s"] >= SLEEP_S
