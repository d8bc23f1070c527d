"""Scripts under whoever proposes one way after the other that it may choose here, and saves and drains. Real ranks."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support import rank_pool
from support.rank_pool import Servers, pool
from support.sync_modes import WORLD, Training, plan

from commlayer.engine.observers import Observer, ObserverOrder
from commlayer.engine.switch import switch as go_over
from commlayer.engine.sync_modes import allowed_modes

_ranks = rank_pool.ranks_first(WORLD)
STEPS, PATIENCE = 42, 3
"""Steps in all; steps or exchanges under one plan."""
NAMES = {"forward": "forward", "updates": "updates", "local": "every", "round": "round"}
"""Of the plan that goes such a way."""
SPOILT = (2, 9, 20, 33)
"""Steps in which one rank's loss is not finite."""


class Script(Training):
    seen: list[float]

    def train(self, steps: int) -> float:
        for _ in range(steps):
            self.optimizer.zero_grad()
            for micro in range(3 if "accumulated" in self.how else 1):
                loss = self.loss(3 * self.step + micro)
                spoilt = "scaled" in self.how and self.rank == 1 and self.step in SPOILT
                self.scaler.scale(loss * math.inf if spoilt else loss).backward()
            if "clipped" in self.how:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1
            self.seen.append(float(loss.detach()))
        return self.seen[-1]


def proposed(rank: int, address: str, how: str, folder: str) -> dict[str, Any]:
    training = Script(rank, address, "gradients", how=how)
    training.seen = []
    training.train(1)
    made, ways, gone, count = training.connection, list[str](), list[str](), [0]
    made.terms.auto = True
    for way in sorted(allowed_modes(made)):
        ways += [NAMES[way], "gradients"]

    def propose() -> None:
        count[0] += 1
        if count[0] % PATIENCE == 0 and ways:
            gone.append(ways.pop(0))
            go_over(made, plan(made.worker.job, gone[-1]) if rank == 0 else None)

    training.session._driver.observers.add(Observer(ObserverOrder.CONTROLLER, None, after_step=propose, after_exchange=propose))
    while training.step < STEPS:
        training.train(1)
        if training.step % 7 == 0:
            training.session.flush()
        if training.step % 5 == 0:
            training.session.checkpoint(folder, model=False)
            kept = made.plan
    training.session.flush()
    found = {"gone": gone, "rows": training.tensors(buffers=False), "losses": training.seen}
    training.session.resume(folder)
    found["loaded"] = made.plan == kept
    training.session.close()
    return found


@pytest.mark.commit(2)
@pytest.mark.parametrize("how", [
    "", "clipped", "accumulated", "scaled", "scaled, clipped, accumulated", "ddp, clipped", "ddp, accumulated", "ddp, scaled",
])
def test_a_script_trains_on_whatever_way_is_proposed(how: str, tmp_path: Path) -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(proposed, servers.address, how, str(tmp_path))
    wanted = ["every", "gradients", "round", "gradients", "updates", "gradients"]
    if "ddp" not in how and "scaled" not in how:
        wanted = ["forward", "gradients", *wanted]
    assert first["gone"] == second["gone"] == wanted[: len(first["gone"])]
    assert len(first["gone"]) >= len(wanted) - 1, "all of the ways"
    assert all(torch.equal(a, b) for a, b in zip(first["rows"], second["rows"], strict=True))
    assert median(first["losses"][-9:]) < 0.9 * median(first["losses"][:9])
    assert first["loaded"]
    assert second["loaded"]


def read(rank: int, address: str, way: str, how: str) -> list[torch.Tensor]:
    training = Script(rank, address, way, how=how, optimizer="adamw")
    training.seen = []
    training.train(6)
    training.session.synchronize()
    rows = training.tensors()
    training.session.close()
    return rows


def test_a_script_that_reads_gradients_under_a_plan_it_did_not_ask_for_gets_them() -> None:
    runs = []
    for way in ("gradients", "forward"):
        with Servers(WORLD, 1) as servers:
            runs += pool(WORLD).call(read, servers.address, way, "clipped")
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
