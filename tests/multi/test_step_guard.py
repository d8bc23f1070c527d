"""What an optimizer applies was averaged, or the job ends by one line. Scripts that part ranks, and scripts that do not."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from msgspec import structs
from support.attached import data, mlp
from support.rank_pool import pool, quick, ranks_first
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.guards import AttachedModel, StepGuard
from commlayer.engine.optimizers import job_of
from commlayer.planner import default_plan

WORLD, EVERY, STEPS = 2, 4, 12
_ranks = ranks_first(WORLD)


class Body(nn.Module):
    """A body that is frozen at first, and a head; or two adapters, of which one is trained."""

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


class Attached:
    """One rank's model, optimizer and session."""

    def __init__(self, rank: int, how: str, every: int, kind: str = "mlp", **attach: Any) -> None:
        torch.manual_seed(5)
        self.rank, self.how, self.every = rank, how, every
        self.rows: list[list[torch.Tensor]] = []
        self.model: Any = mlp() if kind == "mlp" else Body()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.wrapped: Any = self.model
        if how == "ddp":
            self.wrapped = DistributedDataParallel(self.model, find_unused_parameters=kind == "body")
        plan = default_plan(job_of(self.model), codec="identity()", path="allreduce", servers=0, ranks_per_node=WORLD,
                            fuse_nbytes=4096, cut_nbytes=4096)
        self.session = commlayer.attach(self.wrapped, self.optimizer, plan=structs.replace(plan, local_steps=every),
                                        config=quick(ranks_per_node=WORLD, drift_steps=0, deadline_s=8.0), **attach)

    def loss(self, number: int) -> torch.Tensor:
        x, y = data(self.rank, number)
        dtype = next(self.model.parameters()).dtype
        return nn.functional.mse_loss(self.wrapped(x.to(dtype)), y.to(dtype))

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.loss(number).backward()
        self.optimizer.step()

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.step(number)

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def row(self) -> None:
        self.rows.append(self.weights())


class Played(NamedTuple):
    """How a script ended on a rank, what was warned of, its weights at the end and where it noted them, and its steps."""

    said: str
    lines: list[str]
    weights: list[torch.Tensor]
    rows: list[list[torch.Tensor]]
    step: int


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def warnings() -> Any:
    said = Said()
    logging.getLogger("commlayer").addHandler(said)
    try:
        yield said.lines
    finally:
        logging.getLogger("commlayer").removeHandler(said)


Script = Callable[[Attached], None]

# ---- scripts that part ranks


def assigned(t: Attached) -> None:
    t.train(0, 3)
    t.model.load_state_dict({name: p.clone() for name, p in t.model.state_dict().items()}, assign=True)
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.05)
    t.train(3, STEPS)


def assigned_under_the_old_optimizer(t: Attached) -> None:
    t.train(0, 3)
    t.model.load_state_dict({name: p.clone() for name, p in t.model.state_dict().items()}, assign=True)
    t.train(3, STEPS)


def body_unfrozen(t: Attached) -> None:
    t.train(0, 3)
    for module in (t.model.head, t.model.a):
        module.requires_grad_(False)
    t.model.body.requires_grad_(True)
    t.train(3, STEPS)


def other_adapter(t: Attached) -> None:
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


def adapters_injected(t: Attached) -> None:
    t.train(0, 3)
    t.model.requires_grad_(False)
    t.model.head = Adapted(t.model.head)
    t.optimizer = torch.optim.SGD(t.model.head.low.parameters(), lr=0.05)
    t.train(3, STEPS)


def written_by_autograd_grad(t: Attached) -> None:
    t.train(0, 3)
    parameters = list(t.model.parameters())
    for number in range(3, STEPS):
        for p, g in zip(parameters, torch.autograd.grad(t.loss(number), parameters), strict=True):
            p.grad = g
        t.optimizer.step()


def written_in_place(t: Attached) -> None:
    t.train(0, 3)
    parameters = list(t.model.parameters())
    for number in range(3, STEPS):
        for p, g in zip(parameters, torch.autograd.grad(t.loss(number), parameters), strict=True):
            p.grad.copy_(g)
        t.optimizer.step()


