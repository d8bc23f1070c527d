"""Guards: an optimizer applies averaged gradients only, or the job ends with one line that names the parameter. Real ranks."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.attached import assert_refused, data, log_lines, mlp, outcome, parameters, plan_of, same
from support.rank_pool import Servers, pool, quick, ranks_first
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import commlayer

WORLD, EVERY, STEPS = 2, 4, 12
BOTH, ONE = (0, 1), (1,)
_ranks = ranks_first(WORLD)


class Body(nn.Module):
    """A body that is frozen at first, a head, and two adapters, one of which is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 8), nn.Linear(8, 3)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.adapter = "a"
        for module in (self.body, self.b):
            module.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).tanh()
        return self.head(x + (self.a if self.adapter == "a" else self.b)(x))


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, and every other time pulls the weights back towards slow ones."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.steps = inner, inner.param_groups, 0
        self.slow = [p.detach().clone() for p in self.weights()]

    def weights(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.steps += 1
        for p, slow in zip(self.weights(), self.slow, strict=True) if self.steps % 2 == 0 else ():
            p.data.copy_(slow.lerp_(p.data, 0.5))
        return loss


class SharpnessAware(torch.optim.Optimizer):
    """Steps from the weights with the gradients a little uphill of them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        weights = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in weights]
        with torch.enable_grad():
            closure()
        for p in weights:
            p.data.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            loss = closure()
        for p, old in zip(weights, before, strict=True):
            p.data.copy_(old)
        self.inner.step()
        return loss


class PlainLookahead:
    """No torch optimizer, but around one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Attached:
    """One rank's model, optimizer and session. `how`: "module" or "ddp", with "local" in front for local steps."""

    def __init__(self, rank: int, how: str, kind: str) -> None:
        torch.manual_seed(5)
        self.rank = rank
        self.rows: list[list[torch.Tensor]] = []
        self.model: Any = Body() if kind == "body" else mlp()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.wrapped: Any = self.model
        if "ddp" in how:
            self.wrapped = DistributedDataParallel(self.model, find_unused_parameters=kind == "body")
        plan = plan_of(self.model, path="allreduce", ranks_per_node=WORLD, local_steps=EVERY if "local" in how else 1)
        self.session = commlayer.attach(self.wrapped, self.optimizer, plan=plan,
                                        config=quick(ranks_per_node=WORLD, drift_steps=0, deadline_s=8.0))

    def loss(self, number: int) -> torch.Tensor:
        x, y = data(self.rank, number)
        dtype = next(self.model.parameters()).dtype
        return nn.functional.mse_loss(self.wrapped(x.to(dtype)), y.to(dtype))

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.optimizer.zero_grad()
            self.loss(number).backward()
            self.optimizer.step()

    def each_step(self, gradients: Callable[[int], Any], *, first: int = 0) -> None:
        """Steps with the gradients that the function makes; keeps the weights after each."""
        for number in range(first, STEPS):
            self.optimizer.zero_grad()
            gradients(number)
            self.optimizer.step()
            self.rows.append(parameters(self.model))

    def own_gradients(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        weights = list(self.model.parameters())
        return [*zip(weights, torch.autograd.grad(self.loss(number), weights), strict=True)]


Script = Callable[[Attached], None]


def assigns(t: Attached) -> None:
    t.train(0, 3)
    t.model.load_state_dict({name: p.clone() for name, p in t.model.state_dict().items()}, assign=True)
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.05)
    t.train(3, STEPS)


def assigns_and_keeps_the_optimizer(t: Attached) -> None:
    t.train(0, 3)
    t.model.load_state_dict({name: p.clone() for name, p in t.model.state_dict().items()}, assign=True)
    t.train(3, STEPS)


def replaces_one(t: Attached) -> None:
    t.train(0, 3)
    t.model[4].bias = nn.Parameter(torch.ones(3))
    t.optimizer.param_groups[0]["params"].append(t.model[4].bias)
    t.train(3, STEPS)


def adds_to_the_optimizer(t: Attached) -> None:
    t.train(0, 3)
    t.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 5))]})
    t.train(3, STEPS)


def unfreezes_the_body(t: Attached) -> None:
    t.train(0, 3)
    for module in (t.model.head, t.model.a):
        module.requires_grad_(False)
    t.model.body.requires_grad_(True)
    t.train(3, STEPS)


