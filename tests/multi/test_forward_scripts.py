"""overlap="forward", asked for or chosen by a plan: scripts see and train the same bits as when they wait. Real ranks.

No result arrives before it is awaited.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec import structs
from support import rank_pool
from support.forward import OPTIMIZERS, Held, Net, Training, batch, loss_of
from support.rank_pool import pool
from torch import nn
from torch.utils.checkpoint import checkpoint

import commlayer
from commlayer.engine.optimizers import job_of
from commlayer.planner import default_plan
from commlayer.records import Plan

WORLD, STEPS = 2, 5
_ranks = rank_pool.ranks_first(WORLD)
Seen = list[Any]
"""Numbers and tensors that a script has read."""


OPTIMIZERS |= {
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
}


def plan_of(overlap: str) -> Plan:
    made = default_plan(job_of(Net()), codec="int8()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1024,
                        cut_nbytes=2048)
    return structs.replace(made, overlap=overlap)


# ---- scripts that do not read gradients before the step

def clears_late(t: Training) -> None:
    """zero_grad behind the forward pass."""
    for step in range(STEPS):
        loss = loss_of(t.model, t.rank, step)
        t.optimizer.zero_grad()
        loss.backward()
        t.step()


def clears_behind_the_step(t: Training) -> None:
    for step in range(STEPS):
        t.backward(step)
        t.step()
        t.model.zero_grad()


def clears_with_zeros(t: Training) -> None:
    for step in range(STEPS):
        t.optimizer.zero_grad(set_to_none=False)
        t.backward(step)
        t.step()
        t.optimizer.zero_grad(set_to_none=False)
        if step == 3:
            t.step()  # with zeros: momentum and weight decay go on


def freezes_some(t: Training) -> None:
    """With zeros in place of some gradients, between others."""
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        frozen = [p for number, p in enumerate(t.model.parameters()) if number % 3 == step % 3]
        for p in frozen:
            p.grad.zero_()
        t.step()


def gathers(t: Training) -> None:
    for step in range(STEPS):
        t.optimizer.zero_grad()
        with t.session.no_sync():
            t.backward(2 * step)
        t.backward(2 * step + 1)
        t.step()


def averages_twice(t: Training) -> None:
    """As a discriminator: two passes, both averaged, for one step."""
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(2 * step)
        t.backward(2 * step + 1)
        t.step()


def throws_away(t: Training) -> None:
    for step in range(STEPS):
        t.backward(100 + step)
        t.optimizer.zero_grad()
        t.backward(step)
        t.step()
        t.optimizer.zero_grad()


def steps_twice(t: Training) -> None:
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        t.optimizer.step()
        t.step()


def never_clears(t: Training) -> None:
    for step in range(STEPS):
        t.backward(step)
        t.step()


def synchronizes(t: Training) -> None:
    """Clips by itself, where it has asked for final gradients."""
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        t.session.synchronize()
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
        t.step()


def weighs(t: Training) -> None:
    for step in range(STEPS):
        t.session.weight(3 + t.rank + step % 2, 7 + 2 * (step % 2))  # untold, rounding depends on who hears of it when
        t.optimizer.zero_grad()
        t.backward(step)
        t.step()
    t.session.weight(1, WORLD)


def evaluates(t: Training) -> None:
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        t.step()
        t.model.eval()
        with torch.inference_mode():
            t.model(torch.zeros(1, 3, dtype=torch.int64))
        t.model.train()


def mixes_types(t: Training) -> None:
    for step in range(STEPS):
        t.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(t.model, t.rank, step)
        loss.backward()
        t.step()


def recomputes(t: Training) -> None:
    """Activation checkpointing: the forward pass of a layer runs again inside the backward pass."""
    inner = t.model.hidden.forward
    t.model.hidden.forward = lambda y: checkpoint(inner, y, use_reentrant=False)
    clears_late(t)
    del t.model.hidden.forward


def uses_in_turns(t: Training) -> None:
    """Some weights are unused, by one rank or by all."""
    for step in range(STEPS):
        t.optimizer.zero_grad()
        loss = t.model.hidden(torch.ones(2, 12) * (1 + t.rank + step)).square().mean()
        if step % 3 == 0 or (step % 3 == 1 and t.rank == 0):
            loss = loss + t.model.beside(torch.ones(2, 12)).square().mean()
        loss.backward()
        t.step()


def closes_over(t: Training) -> None:
    """step(closure), as some frameworks call every optimizer."""
    for step in range(STEPS):
        def closure(step: int = step) -> torch.Tensor:
            t.optimizer.zero_grad()
            loss = loss_of(t.model, t.rank, step)
            loss.backward()
            return loss

        t.optimizer.step(closure)
        t.schedule.step()


def goes_over(t: Training) -> None:
    """To another plan, ahead of a forward pass."""
    job = t.worker.job
    for step, codec in enumerate(("int4()", "topk(ratio=0.2)", "identity()")):
        t.train(2 * step, 2 * step + 2)
        plan = default_plan(job, codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=1024, cut_nbytes=2048)
        commlayer.switch(t.session, plan)
    t.train(6, 8)


SILENT: list[Callable[[Training], None]] = [
    clears_late, clears_behind_the_step, clears_with_zeros, freezes_some, gathers, averages_twice, throws_away, steps_twice,
    never_clears, synchronizes, weighs, evaluates, mixes_types, recomputes, uses_in_turns, closes_over, goes_over,
]


# ---- scripts that read and change gradients, momenta and weights

def parameters(t: Training) -> list[nn.Parameter]:
    return [*t.model.parameters()]


def gradients(t: Training) -> list[torch.Tensor]:
    return [p.grad for p in parameters(t) if p.grad is not None]


def each_step(act: Callable[[Training, int], Any], *, none: bool = True) -> Callable[[Training], Seen]:
    """A script that does that between backward() and step()."""
    def script(t: Training) -> Seen:
        seen = []
        for step in range(STEPS):
            t.optimizer.zero_grad(set_to_none=none)
            t.backward(step)
            seen.append(act(t, step))
            t.step()
        return seen

    script.__name__ = act.__name__
    return script


def clips(t: Training, step: int) -> Any:
    return nn.utils.clip_grad_norm_(t.model.parameters(), 0.3)


def clips_values(t: Training, step: int) -> Any:
    nn.utils.clip_grad_value_(t.model.parameters(), 0.01)


def clips_by_hand(t: Training, step: int) -> Any:
    total = sum(float(p.grad.data.norm(2)) ** 2 for p in parameters(t) if p.grad is not None) ** 0.5
    for p in parameters(t):
        if p.grad is not None:
            p.grad.data.mul_(min(1.0, 0.2 / total))
    return total


def multiplies(t: Training, step: int) -> Any:
    for g in gradients(t):
        g.mul_(0.5).add_(1e-3)


def replaces(t: Training, step: int) -> Any:
    for p in parameters(t)[::2]:
        p.grad = p.grad * 0.5


def logs_now_and_then(t: Training, step: int) -> Any:
    return [g.norm().item() for g in gradients(t)] if step % 2 else None


def takes_norms_at_once(t: Training, step: int) -> Any:
    return torch._foreach_norm(gradients(t))


def copies_out(t: Training, step: int) -> Any:
    gone = io.BytesIO()
    torch.save(gradients(t)[0], gone)
    gone.seek(0)
    return [torch.load(gone), gradients(t)[1].numpy().copy().sum(), copy.deepcopy(gradients(t)[2]),
            pickle.loads(pickle.dumps(gradients(t)[3])), gradients(t)[4].tolist(), f"{gradients(t)[5]}",
            gradients(t)[6].data_ptr() > 0, torch.utils.dlpack.from_dlpack(gradients(t)[7]).sum().item()]


def asks_what_they_are(t: Training, step: int) -> Any:
    made = [(p.grad is None, p.grad is not None and (p.grad.is_sparse, p.grad.shape, p.grad.dtype, p.grad.requires_grad))
            for p in parameters(t)]
    return [made, [g.detach().clone() for g in gradients(t)]]


def keeps_the_last_ones(t: Training) -> Seen:
    """And compares them with the next, when they have long been cleared."""
    seen: Seen = []
    before: list[torch.Tensor] = []
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        if before:
            seen.append([nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0)
                         for a, b in zip(before, gradients(t), strict=True)])
        before = gradients(t)
        t.step()
    return seen + before


def keeps_them_unread(t: Training) -> Seen:
    """Of each step, and looks at all of them in the end."""
    kept: Seen = []
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        kept.append(gradients(t))
        t.step()
    t.optimizer.zero_grad()
    return [[g.clone() for g in each] for each in kept]


def clears_what_it_kept(t: Training) -> Seen:
    """Behind the step, by names of its own."""
    for step in range(STEPS):
        t.backward(step)
        kept = gradients(t)
        t.step()
        torch._foreach_zero_(kept)
    return gradients(t)


def names_them_once(t: Training) -> Seen:
    """As optimizers with lists of their own: gradients are cleared in place, and used by names from long ago."""
    seen = []
    names: list[torch.Tensor] = []
    for step in range(STEPS):
        t.optimizer.zero_grad(set_to_none=False)
        t.backward(step)
        names = names or gradients(t)
        seen.append([g.clamp_(-0.01, 0.01).sum() for g in names])
        t.step()
    t.optimizer.zero_grad()
    return seen


def lays_them_flat(t: Training) -> Seen:
    """All gradients are views of one tensor, which is clipped as a whole."""
    seen = []
    flat = torch.zeros(sum(p.numel() for p in parameters(t)))
    place = 0
    for p in parameters(t):
        p.grad = flat[place : place + p.numel()].view_as(p)
        place += p.numel()
    for step in range(STEPS):
        flat.zero_()
        t.backward(step)
        seen.append(flat.norm())
        flat.clamp_(-0.02, 0.02)
        t.step()
    t.optimizer.zero_grad()
    return seen


def accumulates(t: Training) -> Seen:
    """Without no_sync()."""
    for step in range(STEPS):
        t.optimizer.zero_grad()
        for micro in range(3):
            (loss_of(t.model, t.rank, 3 * step + micro) / 3).backward()
        t.step()
    return gradients(t)


def is_hooked(t: Training) -> Seen:
    """Ahead of adding a gradient, and behind that, where somebody keeps what he sees."""
    kept: dict[int, torch.Tensor] = {}
    handles = [p.register_hook(lambda g: 0.5 * g) for p in parameters(t)[:4]]
    handles += [p.register_post_accumulate_grad_hook(lambda p: kept.__setitem__(id(p), p.grad)) for p in parameters(t)]
    seen: Seen = []
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        seen.append([kept[id(p)].sum() for p in parameters(t)])
        t.step()
    for handle in handles:
        handle.remove()
    return seen


def clips_in_a_hook(t: Training) -> Seen:
    """Of the optimizer's steps."""
    seen: Seen = []
    handle = t.optimizer.register_step_pre_hook(
        lambda *_: seen.append(nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)))
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        t.step()
    handle.remove()
    return seen


