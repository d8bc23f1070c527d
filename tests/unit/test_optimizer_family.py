"""Which family an optimizer belongs to: torch's, this package's, those of others by name, and wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from commlayer import optim

SGD, ADAM, OTHER = "sgd", "adam", "other"
KNOWN = {
    "ASGD": SGD, "SGD": SGD, "Adadelta": ADAM, "Adafactor": ADAM, "Adagrad": ADAM, "Adam": ADAM, "AdamW": ADAM, "Adamax": ADAM,
    "LBFGS": OTHER, "Muon": OTHER, "NAdam": ADAM, "RAdam": ADAM, "RMSprop": ADAM, "Rprop": OTHER, "SparseAdam": ADAM,
}


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 2))]


@pytest.mark.parametrize("name", sorted({n for n, each in vars(torch.optim).items() if isinstance(each, type)} - {"Optimizer"}))
def test_all_of_torchs_are_known(name: str) -> None:
    result = getattr(torch.optim, name)(weights(), lr=0.1)
    assert optim.family_of(result) == KNOWN[name]


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
    wrapped = Wrapped(torch.optim.SGD(weights(), lr=0.1))
    wrapped.optimizer = wrapped
    assert optim.family_of(None) == OTHER
    assert optim.family_of(type("Odd", (), {"param_groups": []})()) == OTHER
