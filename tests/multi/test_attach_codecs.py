"""attach() with codecs that lose something: training converges, nothing is lost over skipped steps, buffers and idle ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, data, loss_of, mlp, play, weights
from support.rank_pool import pool
from torch import nn

WORLD = 2
TOPK = "topk(ratio=0.05, values='int8', exact=False)"
INT8 = "int8(block=64)"
RUNS = "block_threshold(ratio=0.2, run=8, values='int4')"
DITHERED = "qsgd(block=64, levels=7, norm='max')"
FACTORS = "powersgd(rank=2)"
DRAWN = "randomk(ratio=0.7, values='bf16', unbiased=False)"


def fit(run: Run) -> dict[str, Any]:
    model = mlp()
    wrapped = run.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 200 else 0.3)
    losses = []
    for step in range(300):
        optimizer.zero_grad()
        loss = loss_of(run, wrapped, step % 5)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return weights(model) | {"losses": torch.stack(losses)}


@pytest.fixture(scope="module")
def dense() -> torch.Tensor:
    losses: torch.Tensor = play(0, WORLD, fit, None)["losses"]
    return losses


@pytest.mark.commit(2)
@pytest.mark.parametrize(
    ("codec", "how"), [(TOPK, "module"), (TOPK, "ddp"), (INT8, "module"), (INT8, "ddp"), (RUNS, "module"), (DRAWN, "ddp"),
                       (DITHERED, "module"), (FACTORS, "module")]
)
def test_lossy_codecs_reach_the_dense_loss(codec: str, how: str, dense: torch.Tensor) -> None:
    with coordinators(1, WORLD, 2) as jobs:
        results = pool(WORLD).call(play, WORLD, fit, Setting(how, (jobs[0].address,), codec, servers=2))
    both = torch.stack([r["losses"] for r in results]).mean(0)
    begin, dense_end, end = float(dense[:10].mean()), float(dense[-10:].mean()), float(both[-10:].mean())
    assert dense_end < 0.3 * begin, "the reference must have learned"
    assert end < dense_end + 0.1 * begin
    for name, tensor in results[0].items():
        assert name == "losses" or torch.equal(tensor, results[1][name])


def scheduled(run: Run) -> dict[str, Any]:
    """What the workers took as the learning rate, step by step, while a schedule changes it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    wrapped = run.wrap(model, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rates = []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(run, wrapped, step).backward()
        optimizer.step()
        schedule.step()
        rates.append(run.sessions[0].inspect.connection.worker.units.rate)
    return {"rates": rates}


@pytest.mark.parametrize("how", ["module", "ddp"])
def test_a_session_passes_the_learning_rate_on(how: str) -> None:
    codec = "error_feedback(int8(), lr_correction=True)"
    with coordinators(1, WORLD, 1) as jobs:
        results = pool(WORLD).call(play, WORLD, scheduled, Setting(how, (jobs[0].address,), codec))
    assert [r["rates"] for r in results] == [pytest.approx([0.2, 0.2, 0.1, 0.1, 0.05, 0.05])] * WORLD




# ---- buffers, and ranks without samples


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def batchnorm(run: Run) -> dict[str, Any]:
    """Alone: a replica per part, averaged by hand, since statistics of the union are not those of its parts."""
    replicas = [normalised() for _ in run.parts]
    wrapped = [run.wrap(m) for m in replicas]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in replicas]
    for step in range(4):
        for part, model, optimizer in zip(run.parts, wrapped, optimizers, strict=True):
            optimizer.zero_grad()
            x, y = data(part, step)
            nn.functional.mse_loss(model(x * (part + 1)), y).backward()
        if run.alone:
            with torch.no_grad():
                for same in zip(*(m.parameters() for m in replicas), strict=True):
                    mean = torch.stack([p.grad for p in same]).mean(0)
                    for p in same:
                        p.grad.copy_(mean)
                for same in zip(*(m.buffers() for m in replicas), strict=True):
                    if same[0].is_floating_point():
                        mean = torch.stack(same).mean(0)
                        for b in same:
                            b.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
    return {name: t.clone() for name, t in replicas[0].state_dict().items()}


@pytest.mark.parametrize("codec", ["identity()", INT8])
def test_batchnorm_buffers_are_averaged(codec: str) -> None:
    with coordinators(1, WORLD, 1) as jobs:
        results = pool(WORLD).call(play, WORLD, batchnorm, Setting("module", (jobs[0].address,), codec))
    expected = play(0, WORLD, batchnorm, None)
    assert int(results[0]["1.num_batches_tracked"]) == 4
    loose = {} if codec == "identity()" else {"rtol": 0.05, "atol": 0.05}
    for name, tensor in expected.items():
        torch.testing.assert_close(results[0][name], tensor, **loose, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(results[0][name], results[1][name])


def out_of_samples(run: Run) -> dict[str, Any]:
    """Rank 1 has half the batches of rank 0; then it takes part with weight 0."""
    model = mlp()
    wrapped = run.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        if run.alone:
            losses = [nn.functional.mse_loss(wrapped(x), y) for x, y in (data(p, step) for p in ([0, 1] if step < 3 else [0]))]
            torch.stack(losses).mean().backward()
        elif run.rank == 0 or step < 3:
            run.weight(1)
            loss_of(run, wrapped, step).backward()
        else:
            run.weight(0)
            run.sessions[0].synchronize()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("path", ["service", "all-reduce"])
def test_a_rank_without_samples_takes_part_with_weight_0(path: str) -> None:
    setting = Setting("module") if path == "service" else Setting("module", servers=0, plan="auto", ranks_per_node=2)
    with coordinators(1, WORLD, setting.servers) as jobs:
        setting = setting._replace(addresses=tuple(m.address for m in jobs))
        results = pool(WORLD).call(play, WORLD, out_of_samples, setting)
    for name, tensor in play(0, WORLD, out_of_samples, None).items():
        torch.testing.assert_close(results[1][name], tensor)
        assert torch.equal(results[0][name], results[1][name])
