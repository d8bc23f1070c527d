"""Batches with load balancing: commlayer assigns the global batch to ranks by their speed.

A step uses the same samples in the same order as with equal shares; only their assignment to ranks differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, Dataset

from bench.paced.place import Place
from bench.tasks import Batch, Task

if TYPE_CHECKING:
    from commlayer.session import Session

STEPS = 10_000
"""More steps than any run takes, so that no epoch ends."""


class Samples(Dataset[Batch]):
    """The samples of all ranks and steps in one sequence, indexed by number."""

    def __init__(self, task: Task, place: Place) -> None:
        self._samples, self.batch = place.samples, place.ranks * place.samples
        self._of = lru_cache(maxsize=place.ranks)(lambda rank, step: task.batch(rank, step, place.seed))

    def __len__(self) -> int:
        return STEPS * self.batch

    def __getitem__(self, number: int) -> Batch:
        step, at = divmod(number, self.batch)
        rank, which = divmod(at, self._samples)
        x, y = self._of(rank, step)
        return x[which], y[which]


def shared_batches(place: Place, task: Task, session: Session) -> Iterator[Batch]:
    """This rank's batches: equal shares at first, later shares by measured step times."""
    import commlayer
    from commlayer.balance import Sampler

    samples = Samples(task, place)
    sampler = Sampler(samples, samples.batch, rank=place.rank, world=place.ranks, shuffle=False)
    controller = commlayer.LoadBalancer(session, sampler)
    for x, y in controller.follow(DataLoader(samples, batch_sampler=sampler)):
        assert isinstance(x, torch.Tensor)
        yield x, y
