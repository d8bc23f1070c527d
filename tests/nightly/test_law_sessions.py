"""The law through sessions: applied updates + residuals = input gradients, for modules and DDP, whatever a script does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_pool
from support.law import (
    EVENTS,
    LEFT_OUT,
    SIZES,
    STEPS,
    WORLD,
    Given,
    Script,
    applied_to,
    broken_off,
    plan_of,
    residuals_of,
    slopes,
)
from support.rank_pool import pool

import commlayer
from commlayer.engine.optimizers import job_of


def run(rank: int, how: str, kind: str, per_node: int, address: str, folder: str) -> list[tuple[str, dict[str, Any]]]:
    script, results = Script(rank, how, kind, per_node, address, folder), []
    try:
        for name, event in EVENTS.items():
            if name in LEFT_OUT.get("delayed" if "delayed" in how else script.way, ()):
                continue
            if "ddp" in how and event is broken_off:  # torch itself refuses the next forward pass
                continue
            event(script)
            results.append((name, script.account()))
    finally:
        script.session.close()
    return results


@pytest.mark.commit(4)
@pytest.mark.parametrize(("how", "kind", "per_node"), [
    ("module", "topk", 1), ("module", "int8", 2), ("module", "onebit", 1), ("module", "low rank", 1), ("module", "topk", 2),
    ("module", "topk, staged", 1), ("module", "int8, staged", 2), ("module, optimizer unnamed", "topk", 1),
    ("module, forward", "topk", 1), ("module, forward, late", "int8", 1), ("module, forward", "onebit", 2),
    ("module, forward", "topk, staged", 1),
    ("ddp", "topk", 1), ("ddp", "int8", 1), ("ddp, view", "topk", 1), ("ddp", "onebit", 2), ("ddp", "topk, staged", 1),
    ("module, updates", "topk", 1), ("ddp, rounds", "int8", 1), ("module, overlapped", "topk", 2),
    ("ddp, overlapped", "topk, staged", 1),
    ("module", "topk, shards", 2), ("module", "momentum, shards", 2), ("ddp, view", "int8, shards", 2),
    ("module, forward", "topk, shards", 2), ("ddp, rounds", "topk, shards", 2), ("module, overlapped", "int8, shards", 2),
    ("module, delayed", "topk, late all", 1), ("module, delayed", "topk, late some", 2),
    ("module, delayed", "int8, late all", 2), ("module, delayed", "topk, shards, late some", 2),
    ("ddp, delayed", "topk, late all", 1), ("ddp, view, delayed", "int8, late some", 2),
])
def test_applied_and_owed_is_what_was_put_in(how: str, kind: str, per_node: int, tmp_path: Path) -> None:
    with rank_pool.Servers(WORLD, 2) as servers:
        results = pool(WORLD).call(run, how, kind, per_node, servers.address, str(tmp_path / "save"))
    wrong = []
    for (name, first), (_, second) in zip(*results, strict=True):
        for t in range(len(SIZES)):
            assert torch.equal(first["applied"][t], second["applied"][t]), f"{name}: ranks differ"
            put = first["put"][t] + second["put"][t]
            error = float((WORLD * first["applied"][t] + first["residuals"][t] + second["residuals"][t] - put).abs().max())
            if error > 1e-5 * float(put.abs().max()):
                wrong.append(f"{name}: tensor {t} is off by {error:.2e}")
    assert not wrong, "\n".join(wrong)


def adversaries(rank: int, codec: str, addresses: list[str]) -> list[dict[str, Any]]:
    """Two models, two optimizers, alternating passes: the second one's loss gives the first gradients that nobody wants."""
    models = [Given(), Given()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    sessions = [commlayer.attach(m, o, compression=commlayer.compressors.parse(codec), config=rank_pool.quick(join=address))
                for m, o, address in zip(models, optimizers, addresses, strict=True)]
    for step in range(20):
        optimizers[0].zero_grad()
        models[0](*(torch.ones(s) for s in SIZES)).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        through = models[0](*(-torch.ones(s) for s in SIZES))  # what the first model must not follow
        (models[1](*slopes(rank, step)) + through).backward()
        optimizers[1].step()
    optimizers[0].zero_grad()
    moved = []
    for model, session in zip(models, sessions, strict=True):
        moved.append({"applied": applied_to(model), "residuals": residuals_of(session)})
        session.close()
    return moved


@pytest.mark.parametrize(
    "codec", ["topk(ratio=0.1)", "int8(block=64)", "onebit(block=64)", "randomk(ratio=0.2)", "powersgd(rank=1)"])
def test_a_pass_for_another_model_moves_nothing(codec: str) -> None:
    """Of 20 steps of 1 all is applied, or in residuals of workers and servers."""
    with rank_pool.Servers(WORLD, 1) as first, rank_pool.Servers(WORLD, 1) as second:
        results = pool(WORLD).call(adversaries, codec, [first.address, second.address])
        kept = sum(float(r.sum(dtype="float64")) for r in first.residuals().values())
    applied = sum(float(t.sum()) for t in results[0][0]["applied"])
    owed = sum(float(t.sum()) for r in results for t in r[0]["residuals"])
    put = 20.0 * sum(torch.Size(s).numel() for s in SIZES)
    assert applied + (owed + kept) / WORLD == pytest.approx(put, rel=1e-5)
    assert applied > 0.3 * put, "most of it has moved the model"


def two_optimizers(rank: int, address: str) -> dict[str, Any]:
    """One session, an optimizer for each tensor, one scaler: the optimizers of a bucket that is not finite skip."""
    model = Given()
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in model.parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    session = commlayer.attach(model, optimizers[0], grad_scaler=scaler, config=rank_pool.quick(join=address),
                               plan=plan_of(job_of(model), "topk", 1))
    put = [torch.zeros(s, dtype=torch.float64) for s in SIZES]
    for step in range(STEPS):
        given = slopes(rank, step)
        for t in [1] if step % 2 else range(len(SIZES)):  # the other two share a bucket
            put[t] += given[t].double()
        if step % 2 and rank == 0:
            given[0][5] = float("inf")
        scaler.scale(model(*given)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    account = {"put": put, "residuals": residuals_of(session), "applied": applied_to(model)}
    session.close()
    return account


def test_of_a_step_that_is_not_finite_what_an_optimizer_steps_with_is_applied() -> None:
    with rank_pool.Servers(WORLD, 2) as servers:
        first, second = pool(WORLD).call(two_optimizers, servers.address)
    for t in range(len(SIZES)):
        got = WORLD * first["applied"][t] + first["residuals"][t] + second["residuals"][t]
        put = first["put"][t] + second["put"][t]
        torch.testing.assert_close(got, put, rtol=0, atol=1e-5 * float(put.abs().max()))
