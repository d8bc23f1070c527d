"""session.join(): ranks with unequal numbers of batches. Real ranks, over a server and over all-reduce."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attached import assert_refused, data, mlp, outcome, plan_of
from support.rank_pool import Servers, pool, quick, ranks_first
from torch import nn

import commlayer
from commlayer.errors import StepAbandoned

WORLD = 3
BATCHES = ((5, 8, 5), (0, 2, 8), (4, 4, 1))
"""Of each epoch, how many each rank has."""
FAR_S = 300.0
"""The deadline: an error within a test did not wait for it."""
AT_ONCE_S = 60.0
_ranks = ranks_first(WORLD)


def model_of(rank: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(data(0, 0)[0].shape[1]), *mlp(rank))


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = data(rank, step)
    return nn.functional.mse_loss(model(x), y)


def make_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    moments = {f"{number}.{name}": value for number, state in optimizer.state_dict()["state"].items()
               for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value.clone() for name, value in (model.state_dict() | moments).items()}


def train(rank: int, how: str, kind: str, plan: str, weighed: bool, address: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = model_of(rank)
    optimizer = make(kind, model)
    config = quick(ranks_per_node=WORLD if how == "allreduce" else 1, join=address, deadline_s=FAR_S, drift_steps=2)
    passes, states = [], []
    chosen = None if plan in ("auto", "forward") else plan
    with commlayer.attach(model, optimizer, compression=chosen, config=config,
                          sync="forward" if plan == "forward" else None) as session:
        if weighed:
            session.weight(rank + 1)
        for batches in BATCHES:
            with session.join():
                make_steps(model, optimizer, rank, range(batches[rank]))
            passes.append(session.step)
            states.append(state_of(model, optimizer))
        for step in range(4):  # equal numbers on all ranks: the earlier passes have no effect
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        session.flush()
        states.append(state_of(model, optimizer))
        return {"passes": passes, "states": states, "decisions": [*session.inspect.decisions()]}


def by_hand(kind: str, weighed: bool) -> list[dict[str, torch.Tensor]]:
    """The average is over the ranks that have a batch."""
    model = model_of(0)
    optimizer = make(kind, model)
    states = []
    for batches in (*BATCHES, (4,) * WORLD):
        for step in range(max(batches)):
            active = [rank for rank in range(WORLD) if step < batches[rank]]
            weights = [rank + 1.0 if weighed else 1.0 for rank in active]
            before = {name: b.clone() for name, b in model.named_buffers()}
            means = {name: torch.zeros_like(b, dtype=torch.float64) for name, b in before.items()}
            grads = [torch.zeros_like(p) for p in model.parameters()]
            for rank, weight in zip(active, weights, strict=True):
                model.load_state_dict(before, strict=False)
                model.zero_grad()
                loss_of(model, rank, step).backward()
                for grad, p in zip(grads, model.parameters(), strict=True):
                    assert p.grad is not None
                    grad += p.grad * weight / sum(weights)
                for name, b in model.named_buffers():
                    means[name] += b.double() * weight / sum(weights)
            for grad, p in zip(grads, model.parameters(), strict=True):
                p.grad = grad
            optimizer.step()
            model.load_state_dict({name: mean.to(before[name].dtype) for name, mean in means.items()}, strict=False)
        states.append(state_of(model, optimizer))
    return states


CASES = [("service", "sgd", "identity()", False), ("service", "adam", "identity()", True), ("allreduce", "sgd", "auto", True),
         ("allreduce", "adam", "auto", False), ("service", "sgd", "forward", False), ("service", "sgd", "auto", False),
         ("service", "adam", "topk(ratio=0.1)", False), ("service", "sgd", "int4()", True)]


@pytest.mark.commit(3)
@pytest.mark.parametrize(("how", "kind", "plan", "weighed"), CASES)
def test_averages_are_over_ranks_with_batches_and_replicas_end_equal(how: str, kind: str, plan: str, weighed: bool) -> None:
    with Servers(WORLD, 0 if how == "allreduce" else 1, deadline_s=FAR_S) as servers:
        results = pool(WORLD).call(train, how, kind, plan, weighed, servers.address)
    steps = [sum(map(max, BATCHES[: n + 1])) for n in range(len(BATCHES))]
    exact = plan == "identity()" or how == "allreduce"
    wanted, start = by_hand(kind, weighed), {name: p.detach() for name, p in model_of(0).named_parameters()}
    for result in results:
        assert result["passes"] == steps
        assert not [line for line in result["decisions"] if "differ" in line or "drifted" in line]
        for got, first, expected in zip(result["states"], results[0]["states"], wanted, strict=True):
            for name, value in got.items():
                if "num_batches" in name:
                    continue  # each rank's own count
                assert torch.equal(value, first[name]), (name, "differs between ranks")
                assert bool(value.isfinite().all())
                if exact:
                    torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)
                elif plan == "int4()" and name.endswith("weight"):
                    moved = expected[name] - start[name]
                    assert float((value - expected[name]).norm()) < 0.1 * float(moved.norm()), name


def train_locally(rank: int, how: str, sync: Any, address: str) -> dict[str, Any]:
    model = mlp()
    optimizer = make("sgd", model)
    config = quick(ranks_per_node=WORLD if how == "allreduce" else 1, join=address, deadline_s=FAR_S, drift_steps=2)
    passes, states = [], []
    codec = None if sync == "auto" or how == "allreduce" else "identity()"
    with commlayer.attach(model, optimizer, compression=codec, sync=sync, config=config) as session:
        for batches in BATCHES:
            with session.join():
                make_steps(model, optimizer, rank, range(batches[rank]))
            passes.append(session.step)
            session.flush()
            states.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"passes": passes, "states": states, "decisions": [*session.inspect.decisions()]}


def locally_by_hand(every: int) -> list[dict[str, torch.Tensor]]:
    """Each exchange averages the changes of the ranks that have made a step since the last one."""
    models = [mlp() for _ in range(WORLD)]
    optimizers = [make("sgd", model) for model in models]
    states = []
    for batches in BATCHES:
        for begin in range(0, max(batches), every):
            means = {name: torch.zeros_like(value) for name, value in models[0].state_dict().items()}
            active = [rank for rank in range(WORLD) if batches[rank] > begin]
            for rank in active:
                make_steps(models[rank], optimizers[rank], rank, range(begin, min(begin + every, batches[rank])))
                for name, value in models[rank].state_dict().items():
                    means[name] += value / len(active)
            for model in models:
                model.load_state_dict(means)
        states.append(means)
    return states


@pytest.mark.commit(3)
@pytest.mark.parametrize(("how", "sync"), [
    ("service", commlayer.LocalSteps(3, overlap=False)), ("allreduce", commlayer.LocalSteps(2, overlap=False)),
    ("service", commlayer.LocalSteps(1, overlap=False)), ("service", commlayer.LocalSteps(4, overlap=False, fragments=2)),
    ("service", commlayer.LocalSteps(2)), ("allreduce", commlayer.LocalSteps(4, fragments=2)),
    ("service", "auto"), ("allreduce", "auto"),
], ids=str)
def test_ranks_without_batches_take_part_in_exchanges_of_local_steps(how: str, sync: Any) -> None:
    with Servers(WORLD, 0 if how == "allreduce" else 1, deadline_s=FAR_S) as servers:
        results = pool(WORLD).call(train_locally, how, sync, servers.address)
    exact = sync != "auto" and not sync.overlap and sync.fragments is None
    wanted = locally_by_hand(sync.every) if exact else results[0]["states"]
    for result in results:
        assert result["passes"] == [sum(map(max, BATCHES[: n + 1])) for n in range(len(BATCHES))]
        assert not [line for line in result["decisions"] if "differ" in line or "drifted" in line]
        for got, first, expected in zip(result["states"], results[0]["states"], wanted, strict=True):
            for name, value in got.items():
                assert torch.equal(value, first[name]), (name, "differs between ranks")
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


DRAIN_STEPS, TOPK, INT4 = 40, "topk(ratio=0.3)", "error_feedback(int4())"
SKIPPED: dict[str, set[int]] = {"none": set(), "every third": {1, 4, 7}, "the last": {max(BATCHES[0]) - 1}}
"""Steps whose averages the script throws away."""


def slope(rank: int, step: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step))


def train_slopes(rank: int, plan: str, skipped: str, address: str) -> list[torch.Tensor]:
    """A loss whose gradients do not depend on the weights; then steps with zero gradients, in which residuals are sent."""
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7))
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with commlayer.attach(model, optimizer, compression=plan, config=quick(join=address, deadline_s=FAR_S)) as session:
        with session.join():
            for step in range(BATCHES[0][rank]):
                optimizer.zero_grad()
                sum((p * slope(rank, step, p.shape)).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
                if step not in SKIPPED[skipped]:
                    optimizer.step()
        for _ in range(DRAIN_STEPS):
            optimizer.zero_grad()
            sum((p * 0.0).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
        session.flush()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("plan", "skipped"), [
    (TOPK, "the last"), (INT4, "every third"),
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in (
        (TOPK, "none"), (TOPK, "every third"), (INT4, "none"), (INT4, "the last"))),
])
def test_applied_plus_residuals_equal_input(plan: str, skipped: str) -> None:
    with Servers(WORLD, 1, deadline_s=FAR_S) as servers:
        results = pool(WORLD).call(train_slopes, plan, skipped, servers.address)
    for number, shape in enumerate(p.shape for p in nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7)).parameters()):
        wanted = torch.zeros(shape)
        for step in range(max(BATCHES[0])):
            active = [rank for rank in range(WORLD) if step < BATCHES[0][rank]]
            if step not in SKIPPED[skipped]:
                wanted -= torch.stack([slope(rank, step, shape) for rank in active]).mean(0)
        for result in results:
            torch.testing.assert_close(result[number], wanted, rtol=0.0, atol=0.02)


def failing(rank: int, how: str, address: str) -> tuple[str, float]:
    """Rank 1 fails in its second step, when rank 0 is out of batches."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = quick(ranks_per_node=WORLD if how == "allreduce" else 1, join=address, deadline_s=FAR_S)
    session = commlayer.attach(model, optimizer, config=config)
    begin_s = 0.0

    def train() -> None:
        nonlocal begin_s
        with session.join():
            for step in range((1, 3, 3)[rank]):
                begin_s = time.monotonic()
                if rank == 1 and step == 1:
                    raise ArithmeticError("no more memory, say")
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()

    line = outcome(train)
    elapsed_s = time.monotonic() - begin_s
    session.close()
    return line, elapsed_s


