"""Hooks around an optimizer's steps are there while somebody wants to be called, whenever they come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from commlayer import optim
from commlayer.engine.hooks import Around, OptimizerHooks


class Stepping:
    """An optimizer, and one member that leaves inside its first step."""

    def __init__(self) -> None:
        self.called = 0
        self.parameter = torch.nn.Parameter(torch.ones(2))
        self.parameter.grad = torch.ones(2)
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        self.hooks, self.around = OptimizerHooks(self.optimizer), Around(last=self.leave)
        self.hooks.join(self.around)

    def leave(self, *_: Any) -> None:
        self.called += 1
        self.hooks.leave(self.around)

    def held(self) -> int:
        return len(self.optimizer._optimizer_step_pre_hooks) + len(self.optimizer._optimizer_step_post_hooks)


def test_who_leaves_inside_a_step_leaves_no_hooks() -> None:
    made = Stepping()
    made.optimizer.step()
    assert made.held() == 0
    made.optimizer.step()
    assert made.called == 1


def test_hooks_of_the_script_behind_ours_are_called_in_that_step_and_ours_go_with_the_next_leave() -> None:
    made, seen = Stepping(), []
    made.optimizer.register_step_post_hook(lambda *_: seen.append("script"))
    made.optimizer.step()
    made.optimizer.step()
    assert (made.called, seen) == (1, ["script"] * 2)
    made.hooks.join(made.around)
    assert made.held() == 4, "no second ones"
    made.hooks.leave(made.around)
    assert made.held() == 1


def test_a_step_that_raises_is_no_step_that_goes_on_for_ever() -> None:
    made = Stepping()

    def fails() -> float:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        made.optimizer.step(fails)
    made.optimizer.step()
    assert (made.called, made.held()) == (1, 0)


# ---- Which family an optimizer is of: torch's, this package's, those of others by name, and wrappers

SGD, ADAM, OTHER = "sgd", "adam", "other"
KNOWN = {
    "ASGD": SGD, "SGD": SGD, "Adadelta": ADAM, "Adafactor": ADAM, "Adagrad": ADAM, "Adam": ADAM, "AdamW": ADAM, "Adamax": ADAM,
    "LBFGS": OTHER, "Muon": OTHER, "NAdam": ADAM, "RAdam": ADAM, "RMSprop": ADAM, "Rprop": OTHER, "SparseAdam": ADAM,
}


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 2))]


@pytest.mark.parametrize("name", sorted({n for n, each in vars(torch.optim).items() if isinstance(each, type)} - {"Optimizer"}))
def test_all_of_torchs_are_known(name: str) -> None:
    made = getattr(torch.optim, name)(weights(), lr=0.1)
    assert optim.family_of(made) == KNOWN[name]


@pytest.mark.parametrize(("name", "family"), [
    ("LANS", ADAM), ("CLAN", ADAM), ("SparseAdam", ADAM), ("SparseAdamW", ADAM), ("SparseSGD", SGD),
])
def test_this_packages_own(name: str, family: str) -> None:
    assert optim.family_of(getattr(optim, name)(weights(), lr=0.1)) == family


@pytest.mark.parametrize(("name", "family"), [
    ("Adam8bit", ADAM), ("FusedAdam", ADAM), ("FusedLAMB", ADAM), ("DeepSpeedCPUAdam", ADAM), ("FusedSGD", SGD),
    ("Lion", OTHER),
])
def test_others_are_known_by_name(name: str, family: str) -> None:
    assert optim.family_of(type(name, (torch.optim.Optimizer,), {})(weights(), {})) == family


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer that has another."""

    def __init__(self, inner: Any) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


def test_wrappers_count_as_what_they_wrap() -> None:
    inner = torch.optim.AdamW(weights())
    assert optim.family_of(Wrapped(inner)) == optim.family_of(Wrapped(Wrapped(inner))) == ADAM
    sharded = type("ZeroRedundancyOptimizer", (), {"optim": torch.optim.SGD(weights(), lr=0.1)})()
    assert optim.family_of(sharded) == SGD
    scheduled = type("MySGD", (torch.optim.SGD,), {})(weights(), lr=0.1)
    assert optim.family_of(scheduled) == SGD


def test_what_holds_itself_or_is_none_comes_to_an_end() -> None:
    made = Wrapped(torch.optim.SGD(weights(), lr=0.1))
    made.optimizer = made
    assert optim.family_of(None) == OTHER
    assert optim.family_of(type("Odd", (), {"param_groups": []})()) == OTHER
