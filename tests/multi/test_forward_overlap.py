"""sync="forward": results arrive during the next forward pass, and scripts read and train the same bits. Real ranks."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import rank_pool
from support.attached import Raises, assert_refused, data, mlp, outcome, parameters, plan_of, same
from support.forward import OPTIMIZERS, Held, Net, Training, batch, loss_of
from support.jobs import distributed_job
from support.rank_pool import pool
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import commlayer
from commlayer.errors import find_error_code

WORLD, STEPS = 2, 5
_ranks = rank_pool.ranks_first(WORLD)
Seen = list[Any]
"""Numbers and tensors that a script has read."""
Script = Callable[[Training], Seen]
OPTIMIZERS |= {
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
}


def with_and_without(function: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """function(rank, address, overlap, ...) on all ranks: without overlap, and with it."""
    results = []
    for overlap in ("", "forward"):
        with rank_pool.Servers(WORLD, 1) as servers:
            results.append(pool(WORLD).call(function, servers.address, overlap, *args))
    return results[0], results[1]


def order(rank: int, address: str) -> list[str]:
    """The events of the second forward pass, if the results for the hidden layer arrive once the convolution has run."""
    training = Training(rank, address, "forward", codec="int8()")
    training.train(0, 1)
    training.session.flush()
    training.optimizer.zero_grad()
    held = Held(training.worker, ["hidden.2.weight"])
    training.backward(1)
    before = training.model.hidden[2].weight.detach().clone()
    training.step()
    events = ["stepped"]
    training.model.words.register_forward_hook(lambda *_: events.append("embedding"))
    training.model.conv.register_forward_hook(lambda *_: (events.append("convolution"), held.release())[0])
    training.model.hidden[2].register_forward_hook(lambda *_: events.append("hidden"))
    training.model.hidden[2].register_forward_pre_hook(
        lambda module, _: events.append("applied" if not torch.equal(module.weight, before) else "stale"))
    training.model(batch(rank, 2)[0])
    training.session.close()
    return events


def test_first_layers_run_before_the_last_result_arrives() -> None:
    with rank_pool.Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(order, servers.address)
    assert results == [["stepped", "embedding", "convolution", "applied", "hidden"]] * WORLD


def by_copy(t: Training) -> torch.Tensor:
    twin = copy.deepcopy(t.model)
    assert type(twin.hidden[2].weight) is nn.Parameter
    return twin.hidden[2].weight.detach()


def by_file(t: Training) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(t.model.state_dict(), file)
    file.seek(0)
    return torch.load(file)["hidden.2.weight"]


def by_average(t: Training) -> torch.Tensor:
    average = AveragedModel(Net())
    average.update_parameters(t.model)
    return average.module.hidden[2].weight.detach()


def by_optimizer(t: Training) -> torch.Tensor:
    state = t.optimizer.state_dict()["state"]
    return torch.cat([v.flatten() for _, values in sorted(state.items()) for v in values.values()])


def by_change(t: Training) -> torch.Tensor:
    with torch.no_grad():
        return t.model.hidden[2].weight.clamp_(-0.1, 0.1).detach().clone()


def by_drain(t: Training) -> torch.Tensor:
    assert not t.session.flush()
    return t.model.hidden[2].weight.detach().clone()


READINGS: dict[str, Callable[[Training], torch.Tensor]] = {
    "the model": lambda t: t.model(batch(0, 99)[0]).detach(),
    "a part of it": lambda t: t.model.hidden(torch.ones(3, 12)).detach().clone(),
    "a function": lambda t: nn.functional.linear(torch.ones(3, 40), t.model.hidden[2].weight).detach(),
    "state_dict": lambda t: t.model.state_dict()["hidden.2.weight"].clone(),
    "statistics": lambda t: t.model.norm.running_mean.clone(), "data": lambda t: t.model.hidden[2].weight.data.clone(),
    "a copy": by_copy, "a file": by_file, "an average": by_average, "the optimizer": by_optimizer, "a change": by_change,
    "drain": by_drain,
}


def read(rank: int, address: str, overlap: str) -> list[torch.Tensor]:
    training, rows = Training(rank, address, overlap or None, optimizer="adamw"), []
    training.train(-1, 0)
    held = Held(training.worker, until_awaited=True) if overlap else None
    for number, reading in enumerate(READINGS.values()):
        training.train(2 * number, 2 * number + 2)
        rows.append(reading(training))
        training.model.train()
    assert held is None or held.count > len(READINGS)
    training.session.close()
    return rows


def test_reads_return_weights_of_the_last_step() -> None:
    for waited, overlapped in zip(*with_and_without(read), strict=True):
        rows = zip(READINGS, waited, overlapped, strict=True)
        assert [name for name, a, b in rows if not torch.equal(a, b)] == []


def clip_alone(t: Training) -> None:
    nn.utils.clip_grad_norm_(t.model.parameters(), 1.0, foreach=False)


def unscale(t: Training) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(t.optimizer)


USES: list[Callable[[Training], Any]] = [
    lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), 1.0), clip_alone,
    lambda t: nn.utils.clip_grad_value_(t.model.parameters(), 1.0),
    lambda t: t.model.head.weight.grad.norm(), lambda t: t.model.head.weight.grad.mul_(0.5),
    lambda t: t.model.head.weight.grad.clone(), unscale, lambda t: torch.optim.SGD(t.model.parameters(), lr=0.1).step(),
]


def used(rank: int, address: str) -> list[str]:
    training, lines = Training(rank, address, "forward"), []
    for step, use in enumerate(USES):
        training.optimizer.zero_grad(set_to_none=bool(step % 2))
        training.backward(step)
        lines.append(outcome(lambda use=use: use(training)))
        training.step()
    training.optimizer.zero_grad()
    training.backward(99)
    training.session.synchronize()
    USES[0](training)
    training.step()
    training.model.double()
    lines.append(outcome(lambda: training.backward(100)))
    dist.barrier()  # a rank that has left would be the error of one that has not begun
    training.session.close()
    return lines


def test_pending_gradients_and_unsupported_models_are_refused() -> None:
    with rank_pool.Servers(WORLD, 1) as servers:
        for *lines, converted in pool(WORLD).call(used, servers.address):
            for line in lines:
                assert_refused(line, "E-GRADIENT-PENDING", "session.synchronize()", "clip_grad_norm=")
            assert_refused(converted, "E-MODEL-CHANGED", "scale ", "torch.float64", "torch.float32")


def nothing(_: int) -> None:
    pass


def train(t: Training, backward: Callable[[int], Any] | None = None, *, between: Callable[[int], Any] = nothing,
          after: Callable[[int], Any] = nothing, clear: str = "before", to_none: bool = True) -> Seen:
    """Some steps. `between` runs before the optimizer's step, `after` after it. What `between` returned."""
    seen = []
    for step in range(STEPS):
        if clear == "before":
            t.optimizer.zero_grad(set_to_none=to_none)
        (backward or t.backward)(step)
        seen.append(between(step))
        t.step()
        after(step)
        if clear == "after":
            t.model.zero_grad()
    return seen