@pytest.mark.parametrize("how", ["service", "allreduce"])
def test_rank_that_fails_inside_join_is_named_immediately(how: str) -> None:
    with Servers(WORLD, 0 if how == "allreduce" else 1, deadline_s=FAR_S) as servers:
        results = pool(WORLD).call(failing, how, servers.address)
    assert results[1][0] == "ArithmeticError: no more memory, say"
    for line, elapsed_s in (results[0], results[2]):
        assert line.startswith("PeerLost: worker 1: "), results
        assert "ArithmeticError" in line, results
        assert elapsed_s < AT_ONCE_S


def broken_pass(rank: int, address: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Rank 0's only backward pass raises; its script catches the error."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.attach(model, optimizer, compression="identity()", config=quick(join=address)) as session:
        with session.join():
            for step in range((1, 3, 3)[rank]):
                optimizer.zero_grad()
                x, y = data(rank, step)
                if rank == 0:
                    x.requires_grad_().register_hook(lambda _: 1 / 0)
                try:
                    nn.functional.mse_loss(model(x), y).backward()
                except (ZeroDivisionError, StepAbandoned):
                    continue
                optimizer.step()
        return session.step, state_of(model, optimizer)


def test_failed_last_pass_is_dropped_on_all_ranks() -> None:
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(broken_pass, servers.address)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in (1, 2):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rank, step) for rank in (1, 2)]).mean().backward()
        optimizer.step()
    for steps, got in results:
        assert steps == 3
        for name, value in model.state_dict().items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def adversarial(rank: int, how: str, batches: list[int], address: str, second: str) -> list[Any]:
    """Two models and sessions, trained in turn: the second one twice as often."""
    models = mlp(0), mlp(1)
    optimizers = [make(kind, model) for kind, model in zip(("adam", "sgd"), models, strict=True)]
    sessions = [commlayer.attach(model, optimizer, compression=None if how == "allreduce" else "identity()",
                                 config=quick(ranks_per_node=WORLD if how == "allreduce" else 1, join=join, deadline_s=FAR_S))
                for model, optimizer, join in zip(models, optimizers, (address, second), strict=True)]
    with sessions[0].join(), sessions[1].join():
        for step in range(batches[rank]):
            for number in (1, 0, 1):
                optimizers[number].zero_grad()
                loss_of(models[number], rank, step).backward()
                optimizers[number].step()
    result = [session.step for session in sessions], [state_of(m, o) for m, o in zip(models, optimizers, strict=True)]
    for session in sessions:
        session.close()
    return list(result)


