"""nn.Embedding(sparse=True) on a plain module: sparse gradients are averaged, and come back sparse. Real ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from support.arguments import sync_of
from support.attached import Run, Setting, assert_refused, coordinators, outcome, play, weights
from support.rank_pool import Servers, pool, quick, ranks_first
from torch import nn

import commlayer

WORLD, STEPS, WORDS = 2, 5, 60
_ranks = ranks_first(WORLD)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, 8, sparse=True)
        self.bags = nn.EmbeddingBag(WORDS, 8, sparse=True, mode="sum")
        self.head = nn.Linear(8, 4)

    def forward(self, words: torch.Tensor, *, bags: bool) -> torch.Tensor:
        x = self.words(words).mean(1)
        return self.head(x + self.bags(words) if bags else x)


def batch(part: int, step: int) -> torch.Tensor:
    """Ranks have some words in common, and some twice."""
    return torch.randint(0, WORDS // 3, (5, 3), generator=torch.Generator().manual_seed(10 * step + part)) * (part + 1)


def loss_of(run: Run, model: Any, step: int) -> torch.Tensor:
    """Rank 1 does not use the bags in step 2, and no rank does in step 3."""
    return torch.stack([(model(batch(part, step), bags=step != 3 and (step, part) != (2, 1)) ** 2).mean()
                        for part in run.parts]).mean()


def trained(run: Run, kind: str, micro: int) -> dict[str, Any]:
    model = Tables()
    wrapped, tables = run.wrap(model), [model.words.weight, model.bags.weight]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.head.parameters(), lr=0.1)]
    optimizers.append(torch.optim.SparseAdam(tables, lr=0.05) if kind == "adam" else torch.optim.SGD(tables, lr=0.1))
    layouts = []
    for step in range(STEPS):
        for part in range(micro):
            with contextlib.nullcontext() if part == micro - 1 else run.no_sync(wrapped):
                loss_of(run, wrapped, micro * step + part).backward()
        layouts.append([None if p.grad is None else str(p.grad.layout) for p in tables])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model) | {"layouts": layouts}


SETTINGS = {"service": Setting("module"), "all-reduce": Setting("module", servers=0, plan="auto", ranks_per_node=2)}


@pytest.mark.commit(3)
@pytest.mark.parametrize("path", SETTINGS)
@pytest.mark.parametrize(("kind", "micro"), [("adam", 1), ("sgd", 1), ("sgd", 2)])
def test_as_alone(kind: str, micro: int, path: str) -> None:
    with coordinators(1, WORLD, SETTINGS[path].servers) as jobs:
        setting = SETTINGS[path]._replace(addresses=tuple(m.address for m in jobs))
        one, other = pool(WORLD).call(play, WORLD, trained, setting, kind, micro)
    alone = play(0, WORLD, trained, None, kind, micro)
    assert one.pop("layouts") == other.pop("layouts") == alone.pop("layouts")
    for name, tensor in alone.items():
        torch.testing.assert_close(one[name], tensor, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(one[name], other[name]), f"{name} differs between ranks"


def coded(rank: int, how: dict[str, Any], address: str) -> tuple[set[int], dict[str, torch.Tensor]]:
    """With error feedback rows come later than they were used; and local steps apply this rank's own."""
    model = Tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = set()
    with commlayer.attach(model, optimizer, compression="topk(ratio=0.05)", config=quick(join=address),
                          sync=sync_of(**how)) as session:
        for step in range(STEPS):
            (model(batch(rank, step), bags=True) ** 2).mean().backward()
            assert model.words.weight.grad is not None
            assert model.words.weight.grad.is_sparse
            rows.add(len(model.words.weight.grad._indices()[0]))
            optimizer.step()
            optimizer.zero_grad()
        session.flush()
        return rows, weights(model)


@pytest.mark.parametrize("how", [{}, {"every": 2}, {"codes": "updates"}], ids=str)
def test_replicas_stay_equal_under_other_codecs_and_sync_modes(how: dict[str, Any]) -> None:
    with Servers(WORLD, 1) as servers:
        (rows, one), (_, other) = pool(WORLD).call(coded, how, servers.address)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert max(rows) <= WORDS // 2


def test_overlap_refuses_them_by_name() -> None:
    model = Tables()
    line = outcome(lambda: commlayer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), sync="forward"))
    assert_refused(line, "E-SYNC-FORWARD", "words.weight")


def broken_off(rank: int, address: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A pass raises when the table's gradient is there; in the next one, reentrant, gradients are found at its end."""
    model = Tables()

    def loss(step: int) -> torch.Tensor:
        x = model.words(batch(rank, step)).mean(1)
        return (torch.utils.checkpoint.checkpoint(model.head, x, use_reentrant=step > 0) ** 2).mean()

    def stop(_: torch.Tensor) -> None:
        raise RuntimeError("broken off")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlayer.attach(model, optimizer, compression="identity()", config=quick(join=address)) as session:
        with session.no_sync():
            loss(1).backward()
        assert model.words.weight.grad is not None
        own = model.words.weight.grad.to_dense().clone()
        optimizer.zero_grad()
        handle = model.words.weight.register_post_accumulate_grad_hook(stop)
        with pytest.raises(RuntimeError, match="broken off"):
            loss(0).backward()
        handle.remove()
        optimizer.zero_grad()
        loss(1).backward()
        return own, model.words.weight.grad.to_dense().clone()


def test_a_pass_that_broke_off_leaves_nothing_to_the_next() -> None:
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(broken_off, servers.address)
    mean = torch.stack([own for own, _ in results]).mean(0)
    for _, average in results:
        torch.testing.assert_close(average, mean)
