"""Plan and shares of one job: "auto" plans again after shares changed, and the balancer knows the plan's communication cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.attached import Run, Setting, coordinators, data, mlp, play
from support.rank_pool import pool
from torch import nn
from torch.utils.data import DataLoader

from commlayer.autotune import plan_policy
from commlayer.autotune.controller import TuningController
from commlayer.autotune.shares.load_balancer import LoadBalancer
from commlayer.autotune.state import MEASURED_STEPS, WARM_STEPS
from commlayer.balance import Decision, LinearTime, Sampler
from commlayer.engine.observers import spacing
from commlayer.observe import link_monitor

WORLD, BATCH = 2, 24
SLOW_FROM, STEPS = 40, 70
FAST, SLOW = LinearTime(0.001, 0.002), LinearTime(0.004, 0.002)
COMM_S = 0.05


def decisions(controller: LoadBalancer) -> list[Decision]:
    return [event for event in controller.events if isinstance(event, Decision)]


def longest_s(decision: Decision) -> float:
    return max((SLOW if worker else FAST).time_s(share) for worker, share in decision.by_worker.items() if share)


def train(run: Run) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        # What steps take, and links carry, on a loaded machine is no part of this.
        patch.setattr(plan_policy, "STALE", math.inf)
        patch.setattr(link_monitor, "FACTOR", math.inf)
        patch.setattr(spacing, "MOST_STEPS", 1)
        return balanced(run)


def balanced(run: Run) -> dict[str, Any]:
    model = mlp()
    wrapped = run.wrap(model)
    session = run.sessions[0]
    sampler = Sampler(STEPS * BATCH, BATCH, rank=run.rank, world=WORLD)

    def seconds(step: int, samples: int) -> float:
        return (SLOW if run.rank == 1 and step >= SLOW_FROM else FAST).time_s(samples)

    controller = LoadBalancer(session, sampler, measure=seconds)
    loader: DataLoader[Any] = DataLoader(range(sampler.length), batch_sampler=sampler)  # type: ignore[arg-type]
    searches, planned, planned_price = [], WARM_STEPS + MEASURED_STEPS + 2, None
    for batch in controller.follow(loader):
        x, y = data(run.rank, sampler.step, n=len(batch))
        nn.functional.mse_loss(wrapped(x), y).backward()
        auto: TuningController
        (auto,) = session.inspect.components.of(TuningController)
        if sampler.step in (planned, SLOW_FROM - 1, STEPS - 1):
            auto.settle(30.0)
            searches.append(sum("a plan: " in line for line in session.inspect.decisions()))
        if sampler.step == SLOW_FROM - 1:
            planned_price = session.inspect.context.terms.price
        if sampler.step >= SLOW_FROM - 1 and run.rank == 0:
            session.inspect.context.terms.price = (COMM_S, 0.0)  # so much that expectations show it
    return {"searches": searches, "price": planned_price, "decisions": decisions(controller),
            "shares": controller.shares, "lines": [line for line in session.inspect.decisions() if "new shares" in line]}


@pytest.mark.parametrize("how", ["module", "ddp"])
def test_auto_plans_again_after_shares_changed_and_reports_communication_cost(how: str) -> None:
    with coordinators(1, WORLD, 2) as result:
        setting = Setting(how, (result[0].address,), servers=2, plan="auto")
        results = pool(WORLD).call(play, WORLD, train, setting)
    assert results[0]["searches"] == [1, 1, 2]
    assert results[0]["price"][0] > 0
    result = results[0]["decisions"]
    assert result == results[1]["decisions"] != []
    assert all(decision.after_s > COMM_S + longest_s(decision) / 2 for decision in result), "with the cost that rank 0 has"
    assert results[0]["lines"] == results[1]["lines"]
    assert results[0]["shares"][0] > results[0]["shares"][1]
