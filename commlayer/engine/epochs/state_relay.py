"""Sends a training worker's state to a joining worker, in parts, through the store of the rendezvous."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from commlayer.cluster.calls.messages import StoreKey, unpack
from commlayer.cluster.processes import site_process_group
from commlayer.cluster.processes.relayed_group import PART_NBYTES, PARTS_IN_FLIGHT
from commlayer.errors import CommError, DeadlineExceeded, PeerLost, check_nbytes
from commlayer.records import Epoch
from commlayer.transport.protocol import peer_name

T = TypeVar("T")
WINDOW = 64
"""Number of parts of the state that are in the store at a time; 10 MB in total."""
LOOK_S = 0.5
"""Seconds between two checks by a waiting member whether there is a newer epoch."""


class NewerEpoch(Exception):
    """Error: the coordinator has defined a newer epoch than the one in which the state is sent."""


class NewestEpoch:
    """The coordinator's newest epoch on one rank. The heartbeat thread sets `epoch`."""

    def __init__(self, epoch: Epoch, notice_s: float, away_s: float = 0.0) -> None:
        """`notice_s`: seconds to wait for a new epoch from the coordinator. `away_s`: seconds for which requests to an
        unresponsive coordinator are repeated."""
        self.epoch, self._notice_s, self.away_s = epoch, notice_s, away_s

    def run(self, act: Callable[[Epoch], T]) -> T:
        """Runs `act` with the newest epoch; again, from its start, whenever the coordinator defines a newer one meanwhile."""
        while True:
            try:
                return act(self.epoch)
            except NewerEpoch:
                continue

    def is_outdated(self, epoch: Epoch) -> bool:
        """Returns True if a newer epoch than `epoch` arrives soon. The coordinator defines one when it declares a member dead.
        """
        until = time.monotonic() + self._notice_s
        while self.epoch is epoch and time.monotonic() < until:
            time.sleep(0.05)
        return self.epoch is not epoch