def written_by_func_grad(t: Attached) -> None:
    def loss(parameters: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        x, y = data(t.rank, number)
        return nn.functional.mse_loss(torch.func.functional_call(t.model, parameters, (x,)), y)

    for number in range(STEPS):
        found = torch.func.grad(loss)({name: p.detach() for name, p in t.model.named_parameters()}, number)
        for name, p in t.model.named_parameters():
            p.grad = found[name]
        t.optimizer.step()


def in_double(t: Attached) -> None:
    t.train(0, 3)
    t.wrapped.double()
    t.optimizer.state.clear()
    t.train(3, STEPS)


def never_out_of_no_sync(t: Attached) -> None:
    t.train(0, 3)
    with t.session.no_sync():
        t.train(3, STEPS)


def compiled_autograd(t: Attached) -> None:
    from torch._dynamo import compiled_autograd as compiled

    t.train(0, 3)
    with compiled._enable(torch.compile(backend="eager")):
        t.train(3, STEPS)


def compiled_autograd_configured(t: Attached) -> None:
    t.train(0, 3)
    with torch._dynamo.config.patch(compiled_autograd=True):
        for number in range(3, STEPS):
            t.optimizer.zero_grad()
            torch.compile(lambda n: t.loss(n).backward(), backend="eager")(number)
            t.optimizer.step()


TOOK_PLACE = r"parameter 0\.weight .*place.*E-MODEL-CHANGED"
UNFROZEN = "frozen.*E-MODEL-CHANGED"
NOT_AVERAGED = r"0\.weight .*E-GRADIENT-LOCAL"
WRONG: list[tuple[Script, str, str, str]] = [
    (assigned, "mlp", TOOK_PLACE, "module, ddp, local module, local ddp"),
    (assigned_under_the_old_optimizer, "mlp", TOOK_PLACE, "module, ddp, local module"),
    (body_unfrozen, "body", rf"parameter body\.weight .*{UNFROZEN}", "module, ddp, local ddp"),
    (other_adapter, "body", rf"parameter b\.weight .*{UNFROZEN}", "module, ddp, local module"),
    (adapters_injected, "body", r"parameter head\.low\.weight .*added.*E-MODEL-CHANGED", "module, ddp, local ddp"),
    (written_by_autograd_grad, "mlp", NOT_AVERAGED, "module, ddp"),
    (written_in_place, "mlp", NOT_AVERAGED, "module, ddp"),
    (written_by_func_grad, "mlp", NOT_AVERAGED, "module, ddp, local ddp"),  # DDP has made no connection before a first pass
    (never_out_of_no_sync, "mlp", NOT_AVERAGED, "module, ddp"),
    (in_double, "mlp", r"parameter 0\.weight .*float32 .*float64.*E-MODEL-CHANGED", "ddp"),
    (compiled_autograd, "mlp", "E-COMPILED", "module, local module"),
    (compiled_autograd_configured, "mlp", "E-COMPILED", "module, local module"),
    (compiled_autograd, "mlp", r"Compiled autograd is not compatible with C\+\+ DDP Reducer", "ddp"),
]


def play(rank: int, script: Script, kind: str, how: str, who: tuple[int, ...] = (0, 1)) -> Played:
    """The script on the ranks of `who`, the others train as usual."""
    said = ""
    with warnings() as lines:
        t = Attached(rank, how.split()[-1], EVERY if "local" in how else 1, kind)
        try:
            with t.session:
                if rank in who:
                    script(t)
                else:
                    t.train(0, STEPS)
                t.session.drain()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return Played(said, lines, t.weights(), t.rows, t.session.step)


@pytest.mark.commit(9)
@pytest.mark.parametrize(("script", "kind", "line", "how"), [
    (script, kind, line, how) for script, kind, line, hows in WRONG for how in hows.split(", ")
], ids=lambda value: getattr(value, "__name__", value) if callable(value) else value)
def test_a_script_that_parts_ranks_ends_by_one_line(script: Script, kind: str, line: str, how: str) -> None:
    results = pool(WORLD).call(play, script, kind, how)
    for played in results:
        assert re.search(line, played.said), played.said
        assert "\n" not in played.said
        assert not [warned for warned in played.lines if "were not exchanged" not in warned]
    if "local" not in how:
        assert same(results[0].weights, results[1].weights), "before an optimizer could apply it"


@pytest.mark.commit(2)
@pytest.mark.parametrize(("script", "kind", "line", "how"), [
    (assigned, "mlp", TOOK_PLACE, "module"), (assigned, "mlp", TOOK_PLACE, "ddp"),
    (written_by_autograd_grad, "mlp", NOT_AVERAGED, "module"), (written_by_autograd_grad, "mlp", NOT_AVERAGED, "ddp"),
    (body_unfrozen, "body", UNFROZEN, "module"),
], ids=lambda value: getattr(value, "__name__", value) if callable(value) else value)
def test_an_error_of_one_rank_ends_all(script: Script, kind: str, line: str, how: str) -> None:
    other, own = pool(WORLD).call(play, script, kind, how, (1,))
    assert re.match(f"InvalidInput: .*{line}", own.said), own.said
    assert re.search(line, other.said), "it learns why"


# ---- scripts that are right


def accumulated(t: Attached) -> None:
    for number in range(STEPS):
        t.optimizer.zero_grad()
        for micro in range(3):
            t.loss(3 * number + micro).backward()
        t.optimizer.step()
        t.row()


def accumulated_and_clipped(t: Attached) -> None:
    for number in range(STEPS):
        t.optimizer.zero_grad(set_to_none=False)
        for micro in range(3):
            t.loss(3 * number + micro).backward()
            nn.utils.clip_grad_norm_(t.model.parameters(), 0.3)
        t.optimizer.step()
        t.row()


def accumulated_in_no_sync(t: Attached) -> None:
    for number in range(STEPS):
        t.optimizer.zero_grad()
        for micro in range(3):
            with t.session.no_sync() if micro < 2 else contextlib.nullcontext():
                t.loss(3 * number + micro).backward()
        t.optimizer.step()
        t.row()


def replaced_by_copies(t: Attached) -> None:
    for number in range(STEPS):
        t.optimizer.zero_grad()
        t.loss(number).backward()
        for p in t.model.parameters():
            p.grad = 0.5 * p.grad
        t.optimizer.step()
        t.row()


def stepped_by_another_optimizer(t: Attached) -> None:
    """A new one in the midst, as of a script that makes one for each epoch."""
    t.train(0, 4)
    t.optimizer.zero_grad()
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.02)
    t.train(4, 8)


