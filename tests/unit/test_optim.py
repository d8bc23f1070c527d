"""Lazy optimizers equal torch's for the same gradients; optimizers are mapped to families."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from oracle import lazy_kernels
from support.optim import Case, Race, draw, rates
from torch import nn

from commlayer import native, optim
from commlayer.optim import SparseAdam, SparseAdamW, SparseSGD
from commlayer.optim.sparse_gradients import sparse_gradient

SGD = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "long momentum": {"momentum": 0.99},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.4},
    "decay": {"weight_decay": 0.05},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov and decay": {"momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
    "all but nesterov": {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.4},
}
ADAM = {
    "defaults": {},
    "decay": {"weight_decay": 0.1},
    "short memory": {"betas": (0.8, 0.9)},
    "no momentum": {"betas": (0.0, 0.99)},
    "large eps": {"eps": 1e-2},
}
CASES = {
    **{f"sgd {name}": Case(SparseSGD, torch.optim.SGD, {"lr": 0.05, **settings}) for name, settings in SGD.items()},
    **{f"adamw {name}": Case(SparseAdamW, torch.optim.AdamW, {"lr": 0.01, **settings}) for name, settings in ADAM.items()},
    "adam": Case(SparseAdam, torch.optim.Adam, {"lr": 0.01}),
}
OUR_ROUNDING = 4.0
"""Times torch's own error in single precision; usually ours is the smaller one, as there are fewer steps that round."""
LEAST = 2e-6
EPS_ERROR = 1e-3
"""Where eps is as large as sqrt(v): of what the weights move."""


def fits(race: Race, case: str) -> bool:
    ours, torchs = race.errors()
    moved = EPS_ERROR if "large eps" in case else 0.0
    return ours <= max(OUR_ROUNDING * torchs, LEAST, moved)


@pytest.mark.parametrize(("name", "lag"), [*((name, lag) for name in CASES for lag in (7, 250)), ("sgd momentum", 1)])
def test_flushed_weights_equal_the_dense_optimizer_for_any_schedule(name: str, lag: int) -> None:
    race = Race(CASES[name], lag=lag)
    for rate in rates(60, CASES[name].settings["lr"]):
        race.step(draw(race.shape, 12), rate)
    behind = race.errors()[0]
    race.optimizer.flush()
    assert fits(race, name), race.errors()
    if lag == 250 and name != "sgd plain":
        assert behind > 10 * race.errors()[0], "a residual was kept"


@pytest.mark.parametrize("name", ["sgd all but nesterov", "adamw decay"])
def test_dense_sparse_and_missing_gradients_mix(name: str) -> None:
    race = Race(CASES[name], lag=5)
    for t in range(60):
        gradient = draw(race.shape, 12)
        race.step(None if t % 7 == 3 else gradient.to_dense() if t % 11 == 2 else gradient)
    race.optimizer.flush()
    assert fits(race, name), race.errors()


@pytest.mark.parametrize("name", CASES)
def test_dense_gradients_equal_the_torch_step_bit_for_bit(name: str) -> None:
    case, start = CASES[name], torch.randn(5, 7)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = case.lazy([ours], **case.settings), case.dense([theirs], **case.settings)
    for _ in range(5):
        ours.grad = torch.randn(5, 7)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, theirs)
    ours_kept, theirs_kept = (optimizer.state_dict()["state"].get(0, {}).keys() for optimizer in optimizers)
    assert ours_kept == theirs_kept


@pytest.mark.parametrize("name", ["sgd momentum and decay", "adamw decay"])
def test_weights_are_stale_by_at_most_the_lag(name: str) -> None:
    race = Race(CASES[name], lag=6)
    race.step(race.lazy.detach().clone().to_sparse())
    for t in range(70):
        for group in race.optimizer.param_groups:
            group["lag"] = 250 if 30 <= t < 40 else 6
        race.step(draw(race.shape, 3))
        state = race.optimizer.state[race.lazy]
        behind = (state["lazy_steps"] - state["stamp"].long()) % 256
        assert behind.max() < len(state["rows"])
        if t < 30 or t > 60:
            assert behind.max() <= 6
    race.optimizer.flush()
    assert fits(race, name), race.errors()


