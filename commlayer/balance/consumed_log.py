"""Tracks which positions in an epoch's order of samples each worker was assigned in which step, and which are left.

An epoch has positions 0 to length - 1; a permutation maps them to samples. A position is left, open (assigned, but it may be
taken back) or done, and each becomes done once. Positions are assigned from the front, so positions that were taken back are
assigned next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from commlayer.balance.schedule import Shares, SharesSchedule, scaled
from commlayer.errors import InvalidInput
from commlayer.records import Record

Range = tuple[int, int]
"""A range of positions in an epoch's order of samples: the first position, and the one after the last."""


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Returns the ranges sorted, without empty ones, with adjacent ranges joined. Raises InvalidInput if they overlap, since a
    sample would be trained twice."""
    result: list[Range] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if result and start < result[-1][1]:
            raise InvalidInput("E-SAMPLER-STATE", f"consumed log: position {start} appears twice")
        if result and start == result[-1][1]:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


def count_samples(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


class ConsumedLogState(Record, frozen=True):
    """The state of a consumed log as plain values."""

    length: int
    left: list[Range]
    open: dict[int, dict[int, list[Range]]]
    """Ranges that can still be taken back, by step and worker."""


class ConsumedLog:
    """The consumed log of one epoch. All members of a job keep equal logs, because they make the same calls in the same
    order."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._left = merged([(0, length)])
        self.open: dict[int, dict[int, list[Range]]] = {}
        """Ranges that can still be taken back, by step and worker."""

    @property
    def left(self) -> int:
        """Number of positions not assigned yet."""
        return count_samples(self._left)

    @property
    def done(self) -> list[Range]:
        """Ranges of samples that have been trained. The dispatcher does not assign them again."""
        busy = merged([*self._left, *(r for given in self.open.values() for ranges in given.values() for r in ranges)])
        edges = [0, *(edge for r in busy for edge in r), self.length]
        return merged(zip(edges[::2], edges[1::2], strict=True))

    def assign(self, step: int, counts: Mapping[int, int]) -> dict[int, list[Range]]:
        """Assigns counts[worker] positions to each worker, in the order of worker numbers. The positions stay open (may be
        taken back) until `commit`."""
        if step in self.open:
            raise InvalidInput("E-SAMPLER-ARGUMENT", f"consumed log: step {step} is assigned already")
        if sum(counts.values()) > self.left:
            raise InvalidInput("E-SAMPLER-ARGUMENT",
                               f"consumed log: step {step} needs {sum(counts.values())} positions, {self.left} are left")
        given = {worker: self._take(counts[worker]) for worker in sorted(counts)}
        self.open[step] = {worker: list(ranges) for worker, ranges in given.items()}
        return given

    def commit(self, step: int, missing: Iterable[int] = ()) -> None:
        """Marks the positions of an applied step as done. Positions of workers in `missing`, which had no part in the step,
        are left again."""
        if step not in self.open:
            raise InvalidInput("E-SAMPLER-ARGUMENT", f"consumed log: step {step} is not open")
        given = self.open.pop(step)
        self._put_back(given.get(worker, []) for worker in set(missing))

    def take_back(self, worker: int, from_step: int = 0) -> int:
        """Takes back the positions that a lost worker was assigned from `from_step` on. Returns their number."""
        ranges = [given.pop(worker, []) for step, given in self.open.items() if step >= from_step]
        self._put_back(ranges)
        return sum(map(count_samples, ranges))

    def renumber(self, number: Callable[[int], int]) -> None:
        """Renumbers the workers. `number` maps each old number to a new one, no two to the same."""
        self.open = {step: {number(worker): ranges for worker, ranges in given.items()} for step, given in self.open.items()}

    def copy(self) -> ConsumedLog:
        clone = ConsumedLog(self.length)
        clone._left = list(self._left)
        clone.open = {step: {w: list(r) for w, r in given.items()} for step, given in self.open.items()}
        return clone

    @property
    def state(self) -> ConsumedLogState:
        return ConsumedLogState(self.length, self._left, self.open)

    @classmethod
    def of(cls, kept: ConsumedLogState) -> ConsumedLog:
        """Creates a consumed log from the value that `state` returned."""
        log = cls(kept.length)
        log._left, log.open = merged(kept.left), kept.open
        given = [r for by_worker in kept.open.values() for ranges in by_worker.values() for r in ranges]
        held = merged([*kept.left, *given])  # raises on overlap
        if held and (held[0][0] < 0 or held[-1][1] > kept.length):
            raise InvalidInput("E-SAMPLER-STATE", f"state of a consumed log: position outside 0 to {kept.length - 1}")
        return log

    def _put_back(self, lists: Iterable[list[Range]]) -> None:
        self._left = merged([*self._left, *(r for ranges in lists for r in ranges)])

    def _take(self, count: int) -> list[Range]:
        taken: list[Range] = []
        while count > 0:
            start, stop = self._left[0]
            cut = min(stop, start + count)
            taken.append((start, cut))
            count -= cut - start
            self._left[0] = (cut, stop)
            if cut == stop:
                self._left.pop(0)
        return taken


