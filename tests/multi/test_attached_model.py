"""What changes after attach: a parameter that nobody averages ends the job by its name, a frozen one counts as unused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec import structs
from support.attached import data, mlp
from support.rank_pool import pool, quick
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.guards import AttachedModel
from commlayer.engine.optimizers import job_of, parameters_of
from commlayer.errors import CommError
from commlayer.planner import default_plan

WORLD = 2
BOTH, ONE = (0, 1), (1,)
Change = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def unfreeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.requires_grad_(True)


def add(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.add_module("head", nn.Linear(3, 3))
    optimizer.add_param_group({"params": model.head.parameters()})


def replace(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[4].bias = nn.Parameter(torch.ones(3))
    optimizer.param_groups[0]["params"].append(model[4].bias)


def enlist(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 5))]})


def freeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[2].bias.requires_grad_(False)


def leave_out(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    del model[4]  # Tanh before it stays
    model.append(nn.Linear(40, 3).requires_grad_(False))


def local(model: nn.Module) -> Any:
    made = default_plan(job_of(model), codec="identity()", path="allreduce", servers=0, ranks_per_node=WORLD, fuse_nbytes=4096,
                        cut_nbytes=4096)
    return structs.replace(made, local_steps=2)


def run(rank: int, change: Change, who: tuple[int, ...], how: str) -> tuple[str, list[torch.Tensor]]:
    """How it ended, and the parameters then."""
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    wrapped: Any = DistributedDataParallel(model, find_unused_parameters=True) if how == "ddp" else model
    plan = local(model) if how == "local" else "auto"
    said = ""
    try:
        with commlayer.attach(wrapped, optimizer, plan=plan, config=quick(ranks_per_node=WORLD)):
            for step in range(6):
                if step == 3 and rank in who:
                    change(model, optimizer)
                optimizer.zero_grad()
                x, y = data(rank, step)
                nn.functional.mse_loss(wrapped(x), y).backward()
                optimizer.step()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, [p.detach().clone() for p in model.parameters()]


LINES = {
    unfreeze: "parameter 0.weight was frozen when the model was attached, and no longer is",
    add: "parameter head.weight was added",
    replace: "parameter 4.bias replaced another parameter",
    enlist: "parameter 0 of the optimizer's group 1, of shape (2, 5), was added after attach() and belongs",
}


@pytest.mark.commit(3)
@pytest.mark.parametrize(("change", "who", "how"), [
    *((change, BOTH, "module") for change in LINES), (unfreeze, ONE, "module"), (unfreeze, BOTH, "local"),
    (unfreeze, BOTH, "ddp"), (add, BOTH, "ddp"), (enlist, BOTH, "ddp"),
])
def test_what_nobody_averages_ends_the_job_by_its_name(change: Change, who: tuple[int, ...], how: str) -> None:
    results = pool(WORLD).call(run, change, who, how)
    for rank, (said, _) in enumerate(results):
        assert LINES[change] in said
        assert said.endswith("[E-MODEL-CHANGED]")
        assert "\n" not in said
        assert said.startswith("InvalidInput: ") == (rank in who)
    if who == BOTH and how != "local":  # before the optimizer could take it
        assert all(torch.equal(a, b) for a, b in zip(results[0][1][:6], results[1][1][:6], strict=True))


@pytest.mark.parametrize(("change", "who", "how"), [
    (freeze, BOTH, "module"), (freeze, ONE, "module"), (freeze, BOTH, "local"), (leave_out, BOTH, "module"),
])
def test_what_is_frozen_counts_as_unused(change: Change, who: tuple[int, ...], how: str) -> None:
    (said, mine), (too, theirs) = pool(WORLD).call(run, change, who, how)
    assert said == too == ""
    assert change is leave_out or all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def shared(rank: int) -> str:
    """One optimizer over two models; the second one grows by what the session then knows."""
    one, two = mlp(0), mlp(1)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    with commlayer.attach(one, optimizer, config=quick(ranks_per_node=WORLD)), \
            commlayer.attach(two, config=quick(ranks_per_node=WORLD)):
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": two.parameters()})
            x, y = data(rank, step)
            nn.functional.mse_loss(one(x) + two(x), y).backward()
            optimizer.step()
    return ""


def test_another_attached_model_may_join_the_optimizer() -> None:
    assert pool(WORLD).call(shared) == ["", ""]


def strangers(rank: int, named: bool) -> list[str]:
    """What is logged where the optimizer steps another model, too: parameters with names and without."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log, model = logging.getLogger("commlayer"), mlp()
    critic = nn.Linear(2, 5)
    groups: Any = [{"params": [*model.named_parameters()]}, {"params": [*critic.named_parameters("critic")]}]
    if not named:
        groups = [{"params": [*model.parameters()]}, {"params": [*critic.parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    log.addHandler(handler)
    try:
        with commlayer.attach(model, optimizer, config=quick()):
            model(data(rank, 0)[0]).sum().backward()
            optimizer.step()
    finally:
        log.removeHandler(handler)
    return [line for line in lines if "no attached model" in line]


@pytest.mark.parametrize(("named", "first", "second"), [
    (True, "critic.weight", "critic.bias"), (False, "parameter 0 of group 1", "parameter 1 of group 1"),
])
def test_parameters_of_another_model_are_named(named: bool, first: str, second: str) -> None:
    for (line,) in pool(WORLD).call(strangers, named):
        assert f"2 parameters that belong to no attached model: {first} (shape (5, 2)), {second} (shape (5,))." in line


def step_inside(rank: int, when: str, how: str) -> tuple[str, bool]:
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    wrapped: Any = DistributedDataParallel(model) if how == "ddp" else model

    def hook_all() -> None:
        for p in model.parameters():
            optimizer = torch.optim.Adam([p], lr=0.1)

            def step(parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                parameter.grad = None

            p.register_post_accumulate_grad_hook(step)

    if when == "torch":
        _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.1})
    if when == "before":
        hook_all()
    try:
        with commlayer.attach(wrapped, config=quick(ranks_per_node=WORLD)):
            if when == "after":
                hook_all()
            x, y = data(rank, 0)
            nn.functional.mse_loss(wrapped(x), y).backward()
    except (RuntimeError, ValueError, CommError) as error:  # the other rank may have left for it
        return str(error), all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return "", False


@pytest.mark.parametrize(("when", "how"), [("before", "module"), ("after", "module"), ("torch", "module"), ("after", "ddp")])
def test_an_optimizer_that_steps_inside_backward_is_refused_by_name(when: str, how: str) -> None:
    for said, untouched in pool(WORLD).call(step_inside, when, how):
        assert "Adam" in said
        assert said.endswith("[E-STEP-IN-BACKWARD]")
        assert untouched


def test_optimizers_of_other_parameters_may_step_inside_backward() -> None:
    mine, other = nn.Linear(2, 2), nn.Linear(2, 2)
    attached = AttachedModel(mine, parameters_of(mine))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    handle = other.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    other(mine(torch.ones(1, 2))).sum().backward()
    attached.remove()
    handle.remove()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    mine.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    mine(torch.ones(1, 2)).sum().backward()