@pytest.mark.parametrize("name", ["sgd nesterov and decay", "adamw decay"])
@pytest.mark.parametrize("flush", [False, True])
def test_checkpoint_resumes_bit_for_bit_in_any_save_order(name: str, flush: bool) -> None:
    race = Race(CASES[name], lag=9)
    gradients = [draw(race.shape, 12) for _ in range(40)]
    for gradient in gradients[:20]:
        race.step(gradient)
    if flush:
        race.optimizer.flush()
    weights = race.lazy.detach().clone()
    saved = io.BytesIO()
    torch.save(race.optimizer.state_dict(), saved)
    assert torch.equal(weights, race.lazy), "saving changes no weights: other ranks do not save"
    saved.seek(0)
    other = Race(CASES[name], lag=9)
    other.optimizer.load_state_dict(torch.load(saved, weights_only=True))
    with torch.no_grad():
        other.lazy.copy_(weights)
    for gradient in gradients[20:]:
        race.step(gradient)
        other.lazy.grad = gradient
        other.optimizer.step()
    assert torch.equal(race.lazy, other.lazy)
    race.optimizer.flush()
    other.optimizer.flush()
    assert torch.equal(race.lazy, other.lazy)


@pytest.mark.parametrize("name", ["sgd momentum", "adamw decay", "adam"])
def test_states_convert_to_and_from_torch_optimizers(name: str) -> None:
    race, case = Race(CASES[name]), CASES[name]
    for _ in range(10):
        race.step(draw(race.shape, 12))
    race.optimizer.load_state_dict(race.rivals[1].state_dict())
    with torch.no_grad():
        race.lazy.copy_(race.single)
    for _ in range(10):
        race.step(draw(race.shape, 12))
    race.optimizer.flush()
    assert fits(race, name)
    theirs = case.dense([race.lazy], **case.settings)
    theirs.load_state_dict(race.optimizer.state_dict())
    race.lazy.grad = race.single.grad
    for optimizer in (theirs, *race.rivals):
        optimizer.step()
    assert fits(race, name)


@pytest.mark.parametrize("name", ["sgd nesterov and decay", "sgd decay", "sgd plain", "adamw decay"])
@pytest.mark.skipif(native.core is None, reason="built without the native core")
def test_native_and_reference_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core, results = native.core, []
    assert core is not None
    for backend, portable in ((core, False), (core, True), (lazy_kernels, False)):
        monkeypatch.setattr(native, "core", backend)
        before = core.force_portable(portable)
        try:
            race = Race(CASES[name], shape=(37, 53), lag=4)
            for rate in rates(30, 0.05):
                race.step(draw(race.shape, 90), rate)
            state = race.optimizer.state[race.lazy]
            results.append([race.lazy.detach(), *(v for k, v in sorted(state.items()) if isinstance(v, torch.Tensor))])
        finally:
            core.force_portable(before)
    assert len(results[0]) > (1 if name != "sgd plain" else 0)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_gradient_changed_in_place_is_read_again() -> None:
    changes = {
        "added to": lambda grad: grad.add_(draw((4, 9), 8)), "cleared": lambda grad: grad.zero_(),
        "scaled": lambda grad: grad.mul_(3), "its values scaled": lambda grad: grad._values().mul_(3),
        "as it was": lambda grad: grad,
    }
    for change in changes.values():
        p = nn.Parameter(torch.zeros(4, 9))
        p.grad = sparse_gradient(torch.tensor([3, 20, 35], dtype=torch.int32), torch.tensor([1.0, 2.0, 4.0]), (4, 9))
        change(p.grad)
        dense = p.grad.to_dense()
        SparseSGD([p], lr=1.0).step()
        assert torch.equal(p.detach(), -dense)


def coo(at: list[list[int]], values: list[float], shape: tuple[int, ...], *, coalesced: bool = True) -> torch.Tensor:
    entries = torch.tensor(at), torch.tensor(values)
    return torch.sparse_coo_tensor(*entries, shape, is_coalesced=coalesced, check_invariants=False)