def two_optimizers_step_with_each_gradient(t: Attached) -> None:
    """A preconditioner, or weight decay of its own, ahead of the optimizer."""
    other = torch.optim.SGD(t.model.parameters(), lr=0.01)
    for number in range(STEPS):
        t.optimizer.zero_grad()
        t.loss(number).backward()
        other.step()
        t.optimizer.step()
        t.row()


def in_a_closure(t: Attached) -> None:
    for number in range(STEPS):
        def closure(number: int = number) -> torch.Tensor:
            t.optimizer.zero_grad()
            loss = t.loss(number)
            loss.backward()
            return loss

        t.optimizer.step(closure)
        t.row()


def step_ahead_of_any_gradient(t: Attached) -> None:
    t.optimizer.step()
    t.optimizer.zero_grad()
    accumulated(t)


def with_an_average_of_weights(t: Attached) -> None:
    """And a model of this rank's own, with an optimizer of its own."""
    average, own = torch.optim.swa_utils.AveragedModel(t.model), nn.Linear(2, 1)
    other = torch.optim.SGD(own.parameters(), lr=0.1)
    for number in range(STEPS):
        t.step(number)
        average.update_parameters(t.model)
        other.zero_grad()
        own(torch.full((1, 2), float(t.rank))).sum().backward()
        other.step()
        t.row()


