"""attach(plan="auto"): the first steps are measured, a plan is made on rank 0 and taken up by all at one step."""

from __future__ import annotations

import logging
from typing import Any

import torch
from attach_kit import Run, Setting, coordinators, mlp, play
from pool_kit import pool
from torch import nn

from commlayer.job.autoplan import driver as auto

WORLD, SERVERS = 2, 2


def train(run: Run, steps: int) -> dict[str, Any]:
    logging.getLogger("commlayer").setLevel(logging.INFO)
    model = mlp()
    wrapped = run.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, digests = [], []
    for step in range(steps):
        made = torch.Generator().manual_seed(2 * step + run.rank)
        x = torch.randn(6, 12, generator=made)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(x), torch.stack([x[:, 0], x[:, 2], x.mean(1)], 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        session = run.sessions[0]
        digests.append(len(session.plan.buckets) if session.plan else 0)
    return {"losses": losses, "buckets": digests, "decisions": session.decisions(),
            "weights": torch.cat([p.detach().view(-1) for p in model.parameters()])}


def steps_until_settled() -> int:
    return auto.WARM_STEPS + auto.MEASURED_STEPS + 200


def check(results: list[dict[str, Any]]) -> None:
    said = results[0]["decisions"]
    assert any("found a plan" in line for line in said), said
    assert all(torch.equal(r["weights"], results[0]["weights"]) for r in results)
    assert sum(results[0]["losses"][-20:]) < 0.5 * sum(results[0]["losses"][:20])
    assert all(r["buckets"] == results[0]["buckets"] for r in results), "all take a plan up at the same step"


def test_a_module_goes_over_to_a_plan_of_its_own() -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        setting = Setting("module", (made[0].address,), servers=SERVERS, plan="auto")
        check(pool(WORLD).call(play, WORLD, train, setting, steps_until_settled()))


def test_ddp_goes_over_to_a_plan_of_its_own() -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        setting = Setting("ddp", (made[0].address,), servers=SERVERS, plan="auto")
        check(pool(WORLD).call(play, WORLD, train, setting, steps_until_settled()))