def trains_the_other_adapter(t: Attached) -> None:
    t.train(0, 3)
    t.model.adapter = "b"
    for name, p in t.model.named_parameters():
        p.requires_grad_(name.startswith("b."))
    t.optimizer = torch.optim.SGD([p for p in t.model.parameters() if p.requires_grad], lr=0.05)
    t.train(3, STEPS)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.low = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.low(x)


def injects_adapters(t: Attached) -> None:
    t.train(0, 3)
    t.model.requires_grad_(False)
    t.model.head = Adapted(t.model.head)
    t.optimizer = torch.optim.SGD(t.model.head.low.parameters(), lr=0.05)
    t.train(3, STEPS)


def sets_own_gradients(t: Attached) -> None:
    def gradients(number: int) -> None:
        for p, g in t.own_gradients(number):
            p.grad = g

    t.train(0, 3)
    t.each_step(gradients, first=3)


def copies_own_gradients(t: Attached) -> None:
    t.train(0, 3)
    for number in range(3, STEPS):
        for p, g in t.own_gradients(number):
            p.grad.copy_(g)
        t.optimizer.step()


def sets_one_gradient(t: Attached) -> None:
    t.train(0, 3)
    t.optimizer.zero_grad()
    t.model[2].weight.grad = torch.ones(40, 40)
    t.optimizer.step()


def sets_own_gradients_in_a_closure(t: Attached) -> None:
    """Detected only after the step has applied them. A step that raised is over."""
    def gradients() -> None:
        for p, g in t.own_gradients(STEPS):
            p.grad = g

    t.train(0, 3)
    with contextlib.suppress(ZeroDivisionError):
        t.optimizer.step(lambda: 1 / 0)
    t.optimizer.step(gradients)


def sets_own_gradients_in_a_wrappers_closure(t: Attached) -> None:
    def gradients() -> None:
        for p, g in t.own_gradients(STEPS):
            p.grad = g

    t.train(0, 3)
    t.optimizer = Lookahead(t.optimizer)
    t.optimizer.step(gradients)


def sets_own_gradients_of_a_part(t: Attached) -> None:
    """Whose optimizer has not stepped as late as the other one."""
    often, rarely = (torch.optim.SGD(part, lr=0.05) for part in ([*t.model.parameters()][:3], [*t.model.parameters()][3:]))
    t.loss(0).backward()
    rarely.step()
    for p, g in t.own_gradients(1):
        p.grad = g
    rarely.step()
    often.step()


