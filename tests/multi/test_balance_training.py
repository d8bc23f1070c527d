"""Uneven and changing batch shares through the real runtime train like a single process on the union of the batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, mlp, play, weights
from support.rank_pool import pool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from commlayer.balance import Sampler

WORLD = 3
EPOCHS = 2
BATCH, LENGTH = 12, 67
SHARES = [7, 4, 1]
LATER = {2: [1, 2, 9], 4: [12, 0, 0]}
"""By the step that they are for, announced as soon as the step is free."""


def dataset() -> TensorDataset:
    x = torch.randn(LENGTH, 12, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), x.sum(1).sin()], dim=1))


def sampler_of(run: Run, **fields: Any) -> Sampler:
    """Alone, the same stream in whole batches."""
    shares = [BATCH] if run.alone else SHARES
    return Sampler(LENGTH, BATCH, shares=shares, rank=0 if run.alone else run.rank, seed=1, **({} if run.alone else fields))


def train(run: Run, model: nn.Module, sampler: Sampler, *, workers: int = 0,
          later: dict[int, list[int]] = LATER) -> dict[str, Any]:
    wrapped = run.wrap(model)
    session = None if run.alone else run.sessions[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    if not run.alone:
        for step, shares in later.items():
            sampler.announce(step, shares)
    sizes = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in sampler.follow(loader, session):
            sizes.append(len(x))
            (nn.functional.mse_loss(wrapped(x), y) * sampler.fraction).backward()
            if sampler.last:
                optimizer.step()
                optimizer.zero_grad()
    assert sampler.step == EPOCHS * -(-LENGTH // BATCH)
    return weights(model) | {"most": torch.tensor(max(sizes))}


def changing_shares(run: Run) -> dict[str, Any]:
    return train(run, mlp(), sampler_of(run))


def micro_batches(run: Run) -> dict[str, Any]:
    """Each rank has another cap, so ranks differ in how many backward passes make their step."""
    return train(run, mlp(), sampler_of(run, cap=[3, 0, 5][run.rank]))


def loader_workers(run: Run) -> dict[str, Any]:
    return train(run, mlp(), sampler_of(run), workers=1)


def tokens(run: Run) -> dict[str, Any]:
    """A loss that is a mean over tokens, of which samples have different numbers."""
    model = mlp()
    wrapped = run.wrap(model)
    sampler = sampler_of(run, cap=4)
    mask = (torch.arange(LENGTH) % 3 + 1)[:, None] > torch.arange(3)

    def count(batch: list[torch.Tensor]) -> float:
        return float(batch[2].sum())

    loader = DataLoader(TensorDataset(*dataset().tensors, mask), batch_sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y, used in sampler.follow(loader, None if run.alone else run.sessions[0], weigh=count):
        loss = ((wrapped(x) - y).square() * used).sum() / used.sum()
        (loss * sampler.fraction).backward()
        if sampler.last:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def same_weights(results: list[dict[str, Any]]) -> None:
    for name in [n for n in results[0] if n != "most"]:
        for other in results[1:]:
            assert torch.equal(results[0][name], other[name]), f"{name} differs between ranks"


def run_all(script: Callable[[Run], dict[str, Any]], how: str) -> list[dict[str, Any]]:
    with coordinators(1, WORLD, 1) as jobs:
        return pool(WORLD).call(play, WORLD, script, Setting(how, addresses=tuple(m.address for m in jobs)))


@pytest.mark.commit(3)
@pytest.mark.parametrize(("script", "how"), [
    (changing_shares, "module"), (changing_shares, "ddp"), (micro_batches, "module"), (micro_batches, "ddp"),
    (loader_workers, "module"), (tokens, "module"),
], ids=lambda value: getattr(value, "__name__", value))
def test_training_equals_a_single_process_on_the_union(script: Callable[[Run], dict[str, Any]], how: str) -> None:
    results = run_all(script, how)
    expected = play(0, WORLD, script, None)
    same_weights(results)
    for name, tensor in expected.items():
        if name != "most":
            torch.testing.assert_close(results[0][name], tensor, msg=lambda m, n=name: f"{n}: {m}")
    if script is micro_batches:
        assert [int(r["most"]) for r in results] == [3, 4, 5]
