"""A sampler's state as a value: for checkpoints, and for workers that join a running job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import field

from commlayer.balance.ledger import Ledger
from commlayer.balance.schedule import Announcement
from commlayer.records import Record


class SamplerState(Record, frozen=True):
    """A sampler as a value: the same on all workers at the same step."""

    length: int
    batch: int
    seed: int
    epoch: int
    step: int
    ledger: dict[str, str]
    schedule: list[Announcement]
    world: int = 0
    """Number of workers that the sampler was made for. 0: unknown. -1: workers have left or joined since."""
    left: list[int] = field(default_factory=list)
    """The present workers, in the order of their ranks."""


class GivenSampler(Record, frozen=True):
    """The state that a joining worker gets from the other workers."""

    state: SamplerState
    numbers: list[int]
    gone: list[int]
    amiss: int
    """As in Roster."""
    passes: dict[int, int]
    """As in Sampler."""
    under_way: bool
    """Whether the worker joins in the middle of a step."""


def place_among(left: Sequence[int]) -> Callable[[int], int]:
    """Renumbers the workers in `left` from 0 on; all others come after them."""
    places = {worker: place for place, worker in enumerate(left)}
    return lambda worker: places.get(worker, len(places) + worker)


def epoch_to_come(given: GivenSampler) -> int:
    """The epoch that is in progress there, or the next one."""
    return given.state.epoch + (not given.under_way and not Ledger.from_state(given.state.ledger).left)