def sets_functional_gradients(t: Attached) -> None:
    def loss(weights: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        x, y = data(t.rank, number)
        return nn.functional.mse_loss(torch.func.functional_call(t.model, weights, (x,)), y)

    for number in range(STEPS):
        gradients = torch.func.grad(loss)({name: p.detach() for name, p in t.model.named_parameters()}, number)
        for name, p in t.model.named_parameters():
            p.grad = gradients[name]
        t.optimizer.step()


def stays_in_no_sync(t: Attached) -> None:
    t.train(0, 3)
    with t.session.no_sync():
        t.train(3, STEPS)


def ends_in_no_sync(t: Attached) -> None:
    """The last backward pass of an accumulated step is the one that is not averaged."""
    t.train(0, 3)
    for number in range(3, STEPS):
        t.optimizer.zero_grad()
        t.loss(2 * number).backward()
        with t.session.no_sync():
            t.loss(2 * number + 1).backward()
        t.optimizer.step()


def changes_a_gradient_of_another(t: Attached) -> None:
    """In a hook that runs when the other gradient has been passed on."""
    def hook(_: torch.Tensor) -> None:
        t.model[4].weight.grad.mul_(2.0)

    t.model[0].weight.register_post_accumulate_grad_hook(hook)
    t.train(0, STEPS)


def replaces_a_gradient_of_another(t: Attached) -> None:
    t.model[0].weight.register_post_accumulate_grad_hook(
        lambda _: setattr(t.model[4].weight, "grad", torch.ones(3, 40)))
    t.train(0, STEPS)


def converts_to_double(t: Attached) -> None:
    t.train(0, 3)
    t.wrapped.double()
    t.optimizer.state.clear()
    t.train(3, STEPS)


def compiles_autograd(t: Attached) -> None:
    from torch._dynamo import compiled_autograd

    t.train(0, 3)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        t.train(3, STEPS)


def configures_compiled_autograd(t: Attached) -> None:
    t.train(0, 3)
    with torch._dynamo.config.patch(compiled_autograd=True):
        for number in range(3, STEPS):
            t.optimizer.zero_grad()
            torch.compile(lambda n: t.loss(n).backward(), backend="eager")(number)
            t.optimizer.step()


class Wrong(NamedTuple):
    script: Script
    hows: str
    code: str
    names: tuple[str, ...]
    """In the error."""
    kind: str = "mlp"
    ranks: tuple[int, ...] = BOTH
    """Which ranks run the script; the others train as usual."""


def changed(*names: str) -> tuple[str, tuple[str, ...]]:
    return "E-MODEL-CHANGED", names


LOCAL_GRADIENT = "E-GRADIENT-LOCAL", ("0.weight",)
WRONG = [
    Wrong(assigns, "module, ddp, local module, local ddp", *changed("parameter 0.weight", "place")),
    Wrong(assigns_and_keeps_the_optimizer, "module, local module", *changed("parameter 0.weight", "place")),
    Wrong(replaces_one, "module", *changed("parameter 4.bias", "replaced")),
    Wrong(adds_to_the_optimizer, "module", *changed("parameter 0", "group 1", "(2, 5)")),
    Wrong(unfreezes_the_body, "module", *changed("parameter body.weight", "frozen"), "body"),
    Wrong(trains_the_other_adapter, "module, local module", *changed("parameter b.weight", "frozen"), "body"),
    Wrong(injects_adapters, "module", *changed("parameter head.low.weight", "added"), "body"),
    Wrong(sets_own_gradients, "module", *LOCAL_GRADIENT),
    Wrong(copies_own_gradients, "module", *LOCAL_GRADIENT),
    Wrong(sets_one_gradient, "module", "E-GRADIENT-LOCAL", ("2.weight",)),
    Wrong(sets_own_gradients_in_a_closure, "module", *LOCAL_GRADIENT),
    Wrong(sets_own_gradients_in_a_wrappers_closure, "module", *LOCAL_GRADIENT),
    Wrong(sets_own_gradients_of_a_part, "module", "E-GRADIENT-LOCAL", ("2.bias", "2 others")),
    Wrong(sets_functional_gradients, "module", *LOCAL_GRADIENT),
    Wrong(stays_in_no_sync, "module, ddp", *LOCAL_GRADIENT),
    Wrong(ends_in_no_sync, "module, ddp", "E-GRADIENT-LOCAL", ("0.weight and those of 5 others", "synchronize()")),
    Wrong(ends_in_no_sync, "module", *LOCAL_GRADIENT, ranks=ONE),
    Wrong(changes_a_gradient_of_another, "module, ddp", "E-GRADIENT-CHANGED", ("4.weight",)),
    Wrong(replaces_a_gradient_of_another, "module", "E-GRADIENT-CHANGED", ("4.weight",)),
    Wrong(compiles_autograd, "module, local module", "E-COMPILED", ()),
    Wrong(configures_compiled_autograd, "module, local module", "E-COMPILED", ()),
    Wrong(compiles_autograd, "ddp", "", ("Compiled autograd is not compatible with C++ DDP Reducer",)),
    Wrong(assigns, "module", *changed("parameter 0.weight", "place"), ranks=ONE),
    Wrong(sets_own_gradients, "module", *LOCAL_GRADIENT, ranks=ONE),
    Wrong(unfreezes_the_body, "module", *changed("frozen"), "body", ONE),
]


class Result(NamedTuple):
    """How a script ended on a rank, the log, its weights at the end and after the recorded steps, its steps."""

    error: str
    lines: list[str]
    weights: list[torch.Tensor]
    rows: list[list[torch.Tensor]]
    step: int


def play(rank: int, script: Script, kind: str, how: str, ranks: tuple[int, ...] = BOTH) -> Result:
    def run() -> None:
        with t.session:
            script(t) if rank in ranks else t.train(0, STEPS)
            t.session.flush()

    with log_lines() as lines:
        t = Attached(rank, how, kind)
        error = outcome(run)
    return Result(error, lines, parameters(t.model), t.rows, t.session.step)


def ids(value: Any) -> str:
    if isinstance(value, functools.partial):
        return f"{value.func.__name__}-{value.keywords['wrapper'].__name__}"
    return getattr(value, "__name__", "") or (f"{value.script.__name__}{'-one' * (value.ranks == ONE)}"
                                              if isinstance(value, Wrong) else str(value))


@pytest.mark.commit(9)
@pytest.mark.parametrize(("row", "how"), [(row, how) for row in WRONG for how in row.hows.split(", ")], ids=ids)
def test_unaveraged_gradients_end_the_job_on_all_ranks(row: Wrong, how: str) -> None:
    results = pool(WORLD).call(play, row.script, row.kind, how, row.ranks)
    assert row.ranks == BOTH or results[1].error.startswith("InvalidInput: ")
    for result in results:
        if row.code:
            assert_refused(result.error, row.code, *row.names)
        else:
            assert row.names[0] in result.error
        assert row.ranks == ONE or not result.lines
    if "local" not in how and row.ranks == BOTH and "closure" not in row.script.__name__:
        assert same(results[0].weights, results[1].weights), "before an optimizer could apply it"


def accumulates(t: Attached) -> None:
    t.each_step(lambda number: [t.loss(3 * number + micro).backward() for micro in range(3)])


def accumulates_and_clips(t: Attached) -> None:
    for number in range(STEPS):
        t.optimizer.zero_grad(set_to_none=False)
        for micro in range(3):
            t.loss(3 * number + micro).backward()
            nn.utils.clip_grad_norm_(t.model.parameters(), 0.3)
        t.optimizer.step()
        t.rows.append(parameters(t.model))


def accumulates_in_no_sync(t: Attached) -> None:
    def gradients(number: int) -> None:
        for micro in range(3):
            with t.session.no_sync() if micro < 2 else contextlib.nullcontext():
                t.loss(3 * number + micro).backward()

    t.each_step(gradients)


def synchronizes_after_no_sync(t: Attached) -> None:
    def gradients(number: int) -> None:
        t.loss(2 * number).backward()
        with t.session.no_sync():
            t.loss(2 * number + 1).backward()
        t.session.synchronize()

    t.each_step(gradients)


def inspects_in_no_sync(t: Attached) -> None:
    """Gradients that the script clears before it steps again."""
    for number in range(STEPS):
        t.loss(number).backward()
        t.optimizer.step()
        with t.session.no_sync():
            t.loss(number + 1).backward()
        t.optimizer.zero_grad(set_to_none=bool(number % 2))
        t.optimizer.step()
        t.rows.append(parameters(t.model))


def accumulates_into_one_buffer(t: Attached) -> None:
    """All gradients are views of it, so that they have one version."""
    flat = torch.zeros(sum(p.numel() for p in t.model.parameters()))
    views = flat.split([p.numel() for p in t.model.parameters()])

    def gradients(number: int) -> None:
        flat.zero_()
        for p, view in zip(t.model.parameters(), views, strict=True):
            p.grad = view.view_as(p)
        t.loss(number).backward()

    t.each_step(gradients)


def replaces_gradients_by_copies(t: Attached) -> None:
    def gradients(number: int) -> None:
        t.loss(number).backward()
        for p in t.model.parameters():
            p.grad = 0.5 * p.grad

    t.each_step(gradients)


def makes_a_new_optimizer(t: Attached) -> None:
    """As a script does that makes one for each epoch."""
    t.train(0, 4)
    t.optimizer.zero_grad()
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.02)
    t.train(4, 8)