def weights(t: Training) -> list[nn.Parameter]:
    return [*t.model.parameters()]


def gradients(t: Training) -> list[torch.Tensor]:
    return [p.grad for p in weights(t) if p.grad is not None]


def clears_after_the_forward_pass(t: Training) -> Seen:
    def backward(step: int) -> None:
        loss = loss_of(t.model, t.rank, step)
        t.optimizer.zero_grad()
        loss.backward()

    return train(t, backward, clear="")


def clears_with_zeros(t: Training) -> Seen:
    def after(step: int) -> None:
        t.optimizer.zero_grad(set_to_none=False)
        if step == 3:
            t.step()  # momentum and weight decay go on

    return train(t, after=after, to_none=False)


def zeroes_some(t: Training) -> Seen:
    return train(t, between=lambda step: [p.grad.zero_() for p in weights(t)[step % 3 :: 3]] and None)


def accumulates_in_no_sync(t: Training) -> Seen:
    def backward(step: int) -> None:
        with t.session.no_sync():
            t.backward(2 * step)
        t.backward(2 * step + 1)

    return train(t, backward)


def averages_twice(t: Training) -> Seen:
    """A discriminator: two passes, both averaged, for one step."""
    return train(t, lambda step: (t.backward(2 * step), t.backward(2 * step + 1)))