P = (3, 4)
MISTAKES = {
    "outside": (coo([[3], [0]], [1.0], P), r"\b3 in dimension 0, .*0 to 2"),
    "negative": (coo([[0], [-1]], [1.0], P), r" -1 in dimension 1, .*0 to 3"),
    "outside, repeated": (coo([[0, 0], [9, 9]], [1.0, 1.0], P, coalesced=False), r"\b9 in dimension 1, .*0 to 3"),
    "twice": (coo([[1, 1], [2, 2]], [1.0, 1.0], P), r"increase.*coalesced"),
    "backwards": (coo([[1, 0], [2, 2]], [1.0, 1.0], P), r"increase.*coalesced"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_gradient_of_a_wrong_shape_is_one_line_and_has_no_effect(mistake: str) -> None:
    gradient, message = MISTAKES[mistake]
    good, bad = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(P))
    optimizer = SparseSGD([good, bad], lr=0.1, momentum=0.9)
    good.grad, bad.grad = torch.ones(4), gradient
    with pytest.raises(ValueError, match=rf"^SparseSGD: .*\(3, 4\): .*{message}.*E-OPTIM-GRADIENT") as caught:
        optimizer.step()
    assert "\n" not in str(caught.value)
    assert good.eq(1).all()
    assert bad.eq(1).all()
    assert not optimizer.state


@pytest.mark.parametrize(("make", "message"), [
    (lambda p: SparseSGD(p, lr=-1.0), r"SparseSGD: lr: got -1\.0.*E-OPTIM-ARGUMENT"),
    (lambda p: SparseSGD(p, momentum=-0.1), r"SparseSGD: momentum: got -0\.1.*E-OPTIM-ARGUMENT"),
    (lambda p: SparseSGD(p, weight_decay=-1), "SparseSGD: weight_decay: got -1.*E-OPTIM-ARGUMENT"),
    (lambda p: SparseSGD(p, nesterov=True), "SparseSGD: nesterov: got True.*momentum.*dampening.*E-OPTIM-ARGUMENT"),
    (lambda p: SparseSGD(p, lag=0), "SparseSGD: lag: got 0.*1 to 250.*E-OPTIM-ARGUMENT"),
    (lambda p: SparseSGD(p, lag=251), "SparseSGD: lag: got 251.*1 to 250.*E-OPTIM-ARGUMENT"),
    (lambda p: SparseAdamW(p, betas=(0.9, 1.0)), r"SparseAdamW: betas: got \(0\.9, 1\.0\).*E-OPTIM-ARGUMENT"),
    (lambda p: SparseAdam(p, eps=-1e-8), "SparseAdam: eps: got -1e-08.*E-OPTIM-ARGUMENT"),
    (lambda p: SparseSGD([p[0].detach().half().requires_grad_()]), r"SparseSGD: .*\(3,\) .*torch\.float16.*E-OPTIM-PARAMETER"),
])
def test_invalid_setting_is_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.ones(3))])


def test_sparse_gradients_without_the_native_core_or_on_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.ones(40, device="meta"))
    p.grad = torch.sparse_coo_tensor(size=(40,), device="meta")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="on meta.*E-OPTIM-PARAMETER"):
        SparseSGD([p], lr=0.1).step()
    p = nn.Parameter(torch.ones(40))
    p.grad = draw((40,), 3)
    monkeypatch.setattr(native, "core", None)
    with pytest.raises(ValueError, match="E-CODEC-BACKEND"):
        SparseSGD([p], lr=0.1, momentum=0.9).step()


@pytest.mark.parametrize(("kind", "theirs"), [
    (SparseSGD, torch.optim.SGD([nn.Parameter(torch.ones(3))], maximize=True)),
    (SparseAdamW, torch.optim.AdamW([nn.Parameter(torch.ones(3))], amsgrad=True)),
    (SparseAdam, torch.optim.Adam([nn.Parameter(torch.ones(3))], weight_decay=0.1)),
])
def test_state_with_an_unsupported_option_is_refused(kind: Any, theirs: torch.optim.Optimizer) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: .*E-OPTIM-STATE"):
        kind([nn.Parameter(torch.ones(3))]).load_state_dict(theirs.state_dict())


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer that has another."""

    def __init__(self, inner: Any) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


FAMILIES = {
    "sgd": ["ASGD", "SGD", "SparseSGD", "FusedSGD"],
    "adam": ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SparseAdam", "LANS",
             "CLAN", "SparseAdamW", "Adam8bit", "FusedAdam", "FusedLAMB", "DeepSpeedCPUAdam"],
    "muon": ["Muon", "NorMuon", "MuonWithAuxAdam", "Dion2"],
    "lion": ["Lion", "DecoupledLionW", "PagedLion8bit", "SignSGD", "Signum"],
    "other": ["LBFGS", "Rprop"],
}


def optimizer_called(name: str) -> torch.optim.Optimizer:
    """torch's or this package's; or another one of this name."""
    known = getattr(torch.optim, name, None) or getattr(optim, name, None)
    weights = [nn.Parameter(torch.zeros(2, 2))]
    return known(weights, lr=0.1) if known else type(name, (torch.optim.Optimizer,), {})(weights, {})


def test_family_follows_the_class_or_name_and_wrappers_inherit_it() -> None:
    torchs = {name for name, each in vars(torch.optim).items() if isinstance(each, type)} - {"Optimizer"}
    assert torchs <= {name for names in FAMILIES.values() for name in names}
    for family, names in FAMILIES.items():
        for name in names:
            result = optimizer_called(name)
            assert optim.family_of(result) == optim.family_of(Wrapped(Wrapped(result))) == family, name
            assert optim.family_of(type("ZeroRedundancyOptimizer", (), {"optim": result})()) == family
    odd = type("Odd", (), {"param_groups": []})()
    odd.optimizer = odd
    assert optim.family_of(None) == optim.family_of(odd) == "other"
    assert optim.family_of(type("MySGD", (torch.optim.SGD,), {})([nn.Parameter(torch.zeros(2))], lr=0.1)) == "sgd"
