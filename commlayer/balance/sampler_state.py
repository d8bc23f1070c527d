"""The state of a sampler, as it is saved and as joining workers receive it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import field

from commlayer.balance.consumed_log import ConsumedLog, ConsumedLogState
from commlayer.balance.schedule import Announcement
from commlayer.records import Record


class SamplerState(Record, frozen=True):
    """The state of a sampler as plain values, equal on all workers at the same step."""

    length: int
    batch: int
    seed: int
    epoch: int
    step: int
    consumed: ConsumedLogState
    schedule: list[Announcement]
    world: int = 0
    """Number of workers that the sampler was made for. 0: unknown. -1: workers have left or joined since."""
    left: list[int] = field(default_factory=list)
    """Numbers of the present workers, in the order of their ranks."""


class JoinState(Record, frozen=True):
    """The state that a joining worker gets from the other workers."""

    state: SamplerState
    numbers: list[int]
    departed: list[int]
    session_steps: dict[int, int]
    """See SamplerMembership.session_steps."""
    mid_step: bool
    """True: the worker joins in the middle of a step."""


def canonical_json(state: Record) -> str:
    """Returns canonical JSON of a record whose maps have numbers as keys."""
    return msgspec.json.encode(msgspec.to_builtins(state, str_keys=True), order="deterministic").decode()


def renumbering(left: Sequence[int]) -> Callable[[int], int]:
    """Returns a function that renumbers the workers in `left` from 0 on; all other workers come after them."""
    places = {worker: place for place, worker in enumerate(left)}
    return lambda worker: places.get(worker, len(places) + worker)


def joining_epoch(given: JoinState) -> int:
    """Returns the epoch in which the running job is; the next one if that epoch's last step is over."""
    return given.state.epoch + (not given.mid_step and not ConsumedLog.of(given.state.consumed).left)