def discards(t: Training) -> Seen:
    return train(t, lambda step: (t.backward(100 + step), t.optimizer.zero_grad(), t.backward(step)), clear="after")


def synchronizes(t: Training) -> Seen:
    def between(_: int) -> None:
        t.session.synchronize()
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)

    return train(t, between=between)


def weighs(t: Training) -> Seen:
    def backward(step: int) -> None:
        t.session.weight(3 + t.rank + step % 2)
        t.backward(step)

    train(t, backward)
    t.session.weight(1)
    return []


def evaluates(t: Training) -> Seen:
    def after(_: int) -> None:
        t.model.eval()
        with torch.inference_mode():
            t.model(torch.zeros(1, 3, dtype=torch.int64))
        t.model.train()

    return train(t, after=after)


def uses_autocast(t: Training) -> Seen:
    def backward(step: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(t.model, t.rank, step)
        loss.backward()

    return train(t, backward)


def recomputes(t: Training) -> Seen:
    """Activation checkpointing: the forward pass of a layer runs again inside the backward pass."""
    inner = t.model.hidden.forward
    t.model.hidden.forward = lambda y: checkpoint(inner, y, use_reentrant=False)
    clears_after_the_forward_pass(t)
    del t.model.hidden.forward
    return []


def part_of_the_model(t: Training, beside: Callable[[int], bool]) -> Callable[[int], None]:
    def backward(step: int) -> None:
        loss = t.model.hidden(torch.ones(2, 12) * (1 + t.rank + step)).square().mean()
        if beside(step):
            loss = loss + t.model.beside(torch.ones(2, 12)).square().mean()
        loss.backward()

    return backward


def leaves_weights_unused(t: Training) -> Seen:
    """By one rank, or by all."""
    return train(t, part_of_the_model(t, lambda step: step % 3 == 0 or (step % 3 == 1 and t.rank == 0)))


def has_a_closure(t: Training) -> Seen:
    for step in range(STEPS):
        def closure(step: int = step) -> torch.Tensor:
            t.optimizer.zero_grad()
            loss = loss_of(t.model, t.rank, step)
            loss.backward()
            return loss

        t.optimizer.step(closure)
        t.schedule.step()
    return []


def switches(t: Training) -> Seen:
    for step, codec in enumerate(("int4()", "topk(ratio=0.2)", "identity()")):
        t.train(2 * step, 2 * step + 2)
        t.session.switch(plan_of(t.model, codec, nbytes=(1024, 2048)))
    t.train(6, 8)
    return []


SILENT: list[Script] = [
    clears_after_the_forward_pass, lambda t: train(t, clear="after"), clears_with_zeros, zeroes_some, accumulates_in_no_sync,
    averages_twice, discards, lambda t: train(t, between=lambda _: t.optimizer.step()), lambda t: train(t, clear=""),
    synchronizes, weighs, evaluates, uses_autocast, recomputes, leaves_weights_unused, has_a_closure, switches,
]


def clips_by_hand(t: Training) -> Seen:
    def between(_: int) -> float:
        total = sum(float(g.data.norm(2)) ** 2 for g in gradients(t)) ** 0.5
        for g in gradients(t):
            g.data.mul_(min(1.0, 0.2 / total))
        return total

    return train(t, between=between)


def replaces(t: Training) -> Seen:
    def between(_: int) -> None:
        for p in weights(t)[::2]:
            p.grad = p.grad * 0.5

    return train(t, between=between)


def logs(t: Training, *, to_none: bool = True) -> Seen:
    return train(t, between=lambda step: [g.norm().item() for g in gradients(t)] if step % 2 else None, to_none=to_none)


def copies_out(t: Training) -> Seen:
    def between(_: int) -> Any:
        file = io.BytesIO()
        torch.save(gradients(t)[0], file)
        file.seek(0)
        return [torch.load(file), gradients(t)[1].numpy().copy().sum(), copy.deepcopy(gradients(t)[2]),
                pickle.loads(pickle.dumps(gradients(t)[3])), gradients(t)[4].tolist(), f"{gradients(t)[5]}",
                gradients(t)[6].data_ptr() > 0, torch.utils.dlpack.from_dlpack(gradients(t)[7]).sum().item()]

    return train(t, between=between)


def inspects(t: Training) -> Seen:
    def between(_: int) -> Any:
        facts = [p.grad is not None and (p.grad.is_sparse, p.grad.shape, p.grad.dtype, p.grad.requires_grad)
                 for p in weights(t)]
        return [facts, [g.detach().clone() for g in gradients(t)]]

    return train(t, between=between)


def compares_with_the_last_ones(t: Training) -> Seen:
    """When those have long been cleared."""
    kept: list[list[torch.Tensor]] = []

    def between(_: int) -> Any:
        kept.append(gradients(t))
        return [nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in zip(*kept[-2:], strict=True)] \
            if len(kept) > 1 else None

    seen = train(t, between=between)
    t.optimizer.zero_grad()
    return [seen, [[g.clone() for g in each] for each in kept]]


def reads_kept_gradients_at_the_end(t: Training) -> Seen:
    kept: Seen = []
    train(t, between=lambda _: kept.append(gradients(t)))
    t.optimizer.zero_grad()
    return [[g.clone() for g in each] for each in kept]


def clears_kept_gradients(t: Training) -> Seen:
    """After the step, through the script's own references."""
    kept: list[list[torch.Tensor]] = []
    train(t, between=lambda _: kept.append(gradients(t)), after=lambda _: torch._foreach_zero_(kept[-1]), clear="")
    return gradients(t)


def names_gradients_once(t: Training) -> Seen:
    """Optimizers with their own lists: gradients are cleared in place, and used by names of the first step."""
    names: list[torch.Tensor] = []

    def between(_: int) -> Any:
        names.extend(gradients(t) if not names else [])
        return [g.clamp_(-0.01, 0.01).sum() for g in names]

    seen = train(t, between=between, to_none=False)
    t.optimizer.zero_grad()
    return seen


def lays_gradients_flat(t: Training) -> Seen:
    """All gradients are views of one tensor, which is clipped as a whole."""
    flat, place = torch.zeros(sum(p.numel() for p in weights(t))), 0
    for p in weights(t):
        p.grad = flat[place : place + p.numel()].view_as(p)
        place += p.numel()
    seen = train(t, lambda step: (flat.zero_(), t.backward(step)),
                 between=lambda _: (flat.norm(), flat.clamp_(-0.02, 0.02))[0], clear="")
    t.optimizer.zero_grad()
    return seen


def accumulates(t: Training) -> Seen:
    """Without no_sync()."""
    train(t, lambda step: [(loss_of(t.model, t.rank, 3 * step + micro) / 3).backward() for micro in range(3)])
    return gradients(t)


def has_hooks(t: Training) -> Seen:
    """Before a gradient is accumulated, and after that, where the hook keeps the gradient."""
    kept: dict[int, torch.Tensor] = {}
    handles = [p.register_hook(lambda g: 0.5 * g) for p in weights(t)[:4]]
    handles += [p.register_post_accumulate_grad_hook(lambda p: kept.__setitem__(id(p), p.grad)) for p in weights(t)]
    seen = train(t, between=lambda _: [kept[id(p)].sum() for p in weights(t)])
    for handle in handles:
        handle.remove()
    return seen


def clips_in_a_hook(t: Training) -> Seen:
    """Of the optimizer's steps."""
    seen: Seen = []
    handle = t.optimizer.register_step_pre_hook(lambda *_: seen.append(nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)))
    train(t)
    handle.remove()
    return seen


