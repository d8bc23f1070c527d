"""Ranks with other optimizers, settings, weights or states: all ranks name what differs, at attach() or while training."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from support.arguments import sync_of
from support.attached import assert_refused, mlp, outcome, parameters, same, train_step
from support.rank_pool import pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.optimizers import differences, settings_of

WORLD = 2


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    weights = [*model.parameters()]
    if kind == "sgd":
        return torch.optim.SGD(weights, lr=0.1)
    if kind == "decayed":
        return torch.optim.AdamW(weights, lr=0.01, weight_decay=0.5)
    if kind == "grouped":
        return torch.optim.AdamW([{"params": weights[:2], "lr": 0.02}, {"params": weights[2:]}], lr=0.01)
    if kind == "tensor lr":
        return torch.optim.AdamW(weights, lr=torch.tensor(0.01), foreach=False)
    stepped = weights[::2] if kind == "half" else weights[::-1] if kind == "reversed" else weights
    return torch.optim.AdamW(stepped, lr=0.02 if kind == "faster" else 0.01)


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t.clone() for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]


class Result(NamedTuple):
    error: str
    decisions: list[str]
    weights: list[torch.Tensor]
    moments: list[torch.Tensor]
    rate: float
    """The first group's learning rate at the end."""


def run(rank: int, how: str, what: str, drift: str, kind: str = "adamw") -> Result:
    """Rank 1 has an optimizer of another kind. Or `what` is loaded or set by some ranks, after attach() or from step 5 on."""
    model, other = mlp(), mlp()
    if kind == "frozen" and rank:
        next(model.parameters()).requires_grad_(False)
    optimizer, trained = optimizer_of(model, kind if rank else "adamw"), optimizer_of(other, "adamw")
    for number in range(3):
        train_step(other, trained, rank if what == "own state" else 0, number)
    wrapped: Any = DistributedDataParallel(model) if how == "ddp" else model
    config = quick(ranks_per_node=WORLD, drift=drift, **({"drift_steps": 2} if what == "rate" else {}))
    session: Any = None

    def train() -> None:
        nonlocal session
        session = commlayer.attach(wrapped, optimizer, config=config, sync=sync_of(every=4) if how == "local" else None)
        if what == "lr" and rank:
            optimizer.param_groups[0]["lr"] = 0.02
        elif what == "weights" and rank == 0:
            model.load_state_dict(other.state_dict())
        elif what == "own state" or (what == "state" and rank == 0):
            optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        for number in range(14 if what == "rate" else 8):
            if what == "rate" and rank and number > 4:
                optimizer.param_groups[0]["lr"] = 0.05
            train_step(wrapped, optimizer, rank, number)

    error = outcome(train)
    decisions = session.inspect.decisions() if session else []
    if session:
        session.close()
    return Result(error, decisions, parameters(model), moments(model, optimizer), optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("how", "kind", "name", "values"), [
    ("module", "sgd", "optimizer", ("AdamW", "SGD")), ("module", "faster", "lr of the optimizer", ("0.01", "0.02")),
    ("ddp", "faster", "lr of the optimizer", ("0.01", "0.02")),  # in the first backward pass
    ("module", "decayed", "weight_decay of the optimizer", ("0.01", "0.5")),
    ("module", "grouped", "number of the optimizer's groups", ("1", "2")),
    ("module", "half", "parameters of the optimizer", ("6", "3")),
    ("module", "reversed", "parameters of the optimizer", ("6", "6")), ("module", "frozen", "trained parameters", ("6", "5")),
])
def test_optimizers_that_differ_are_named_on_all_ranks(how: str, kind: str, name: str, values: tuple[str, str]) -> None:
    lines = [result.error for result in pool(WORLD).call(run, how, "", "resync", kind)]
    assert lines[0] == lines[1]
    assert_refused(lines[0], "E-RANKS-DIFFER", f": {name}: {values[0]} ", f"{values[1]} ", "on rank 0 (", "on rank 1 (")


@pytest.mark.parametrize("kind", ["sgd", "faster", "half"])
def test_drift_warn_trains_with_different_optimizers(kind: str) -> None:
    for result in pool(WORLD).call(run, "module", "", "warn", kind):
        assert result.error == ""
        assert any("on rank 0 (" in line and 'drift="warn"' in line for line in result.decisions)


