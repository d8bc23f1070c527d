"""Tracks which ranges of an epoch's index stream each worker was assigned in which step, and what is left.

The stream is positions 0 to length - 1. A position is left, open (assigned, may still be taken back) or done; each is done
once. Positions are assigned from the front, so positions that come back are the next to be assigned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from commlayer.errors import InvalidInput
from commlayer.records import Record, decode

Range = tuple[int, int]
"""Positions [start, stop)."""


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, without empty ranges, neighbours joined. Overlap is an error: a position would be trained twice."""
    result: list[Range] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if result and start < result[-1][1]:
            raise InvalidInput("E-SAMPLER-STATE", f"ledger: position {start} is there twice")
        if result and start == result[-1][1]:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


def size(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def text_of(state: Record) -> str:
    """A record with numbers as keys, as canonical JSON."""
    return msgspec.json.encode(msgspec.to_builtins(state, str_keys=True), order="deterministic").decode()


class LedgerState(Record, frozen=True):
    """A ledger as a value."""

    length: int
    left: list[Range]
    open: dict[int, dict[int, list[Range]]]
    """By step, by worker."""


class Ledger:
    """One epoch. All members of a job keep the same ledger: they make the same calls in the same order."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._left = merged([(0, length)])
        self._open: dict[int, dict[int, list[Range]]] = {}

    @property
    def left(self) -> int:
        """Number of positions not assigned yet."""
        return size(self._left)

    @property
    def open(self) -> Mapping[int, Mapping[int, list[Range]]]:
        """Ranges that can still be taken back, by step and worker."""
        return self._open

    @property
    def done(self) -> list[Range]:
        """Ranges that need no further assignment."""
        busy = merged([*self._left, *(r for given in self._open.values() for ranges in given.values() for r in ranges)])
        edges = [0, *(edge for r in busy for edge in r), self.length]
        return merged(zip(edges[::2], edges[1::2], strict=True))

    def give(self, step: int, counts: Mapping[int, int]) -> dict[int, list[Range]]:
        """Assigns counts[worker] positions to each worker, in the order of their numbers; open until `commit`."""
        if step in self._open:
            raise InvalidInput("E-SAMPLER-ARGUMENT", f"ledger: step {step} has been given out already")
        if sum(counts.values()) > self.left:
            raise InvalidInput("E-SAMPLER-ARGUMENT",
                               f"ledger: step {step} asks for {sum(counts.values())} positions, {self.left} are left")
        given = {worker: self._take(counts[worker]) for worker in sorted(counts)}
        self._open[step] = {worker: list(ranges) for worker, ranges in given.items()}
        return given

    def commit(self, step: int, missing: Iterable[int] = ()) -> None:
        """Closes an applied step. The ranges of workers in `missing`, which had no part in it, are left again."""
        if step not in self._open:
            raise InvalidInput("E-SAMPLER-ARGUMENT", f"ledger: step {step} is not open")
        given = self._open.pop(step)
        self._give_back(given.get(worker, []) for worker in set(missing))

    def take_back(self, worker: int, from_step: int = 0) -> int:
        """Takes back what a lost worker was assigned from `from_step` on; returns the number of positions."""
        ranges = [given.pop(worker, []) for step, given in self._open.items() if step >= from_step]
        self._give_back(ranges)
        return sum(map(size, ranges))

    def renumber(self, number: Callable[[int], int]) -> None:
        """Renumbers the workers; `number` must be one-to-one."""
        self._open = {step: {number(worker): ranges for worker, ranges in given.items()} for step, given in self._open.items()}

    def copy(self) -> Ledger:
        clone = Ledger(self.length)
        clone._left = list(self._left)
        clone._open = {step: {w: list(r) for w, r in given.items()} for step, given in self._open.items()}
        return clone

    def state_dict(self) -> dict[str, Any]:
        return {"ledger": text_of(LedgerState(self.length, self._left, self._open))}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """The inverse of `state_dict`."""
        kept = decode(str(state.get("ledger", "")).encode(), LedgerState, "state of a ledger")
        ledger = cls(kept.length)
        ledger._left, ledger._open = merged(kept.left), kept.open
        given = [r for by_worker in kept.open.values() for ranges in by_worker.values() for r in ranges]
        held = merged([*kept.left, *given])  # raises on overlap
        if held and (held[0][0] < 0 or held[-1][1] > kept.length):
            raise InvalidInput("E-SAMPLER-STATE", f"state of a ledger: position outside 0 to {kept.length - 1}")
        return ledger

    def _give_back(self, lists: Iterable[list[Range]]) -> None:
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
