"""Batches with load balancing: commlayer assigns the global batch to ranks by their speed.

A step uses the same samples in the same order as with equal shares; only their assignment to ranks differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, default_collate

from bench.paced.place import Place
from bench.tasks import Batch, Task

if TYPE_CHECKING:
    from commlayer.session import Session

STEPS = 10_000
"""More steps than any run takes, so that no epoch ends."""


def shared_batches(place: Place, task: Task, session: Session) -> Iterator[Batch]:
    """This rank's batches: equal shares at first, later shares by measured step times. The samples of all ranks and steps are
    one sequence, in which a sample is a number."""
    import commlayer
    from commlayer.balance import Sampler

    size = place.ranks * place.samples
    batch_of = lru_cache(maxsize=place.ranks)(task.batch)

    def sample(number: int) -> Batch:
        step, at = divmod(number, size)
        rank, which = divmod(at, place.samples)
        x, y = batch_of(rank, step, place.seed)
        return x[which], y[which]

    numbers = range(STEPS * size)
    sampler = Sampler(numbers, size, rank=place.rank, world=place.ranks, shuffle=False)
    controller = commlayer.LoadBalancer(session, sampler)
    loader: DataLoader[Any] = DataLoader(numbers, batch_sampler=sampler,  # type: ignore[arg-type]
                                         collate_fn=lambda own: default_collate([sample(number) for number in own]))
    yield from controller.follow(loader)
