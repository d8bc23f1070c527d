"""Lazy sparse optimizers against torch's dense optimizers with 1 % nonzero gradients: step time and final loss.

Runs on one thread. The optimizers are interleaved in each round; ratios are medians over rounds. "fused" is torch's fused
kernel, one pass over memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bench import Unmeasurable
from bench.report import Result
from commlayer.optim import SparseAdamW, SparseSGD
from commlayer.optim.sparse_gradients import sparse_gradient

SHAPE = (5000, 5000)
DENSITY = 0.01
LAGS = (4, 16, 64)
ROUNDS, ROUNDS_QUICK = 9, 5
STEPS, BATCH, HIDDEN, RATE = 600, 64, 128, 0.01
SEEDS, SEEDS_QUICK = (1, 2, 3), (1,)

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "sgd": (SparseSGD, torch.optim.SGD, {"lr": 1e-3}),
    "sgdm": (SparseSGD, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adamw": (SparseAdamW, torch.optim.AdamW, {"lr": 1e-3}),
}


def _gradient(seed: int, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    n = shape[0] * shape[1]
    idx = torch.randint(0, n, (int(n * DENSITY),), generator=generator).unique()
    return sparse_gradient(idx.to(torch.int32), torch.randn(len(idx), generator=generator), shape)


class _Rival:
    """One parameter and its optimizer, stepped once per call."""

    def __init__(self, make: Make, gradients: list[torch.Tensor]) -> None:
        self.parameter = nn.Parameter(torch.ones(SHAPE))
        self.optimizer, self.gradients, self.calls = make([self.parameter]), gradients, 0

    def seconds(self) -> float:
        self.parameter.grad = self.gradients[self.calls % len(self.gradients)]
        self.calls += 1
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin


def _speed(kind: str, rounds: int) -> list[dict[str, Any]]:
    lazy, dense, settings = KINDS[kind]
    sparse, full = [_gradient(seed) for seed in range(3)], [torch.full(SHAPE, 1e-3)]
    rivals = {
        "dense": _Rival(partial(dense, **settings), full),
        "fused": _Rival(partial(dense, **settings, fused=True), full),
        **{f"lag {lag}": _Rival(partial(lazy, **settings, lag=lag), sparse) for lag in LAGS},
    }
    if kind == "sgdm":
        rivals["no momentum"] = _Rival(partial(SparseSGD, lr=1e-3), sparse)
    for _ in range(2):
        for rival in rivals.values():
            rival.seconds()
    spent = [{name: rival.seconds() for name, rival in rivals.items()} for _ in range(rounds)]

    def over(rival: str, name: str) -> float:
        return round(statistics.median(one[rival] / one[name] for one in spent), 2)

    return [
        {
            "optimizer": kind, "step": name, "median_ms": round(1e3 * statistics.median(one[name] for one in spent), 2),
            "best_ms": round(1e3 * min(one[name] for one in spent), 2), "times_dense": over("dense", name),
            "times_fused": over("fused", name),
        }
        for name in rivals
    ]


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Unmeasurable(f"scikit-learn is missing ({error}): pip install commlayer[bench]") from None
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def train(make: Callable[[Any], Any], seed: int, *, sparse: bool, flush: bool = False, steps: int = STEPS) -> float:
    """Loss over all digits after training with the largest 1 % of each gradient; the rest stays as a residual."""
    images, labels = _digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    optimizer, kept = make(model.parameters()), [torch.zeros(p.numel()) for p in model.parameters()]
    for _ in range(steps):
        some = torch.randint(0, len(images), (BATCH,))
        optimizer.zero_grad()
        cross_entropy(model(images[some]), labels[some]).backward()
        for p, rest in zip(model.parameters(), kept, strict=True):
            assert p.grad is not None
            rest += p.grad.view(-1)
            idx = rest.abs().topk(max(1, int(DENSITY * len(rest)))).indices.sort().values
            gradient = sparse_gradient(idx.to(torch.int32), rest[idx], p.shape)
            p.grad, rest[idx] = gradient if sparse else gradient.to_dense(), 0.0
        optimizer.step()
        if flush:
            optimizer.flush()
    if sparse:
        optimizer.flush()
    with torch.no_grad():
        return float(cross_entropy(model(images), labels))


def _learning(seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    def mean(**how: Any) -> float:
        return round(statistics.mean(train(seed=seed, **how) for seed in seeds), 4)

    rows = []
    for kind, (lazy, dense, settings) in KINDS.items():
        chosen = {**settings, "lr": {"sgd": 10 * RATE, "sgdm": RATE, "adamw": 1e-3}[kind]}
        settings_by_name: dict[str, dict[str, Any]] = {
            "dense": {"make": partial(dense, **chosen), "sparse": False},
            "flushed each step": {"make": partial(lazy, **chosen), "sparse": True, "flush": True},
        }
        for lag in LAGS if kind != "sgd" else ():
            settings_by_name[f"lag {lag}"] = {"make": partial(lazy, **chosen, lag=lag), "sparse": True}
        rows += [{"optimizer": kind, "step": name, "loss": mean(**how)} for name, how in settings_by_name.items()]
    return rows


def run(quick: bool) -> Result:
    torch.set_num_threads(1)
    speeds = [row for kind in ("sgdm", "adamw") for row in _speed(kind, ROUNDS_QUICK if quick else ROUNDS)]
    losses = _learning(SEEDS_QUICK if quick else SEEDS)
    summary = {f"{row['optimizer']}_{row['step'].replace(' ', '_')}_vs_dense": row["times_dense"]
               for row in speeds if row["step"] not in ("dense", "fused")}
    summary |= {f"{row['optimizer']}_{row['step'].replace(' ', '_')}_loss": row["loss"] for row in losses}
    return {"rows": speeds + losses, "summary": summary}
