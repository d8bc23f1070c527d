"""Lazy optimizers under attach(): sparse averages arrive as sparse gradients, and training equals that of torch's optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, data, play
from support.rank_pool import pool
from torch import nn

from commlayer.engine.buckets.results import SparseResult
from commlayer.engine.worker.sparse_averages import join_parts
from commlayer.optim import SparseAdamW, SparseSGD

WORLD, STEPS = 2, 6
FIRST, SPARE = 0, 2
"""Places of the large weights among the parameters."""
KINDS: dict[str, tuple[Any, Any, dict[str, float]]] = {
    "sgd": (SparseSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (SparseAdamW, torch.optim.AdamW, {"lr": 0.01}),
}


class Net(nn.Module):
    """Two weights of 4800 elements, one of which only some steps use; the rest is small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(12, 400), nn.Linear(12, 400), nn.Linear(400, 3)

    def forward(self, x: torch.Tensor, *, spare: bool) -> torch.Tensor:
        inner = self.first(x) + self.spare(x) if spare else self.first(x)
        out: torch.Tensor = self.last(inner.tanh())
        return out


def train(run: Run, kind: str, lazy: bool, cleared: bool = False, looks: bool = False) -> dict[str, Any]:
    """`looks`: averages are dense first, and looked through for entries."""
    wholes = []
    spread = SparseResult.to_dense

    def counted(result: SparseResult) -> torch.Tensor:
        wholes.append(result)
        return spread(result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseResult, "to_dense", counted)
        if looks:
            patch.setattr("commlayer.engine.worker.sparse_averages.SparseGradients.follow", lambda *_: None)
        return trained(run, kind, lazy=lazy, cleared=cleared) | {"wholes": len(wholes)}


def trained(run: Run, kind: str, *, lazy: bool, cleared: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    ours, theirs, settings = KINDS[kind]
    optimizer = (ours if lazy else theirs)(model.parameters(), **settings)
    wrapped, layouts = run.wrap(model, optimizer=optimizer), []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x, y = data(run.rank, step)
        nn.functional.mse_loss(wrapped(x, spare=step % 3 == 0), y).backward()
        layouts.append([p.grad is not None and p.grad.is_sparse for p in model.parameters()])
        if cleared and step == 2:
            continue  # the average is discarded, so its entries go to the residual
        optimizer.step()
        if lazy:
            optimizer.flush()
    worker = run.sessions[0].inspect.context.worker
    kept = sum(isinstance(bucket.compact, SparseResult) for bucket in worker.buckets)
    report: dict[str, Any] = {"layouts": layouts, "kept": kept}
    return report | {name: p.detach().clone() for name, p in model.named_parameters()}


def played(codec: str, *script: Any, fields: tuple[tuple[str, Any], ...] = ()) -> list[dict[str, Any]]:
    with coordinators(1, WORLD, 1) as jobs:
        setting = Setting("module", tuple(each.address for each in jobs), codec, fields=fields)
        return pool(WORLD).call(play, WORLD, train, setting, *script)


OFF = (("guard", "off"),)


@pytest.mark.parametrize(("kind", "cleared"), [("sgd", False), ("adamw", False), ("sgd", True)])
def test_lazy_optimizer_receives_sparse_averages_and_trains_like_torch(kind: str, cleared: bool) -> None:
    results = [played("topk(ratio=0.02)", kind, lazy, cleared, fields=OFF) for lazy in (True, False)]
    sparse, dense = results
    assert all(layout[FIRST] and sum(layout) <= 2 for layout in sparse[0]["layouts"])
    assert sum(layout[SPARE] for layout in sparse[0]["layouts"]) >= STEPS / 3
    assert not any(any(layout) for layout in dense[0]["layouts"])
    assert sparse[0]["kept"] >= 1
    assert sparse[0]["wholes"] == dense[0]["kept"] == 0, "no dense sum anywhere"
    for name in set(sparse[0]) - {"layouts", "kept", "wholes"}:
        assert torch.equal(sparse[0][name], sparse[1][name]), "replicas stay the same to the last bit"
        assert torch.allclose(sparse[0][name], dense[0][name], atol=1e-5)


@pytest.mark.parametrize(("codec", "fields"), [
    ("topk(ratio=0.02)", (("guard", "warn"),)), ("randomk(ratio=0.05)", ()),
    ("topk(ratio=0.02, values='fp16')", (("warmup", 4), ("ratio_over", "plan"), ("cut_nbytes", 8192))),
])
def test_sparse_averages_train_bit_equal_to_scanned_dense_ones(
    codec: str, fields: tuple[tuple[str, Any], ...],
) -> None:
    results = [played(codec, "sgd", True, True, looks, fields=fields) for looks in (False, True)]
    ours, theirs = results[0][0], results[1][0]
    assert ours.pop("kept")
    assert not theirs.pop("kept")
    assert ours["layouts"] == theirs["layouts"]
    for name in set(ours) - {"layouts", "wholes"}:
        assert torch.equal(ours[name], theirs[name]), name


def test_averages_with_many_entries_stay_dense() -> None:
    assert not any(layout[FIRST] for layout in played("fp16()", "sgd", True)[0]["layouts"])
    first = played("topk(ratio=0.25)", "sgd", True, fields=OFF)[0]
    assert not first["kept"], "more entries than are handed over"
    assert not any(layout[FIRST] for layout in first["layouts"])


def test_few_finite_entries_are_merged() -> None:
    idx, shape = torch.arange(3, dtype=torch.int32), torch.Size((6, 8))
    many = [(idx, torch.ones(3)), (idx + 10, torch.ones(4)[:3]), (idx + 40, torch.full((3,), float("inf")))]
    assert join_parts(many, shape) is None
    assert join_parts(many[2:], shape) is None
    result = join_parts([many[0], (idx + 10, torch.tensor([1.0, 2.0**-130, 2.0]))], shape)
    assert result is not None
    assert result._nnz() == 5
    assert result.to_dense().flatten()[[0, 10, 11, 12]].tolist() == [1.0, 1.0, 0.0, 2.0]