def looks_at_what_is_remembered(t: Training) -> Seen:
    """And changes it."""
    seen: Seen = []
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        t.step()
        momenta = [t.optimizer.state[p]["momentum_buffer"] for p in parameters(t)]
        seen += [m.sum() for m in momenta]
        momenta[step].zero_()
        assert type(t.optimizer) is torch.optim.SGD
    return seen


def copies_the_optimizer(t: Training) -> Seen:
    seen: Seen = []
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        t.step()
        kept = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        kept.__setstate__(copy.deepcopy(t.optimizer.__getstate__()))
        seen += [kept.state[p]["momentum_buffer"].sum() for group in kept.param_groups for p in group["params"]]
    return seen


def has_weights_by_another_name(t: Training) -> Seen:
    views, seen = [p.data for p in parameters(t)], []
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        t.step()
        seen.append([view.sum() for view in views])
        for view in views:
            view.clamp_(-0.4, 0.4)
    return seen


def scales_the_loss(t: Training) -> Seen:
    """With a GradScaler that nobody was told of."""
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=8.0), list[Any]()
    for step in range(STEPS):
        t.optimizer.zero_grad()
        scaler.scale(loss_of(t.model, t.rank, step)).backward()
        scaler.unscale_(t.optimizer)
        seen.append(nn.utils.clip_grad_norm_(t.model.parameters(), 1.0))
        scaler.step(t.optimizer)
        scaler.update()
    return seen