def changes_the_optimizers_state(t: Training) -> Seen:
    seen: Seen = []

    def after(step: int) -> None:
        momenta = [t.optimizer.state[p]["momentum_buffer"] for p in weights(t)]
        seen.extend(m.sum() for m in momenta)
        momenta[step].zero_()
        assert type(t.optimizer) is torch.optim.SGD

    train(t, after=after)
    return seen


def copies_the_optimizer(t: Training) -> Seen:
    seen: Seen = []

    def after(_: int) -> None:
        twin = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        twin.__setstate__(copy.deepcopy(t.optimizer.__getstate__()))
        seen.extend(twin.state[p]["momentum_buffer"].sum() for group in twin.param_groups for p in group["params"])

    train(t, after=after)
    return seen


def has_views_of_weights(t: Training) -> Seen:
    views, seen = [p.data for p in weights(t)], list[Any]()
    train(t, after=lambda _: seen.append([(view.sum(), view.clamp_(-0.4, 0.4))[0] for view in views]))
    return seen


def scales_the_loss(t: Training) -> Seen:
    """attach() was not given the scaler."""
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=8.0), list[Any]()
    for step in range(STEPS):
        t.optimizer.zero_grad()
        scaler.scale(loss_of(t.model, t.rank, step)).backward()
        scaler.unscale_(t.optimizer)
        seen.append(nn.utils.clip_grad_norm_(t.model.parameters(), 1.0))
        scaler.step(t.optimizer)
        scaler.update()
    return seen