def steps_two_optimizers_with_each_gradient(t: Attached) -> None:
    """A preconditioner, or separate weight decay, before the optimizer."""
    other = torch.optim.SGD(t.model.parameters(), lr=0.01)
    t.each_step(lambda number: (t.loss(number).backward(), other.step()))


def steps_again(t: Attached) -> None:
    """With the same gradients, and with zeros."""
    def gradients(number: int) -> None:
        t.loss(number).backward()
        t.optimizer.step()
        if number % 2:
            t.optimizer.step()
            t.optimizer.zero_grad(set_to_none=False)

    t.each_step(gradients)


def steps_another_optimizer_inside(t: Attached) -> None:
    """Twice, with gradients that the outer one writes."""
    inner = t.optimizer

    class Wrapper(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for _ in range(2):
                inner.step()
                for p in self.param_groups[0]["params"]:
                    p.grad = 0.5 * p.grad

    t.optimizer = Wrapper(t.model.parameters(), lr=0.05)
    t.each_step(lambda number: t.loss(number).backward())


def steps_with_a_closure(t: Attached) -> None:
    for number in range(STEPS):
        def closure(number: int = number) -> torch.Tensor:
            t.optimizer.zero_grad()
            loss = t.loss(number)
            loss.backward()
            return loss

        t.optimizer.step(closure)
        t.rows.append(parameters(t.model))


def steps_a_wrapper_with_a_closure(t: Attached, wrapper: Callable[[torch.optim.Optimizer], Any]) -> None:
    t.optimizer = wrapper(t.optimizer)
    steps_with_a_closure(t)


def steps_before_any_gradient(t: Attached) -> None:
    t.optimizer.step()
    accumulates(t)


def averages_weights(t: Attached) -> None:
    average = torch.optim.swa_utils.AveragedModel(t.model)
    for number in range(STEPS):
        t.train(number, number + 1)
        average.update_parameters(t.model)
        t.rows.append(parameters(t.model))


def steps_parts_at_other_frequencies(t: Attached) -> None:
    weights = list(t.model.parameters())
    often, rarely = (torch.optim.SGD(part, lr=0.05) for part in (weights[:3], weights[3:]))
    for number in range(STEPS):
        often.zero_grad()
        t.loss(number).backward()
        often.step()
        if number % 3 == 2:
            rarely.step()
            rarely.zero_grad()
        t.rows.append(parameters(t.model))


def synchronizes_own_gradients(t: Attached) -> None:
    def gradients(number: int) -> None:
        for p, g in t.own_gradients(number):
            p.grad = g
        t.session.synchronize()

    t.each_step(gradients)


def steps_with_lbfgs(t: Attached) -> None:
    t.optimizer = torch.optim.LBFGS(t.model.parameters(), lr=0.1, max_iter=4)
    steps_with_a_closure(t)


def freezes_one(t: Attached) -> None:
    t.train(0, 3)
    t.model[2].bias.requires_grad_(False)
    t.train(3, STEPS)


def replaces_the_head_by_a_frozen_one(t: Attached) -> None:
    t.train(0, 3)
    del t.model[4]
    t.model.append(nn.Linear(40, 3).requires_grad_(False))
    t.train(3, STEPS)


RIGHT: list[tuple[Script, str]] = [
    (accumulates, "module, local module"), (accumulates_and_clips, "module, local module"),
    (accumulates_in_no_sync, "module, ddp, local module, local ddp"),
    (synchronizes_after_no_sync, "module, ddp"), (inspects_in_no_sync, "module, ddp"), (accumulates_into_one_buffer, "module"),
    (replaces_gradients_by_copies, "module, local module"), (makes_a_new_optimizer, "module"),
    (steps_two_optimizers_with_each_gradient, "module, local module"),
    (steps_again, "module"), (steps_another_optimizer_inside, "module"),
    (steps_with_a_closure, "module, ddp, local module, local ddp"),
    *((functools.partial(steps_a_wrapper_with_a_closure, wrapper=kind), "module, ddp")
      for kind in (Lookahead, SharpnessAware, PlainLookahead)),
    (steps_before_any_gradient, "module, ddp, local module"),
    (averages_weights, "module, local module"), (steps_parts_at_other_frequencies, "module"),
    (synchronizes_own_gradients, "module, local module"), (steps_with_lbfgs, "module"),
    (converts_to_double, "module, ddp, local module, local ddp"), (freezes_one, "module, local module"),
    (replaces_the_head_by_a_frozen_one, "module"),
]


@pytest.mark.commit(9)
@pytest.mark.parametrize(("script", "how"), [(script, how) for script, hows in RIGHT for how in hows.split(", ")], ids=ids)
def test_averaged_gradients_are_accepted_and_ranks_stay_equal(script: Script, how: str) -> None:
    one, other = pool(WORLD).call(play, script, "mlp", how)
    assert (one.error, one.lines, other.error, other.lines) == ("", [], "", [])
    assert same(one.weights, other.weights)
    assert all(bool(w.isfinite().all()) for w in one.weights)
    for step, (mine, theirs) in enumerate(zip(one.rows, other.rows, strict=True), 1):
        assert same(mine, theirs) == ("local" not in how or step % EVERY == 0), f"after optimizer step {step}"


def test_parameter_frozen_on_one_rank_counts_as_unused() -> None:
    one, other = pool(WORLD).call(play, freezes_one, "mlp", "module", ONE)
    assert one.error == other.error == ""
    assert same(one.weights, other.weights)


@pytest.mark.commit(2)
@pytest.mark.parametrize("how", ["local module", "local ddp"])
@pytest.mark.parametrize("script", [sets_own_gradients, copies_own_gradients, stays_in_no_sync, ends_in_no_sync], ids=ids)
def test_local_steps_apply_any_gradient(script: Script, how: str) -> None:
    """No gradient must be averaged, and all ranks exchange after the same number of optimizer steps."""
    one, other = pool(WORLD).call(play, script, "mlp", how)
    assert one.error == other.error == ""
    assert one.step == other.step == STEPS
    assert same(one.weights, other.weights)


def scaled(t: Attached, infinite: tuple[int, ...], late: bool, to_none: bool, micros: int, unscale: bool) -> None:
    """Rank 1 has an infinite gradient in these steps, so it skips them. `late`: cleared after the forward pass."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for number in range(STEPS):
        for micro in range(micros):
            if not late and not micro:
                t.optimizer.zero_grad(set_to_none=to_none)
            loss = t.loss(micros * number + micro)
            if late and not micro:
                t.optimizer.zero_grad(set_to_none=to_none)
            scaler.scale(loss * math.inf if number in infinite and t.rank == 1 and not micro else loss).backward()
        if unscale:
            scaler.unscale_(t.optimizer)
        scaler.step(t.optimizer)
        scaler.update()


@pytest.mark.commit(2)
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize(("late", "to_none"), [(False, True), (True, True), (False, False), (True, False)])
def test_skipped_local_step_still_counts(late: bool, to_none: bool, micros: int) -> None:
    for infinite, unscale in (((3, 4, 5), True), ((1, 7), False)):
        script = functools.partial(scaled, infinite=infinite, late=late, to_none=to_none, micros=micros, unscale=unscale)
        one, other = pool(WORLD).call(play, script, "mlp", "local module")
        assert one.error == other.error == ""
        assert one.step == other.step == STEPS
        assert same(one.weights, other.weights)
        assert all(bool(w.isfinite().all()) for w in one.weights)


def shared(rank: int) -> list[torch.Tensor]:
    """One optimizer over two attached models, the second of which is added later. Returns all weights."""
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
    return parameters(one) + parameters(two)


def test_optimizer_may_include_another_attached_model() -> None:
    first, *others = pool(WORLD).call(shared)
    start = parameters(mlp(0)) + parameters(mlp(1))
    assert all(same(first, other) for other in others)
    assert not any(torch.equal(before, after) for before, after in zip(start, first, strict=True))


def strangers(rank: int, how: str) -> list[str]:
    """The log if an optimizer steps parameters of another model.

    `how`: the first optimizer, with or without names; with parameters of no module, or those that DDP averages; a separate
    optimizer, twice; a group that is added later.
    """
    model, critic = mlp(), nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1))
    loose, own = nn.Parameter(torch.ones(7)), how in ("own", "twice", "ddp")
    wrapped = DistributedDataParallel(critic) if how == "ddp" else critic
    other = [loose] if how == "loose" else [*critic[0].parameters()]
    names, named = [*model.named_parameters()], [*critic[0].named_parameters("critic")]
    groups: Any = [{"params": names}, {"params": named}] if how == "named" else [
        {"params": [*model.parameters()]}, *([] if own or how == "added" else [{"params": other}])]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with log_lines() as lines, commlayer.attach(model, None if how == "added" else optimizer,
                                                config=quick(ranks_per_node=WORLD)):
        for step in range(3):
            (model(data(rank, step)[0]).sum() + wrapped(torch.ones(1, 2)).sum() + loose.sum()).backward()
            optimizer.step()
            if own and (not step or how == "twice"):
                extra = torch.optim.Adam(other, lr=0.1)
            if own:
                extra.step()
            elif how == "added" and not step:
                optimizer.add_param_group({"params": other})
    return lines


@pytest.mark.commit(3)
@pytest.mark.parametrize(("how", "what", "names"), [
    ("named", "SGD updates 2 ", ("critic.weight (parameter 0 of group 1, shape (5, 2))", "critic.bias (parameter 1 of ")),
    ("unnamed", "SGD updates 2 ", ("Sequential.0.weight (parameter 0 of group 1, shape (5, 2))", "Sequential.0.bias ")),
    ("loose", "SGD updates 1 ", ("(parameter 0 of group 1, shape (7,))",)),
    ("added", "SGD updates 2 ", ("Sequential.0.weight (parameter 0 of group 1, ",)),
    ("own", "Adam updates 2 ", ("Sequential.0.weight (parameter 0 of group 0, ",)),
    ("twice", "Adam updates 2 ", ("Sequential.0.weight (parameter 0 of group 0, ",)),
])
def test_parameters_that_no_session_averages_are_named_once(how: str, what: str, names: tuple[str, ...]) -> None:
    for lines in pool(WORLD).call(strangers, how):
        (line,) = lines
        assert_refused(line, "E-PARAMETER-LOCAL", what, *names)


def test_parameters_that_ddp_averages_are_not_named() -> None:
    assert pool(WORLD).call(strangers, "ddp") == [[], []]


def steps_in_backward(rank: int, when: str, how: str, by: str) -> tuple[str, bool]:
    """`when`: the script sets its hooks before or after attach(), or by torch; or only on another model.

    `by`: an optimizer steps, or the script updates by hand and clears the gradient.
    """
    model, other = mlp(), nn.Linear(3, 1)
    before = parameters(model)
    wrapped: Any = DistributedDataParallel(model) if how == "ddp" else model

    def hook_all(module: nn.Module) -> None:
        for p in module.parameters():
            def step(parameter: torch.Tensor, optimizer: Any = torch.optim.Adam([p], lr=0.1)) -> None:
                optimizer.step() if by == "optimizer" else parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None

            p.register_post_accumulate_grad_hook(step)

    def run() -> None:
        with commlayer.attach(wrapped, config=quick(ranks_per_node=WORLD)):
            if when in ("after", "other"):
                hook_all(other if when == "other" else model)
            for number in range(2):
                other(wrapped(data(rank, number)[0])).sum().backward()

    if when == "torch":
        _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.1})
    if when == "before":
        hook_all(model)
    return outcome(run), same(before, parameters(model))


@pytest.mark.commit(4)
@pytest.mark.parametrize(("when", "how", "by"), [
    ("before", "module", "optimizer"), ("after", "module", "optimizer"), ("torch", "module", "optimizer"),
    ("after", "ddp", "optimizer"), ("other", "module", "optimizer"), ("before", "module", "hand"), ("after", "module", "hand"),
])
def test_updates_of_averaged_parameters_inside_backward_are_refused(when: str, how: str, by: str) -> None:
    for line, untouched in pool(WORLD).call(steps_in_backward, when, how, by):
        assert untouched or by == "hand"
        if when == "other":
            assert line == ""
        elif by == "optimizer":
            assert_refused(line, "E-STEP-IN-BACKWARD", "Adam")
        else:
            assert_refused(line, "E-HOOKS-TAKEN")


def modifies_in_place(rank: int, attached: bool) -> str:
    """A hook set before attach() steps with a gradient, clears it, and changes a weight that the pass still needs."""
    model = mlp()

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.grad = None
            model[2].weight.add_(1.0)

    model[4].weight.register_post_accumulate_grad_hook(step)
    with commlayer.attach(model, config=quick()) if attached else contextlib.nullcontext():
        line = outcome(lambda: model(data(rank, 0)[0]).sum().backward())
        dist.barrier()  # a rank that leaves first would be the other's error
        return line


def test_torch_error_is_shown_if_a_hook_removed_a_gradient() -> None:
    expected, _ = pool(WORLD).call(modifies_in_place, False)
    assert "modified by an inplace operation" in expected
    assert pool(WORLD).call(modifies_in_place, True) == [expected, expected]


def accumulates_as_frameworks_do(rank: int, address: str) -> list[torch.Tensor]:
    """Accelerate sets require_backward_grad_sync before the last backward pass of a step."""
    model: Any = mlp()
    seen = []
    with commlayer.attach(model, compression=commlayer.compressors.identity(), config=quick(join=address)) as session:
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            model(data(rank, micro)[0]).sum().backward()
            seen.append(model[0].weight.grad.clone())
        assert session.metrics()["steps"] == 1
    return seen


def test_require_backward_grad_sync_is_obeyed_on_a_plain_module() -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(accumulates_as_frameworks_do, servers.address)
    assert not torch.equal(first[0], second[0])
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)