def uses_some(t: Training) -> Seen:
    """Of the others there are no gradients, which is what a script sees."""
    seen: Seen = []
    for step in range(STEPS):
        t.optimizer.zero_grad()
        loss = t.model.hidden(torch.ones(2, 12) * (1 + t.rank + step)).square().mean()
        if step == 2 and t.rank == 0:
            loss = loss + t.model.beside(torch.ones(2, 12)).square().mean()
        loss.backward()
        seen.append([p.grad is None for p in parameters(t)])
        t.step()
    return seen


def steps_by_hand(t: Training) -> Seen:
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        with torch.no_grad():
            for p in parameters(t):
                p -= 0.01 * p.grad
    return []


def climbs_first(t: Training) -> Seen:
    """Two passes to a step, the first at weights that are moved for it (SAM)."""
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.backward(step)
        moved = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in parameters(t)]
        with torch.no_grad():
            torch._foreach_add_(parameters(t), moved)
        t.optimizer.zero_grad()
        t.backward(step)
        with torch.no_grad():
            torch._foreach_sub_(parameters(t), moved)
        t.step()
    return []


def calls_it_compiled(t: Training) -> Seen:
    called, seen = torch.compile(t.model, backend="eager"), list[Any]()
    for step in range(STEPS):
        t.optimizer.zero_grad()
        x, y = batch(t.rank, step)
        nn.functional.cross_entropy(called(x).flatten(0, 1), y.flatten()).backward()
        seen.append(gradients(t)[0].sum())
        t.step()
    return seen


