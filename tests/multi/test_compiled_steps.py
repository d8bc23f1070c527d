"""torch.compile of a function that holds forward, backward and optimizer step: hooks run as without it. Real ranks."""

from __future__ import annotations

import functools

import pytest
import torch
import torch._dynamo  # else its first import comes where it lacks a name
from support.attached import coordinators, data, mlp, weights
from support.rank_pool import pool, quick, ranks_first
from torch import nn

import commlayer
from commlayer.engine.hooks import uncompiled

WORLD, STEPS = 2, 3
_ranks = ranks_first(WORLD)


def trained(rank: int, codec: str, compiled: bool, address: str) -> dict[str, torch.Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.attach(model, optimizer, compression=codec, config=quick(join=address)):
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        run = torch.compile(step, backend="aot_eager") if compiled else step
        for number in range(STEPS):
            run(*data(rank, number))
    torch._dynamo.reset()
    return weights(model)


@pytest.mark.commit(1)
@pytest.mark.parametrize("codec", ["identity()", "topk(ratio=0.1)"])
def test_a_compiled_step_trains_as_one_that_is_not(codec: str) -> None:
    results = []
    for compiled in (False, True):
        with coordinators(1, WORLD, 1) as jobs:
            results += pool(WORLD).call(trained, codec, compiled, jobs[0].address)
    for other in results[1:]:
        for name, tensor in results[0].items():
            torch.testing.assert_close(other[name], tensor)
    assert all(torch.equal(results[2][name], results[3][name]) for name in results[2]), "ranks are alike"


def test_hooks_do_without_what_torch_2_6_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(number: int, given: int) -> int:
        return number + given

    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    assert uncompiled(functools.partial(hook, 1))(2) == 3
    assert uncompiled(hook)(1, 2) == 3