class EpochProgress:
    """Assigns the positions of an epoch step by step; `step` is the next one to assign."""

    def __init__(self, log: ConsumedLog, schedule: SharesSchedule, step: int, batch: int, *, drop: bool) -> None:
        """`drop`: True: a last step with fewer samples than `batch` is left out."""
        self.consumed, self.step = log, step
        self._schedule, self._batch, self._drop = schedule, batch, drop

    def copy(self) -> EpochProgress:
        """Returns a copy with which a caller can look ahead. The copy shares only the schedule."""
        return self.restarted(self.consumed.copy(), self._schedule, self.step)

    def restarted(self, log: ConsumedLog, schedule: SharesSchedule, step: int) -> EpochProgress:
        """Returns the same epoch with another log, schedule and step."""
        return EpochProgress(log, schedule, step, self._batch, drop=self._drop)

    def is_exhausted(self) -> bool:
        """Returns whether no positions are left to assign."""
        return self.consumed.left < (self._batch if self._drop else 1)

    def is_last_step(self) -> bool:
        """Returns whether the next step is the last one."""
        full, rest = self.steps_left()
        return full + bool(rest) <= 1

    def is_finished(self) -> bool:
        """Returns whether the epoch is over. If a worker was lost in this epoch, but is announced as lost for a later step,
        first takes back that worker's positions. Call this only for trained steps, which are equal on all workers, not for
        steps drawn in advance. """
        if not self.is_exhausted():
            return False
        for worker, first in self._schedule.move_losses_forward(self.step).items():
            self.consumed.take_back(worker, first)
        return self.is_exhausted()

    def advance(self, keep_from: int) -> dict[int, list[Range]]:
        """Assigns the next step and returns each worker's ranges. Steps before `keep_from` can no longer be taken back."""
        for worker, first in self._schedule.losses(self.step).items():
            self.consumed.take_back(worker, first)
        for step in [s for s in self.consumed.open if s < keep_from]:
            self.consumed.commit(step)
        given = self.consumed.assign(self.step, self._counts())
        self.step += 1
        return given

    def steps_left(self) -> tuple[int, int]:
        """Returns the number of full steps left, and the number of positions in a shorter last step."""
        full, rest = divmod(self.consumed.left, self._batch)
        return full, 0 if self._drop else rest

    def _counts(self) -> Shares:
        shares = self._schedule.shares(self.step)
        step_samples = sum(shares.values())
        return shares if self.consumed.left >= step_samples else scaled(shares, self.consumed.left)


TABLE = 1 << 20
"""Longest epoch whose order is kept in memory: 8 MB and about 0.1 s. A longer order is computed by a Feistel network. Over few
bits such a network would be far from random; above this length it has at least 20 bits."""
ROUNDS = 6
MASK = (1 << 64) - 1

Array = npt.NDArray[np.uint64]


def mix_bits(x: Array) -> Array:
    """Returns the finalizer of splitmix64: each bit of the result depends on all bits of `x`."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """Maps a position in the epoch's order to the index of a sample."""

    def __init__(self, length: int, seed: int, epoch: int, *, longest_table: int = TABLE) -> None:
        """`longest_table`: longest order that is kept in memory; a longer one is computed. Must be equal on all members."""
        self.length = length
        key = mix_bits(np.array([seed & MASK], dtype=np.uint64)) + np.uint64(epoch)
        ids = np.arange(1, ROUNDS + 1, dtype=np.uint64)
        self._keys = mix_bits(mix_bits(key) + ids * np.uint64(0x9E3779B97F4A7C15))
        self._half = np.uint64((max(length - 1, 1).bit_length() + 1) // 2)
        self._table: npt.NDArray[Any] | None = None
        if length <= longest_table:
            self._table = np.argsort(mix_bits(np.arange(length, dtype=np.uint64) + self._keys[0]), kind="stable")

    def at(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        parts = [self._permute(np.arange(start, stop, dtype=np.uint64)) for start, stop in ranges]
        return [int(index) for part in parts for index in part]

    def _permute(self, positions: Array) -> npt.NDArray[Any]:
        if self._table is not None:
            return self._table[positions.astype(np.int64)]
        result = self._feistel(positions)
        # The network permutes a power of four, at most four times the length, so few results are outside.
        while (outside := result >= self.length).any():
            result[outside] = self._feistel(result[outside])
        return result

    def _feistel(self, x: Array) -> Array:
        low = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = x >> self._half, x & low
        for key in self._keys:
            left, right = right, left ^ (mix_bits(right + key) & low)
        return (left << self._half) | right


class SequentialOrder:
    """Reads the samples in the dataset's own order, without shuffling."""

    def at(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        return [index for start, stop in ranges for index in range(start, stop)]
