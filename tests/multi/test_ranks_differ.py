"""Ranks that train differently: all of them name the setting, weight or state that differs, at attach() or the first step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.arguments import sync_of
from support.attached import data, mlp
from support.rank_pool import pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.optimizers import differences, settings_of
from commlayer.errors import code_of

WORLD = 2


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    parameters = [*model.parameters()]
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1)
    if kind == "decayed":
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)
    if kind == "grouped":
        return torch.optim.AdamW([{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}], lr=0.01)
    if kind == "tensor lr":
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False)
    taken = parameters[::2] if kind == "half" else parameters[::-1] if kind == "reversed" else parameters
    return torch.optim.AdamW(taken, lr=0.02 if kind == "faster" else 0.01)


def step(model: Any, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    x, y = data(rank, number)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def apart(rank: int, how: str, kind: str, drift: str) -> tuple[str, list[str]]:
    """Rank 1 has another optimizer. What rank hears in attach() or its first steps, and its decisions."""
    model = mlp()
    if kind == "frozen" and rank:
        next(model.parameters()).requires_grad_(False)
    optimizer = optimizer_of(model, kind if rank else "adamw")
    wrapped: Any = DistributedDataParallel(model) if how == "ddp" else model
    session = None
    try:
        session = commlayer.attach(wrapped, optimizer, config=quick(ranks_per_node=WORLD, drift=drift))
        for number in range(3):
            step(wrapped, optimizer, rank, number)
    except (ValueError, commlayer.CommError) as error:
        return str(error), []
    finally:
        if session is not None:
            decisions = session.inspect.decisions()
            session.close()
    return "", decisions


@pytest.mark.parametrize(("how", "kind", "name", "values"), [
    ("module", "sgd", "optimizer", ("AdamW", "SGD")),
    ("module", "faster", "lr of the optimizer", ("0.01", "0.02")),
    ("ddp", "faster", "lr of the optimizer", ("0.01", "0.02")),  # in the first backward pass
    ("module", "decayed", "weight_decay of the optimizer", ("0.01", "0.5")),
    ("module", "grouped", "number of the optimizer's groups", ("1", "2")),
    ("module", "half", "parameters of the optimizer", ("6", "3")),
    ("module", "reversed", "parameters of the optimizer", ("6", "6")),
    ("module", "frozen", "trained parameters", ("6", "5")),
])
def test_optimizers_that_differ_are_named_on_all_ranks(how: str, kind: str, name: str, values: tuple[str, str]) -> None:
    lines = [error for error, _ in pool(WORLD).call(apart, how, kind, "resync")]
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"{name}: {values[0]} ")
    assert code_of(lines[0]) == "E-RANKS-DIFFER"
    assert f"{values[1]} " in lines[0].partition("on rank 0 (")[2].partition("on rank 1")[0]
    assert "\n" not in lines[0]


@pytest.mark.parametrize("kind", ["sgd", "faster", "half"])
def test_drift_warn_trains_with_different_optimizers(kind: str) -> None:
    for error, decisions in pool(WORLD).call(apart, "module", kind, "warn"):
        assert error == ""
        assert any("on rank 0 (" in line and 'drift="warn"' in line for line in decisions)


def test_how_a_step_is_computed_may_differ() -> None:
    assert pool(WORLD).call(apart, "module", "tensor lr", "end") == [("", [])] * WORLD


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t.clone() for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]


def resumed(rank: int, how: str, what: str, drift: str) -> dict[str, Any]:
    """Behind attach(), rank 0 alone loads a checkpoint; or all do, each one of its own."""
    model = mlp()
    optimizer = optimizer_of(model, "adamw")
    other = mlp()
    trained = optimizer_of(other, "adamw")
    for number in range(3):
        step(other, trained, rank if what == "own state" else 0, number)
    wrapped: Any = DistributedDataParallel(model) if how == "ddp" else model
    sync = sync_of(every=4) if how == "local" else None
    session = commlayer.attach(wrapped, optimizer, config=quick(ranks_per_node=WORLD, drift=drift), sync=sync)
    loads = rank == 0 or what == "own state"
    if what == "lr":
        optimizer.param_groups[0]["lr"] = 0.01 if rank == 0 else 0.02
    elif what == "weights":
        model.load_state_dict(other.state_dict() if loads else model.state_dict())
    elif what != "nothing" and loads:
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    line, first, steps = "", [], 8
    try:
        for number in range(steps):
            step(wrapped, optimizer, rank, number)
            first = first or moments(model, optimizer)
    except commlayer.CommError as error:
        line = str(error)
    decisions = session.inspect.decisions()
    rate = optimizer.param_groups[0]["lr"]
    session.close()
    return {"error": line, "decisions": decisions, "weights": [p.detach().clone() for p in model.parameters()],
            "moments": moments(model, optimizer), "steps": [float(t) for t in moments(model, optimizer) if t.numel() == 1],
            "rate": rate}


def same(results: list[dict[str, Any]], what: str) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results[0][what], results[1][what], strict=True))


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
    results = pool(WORLD).call(resumed, how, what, drift)
    for result in results:
        lines = [*result["decisions"], *filter(None, [result["error"]])]
        assert all(named in line and "\n" not in line for line in lines)
        assert not named or lines
        assert code_of(result["error"]) == ("E-REPLICAS" if named and drift == "end" else "")
    if drift == "warn":
        assert results[0]["steps"] != results[1]["steps"], "states stay as they are"
    elif drift == "resync":
        for result in results:
            assert len(result["decisions"]) == 1
            assert result["rate"] == 0.01
            assert result["steps"] == [8.0 if what in ("lr", "weights") else 11.0] * 6
        assert how == "local" or (same(results, "moments") and same(results, "weights"))


def scheduled(rank: int, drift: str) -> tuple[str, list[str]]:
    """From step 4 on a schedule of rank 1's own sets another rate there, again and again."""
    model = mlp()
    optimizer = optimizer_of(model, "sgd")
    session = commlayer.attach(model, optimizer, config=quick(ranks_per_node=WORLD, drift=drift, drift_steps=2))
    line = ""
    try:
        for number in range(14):
            if rank and number > 4:
                optimizer.param_groups[0]["lr"] = 0.05
            step(model, optimizer, rank, number)
    except commlayer.CommError as error:
        line = str(error)
    decisions = session.inspect.decisions()
    session.close()
    return line, decisions