def parts_at_other_frequencies(t: Attached) -> None:
    parameters = list(t.model.parameters())
    often, rarely = (torch.optim.SGD(part, lr=0.05) for part in (parameters[:3], parameters[3:]))
    for number in range(STEPS):
        often.zero_grad()
        t.loss(number).backward()
        often.step()
        if number % 3 == 2:
            rarely.step()
            rarely.zero_grad()
        t.row()


def synchronized_by_hand(t: Attached) -> None:
    parameters = list(t.model.parameters())
    for number in range(STEPS):
        for p, g in zip(parameters, torch.autograd.grad(t.loss(number), parameters), strict=True):
            p.grad = g
        t.session.synchronize()
        t.optimizer.step()
        t.row()


def stepped_by_lbfgs(t: Attached) -> None:
    optimizer = torch.optim.LBFGS(t.model.parameters(), lr=0.1, max_iter=4)
    for number in range(4):
        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = t.loss(number)
            loss.backward()
            return loss

        optimizer.step(closure)
        t.row()


RIGHT: list[tuple[Script, str]] = [
    (accumulated, "module, ddp, local module, local ddp"), (accumulated_and_clipped, "module, local module, local ddp"),
    (accumulated_in_no_sync, "module, ddp, local module, local ddp"), (replaced_by_copies, "module, ddp, local module"),
    (stepped_by_another_optimizer, "module, ddp"),
    (two_optimizers_step_with_each_gradient, "module, ddp, local module"),
    (in_a_closure, "module, ddp, local module, local ddp"), (step_ahead_of_any_gradient, "module, ddp, local module"),
    (with_an_average_of_weights, "module, ddp, local module"), (parts_at_other_frequencies, "module, ddp"),
    (synchronized_by_hand, "module, local module"), (stepped_by_lbfgs, "module, ddp"),
    (in_double, "module, local module, local ddp"),
]


@pytest.mark.commit(12)
@pytest.mark.parametrize(("script", "how"), [(script, how) for script, hows in RIGHT for how in hows.split(", ")],
                         ids=lambda value: getattr(value, "__name__", value))
def test_a_right_script_stays_silent_and_ranks_equal(script: Script, how: str) -> None:
    one, other = pool(WORLD).call(play, script, "mlp", how)
    for played in (one, other):
        assert played.said == ""
        assert played.lines == []
    assert same(one.weights, other.weights)
    assert all(bool(w.isfinite().all()) for w in one.weights)
    for step, (mine, theirs) in enumerate(zip(one.rows, other.rows, strict=True), 1):
        assert same(mine, theirs) == ("local" not in how or step % EVERY == 0), f"behind optimizer step {step}"


@pytest.mark.commit(2)
@pytest.mark.parametrize("how", ["local module", "local ddp"])
@pytest.mark.parametrize("script", [written_by_autograd_grad, written_in_place, never_out_of_no_sync], ids=lambda s: s.__name__)
def test_local_steps_count_whatever_gradients_they_apply(script: Script, how: str) -> None:
    """Nothing has to be averaged, and all ranks exchange behind the same optimizer steps."""
    one, other = pool(WORLD).call(play, script, "mlp", how)
    assert one.said == other.said == ""
    assert one.step == other.step == STEPS
    assert same(one.weights, other.weights)