@pytest.mark.commit(1)
@pytest.mark.parametrize("how", ["service", "allreduce"])
def test_sessions_of_two_models_share_their_join(how: str) -> None:
    batches, servers = [0, 4, 2], int(how == "service")
    with Servers(WORLD, servers, deadline_s=FAR_S) as one, Servers(WORLD, servers, deadline_s=FAR_S) as other:
        results = pool(WORLD).call(adversarial, how, batches, one.address, other.address)
    for number, kind in enumerate(("adam", "sgd")):
        model = mlp(number)
        optimizer = make(kind, model)
        for step in range(max(batches)):
            for _ in range(1 + number):
                optimizer.zero_grad()
                active = [rank for rank in range(WORLD) if step < batches[rank]]
                torch.stack([loss_of(model, rank, step) for rank in active]).mean().backward()
                optimizer.step()
        for steps, states in results:
            assert steps == [max(batches), 2 * max(batches)]
            for name, value in state_of(model, optimizer).items():
                torch.testing.assert_close(states[number][name], value, rtol=1e-4, atol=1e-5, msg=name)
                assert torch.equal(states[number][name], results[0][1][number][name]), (name, "differs between ranks")


def one_enters(rank: int, how: str, drift_steps: int, address: str) -> str:
    """Only rank 0 enters session.join()."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = quick(ranks_per_node=WORLD if how == "allreduce" else 1, join=address, drift_steps=drift_steps,
                   deadline_s=FAR_S if drift_steps or rank else 2.0, dead_after_s=2.5)

    def run() -> None:
        with session.join() if rank == 0 else contextlib.nullcontext():
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()

    session = commlayer.attach(model, optimizer, plan=plan_of(model, path=how, ranks_per_node=config["ranks_per_node"]),
                               config=config)
    line = outcome(run)
    session.close()
    return line


@pytest.mark.commit(1)
@pytest.mark.parametrize("how", ["service", "allreduce"])
def test_join_not_entered_by_one_rank_is_named_on_all(how: str) -> None:
    """Immediately if ranks exchange anything else; otherwise at the deadline."""
    for drift_steps, code in ((1, "E-CALLS-DIFFER"), (0, "E-DEADLINE")):
        with Servers(WORLD, int(how == "service"), deadline_s=FAR_S) as servers:
            for line in pool(WORLD).call(one_enters, how, drift_steps, servers.address):
                assert_refused(line, code, "session.join()")


def another_session(rank: int) -> str:
    first, second = mlp(0), mlp(1)
    config = quick(ranks_per_node=WORLD)
    with commlayer.attach(first, torch.optim.SGD(first.parameters(), lr=0.05), config=config) as session, \
            commlayer.attach(second, config=config):
        with contextlib.suppress(commlayer.errors.InvalidInput), session.join():
            line = outcome(lambda: loss_of(second, rank, 0).backward())
            raise commlayer.errors.InvalidInput("E-ARGUMENT", "over")
        return line


def test_session_inside_the_join_of_another_must_enter_its_own() -> None:
    for line in pool(WORLD).call(another_session):
        assert_refused(line, "E-UNEVEN-INPUTS", "another session's join()")


def entered(inside: Callable[[Any], Any] = lambda _: None, *, model: Any = None, optimizer: Any = "all", **how: Any) -> None:
    model = model or mlp()
    stepped = list(model.parameters())[: 2 if optimizer == "a part" else None]
    with commlayer.attach(model, torch.optim.SGD(stepped, lr=0.05) if optimizer else None, config=quick(ranks_per_node=WORLD),
                          **how) as session, session.join():
        inside(session)


def with_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    entered()
    del scaler


def again(session: Any) -> None:
    with session.join():
        pass


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "no optimizer": (lambda: entered(optimizer=None), "attach(model, optimizer)"),
    "a part": (lambda: entered(optimizer="a part"), "2.weight"),
    "a scaler that attach() was not given": (with_a_scaler, ""),
    "twice": (lambda: entered(again), "once"),
    "flush": (lambda: entered(lambda session: session.flush()), "flush()"),
    "checkpoint": (lambda: entered(lambda session: session.checkpoint("nowhere")), "checkpoint()"),
    "switch": (lambda: entered(lambda session: session.switch(session.inspect.plan)), "switch()"),
}


def refused(rank: int) -> dict[str, str]:
    return {name: outcome(act) for name, (act, _) in REFUSED.items()}


@pytest.mark.nightly
def test_unsupported_uses_of_join_are_refused_by_name() -> None:
    for lines in pool(WORLD).call(refused):
        for name, line in lines.items():
            assert_refused(line, "E-UNEVEN-INPUTS", REFUSED[name][1])


def test_join_of_a_single_process_has_no_effect() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.attach(model, optimizer) as session:
        with session.join():
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, 0, step).backward()
                optimizer.step()
        assert session.step == 3