@pytest.mark.commit(1)
@pytest.mark.parametrize(("drift", "ends"), [("resync", True), ("end", True), ("warn", False)])
def test_a_rate_that_goes_its_own_way_is_named_while_training_runs(drift: str, ends: bool) -> None:
    for line, decisions in pool(WORLD).call(scheduled, drift):
        named = "lr of the optimizer is 0.1 on rank 0, 0.05 on rank 1"
        assert (named in line, code_of(line)) == (ends, "E-REPLICAS" if ends else "")
        assert len([line for line in decisions if named in line]) == (0 if drift == "end" else 1)


def test_settings_are_spelled_alike_for_equal_values() -> None:
    model = mlp()
    one, other = (settings_of(optimizer_of(model, kind), model.named_parameters()) for kind in ("adamw", "tensor lr"))
    assert one == other
    assert settings_of(None, model.named_parameters()) == {}
    assert differences([one, {**other, "lr of the optimizer": "0.5"}]) == {"lr of the optimizer": ["0.01", "0.5"]}


class Adaptive(torch.optim.SGD):
    """Keeps what it has learned in its groups, as Prodigy keeps `d` and ScheduleFree `k`, `weight_sum` and `train_mode`."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-6, **rest: Any) -> None:
        super().__init__(params, lr=lr, **rest)
        for group in self.param_groups:
            group.update(d0=d0, d=d0, k=0, train_mode=False)


def test_values_that_an_optimizer_adapts_are_no_settings() -> None:
    model = mlp()
    one, other = (Adaptive(model.parameters(), momentum=0.9) for _ in range(2))
    other.param_groups[0].update(d=0.5, k=7, train_mode=True)
    before, changed = (settings_of(each, model.named_parameters()) for each in (one, other))
    assert before == changed
    assert {"lr of the optimizer", "d0 of the optimizer", "momentum of the optimizer"} <= before.keys()
    other.param_groups[0].update(d0=1e-5, momentum=0.8)
    assert differences([before, settings_of(other, model.named_parameters())]).keys() == {
        "d0 of the optimizer", "momentum of the optimizer"}