class StateRelay:
    """Sends the state for a joining worker through the store, in one epoch. The giver calls `give`, the joining worker `take`,
    and other members that must wait for the transfer call `watch`.

    Values stay in the store, so late readers receive them, too. A wait ends as soon as there is a newer epoch. After that, no
    value of this epoch is accepted. So either all who take part have read all values that they wait for, or none has.
    """

    def __init__(self, newest: NewestEpoch, epoch: Epoch, joining: int, own: int, giver: int, limit_s: float, judged_s: float,
                 most_nbytes: int) -> None:
        """`joining`, `own`, `giver`: numbers of the joining worker, of this rank and of the giver. `limit_s`: longest wait for
        others, in seconds; the coordinator receives this limit. `judged_s`: further seconds in which the coordinator decides
        whether missing members are lost. `most_nbytes`: largest state that this rank receives or waits for."""
        self._newest, self._epoch, self._joining, self._own, self._giver = newest, epoch, joining, own, giver
        self._limit_s, self._deadline_s, self._most_nbytes = limit_s, limit_s + judged_s, most_nbytes

    def give(self, data: bytes, among: Sequence[int]) -> None:
        """Sends the state. `among`: all who wait for the transfer, with giver and joining worker."""
        windows = self._windows(len(data))
        self._put([(self._size, msgspec.msgpack.encode((len(data), among)))])
        for window in range(windows):
            parts = self._parts(window, len(data))
            keys = [self._key(part) for part in parts]
            try:
                for part, key in zip(parts, keys, strict=True):
                    self._put([(key, data[part * PART_NBYTES : (part + 1) * PART_NBYTES])])
                self._meet(window, among)
            finally:
                self._put([], drop=keys)
        self._meet(windows, among)

    def take(self, enter: Callable[[bytes], T]) -> T:
        """Receives the complete state and calls `enter` with it, before the others are told of its arrival. Returns the result
        of `enter`."""
        nbytes, among = self._announced()
        windows, data = self._windows(nbytes), bytearray()
        for window in range(windows):
            parts = self._parts(window, nbytes)
            for first in range(0, len(parts), PARTS_IN_FLIGHT):
                want = [self._key(part) for part in parts[first : first + PARTS_IN_FLIGHT]]
                for row in self._read(want):
                    data += row
                self._check(len(data), nbytes)
            self._meet(window, among)
        entered = enter(bytes(data))
        self._meet(windows, among)
        return entered

    def watch(self) -> None:
        nbytes, among = self._announced()
        for window in range(self._windows(nbytes) + 1):
            self._meet(window, among)

    def _announced(self) -> tuple[int, Sequence[int]]:
        (row,) = self._read([self._size])
        nbytes, among = unpack(row, tuple[int, list[int]], peer_name(self._giver), "a size")
        return self._check(nbytes, self._most_nbytes), among

    def _check(self, nbytes: int, most_nbytes: int) -> int:
        return check_nbytes(nbytes, most_nbytes, "the state for a joining worker", peer_name(self._giver))

    @property
    def _size(self) -> StoreKey:
        return self._named("state", self._giver)

    def _key(self, part: int) -> StoreKey:
        return self._named(f"part{part}", self._giver)

    def _named(self, what: str, rank: int) -> StoreKey:
        return f"joining{self._epoch.generation}/{self._joining}/{what}", rank

    def _windows(self, nbytes: int) -> int:
        return -(-nbytes // (WINDOW * PART_NBYTES))

    def _parts(self, window: int, nbytes: int) -> range:
        return range(window * WINDOW, min((window + 1) * WINDOW, -(-nbytes // PART_NBYTES)))

    def _meet(self, window: int, among: Sequence[int]) -> None:
        what = f"window{window}"
        self._read([self._named(what, rank) for rank in among], put=[(self._named(what, self._own), b"")])

    def _read(self, want: Sequence[StoreKey], put: Sequence[tuple[StoreKey, bytes]] = ()) -> list[bytes]:
        """Waits for values in the store and returns them. `want`: their keys. `put`: keys and values to write first."""
        begin, give_up = time.monotonic(), math.inf
        until = begin + self._deadline_s
        while True:
            try:
                newer, store = self._newest.epoch is not self._epoch, site_process_group.kv_client()
                rows = store.request(
                    min(until, time.monotonic() + LOOK_S), put=put, want=want, wait=not newer,
                    generation=self._epoch.generation, rank=self._own, limit_s=self._limit_s, since=begin).values
            except CommError as error:
                if store is not site_process_group.kv_client():
                    continue  # this rank has continued with other members
                now = time.monotonic()
                give_up = min(give_up, now + self._newest.away_s)
                # The request is sent even if there is a newer epoch, because only a reply shows whether others have found all
                # values of this one.
                if _unanswered(error) and now < min(until, give_up):
                    continue
                if self._newest.epoch is self._epoch and not self._newest.is_outdated(self._epoch):
                    raise
                raise NewerEpoch from None
            put, give_up = (), math.inf
            if None not in rows:
                return [row for row in rows if row is not None]
            if newer:
                raise NewerEpoch
            if time.monotonic() >= until:
                late = [peer_name(rank) for (_, rank), row in zip(want, rows, strict=True) if row is None]
                raise DeadlineExceeded("has not sent or received the state for a joining worker before the deadline",
                                       peer=", ".join(late))

    def _put(self, rows: Sequence[tuple[StoreKey, bytes]], drop: Sequence[StoreKey] = ()) -> None:
        store = site_process_group.kv_client()
        try:
            store.request(time.monotonic() + self._deadline_s, put=rows, drop=drop, generation=self._epoch.generation)
        except CommError:
            if store is not site_process_group.kv_client():
                self._put(rows, drop)  # this rank has continued with other members
            elif self._newest.is_outdated(self._epoch):
                raise NewerEpoch from None
            elif store is not site_process_group.kv_client():
                self._put(rows, drop)
            else:
                raise


def _unanswered(error: CommError) -> bool:
    """Returns True if an error means that the coordinator did not reply. It might be restarting; its store then still contains
    all values."""
    return isinstance(error, (PeerLost, DeadlineExceeded)) and error.peer.startswith("coordinator ")
