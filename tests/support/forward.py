"""A small network of everything that a forward pass does with weights, and a script that trains it, for overlap="forward"."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

import commlayer
from commlayer.records import Plan
from support import rank_pool
from support.attached import plan_or_codec
from support.jobs import distributed_job


class Net(nn.Module):
    """Convolution, statistics, an embedding whose weight is also the head, and one weight that no module is called for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 12)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.norm = nn.BatchNorm1d(12)
        self.hidden = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 12))
        self.beside = nn.Linear(12, 12, bias=False)
        self.scale = nn.Parameter(torch.ones(12))
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(self.words(x).transpose(1, 2))).transpose(1, 2)
        y = y + nn.functional.linear(y, self.beside.weight)
        return self.head(self.hidden(y) * self.scale)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(0, 20, (4, 7), generator=generator)
    return words[:, :-1], words[:, 1:]


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def halves(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    """Two groups of parameters, of which the second has its own hyperparameters."""
    parameters = [*model.parameters()]
    return [{"params": parameters[::2]}, {"params": parameters[1::2], **second}]


Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda m: torch.optim.SGD(halves(m, lr=0.02), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(halves(m, betas=(0.8, 0.95)), lr=0.01, foreach=False),
    "adamw": lambda m: torch.optim.AdamW(halves(m, weight_decay=0.2), lr=0.01, amsgrad=True, foreach=True),
    "tensor rate": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01), foreach=False),
}


class Training:
    """One rank's."""

    def __init__(
        self, rank: int, address: str, overlap: str | None, *, optimizer: str = "sgd", codec: str = "topk(ratio=0.1)",
        model: nn.Module | None = None, scaler: Any = None, max_norm: float | None = None, given: Plan | None = None,
        **fields: Any,
    ) -> None:
        """`given`: instead of the codec."""
        self.rank, self.model = rank, model or Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5 + 0.5 ** (1 + step / 50))
        where: dict[str, Any] = {"join": address} if address else {}
        plan: Any = given or codec
        self.session = commlayer.attach(
            self.model, self.optimizer, **plan_or_codec(plan), sync=overlap, grad_scaler=scaler, clip_grad_norm=max_norm,
            config=rank_pool.quick(**where, **fields))

    @property
    def worker(self) -> Any:
        return distributed_job(self.session).worker

    def backward(self, step: int) -> None:
        loss_of(self.model, self.rank, step).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.schedule.step()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.backward(step)
            self.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Weights, statistics and what the optimizer remembers, bit for bit."""
        kept = {name: t.clone() for name, t in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            kept |= {f"{number}.{name}": v.clone() for name, v in values.items() if isinstance(v, torch.Tensor)}
        return kept


class Held:
    """Keeps results from arriving at this rank until `release`, or until they are waited for."""

    def __init__(self, worker: Any, names: Collection[str] = (), *, until_awaited: bool = False) -> None:
        """Holds results of tensors with these names, or of all. The one that decides whether the step is finite arrives."""
        numbers = [n for n, info in enumerate(worker.job.tensors) if not names or info.name in names]
        self.buckets = {b.id for n in numbers for b in worker.holding(n)} - {worker._assembler.last.id}
        assert self.buckets
        self.count = 0
        """Results that were held."""
        self.awaited: set[int] = set()
        """Buckets whose results were waited for. The test clears it."""
        self._lock, self._waiting = threading.RLock(), []
        self._exchange = next(iter(worker._paths.of.values()))._exchange
        self._answered, self._take = self._exchange._answered, worker.take
        self._exchange._answered = self._arrived
        if until_awaited:
            worker.take, self._wait, worker.wait = self._awaited, worker.wait, self._all_awaited

    def _arrived(self, bucket: Any, *args: Any) -> None:
        with self._lock:
            held = bucket.id in self.buckets
            if held:
                self._waiting.append((bucket, *args))
                self.count += 1
        if not held:
            self._answered(bucket, *args)

    def _awaited(self, bucket: Any, deadline: float | None) -> bool:
        if deadline is not None and bucket.id in self.buckets:
            self.awaited.add(bucket.id)
            with self._lock:
                self.buckets -= {bucket.id}
                self._let([args for args in self._waiting if args[0] is bucket])
            present = self._take(bucket, deadline)
            self.buckets |= {bucket.id}
            return present
        return self._take(bucket, deadline)

    def _all_awaited(self, deadline_s: float, turn: int = 0) -> None:
        buckets = set(self.buckets)
        self.awaited |= buckets
        self.release()
        self._wait(deadline_s, turn)
        self.buckets |= buckets

    def release(self) -> None:
        with self._lock:
            self.buckets.clear()
            self._let([*self._waiting])

    def _let(self, gone: list[Any]) -> None:
        self._waiting = [args for args in self._waiting if args not in gone]
        for args in gone:
            self._answered(*args)