def looks_for_unused_weights(t: Training) -> Seen:
    return train(t, part_of_the_model(t, lambda step: step == 2 and t.rank == 0),
                 between=lambda _: [p.grad is None for p in weights(t)])


def steps_by_hand(t: Training) -> Seen:
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        with torch.no_grad():
            for p in weights(t):
                p -= 0.01 * p.grad
    return []


def steps_sharpness_aware(t: Training) -> Seen:
    """Two passes to a step, the first at weights that are moved for it (SAM)."""
    def backward(step: int) -> None:
        t.backward(step)
        moved = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in weights(t)]
        with torch.no_grad():
            torch._foreach_add_(weights(t), moved)
        t.optimizer.zero_grad()
        t.backward(step)
        with torch.no_grad():
            torch._foreach_sub_(weights(t), moved)

    return train(t, backward)


def compiles(t: Training) -> Seen:
    compiled = torch.compile(t.model, backend="eager")

    def backward(step: int) -> None:
        x, y = batch(t.rank, step)
        nn.functional.cross_entropy(compiled(x).flatten(0, 1), y.flatten()).backward()

    return train(t, backward, between=lambda _: gradients(t)[0].sum())


READING: list[Script] = [
    lambda t: train(t, between=lambda _: nn.utils.clip_grad_norm_(t.model.parameters(), 0.3)), clips_by_hand, replaces,
    lambda t: train(t, between=lambda _: [g.mul_(0.5).add_(1e-3) for g in gradients(t)] and None),
    lambda t: train(t, between=lambda _: torch._foreach_norm(gradients(t))), logs, lambda t: logs(t, to_none=False),
    copies_out, inspects, compares_with_the_last_ones, reads_kept_gradients_at_the_end, clears_kept_gradients,
    names_gradients_once, lays_gradients_flat, accumulates, has_hooks, clips_in_a_hook, changes_the_optimizers_state,
    copies_the_optimizer, has_views_of_weights, scales_the_loss, looks_for_unused_weights, steps_by_hand,
    steps_sharpness_aware, compiles,
]


class Watched(Training):
    """Counts the steps that ended before all their results were waited for."""

    held: Held | None = None
    open_steps = 0

    def step(self) -> None:
        if self.held is not None:
            self.open_steps += not self.held.buckets <= self.held.awaited
        super().step()


