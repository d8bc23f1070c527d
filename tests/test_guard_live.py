"""The guard in a running job: what is too lossy is made finer on all ranks at one step, what is exact is left alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from attach_kit import Run, Setting, coordinators, mlp, play
from pool_kit import pool
from torch import nn

from commlayer import guarding
from commlayer.guarding import Change, Guarding, Outcome
from commlayer.runtime.fidelity import measure

WORLD, SERVERS = 2, 2
LATEST = 150
"""Steps until a codec that loses nearly everything has become fine enough."""


def guard(run: Run) -> Guarding | None:
    driver = run.sessions[0]._driver
    made: Guarding | None = getattr(driver, "_guard", None) or getattr(getattr(driver, "_state", None), "_guard", None)
    return made


def train(run: Run, steps: int) -> dict[str, Any]:
    """Looks as often as it may, whatever that costs: time decides nothing here."""
    guarding.PRICE = 1e9
    logging.getLogger("commlayer").setLevel(logging.ERROR)
    model = mlp()
    wrapped = run.wrap(model)
    session = run.sessions[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plans = []
    for step in range(steps):
        made = torch.Generator().manual_seed(2 * step + run.rank)
        x = torch.randn(6, 12, generator=made)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(x), torch.stack([x[:, 0], x[:, 2], x.mean(1)], 1))
        loss.backward()
        session.report(loss)
        optimizer.step()
        plans.append(max(b.codec for b in session.plan.buckets) if session.plan else "")
    found = guard(run)
    return {"plans": plans, "said": session.decisions(), "history": found.history if found else [],
            "weights": torch.cat([p.detach().view(-1) for p in model.parameters()]), "stats": session.stats()}


def ran(steps: int, codec: str, how: str = "module", **fields: Any) -> list[dict[str, Any]]:
    with coordinators(1, WORLD, SERVERS) as made:
        setting = Setting(how, (made[0].address,), codec, servers=SERVERS, fields=tuple(fields.items()))
        return list(pool(WORLD).call(play, WORLD, train, setting, steps))


@pytest.mark.parametrize(("how", "codec"), [
    ("module", "topk(ratio=0.0001)"), ("ddp", "topk(ratio=0.0001)"), ("module", "terngrad()"),
])
def test_a_codec_that_loses_too_much_is_made_finer_at_one_step(how: str, codec: str) -> None:
    results = ran(LATEST, codec, how, guard="act", max_loss=0.005)
    assert results[0]["plans"] == results[1]["plans"], "both ranks at the same step"
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    changes = [c for c in results[0]["history"] if isinstance(c, Change)]
    assert changes[0].seen.cosine < 0.8
    assert all(c.after > c.before for c in changes[:2])
    assert "finer from here on" in results[0]["said"][0]
    outcomes = [o for o in results[0]["history"] if isinstance(o, Outcome)]
    assert outcomes[0].change is changes[0]
    assert outcomes[-1].seen.cosine >= 0.8, "what it was changed to is good enough"
    assert results[0]["stats"]["guard_s"] > 0


@pytest.mark.parametrize(("codec", "fields"), [
    ("identity()", {"guard": "act", "max_loss": 0.005}), ("fp16()", {"guard": "act", "max_loss": 0.005}),
    ("topk(ratio=0.0001)", {}), ("topk(ratio=0.0001)", {"guard": "off", "max_loss": 0.005}),
])
def test_what_is_exact_or_not_guarded_is_left_alone(codec: str, fields: dict[str, Any]) -> None:
    results = ran(40, codec, **fields)
    assert len(set(results[0]["plans"])) == 1
    assert results[0]["said"] == []
    compared = codec == "fp16()"
    assert (results[0]["stats"]["guard_s"] > 0) == compared


def test_a_plan_that_was_asked_for_stays_and_the_user_hears_why() -> None:
    results = ran(40, "topk(ratio=0.0001)", max_loss=0.005)
    assert len(set(results[0]["plans"])) == 1
    assert any("the plan stays as it was asked for" in line for line in results[0]["said"])
    assert len(results[0]["said"]) <= 3, "each complaint once"


def look_closely(run: Run, codec: str) -> dict[str, Any]:
    """Every comparison of a few steps, beside what it should have seen, computed from the gradients themselves."""
    from commlayer.runtime import comparing

    guarding.PRICE = 1e9
    model = mlp()
    wrapped = run.wrap(model)
    session = run.sessions[0]
    session.weight(1.0 + run.rank)
    seen: list[dict[str, Any]] = []
    real, locally = comparing.everywhere, comparing.here
    payloads: list[tuple[Any, Any]] = []

    def decoded(worker: Any, of: Any, mine: torch.Tensor, groups: Any, deadline_s: float) -> Any:
        found = locally(worker, of, mine, groups, deadline_s)
        if run.setting is not None and run.setting.ranks_per_node == 1:
            flow = of.flow
            payloads.append((found.fidelity(), measure(flow.codec, mine, flow.state["_sent"], flow.state)))
        return found

    def watched(of: Any, mine: torch.Tensor, groups: Any, deadline_s: float) -> Any:
        own = mine.clone()
        found = real(of, mine, groups, deadline_s)
        seen.append({"slices": of.flow.bucket.slices, "start": of.start, "stop": of.stop, "own": own, "exact": mine.clone(),
                     "back": of.flow.x[of.start : of.stop].clone(), "dots": found})
        return found

    comparing.everywhere, comparing.here = watched, decoded
    try:
        grads = []
        for step in range(3 * guarding.EVERY_LEAST):
            made = torch.Generator().manual_seed(10 * step + run.rank)
            x = torch.randn(6, 12, generator=made)
            alone = mlp()
            alone.load_state_dict(model.state_dict())
            nn.functional.mse_loss(alone(x), x[:, :3]).backward()
            grads.append([p.grad.detach().view(-1) * (1.0 + run.rank) for p in alone.parameters() if p.grad is not None])
            model.zero_grad()
            nn.functional.mse_loss(wrapped(x), x[:, :3]).backward()
    finally:
        comparing.everywhere, comparing.here = real, locally
    steps = [s for s in range(len(grads)) if s >= guarding.SETTLE and (s - guarding.SETTLE) % guarding.EVERY_LEAST == 0]
    return {"seen": seen, "grads": [grads[s] for s in steps], "payloads": payloads}


@pytest.mark.parametrize(("codec", "ranks_per_node"), [("topk(ratio=0.1)", 1), ("int8(block=32)", 1), ("topk(ratio=0.1)", 2)])
def test_all_ranks_compare_with_the_exact_sum(codec: str, ranks_per_node: int) -> None:
    with coordinators(1, WORLD, 1) as made:
        setting = Setting("module", (made[0].address,), codec, ranks_per_node=ranks_per_node, fields=(("guard", "warn"),))
        results = pool(WORLD).call(play, WORLD, look_closely, setting, codec)
    assert len(results[0]["seen"]) == len(results[0]["grads"]) == 2
    for number in range(2):
        mine, theirs = (r["seen"][number] for r in results)
        expected = []
        for rank in range(WORLD):
            whole = torch.cat([results[rank]["grads"][number][s.tensor][s.start : s.stop] for s in mine["slices"]])
            piece = whole[mine["start"] : mine["stop"]]
            assert torch.allclose(results[rank]["seen"][number]["own"], piece, rtol=1e-5, atol=1e-7)
            expected.append(piece)
        total = expected[0] + expected[1]
        assert torch.allclose(mine["exact"], total, rtol=1e-5, atol=1e-7), "the exact mean, but for the sum of weights"
        assert mine["dots"].fidelity().cosine == pytest.approx(float(nn.functional.cosine_similarity(total, mine["back"], 0)),
                                                               rel=1e-4)
        assert mine["dots"] == theirs["dots"]
    for from_residuals, from_payload in results[0]["payloads"]:
        assert from_residuals == pytest.approx(from_payload, rel=1e-4, abs=1e-4), "what left, told by what stayed"
    assert bool(results[0]["payloads"]) == (ranks_per_node == 1)
