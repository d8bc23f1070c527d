"""Sends a training worker's state to joining workers, in parts, through the store of the rendezvous."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from commlayer.cluster.calls.messages import StoreKey, unpack
from commlayer.cluster.processes.relayed_group import PART_NBYTES, PARTS_IN_FLIGHT
from commlayer.engine.epochs import agreement
from commlayer.engine.epochs.agreement import Vote
from commlayer.engine.epochs.epoch_messages import EpochMessages
from commlayer.engine.job.job import DistributedJob
from commlayer.errors import check_nbytes
from commlayer.records import Epoch, Plan
from commlayer.transport.protocol import peer_name

T = TypeVar("T")
WINDOW = 64
"""Number of parts of the state that are in the store at a time; 10 MB in total."""


class StateRelay:
    """Sends the state for joining workers through the store, for one epoch. Each member calls `give`, `take` or `watch` once.
    """

    def __init__(self, messages: EpochMessages, epoch: Epoch, mine: int, vote: Vote, limit_s: float, judged_s: float,
                 most_nbytes: int) -> None:
        """`limit_s`: longest wait for other members, in seconds. `judged_s`: further seconds in which the coordinator decides
        whether missing members are lost. `most_nbytes`: largest state that this rank receives or waits for."""
        self._most_nbytes = most_nbytes
        self._messages, self._epoch, self._mine, self._vote = messages, epoch, mine, vote
        self._limit_s, self._deadline_s = limit_s, limit_s + judged_s
        self.giver = epoch.members[0].rank
        """Rank of the member that sends the state: the oldest one, since joining workers come last in an epoch."""

    def give(self, data: bytes) -> None:
        windows = self._windows(len(data))
        self._messages.put(self._epoch, [(self._size, msgspec.msgpack.encode(len(data)))], self._until())
        for window in range(windows):
            parts = self._parts(window, len(data))
            keys = [self._key(part) for part in parts]
            try:
                for part, key in zip(parts, keys, strict=True):
                    self._messages.put(self._epoch, [(key, data[part * PART_NBYTES : (part + 1) * PART_NBYTES])], self._until())
                self._meet(window)
            finally:
                self._messages.put(self._epoch, [], self._until(), drop=keys)
        self._meet(windows)

    def take(self, enter: Callable[[bytes], T]) -> T:
        """Receives the complete state and calls `enter` with it, before the other members are told of its arrival. Returns the
        result of `enter`."""
        nbytes = self._nbytes()
        windows, data = self._windows(nbytes), bytearray()
        for window in range(windows):
            parts = self._parts(window, nbytes)
            for first in range(0, len(parts), PARTS_IN_FLIGHT):
                want = [self._key(part) for part in parts[first : first + PARTS_IN_FLIGHT]]
                for row in self._read(want):
                    data += row
                self._check(len(data), nbytes)
            self._meet(window)
        entered = enter(bytes(data))
        self._meet(windows)
        return entered

    def watch(self) -> None:
        for window in range(self._windows(self._nbytes()) + 1):
            self._meet(window)

    def _nbytes(self) -> int:
        (row,) = self._read([self._size])
        return self._check(unpack(row, int, peer_name(self.giver), "a size"), self._most_nbytes)

    def _check(self, nbytes: int, most_nbytes: int) -> int:
        return check_nbytes(nbytes, most_nbytes, "the state for a joining worker", peer_name(self.giver))

    def _read(self, want: Sequence[StoreKey]) -> list[bytes]:
        return self._messages.read(self._epoch, want, self._until(), step=self._vote.step, waits=(self._mine, self._limit_s))

    @property
    def _size(self) -> StoreKey:
        return agreement.key_of(self._epoch, "state", self.giver)

    def _key(self, part: int) -> StoreKey:
        return agreement.key_of(self._epoch, f"part{part}", self.giver)

    def _windows(self, nbytes: int) -> int:
        return -(-nbytes // (WINDOW * PART_NBYTES))

    def _parts(self, window: int, nbytes: int) -> range:
        return range(window * WINDOW, min((window + 1) * WINDOW, -(-nbytes // PART_NBYTES)))

    def _meet(self, window: int) -> None:
        self._messages.exchange_votes(self._epoch, f"window{window}", self._mine, self._vote, self._until(),
                                      limit_s=self._limit_s)

    def _until(self) -> float:
        return time.monotonic() + self._deadline_s


class StateGiver(Protocol):
    """Interface of the object that creates the state for joining ranks; `replica.py` implements it."""

    @property
    def most_nbytes(self) -> int: ...

    def given(self, context: DistributedJob, plan: Plan) -> bytes: ...