def play(rank: int, address: str, overlap: str, requested: bool, optimizer: str) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """All scripts in sequence: what each has read, and the state that it leaves."""
    plan = plan_of(Net(), "int8()", nbytes=(1024, 2048), overlap=overlap)
    t = Watched(rank, address, overlap or None if requested else None, optimizer=optimizer, codec="int8()",
                given=None if requested else plan)
    t.train(-1, 0)
    t.held = Held(t.worker, until_awaited=True) if overlap else None
    handle = t.model.register_forward_hook(lambda *_: t.held and t.held.awaited.clear())  # those of the step before
    scripts = SILENT if requested else READING
    if optimizer != "sgd":
        scripts = [clears_after_the_forward_pass] if requested else [logs, READING[0], accumulates]
    rows = []
    for script in scripts:
        rows.append((plain(script(t)), t.state()))
        t.optimizer.zero_grad()
    if t.held is not None:
        assert t.held.count > len(scripts) // 2
        assert t.open_steps > 1
    handle.remove()
    t.session.close()
    return rows


def plain(seen: Any) -> Any:
    """To be compared, and sent."""
    if isinstance(seen, torch.Tensor):
        return seen.detach().clone().as_subclass(torch.Tensor).numpy().tolist()
    return [plain(each) for each in seen] if isinstance(seen, list | tuple) else seen


@pytest.mark.commit(3)
@pytest.mark.parametrize(("requested", "optimizer"), [
    (False, "sgd"), (False, "foreach"), (False, "fused"), (True, "sgd"), (True, "adam"), (True, "adamw"), (True, "tensor rate"),
])
def test_scripts_read_and_train_the_same_bits(requested: bool, optimizer: str) -> None:
    """`requested`: attach() was given sync="forward". Otherwise the plan sets it, and scripts use gradients as usual."""
    for waited, overlapped in zip(*with_and_without(play, requested, optimizer), strict=True):
        for number, ((seen, state), (seen_too, state_too)) in enumerate(zip(waited, overlapped, strict=True)):
            assert seen == seen_too, f"script {number}"
            assert [key for key in state if not torch.equal(state[key], state_too[key])] == [], f"script {number}"


def averaged(rank: int, address: str, overlap: str) -> list[torch.Tensor]:
    """An average of weights by a hook that the script had set before it attached."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean = torch.zeros_like(model.conv.weight)
    optimizer.register_step_post_hook(lambda *_: mean.lerp_(model.conv.weight.detach(), 0.5))
    session = commlayer.attach(model, optimizer, compression=commlayer.compressors.int8(), sync=overlap or None,
                               config=rank_pool.quick(join=address))
    for step in range(STEPS):
        if overlap and step == 1:
            Held(distributed_job(session).worker, until_awaited=True)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    session.close()
    return [mean]


def test_hook_set_before_attach_reads_new_weights() -> None:
    waited, overlapped = with_and_without(averaged)
    assert all(same(row, waited[0]) for row in (*waited, *overlapped))


def configured(rank: int, address: str, overlap: str, how: str) -> dict[str, torch.Tensor]:
    """Rank 1 has an infinite loss in one step, if there is a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4, enabled=how == "scaler")
    path: dict[str, Any] = {"codec": how, "ranks_per_node": 2} if how in ("auto", "int8()") else {}
    training = Training(rank, "" if path else address, overlap or None, max_norm=0.3 if how in ("clip", "scaler") else None,
                        scaler=scaler if how == "scaler" else None, **path)
    for step in range(8):
        training.optimizer.zero_grad()
        loss = loss_of(training.model, rank, step)
        scaler.scale(loss * float("inf") if how == "scaler" and rank and step == 3 else loss).backward()
        if how == "clip by hand":
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.3)
        scaler.step(training.optimizer)
        scaler.update()
        training.schedule.step()
    state = training.state()
    training.session.close()
    return state