def scaled(t: Attached, hurt: tuple[int, ...], late: bool, to_none: bool, micros: int, unscale: bool) -> None:
    """Rank 1 has a gradient that is not finite in the steps of `hurt`, which it skips."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for number in range(STEPS):
        if not late:
            t.optimizer.zero_grad(set_to_none=to_none)
        for micro in range(micros):
            loss = t.loss(micros * number + micro)
            if late and not micro:
                t.optimizer.zero_grad(set_to_none=to_none)
            if number in hurt and t.rank == 1 and not micro:
                loss = loss * math.inf
            scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(t.optimizer)
        scaler.step(t.optimizer)
        scaler.update()


@pytest.mark.commit(2)
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize(("late", "to_none"), [(False, True), (True, True), (False, False), (True, False)])
def test_a_local_step_that_one_rank_skips_counts_there_too(late: bool, to_none: bool, micros: int) -> None:
    for hurt, unscale in (((3, 4, 5), True), ((1, 7), False)):
        script = functools.partial(scaled, hurt=hurt, late=late, to_none=to_none, micros=micros, unscale=unscale)
        one, other = pool(WORLD).call(play, script, "mlp", "local module")
        assert one.said == other.said == ""
        assert one.step == other.step == STEPS
        assert same(one.weights, other.weights)
        assert all(bool(w.isfinite().all()) for w in one.weights)


# ---- the guard by itself


class Guarded:
    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.ones(3)) for _ in range(20)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.latched: list[BaseException] = []
        named = [(f"p{number}", p) for number, p in enumerate(self.parameters)]
        self.guard = StepGuard(AttachedModel(None, named), named, self.latched.append)

    def write(self, value: float = 1.0) -> None:
        for p in self.parameters:
            p.grad = torch.full((3,), value)

    def exchange(self) -> None:
        self.write()
        self.guard.exchanged()


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    made = Guarded()
    yield made
    made.guard.remove()


def test_gradients_of_no_exchange_are_refused_and_the_error_stays(guarded: Guarded) -> None:
    guarded.write()
    with pytest.raises(ValueError, match="p0 .*E-GRADIENT-LOCAL") as caught:
        guarded.optimizer.step()
    assert guarded.latched == [caught.value]
    assert all(bool((p == 1).all()) for p in guarded.parameters), "nothing was applied"


def test_each_parameter_has_its_own_last_step(guarded: Guarded) -> None:
    first, second = (torch.optim.SGD(part, lr=0.1) for part in (guarded.parameters[:10], guarded.parameters[10:]))
    guarded.exchange()
    first.step()
    guarded.write()
    second.step()
    with pytest.raises(ValueError, match=r"p0 .* 9 others.*E-GRADIENT-LOCAL"):
        first.step()
    guarded.exchange()
    first.step()
    with pytest.raises(ValueError, match=r"p5 .* 4 others.*E-GRADIENT-LOCAL"):
        torch.optim.SGD(guarded.parameters[5:], lr=0.1).step()


def test_the_same_gradients_may_be_applied_again_and_zeros_always(guarded: Guarded) -> None:
    guarded.exchange()
    guarded.optimizer.step()
    guarded.optimizer.step()
    guarded.optimizer.zero_grad(set_to_none=False)
    guarded.optimizer.step()
    guarded.optimizer.zero_grad()
    guarded.optimizer.step()
    guarded.parameters[7].grad = torch.ones(3)
    with pytest.raises(ValueError, match="p7 .*E-GRADIENT-LOCAL"):
        guarded.optimizer.step()


def test_a_closure_is_judged_when_it_has_run(guarded: Guarded) -> None:
    guarded.write()
    guarded.optimizer.step(guarded.exchange)
    with pytest.raises(ValueError, match="p0 .*E-GRADIENT-LOCAL"):
        guarded.optimizer.step(functools.partial(guarded.write, 2.0))


def test_a_step_that_raises_is_no_step_and_hides_none(guarded: Guarded) -> None:
    def fails() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        guarded.optimizer.step(fails)
    guarded.write()
    with pytest.raises(ValueError, match="p0 .*E-GRADIENT-LOCAL"):
        torch.optim.SGD(guarded.parameters, lr=0.1).step()


class Wrapper(torch.optim.SGD):
    """Steps another optimizer twice inside its own step."""

    def step(self, closure: Any = None) -> None:
        for _ in range(2):
            self.inner.step()
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = 0.5 * p.grad


def test_what_an_optimizer_writes_inside_its_step_is_its_own(guarded: Guarded) -> None:
    outer = Wrapper(guarded.parameters, lr=0.1)
    outer.inner = guarded.optimizer
    guarded.exchange()
    outer.step()
    assert not guarded.latched
