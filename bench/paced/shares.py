"""Batches that follow the speeds of ranks: what all would have in a step, dealt out by commlayer. Knows a task and a session.

A step's samples are the same as those of ranks that share evenly, in the same order: who takes which of them is what differs.
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
"""More than any run takes: no epoch ends."""


class Samples(Dataset[Batch]):
    """Of all ranks and steps in a row, each by its number."""

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


def dealt(place: Place, task: Task, session: Session) -> Iterator[Batch]:
    """This rank's batches, evenly at first, and by what steps take from then on."""
    import commlayer
    from commlayer.balance import Sampler

    samples = Samples(task, place)
    sampler = Sampler(samples, samples.batch, rank=place.rank, world=place.ranks, shuffle=False)
    controller = commlayer.Controller(session, sampler)
    for x, y in controller.follow(DataLoader(samples, batch_sampler=sampler)):
        assert isinstance(x, torch.Tensor)
        yield x, y