READING: list[Callable[[Training], Seen]] = [
    each_step(clips), each_step(clips_values), each_step(clips_by_hand), each_step(multiplies), each_step(replaces),
    each_step(logs_now_and_then), each_step(logs_now_and_then, none=False), each_step(takes_norms_at_once),
    each_step(copies_out), each_step(asks_what_they_are), keeps_the_last_ones, keeps_them_unread, clears_what_it_kept,
    names_them_once, lays_them_flat, accumulates, is_hooked, clips_in_a_hook, looks_at_what_is_remembered, copies_the_optimizer,
    has_weights_by_another_name, scales_the_loss, uses_some, steps_by_hand, climbs_first, calls_it_compiled,
]


class Watched(Training):
    left = 0
    """Parameters that the last step left for later."""

    def step(self) -> None:
        self.optimizer.step()
        self.left = len(self.overlap._later) if self.overlap is not None else 0
        self.schedule.step()


def played(
    rank: int, address: str, asked: bool, overlap: str, optimizer: str,
) -> list[tuple[str, Any, dict[str, torch.Tensor]]]:
    """All scripts in turn: what each has read, and what it leaves behind."""
    t, found = Watched(rank, address, overlap or None if asked else None, optimizer=optimizer, codec="int8()",
                       given=None if asked else plan_of(overlap)), []
    t.train(-1, 0)
    held, late = Held(t.worker, until_awaited=True) if overlap else None, list[int]()
    scripts: list[Callable[[Training], Any]] = [*SILENT] if asked else [*READING]
    if optimizer != "sgd":
        scripts = [clears_late] if asked else [each_step(logs_now_and_then), each_step(clips), accumulates]
    for script in scripts:
        seen = script(t)
        late.append(t.left)
        found.append((script.__name__, plain(seen), t.state()))
        t.optimizer.zero_grad()
    assert held is None or held.count > len(scripts) // 2
    if overlap and not asked:
        assert dict(zip(scripts, late, strict=True)).get(looks_at_what_is_remembered, 1)
        assert sum(map(bool, late)) > 1, "scripts that read nothing leave steps open"
    t.session.close()
    return found


def plain(seen: Any) -> Any:
    """To be compared, and sent."""
    if isinstance(seen, torch.Tensor):
        return seen.detach().clone().as_subclass(torch.Tensor).numpy().tolist()
    return [plain(each) for each in seen] if isinstance(seen, list | tuple) else seen


@pytest.mark.commit(3)
@pytest.mark.parametrize(("asked", "optimizer"), [
    (False, "sgd"), (True, "sgd"), (True, "adam"), (False, "foreach"), (False, "fused"), (True, "adamw"), (True, "tensor rate"),
])
def test_scripts_read_and_train_the_same_bits(asked: bool, optimizer: str) -> None:
    runs = []
    for overlap in ("", "forward"):
        with rank_pool.Servers(WORLD, 1) as servers:
            runs.append(pool(WORLD).call(played, servers.address, asked, overlap, optimizer))
    for one, other in zip(*runs, strict=True):
        for (name, seen, state), (_, seen_too, state_too) in zip(one, other, strict=True):
            assert seen == seen_too, name
            assert [key for key in state if not torch.equal(state[key], state_too[key])] == [], name


def averaged(rank: int, address: str, overlap: str | None) -> torch.Tensor:
    """An average of weights that a hook makes, which the script had set before it attached."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean = torch.zeros_like(model.conv.weight)
    optimizer.register_step_post_hook(lambda *_: mean.lerp_(model.conv.weight.detach(), 0.5))
    session = commlayer.attach(model, optimizer, plan=commlayer.compressors.int8(), overlap=overlap,
                               config=rank_pool.quick(join=address))
    for step in range(STEPS):
        if overlap and step == 1:
            Held(session.inspect.connection.worker, until_awaited=True)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    session.close()
    return mean


def test_a_hook_that_was_there_before_reads_new_weights() -> None:
    means = []
    for overlap in (None, "forward"):
        with rank_pool.Servers(WORLD, 1) as servers:
            means += pool(WORLD).call(averaged, servers.address, overlap)
    assert all(torch.equal(mean, means[0]) for mean in means)
