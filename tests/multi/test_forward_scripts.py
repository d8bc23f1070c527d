"""overlap="forward" in scripts as people write them, beside the same script that waits. Real ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support import rank_pool
from support.forward import Held, Net, Training, loss_of
from support.rank_pool import pool
from torch import nn
from torch.utils.checkpoint import checkpoint

import commlayer
from commlayer.planner import default_plan

WORLD, STEPS = 2, 6
_ranks = rank_pool.ranks_first(WORLD)


# ---- scripts: the same bits whether results are waited for or not

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


def accumulates(t: Training) -> None:
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


SCRIPTS: list[Callable[[Training], None]] = [
    clears_late, clears_behind_the_step, clears_with_zeros, freezes_some, accumulates, averages_twice, throws_away, steps_twice,
    never_clears, synchronizes, weighs, evaluates, mixes_types, recomputes, uses_in_turns, closes_over, goes_over,
]


def played(rank: int, address: str, overlap: str | None) -> list[dict[str, torch.Tensor]]:
    """All scripts, one behind the other."""
    training, found = Training(rank, address, overlap, codec="int8()"), []
    training.train(-1, 0)
    held = Held(training.worker, until_awaited=True) if overlap == "forward" else None
    for script in SCRIPTS:
        script(training)
        training.optimizer.zero_grad()
        found.append(training.state())
    assert held is None or held.count > len(SCRIPTS)
    training.session.close()
    return found


def differing(*runs: list[dict[str, torch.Tensor]]) -> list[tuple[str, list[str]]]:
    pairs = zip(SCRIPTS, *runs, strict=True)
    return [(script.__name__, [name for name in a if not torch.equal(a[name], b[name])]) for script, a, b in pairs
            if any(not torch.equal(a[name], b[name]) for name in a)][:1]


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


def test_scripts_train_as_if_they_waited() -> None:
    results = []
    for overlap in (None, "forward"):
        with rank_pool.Servers(WORLD, 1) as servers:
            results.append(pool(WORLD).call(played, servers.address, overlap))
    assert [differing(a, b) for a, b in zip(*results, strict=True)] == [[], []]
