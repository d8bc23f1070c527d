"""Ranks that train differently: all of them name the setting, weight or state that differs, at attach() or the first step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
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


SETTINGS = [
    ("sgd", "optimizer", ("AdamW", "SGD")),
    ("faster", "lr of the optimizer", ("0.01", "0.02")),
    ("decayed", "weight_decay of the optimizer", ("0.01", "0.5")),
    ("grouped", "number of the optimizer's groups", ("1", "2")),
    ("half", "parameters of the optimizer", ("6", "3")),
    ("reversed", "parameters of the optimizer", ("6", "6")),
]


@pytest.mark.parametrize(("kind", "name", "values"), SETTINGS)
def test_optimizers_that_differ_are_named_on_all_ranks_at_attach(kind: str, name: str, values: tuple[str, str]) -> None:
    said = [error for error, _ in pool(WORLD).call(apart, "module", kind, "resync")]
    assert said[0] == said[1]
    assert said[0].startswith(f"{name}: {values[0]} ")
    assert code_of(said[0]) == "E-RANKS-DIFFER"
    assert "on rank 0 (" in said[0]
    assert f"{values[1]} " in said[0].partition("on rank 0")[2].partition("on rank 1")[0]
    assert "\n" not in said[0]


def test_ddp_names_them_in_the_first_backward_pass() -> None:
    for error, _ in pool(WORLD).call(apart, "ddp", "faster", "end"):
        assert error.startswith("lr of the optimizer: 0.01 on rank 0")
        assert code_of(error) == "E-RANKS-DIFFER"


def test_another_number_of_trained_parameters_is_named() -> None:
    for error, _ in pool(WORLD).call(apart, "module", "frozen", "resync"):
        assert error.startswith("trained parameters: 6 on rank 0")
        assert code_of(error) == "E-RANKS-DIFFER"


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
    plan: Any = {"every": 4} if how == "local" else {}
    session = commlayer.attach(wrapped, optimizer, config=quick(ranks_per_node=WORLD, drift=drift), **plan)
    loads = rank == 0 or what == "own state"
    if what == "lr":
        optimizer.param_groups[0]["lr"] = 0.01 if rank == 0 else 0.02
    elif what == "weights":
        model.load_state_dict(other.state_dict() if loads else model.state_dict())
    elif what != "nothing" and loads:
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    said, first, steps = "", [], 8
    try:
        for number in range(steps):
            step(wrapped, optimizer, rank, number)
            first = first or moments(model, optimizer)
    except commlayer.CommError as error:
        said = str(error)
    decisions = session.inspect.decisions()
    rate = optimizer.param_groups[0]["lr"]
    session.close()
    return {"said": said, "decisions": decisions, "weights": [p.detach().clone() for p in model.parameters()],
            "moments": moments(model, optimizer), "steps": [float(t) for t in moments(model, optimizer) if t.numel() == 1],
            "rate": rate}


def same(results: list[dict[str, Any]], what: str) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results[0][what], results[1][what], strict=True))


STATES = "the optimizer's state of 0.weight, 0.bias, 2.weight and 3 more differs on rank 1"


@pytest.mark.commit(2)
@pytest.mark.parametrize(("how", "what", "named"), [
    ("module", "state", STATES), ("ddp", "state", STATES), ("module", "own state", STATES),
    ("module", "lr", "lr of the optimizer is 0.01 on rank 0, 0.02 on rank 1"),
])
def test_what_was_loaded_on_some_ranks_is_taken_from_rank_0(how: str, what: str, named: str) -> None:
    results = pool(WORLD).call(resumed, how, what, "resync")
    for result in results:
        assert result["said"] == ""
        assert [line for line in result["decisions"] if named in line and "all ranks continue with rank 0's state" in line] == \
            result["decisions"]
        assert len(result["decisions"]) == 1
        assert result["steps"] == [8.0 if what == "lr" else 11.0] * 6
        assert result["rate"] == 0.01
    assert same(results, "moments")
    assert same(results, "weights")


def test_weights_that_were_loaded_on_rank_0_alone_are_taken_from_there() -> None:
    results = pool(WORLD).call(resumed, "module", "weights", "resync")
    for result in results:
        assert len([line for line in result["decisions"] if "weights of 0.weight, 0.bias, 2.weight and 3 more" in line]) == 1
    assert same(results, "weights")


def test_local_steps_take_the_state_of_rank_0_where_others_have_none() -> None:
    results = pool(WORLD).call(resumed, "local", "state", "resync")
    for result in results:
        assert len([line for line in result["decisions"] if "the optimizer's state of" in line]) == 1
        assert result["steps"] == [11.0] * 6


def test_local_steps_leave_each_rank_its_own_moments() -> None:
    assert [r["decisions"] for r in pool(WORLD).call(resumed, "local", "own state", "end")] == [[], []]


@pytest.mark.parametrize("how", ["module", "ddp"])
def test_the_job_ends_at_the_first_step_where_that_is_asked_for(how: str) -> None:
    for result in pool(WORLD).call(resumed, how, "state", "end"):
        assert "the optimizer's state of 0.weight" in result["said"]
        assert code_of(result["said"]) == "E-REPLICAS"
        assert "\n" not in result["said"]


def test_a_warning_leaves_states_what_they_are() -> None:
    results = pool(WORLD).call(resumed, "module", "state", "warn")
    for result in results:
        assert "the optimizer's state of 0.weight" in result["decisions"][0]
    assert results[0]["steps"] != results[1]["steps"]


@pytest.mark.commit(1)
@pytest.mark.parametrize("how", ["module", "ddp", "local"])
def test_nothing_is_said_where_all_is_alike(how: str) -> None:
    assert [r["decisions"] for r in pool(WORLD).call(resumed, how, "nothing", "end")] == [[], []]


def scheduled(rank: int, drift: str) -> tuple[str, list[str]]:
    """From step 4 on a schedule of rank 1's own sets another rate there, again and again."""
    model = mlp()
    optimizer = optimizer_of(model, "sgd")
    session = commlayer.attach(model, optimizer, config=quick(ranks_per_node=WORLD, drift=drift, drift_steps=2))
    said = ""
    try:
        for number in range(14):
            if rank and number > 4:
                optimizer.param_groups[0]["lr"] = 0.05
            step(model, optimizer, rank, number)
    except commlayer.CommError as error:
        said = str(error)
    decisions = session.inspect.decisions()
    session.close()
    return said, decisions


@pytest.mark.commit(1)
@pytest.mark.parametrize(("drift", "ends"), [("resync", True), ("end", True), ("warn", False)])
def test_a_rate_that_goes_its_own_way_is_named_while_training_runs(drift: str, ends: bool) -> None:
    for said, decisions in pool(WORLD).call(scheduled, drift):
        named = "lr of the optimizer is 0.1 on rank 0, 0.05 on rank 1"
        assert (named in said, code_of(said)) == (ends, "E-REPLICAS" if ends else "")
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
    found, changed = (settings_of(each, model.named_parameters()) for each in (one, other))
    assert found == changed
    assert {"lr of the optimizer", "d0 of the optimizer", "momentum of the optimizer"} <= found.keys()
    other.param_groups[0].update(d0=1e-5, momentum=0.8)
    assert differences([found, settings_of(other, model.named_parameters())]).keys() == {
        "d0 of the optimizer", "momentum of the optimizer"}
