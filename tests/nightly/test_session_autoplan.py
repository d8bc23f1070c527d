"""attach(plan="auto"): the first steps are measured, a plan is made on rank 0 and taken up by all at one step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, mlp, play
from support.autotuning import FIRST_PLANNING, any_step_time
from support.rank_pool import pool
from torch import nn

from commlayer.records import digest

WORLD, SERVERS = 2, 2
MOST, AFTER = 4000, 200
"""Steps until a plan is found, which takes a second or two; steps under it."""


def train(run: Run) -> dict[str, Any]:
    model = mlp()
    wrapped = run.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = run.sessions[0]
    losses, digests, sent = [], [], [0.0]
    with any_step_time():
        while len(losses) < MOST and len([d for d in digests if d != digests[0]]) < AFTER:
            made = torch.Generator().manual_seed(2 * len(losses) + run.rank)
            x = torch.randn(6, 12, generator=made)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), torch.stack([x[:, 0], x[:, 2], x.mean(1)], 1))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            digests.append(digest(session.inspect.plan))
            sent.append(session.stats()["sent_nbytes"])
    return {"losses": losses, "digests": digests, "decisions": session.inspect.decisions(),
            "sent": [after - before for before, after in itertools.pairwise(sent)],
            "weights": torch.cat([p.detach().view(-1) for p in model.parameters()])}


@pytest.mark.parametrize("how", ["module", "ddp"])
def test_all_go_over_to_a_plan_of_their_own(how: str) -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        results = pool(WORLD).call(play, WORLD, train, Setting(how, (made[0].address,), servers=SERVERS, plan="auto"))
    first = results[0]
    assert len(set(first["digests"])) == 2, "\n".join(first["decisions"])
    assert all(r["digests"] == first["digests"] for r in results), "all take it up at the same step"
    changed = first["digests"].index(first["digests"][-1])
    assert changed > FIRST_PLANNING
    for r in results:
        (line,) = [line for line in r["decisions"] if "switched to plan" in line]
        assert line.startswith(f"step {changed + 1}: switched to plan {first['digests'][-1]}: ")
        before, after = r["sent"][changed], r["sent"][-1]
        assert before > 0
        assert set(r["sent"][changed - 4 : changed + 1]) == {before}, "of steps under the plan to begin with"
        assert set(r["sent"][changed + 1 :]) == {after}, "of steps under the other"
        assert after != before
    assert all(torch.equal(r["weights"], first["weights"]) for r in results)
    assert sum(first["losses"][-20:]) < 0.5 * sum(first["losses"][:20])