def test_a_tensor_as_learning_rate_is_no_difference() -> None:
    assert [result[:2] for result in pool(WORLD).call(run, "module", "", "end", "tensor lr")] == [("", [])] * WORLD


STATES = "the optimizer's state of 0.weight, 0.bias, 2.weight and 3 more differs on rank 1"


@pytest.mark.commit(6)
@pytest.mark.parametrize(("how", "what", "drift", "named"), [
    ("module", "state", "resync", STATES), ("module", "nothing", "end", ""), ("module", "state", "end", STATES),
    ("module", "own state", "resync", STATES), ("ddp", "state", "resync", STATES), ("local", "state", "resync", STATES),
    ("module", "lr", "resync", "lr of the optimizer is 0.01 on rank 0, 0.02 on rank 1"),
    ("module", "weights", "resync", "weights of 0.weight, 0.bias, 2.weight and 3 more"),
    ("local", "own state", "end", ""),  # each rank keeps its own moments
    ("ddp", "state", "end", STATES), ("module", "state", "warn", STATES), ("ddp", "nothing", "end", ""),
    ("local", "nothing", "end", ""),
])
def test_what_some_ranks_load_is_named_and_handled_as_configured(how: str, what: str, drift: str, named: str) -> None:
    results = pool(WORLD).call(run, how, what, drift)
    steps = [[float(t) for t in result.moments if t.numel() == 1] for result in results]
    for result, counted in zip(results, steps, strict=True):
        lines = [*result.decisions, *filter(None, [result.error])]
        assert all(named in line and "\n" not in line for line in lines)
        assert bool(lines) >= bool(named)
        if named and drift == "end":
            assert_refused(result.error, "E-REPLICAS")
        else:
            assert result.error == ""
        if drift == "resync":
            assert len(result.decisions) == 1
            assert result.rate == 0.01
            assert counted == [8.0 if what in ("lr", "weights") else 11.0] * 6
    if drift == "warn":
        assert steps[0] != steps[1], "states stay as they are"
    elif drift == "resync" and how != "local":
        assert same(results[0].moments, results[1].moments)
        assert same(results[0].weights, results[1].weights)


@pytest.mark.commit(1)
@pytest.mark.parametrize(("drift", "ends"), [("resync", True), ("end", True), ("warn", False)])
def test_a_learning_rate_that_one_rank_changes_again_and_again_is_named(drift: str, ends: bool) -> None:
    named = "lr of the optimizer is 0.01 on rank 0, 0.05 on rank 1"
    for result in pool(WORLD).call(run, "module", "rate", drift):
        if ends:
            assert_refused(result.error, "E-REPLICAS", named)
        else:
            assert result.error == ""
        assert len([line for line in result.decisions if named in line]) == (drift != "end")


class Adaptive(torch.optim.SGD):
    """Adapts values in its groups, as Prodigy does with `d` and ScheduleFree with `k`, `weight_sum` and `train_mode`."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-6, **rest: Any) -> None:
        super().__init__(params, lr=lr, **rest)
        for group in self.param_groups:
            group.update(d0=d0, d=d0, k=0, train_mode=False)


def test_settings_compare_by_value_and_leave_out_what_an_optimizer_adapts() -> None:
    model = mlp()
    one, other = (settings_of(optimizer_of(model, kind), model.named_parameters()) for kind in ("adamw", "tensor lr"))
    assert one == other
    assert settings_of(None, model.named_parameters()) == {}
    assert differences([one, {**other, "lr of the optimizer": "0.5"}]) == {"lr of the optimizer": ["0.01", "0.5"]}
    fresh, adapted = (Adaptive(model.parameters(), momentum=0.9) for _ in range(2))
    adapted.param_groups[0].update(d=0.5, k=7, train_mode=True)
    before, after = (settings_of(each, model.named_parameters()) for each in (fresh, adapted))
    assert before == after
    assert {"lr of the optimizer", "d0 of the optimizer", "momentum of the optimizer"} <= before.keys()
    adapted.param_groups[0].update(d0=1e-5, momentum=0.8)
    assert differences([before, settings_of(adapted, model.named_parameters())]).keys() == {
        "d0 of the optimizer", "momentum of the optimizer"}
