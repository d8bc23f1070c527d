"""What a sampler is as a value: kept with a save, and given to a worker that joins a running job. Deals out nothing."""

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
    """How many workers it was made for; 0 where nobody said, -1 where some of them have gone, or others have come."""
    left: list[int] = field(default_factory=list)
    """Those who are there then, in the order of their ranks."""


class GivenSampler(Record, frozen=True):
    """What a worker that joins a running job must know of the others' sampler."""

    state: SamplerState
    numbers: list[int]
    gone: list[int]
    amiss: int
    """As those of Roster."""
    passes: dict[int, int]
    """As that of Sampler."""
    under_way: bool
    """Whether a step of it is: the one in which that worker joins."""


def place_among(left: Sequence[int]) -> Callable[[int], int]:
    """What workers are called where those count from 0 who were left; the others' numbers are behind these."""
    places = {worker: place for place, worker in enumerate(left)}
    return lambda worker: places.get(worker, len(places) + worker)


def epoch_to_come(given: GivenSampler) -> int:
    """The one that is under way there, or comes next."""
    return given.state.epoch + (not given.under_way and not Ledger.from_state(given.state.ledger).left)
