"""A plan that has overlap="forward" by itself, under scripts that know nothing of it: the bits that the same script sees and
trains without. Real ranks; no result comes in before somebody waits for it."""

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

from commlayer.engine.optimizers import job_of
from commlayer.planner import default_plan
from commlayer.records import Plan

WORLD, STEPS = 2, 5
_ranks = rank_pool.ranks_first(WORLD)
Seen = list[Any]
"""Numbers and tensors that a script has looked at."""


OPTIMIZERS |= {
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
}


def plan_of(overlap: str) -> Plan:
    made = default_plan(job_of(Net()), codec="int8()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1024,
                        cut_nbytes=2048)
    return structs.replace(made, overlap=overlap)


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


SCRIPTS: list[Callable[[Training], Seen]] = [
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


def played(rank: int, address: str, overlap: str, optimizer: str = "sgd") -> list[tuple[str, Any, dict[str, torch.Tensor]]]:
    """All scripts, one behind the other: what each has seen, and what it leaves behind."""
    t, found = Watched(rank, address, None, optimizer=optimizer, given=plan_of(overlap)), []
    t.train(-1, 0)
    held, late = Held(t.worker, until_awaited=True) if overlap else None, list[int]()
    for script in SCRIPTS if optimizer == "sgd" else [each_step(logs_now_and_then), each_step(clips), accumulates]:
        seen = script(t)
        late.append(t.left)
        found.append((script.__name__, plain(seen), t.state()))
        t.optimizer.zero_grad()
    assert held is None or held.count > 10
    assert not overlap or dict(zip(SCRIPTS, late, strict=False)).get(looks_at_what_is_remembered, 1)
    assert not overlap or sum(map(bool, late)) > 1, "steps are left open by those that look at nothing"
    t.session.close()
    return found


def plain(seen: Any) -> Any:
    """To be compared, and sent."""
    if isinstance(seen, torch.Tensor):
        return seen.detach().clone().as_subclass(torch.Tensor).numpy().tolist()
    return [plain(each) for each in seen] if isinstance(seen, list | tuple) else seen


@pytest.mark.commit(1)
@pytest.mark.parametrize("optimizer", ["sgd", "foreach", "fused"])
def test_scripts_that_did_not_ask_for_it_see_and_train_the_same(optimizer: str) -> None:
    runs = []
    for overlap in ("", "forward"):
        with rank_pool.Servers(WORLD, 1) as servers:
            runs.append(pool(WORLD).call(played, servers.address, overlap, optimizer))
    for one, other in zip(*runs, strict=True):
        for (name, saw, state), (_, saw_too, state_too) in zip(one, other, strict=True):
            assert saw == saw_too, name
            assert [key for key in state if not torch.equal(state[key], state_too[key])] == [], name