@pytest.mark.commit(3)
@pytest.mark.parametrize("how", ["clip", "scaler", "auto", "int8()"])
def test_clipping_scalers_and_paths_inside_a_node_train_the_same_bits(how: str) -> None:
    """"auto", "int8()": all ranks are on one node: buckets are all-reduced, or summed inside the node and sent to a server."""
    runs = [*with_and_without(configured, how)]
    if how == "clip":
        with rank_pool.Servers(WORLD, 1) as servers:
            runs.append(pool(WORLD).call(configured, servers.address, "", "clip by hand"))
    assert [same(row, own) for run in runs for row, own in zip(run, runs[0], strict=True)] == [True] * WORLD * len(runs)


def caught(rank: int, address: str, overlap: str) -> tuple[list[str], list[torch.Tensor]]:
    """Rank 0's third pass raises; both scripts catch the error."""
    torch.manual_seed(0)
    model, lines = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(number: int) -> None:
        x, y = data(rank, number)
        optimizer.zero_grad()
        nn.functional.mse_loss(model[2:](Raises.apply(model[:2](x), rank == 0 and number == 2)), y).backward()
        optimizer.step()

    with commlayer.attach(model, optimizer, plan=plan_of(model), sync=overlap or None,
                          config=rank_pool.quick(join=address)) as session:
        lines += [outcome(lambda n=n: step(n)) for n in range(STEPS)]
        assert session.step == STEPS
    return lines, parameters(model)


def test_step_aborted_by_a_peer_does_not_end_later_iterations() -> None:
    without, with_ = with_and_without(caught)
    for (lines, expected), (overlapped, given) in zip(without, with_, strict=True):
        assert same(given, expected)
        assert [find_error_code(line) for line in lines if line] in ([""], ["E-STEP-ABANDONED"])
        # The peer gets the error in the same iteration, as without overlap, or it is only logged.
        assert all(line in {"", own} if "ArithmeticError" not in own else line == own
                   for line, own in zip(overlapped, lines, strict=True))


def main(how: str) -> None:
    """Rank 1 waits to be killed; rank 0 has pending results of that step and continues. Or both end after a step."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    training = Training(rank, "", "forward", codec="int8()", deadline_s=20.0, heartbeat_s=0.5, dead_after_s=2.5)
    training.train(0, 3)
    if how == "ends":
        if rank == 0:
            Held(training.worker, until_awaited=True)
        training.train(3, 4)
        return
    training.session.flush()
    held = Held(training.worker, ["hidden.2.weight"])
    training.train(3, 4)
    for name, p in training.model.named_parameters():
        if name != "hidden.2.weight":
            p.detach()  # arrives with it
    print("ready", flush=True)
    if rank == 1:
        signal.pause()
    print(json.dumps([outcome(lambda: training.model(batch(0, 9)[0])), outcome(training.model.state_dict),
                      outcome(training.session.flush), len(held.buckets)]), flush=True)
    training.session.close("it is over")
    print(json.dumps([type(training.model.hidden[2].weight) is nn.Parameter, outcome(training.model.state_dict)]), flush=True)


def test_peer_that_dies_with_pending_results_is_named_with_the_applied_part() -> None:
    with rank_pool.tree(__file__, WORLD, args=("dies",)) as run:
        for rank in range(WORLD):
            run.until(rank, "ready")
        os.kill(run.processes[1].pid, signal.SIGKILL)
        code, errors = run.ended_one(0, 60.0)
        assert code == 0, errors
        *lines, held = json.loads(run.until(0, "["))
        after = json.loads(run.until(0, "["))
    assert held == 1
    for line in lines:
        assert_refused(line, "E-PEER-LOST", "PeerLost: worker 1: ", "; step 3 updated 10 of 11 parameters")
        assert line.count("step 3 updated") == 1
    assert after == [True, ""]


@pytest.mark.nightly
def test_script_may_end_with_pending_results() -> None:
    with rank_pool.tree(__file__, WORLD, args=("ends",)) as run:
        assert run.ended(60.0) == [(0, ""), (0, "")]


if __name__ == "__main__":
    main(sys.argv[1])
