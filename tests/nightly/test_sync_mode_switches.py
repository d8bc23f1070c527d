"""switch() from any sync mode to any other, at one step of a running job. Real ranks, plain modules."""

from __future__ import annotations

from itertools import pairwise, permutations
from statistics import median
from typing import Any

import pytest
import torch
from support import rank_pool
from support.attached import mlp
from support.rank_pool import Servers, pool
from support.sync_modes import LOCAL, MODES, WORLD, Training
from torch import nn

_ranks = rank_pool.ranks_first(WORLD)


def walk(how: str = "") -> list[str]:
    """A way through all ordered pairs of ways, each once (Hierholzer)."""
    # A GradScaler wants gradients in every step, and late ones are none in the first.
    without = {"forward"} if "ddp" in how else {"late"} if "scaled" in how else set()
    ways = [way for way in MODES if way not in without]
    left = {a: [b for b in ways if b != a] for a in ways}
    path, results = ["gradients"], []
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop(0))
        else:
            results.append(path.pop())
    return results[::-1]


def test_the_walk_sees_all_ordered_pairs() -> None:
    path = walk()
    assert sorted(pairwise(path)) == sorted(permutations(MODES, 2))


def all_pairs(rank: int, address: str, how: str) -> dict[str, Any]:
    first, *rest = walk(how)
    training = Training(rank, address, first, how=how, drift="end", drift_steps=3)
    rows, losses, local = [], [training.train(3)], []
    for before, way in zip(walk(how), rest, strict=False):
        training.switch(way)
        local.append((way, training.connection.local is not None, training.session.inspect.plan))
        # After a step of gradients DDP leaves buffers unequal; it copies rank 0's before the next step.
        rows.append(training.tensors(buffers="ddp" not in how or before in LOCAL))
        losses.append(training.train(3))
    training.session.flush()
    rows.append(training.tensors(buffers="ddp" not in how))
    results = {"rows": rows, "losses": losses, "local": local, "said": training.session.inspect.decisions()}
    training.session.close()
    return results


@pytest.mark.parametrize("how", [
    "", "gathered, scaled, weighed", "ddp, view, gathered, scaled, weighed", "ddp, static",
])
def test_any_way_follows_any_other(how: str) -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(all_pairs, servers.address, how)
    for place, (mine, theirs) in enumerate(zip(first["rows"], second["rows"], strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), f"apart behind {walk(how)[: place + 2][-2:]}"
    assert first["said"] == []
    for way, local, planned in first["local"]:
        assert local == (way in LOCAL)
        assert [getattr(planned, name) for name in MODES[way]] == [*MODES[way].values()]
    assert median(first["losses"][-9:]) < 0.8 * first["losses"][0]


RATE = 0.1


def slopes(rank: int, step: int, model: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def law(rank: int, address: str, codec: str, how: str) -> dict[str, torch.Tensor]:
    """Gradients are known, and so is what SGD makes of them, on whichever way they go."""
    model = mlp()
    training = Training(rank, address, "gradients", model=model, codec=codec, how=how)
    for group in training.optimizer.param_groups:
        group["lr"] = RATE
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    put, step = torch.zeros_like(start), 0
    for way in walk():
        training.switch(way)
        for _ in range(3):
            given = slopes(rank, step, model)
            idle = 1 if "idle" in how and way in LOCAL else 0  # tensors without a gradient that could carry a residual
            given[:idle] = [torch.zeros_like(s) for s in given[:idle]]
            terms = [(p, s) for p, s in zip(model.parameters(), given, strict=True)][idle:]

            def loss(terms: Any = terms) -> torch.Tensor:
                training.optimizer.zero_grad()
                total = sum((p * s).sum() for p, s in terms)
                total.backward()
                return total

            put += RATE * torch.cat([s.reshape(-1) for s in given])
            if "cleared" in how and way in LOCAL:
                loss()  # a probe, whose gradients are thrown away
            if "closure" in how:
                training.optimizer.step(loss)
            else:
                loss()
                training.optimizer.step()
            step += 1
    end = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    results = {"put": put, "applied": start - end, "owed": RATE * training.residuals()}
    training.session.close()
    return results


@pytest.mark.parametrize(("codec", "how"), [
    ("topk(ratio=0.1)", ""), ("topk(ratio=0.1)", "idle"), ("topk(ratio=0.1)", "closure"), ("topk(ratio=0.1)", "cleared"),
    ("int8(block=32)", "node"), ("int8(block=32)", "node, idle"),
])
def test_applied_and_owed_is_what_was_put_in_through_all_of_them(codec: str, how: str) -> None:
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(law, servers.address, codec, how)
    put, owed = sum(r["put"] for r in results), sum(r["owed"] for r in results)
    assert torch.equal(results[0]["applied"], results[1]["applied"])
    assert float(owed.abs().max()) > 0
    torch.testing.assert_close(WORLD * results[0]["applied"] + owed, put, rtol=1e-4, atol=1e-4)
