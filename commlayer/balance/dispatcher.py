"""Uneven and changing batches from a stream that can only be read once, in order.

Limits compared with `Sampler`: every worker reads all items and drops those of the others. The stream must have the same
order on all workers. A lost worker's items are not assigned again. Resuming reads again what was trained.

A DataLoader around the stream, with batch_size=None, may prepare items in advance, in order: with at most one worker process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from commlayer.balance.assignment import BatchSource, StepAssignment, TrainingSession, drawn_batches
from commlayer.balance.consumed_log import text_of
from commlayer.balance.schedule import Announcement, SharesSchedule, check_sizes, checked_shares, scaled
from commlayer.errors import InvalidInput, RecordError
from commlayer.records import Record, decode


class DispatcherState(Record, frozen=True):
    """Position in a stream: the same on all workers."""

    batch: int
    step: int
    items: int
    schedule: list[Announcement]


class Dispatcher(BatchSource):
    """Deals a stream's items to the workers, `batch` of them per step. `fraction` and `last` are those of Sampler."""

    def __init__(self, stream: Iterable[Any], batch: int, *, shares: Sequence[int] | Mapping[int, int], rank: int,
                 collate: Callable[[list[Any]], Any], least: int = 1, cap: int = 0) -> None:
        """`collate` makes a batch of a list of items, as a DataLoader's collate_fn does."""
        check_sizes(batch, 0, least=least, cap=cap)
        self._stream, self._collate, self.batch, self.rank = stream, collate, batch, rank
        self._least, self._cap = least, cap
        self._schedule = SharesSchedule(checked_shares(shares, batch, least))
        self._assignment = StepAssignment()
        self.step = self._read = self._dealt = 0

    def announce(self, step: int, shares: Sequence[int] | Mapping[int, int]) -> None:
        """Sets the shares from `step` on. Every worker must call it before it reaches that step."""
        named = checked_shares(shares, self.batch, self._least)
        if step <= self.step:
            raise InvalidInput("E-SAMPLER-ARGUMENT",
                               f"announce: step {step} is under way or over, allowed: step {self.step + 1} or later")
        self._schedule.add(Announcement(step, named))

    def follow(self, session: TrainingSession | None = None, *, weigh: Callable[[Any], float] | None = None) -> Iterator[Any]:
        """This worker's batches, from the current position to the end of the stream."""
        items = itertools.islice(iter(self._stream), self._read, None)
        try:
            while held := list(itertools.islice(items, self.batch)):
                shares = self._schedule.shares(self.step)
                counts = shares if len(held) == self.batch else scaled(shares, len(held))
                start = sum(count for worker, count in counts.items() if worker < self.rank)
                own = held[start : start + counts.get(self.rank, 0)]
                nothing = list(itertools.islice(itertools.cycle(held), self._least))
                parts = list(drawn_batches(self.step, own, nothing, whole=len(held), least=self._least, cap=self._cap))
                self._dealt = len(held)
                yield from self._assignment.run([(self._collate(mine), part) for part, mine in parts], session, weigh)
                self._commit()
            self._read = 0
        finally:
            if self._assignment.applied():
                self._commit()

    def state_dict(self) -> dict[str, Any]:
        if self._assignment.applied():
            self._commit()
        return {"dealer": text_of(DispatcherState(self.batch, self.step, self._read, self._schedule.since(self.step)))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = decode(str(state.get("dealer", "")).encode(), DispatcherState, "state of a dealer")
        if kept.batch != self.batch:
            raise RecordError("E-SAMPLER-STATE", f"state of a dealer: its batch is {kept.batch}, this one's {self.batch}")
        self.step, self._read, self._schedule = kept.step, kept.items, SharesSchedule.of(kept.schedule)
        self._assignment.finish()

    def _commit(self) -> None:
        if self._assignment.pending:
            self._assignment.finish()
            self.step += 1
            self._read += self._dealt
            self._schedule.forget(self.step)
