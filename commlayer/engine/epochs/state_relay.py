"""Sends the job's state to joining workers, in parts, through the store of the rendezvous."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import msgspec

from commlayer.callbacks import ignore
from commlayer.cluster.calls.messages import ANY, StoreKey, unpack
from commlayer.cluster.calls.site_client import BYTES_S
from commlayer.cluster.processes import site_process_group
from commlayer.cluster.processes.relayed_group import PART_NBYTES, PARTS_IN_FLIGHT
from commlayer.errors import CommError, CorruptFrame, DeadlineExceeded, PeerLost, check_nbytes
from commlayer.records import Epoch
from commlayer.transport.protocol import peer_name

T = TypeVar("T")
BATCH_NBYTES = PARTS_IN_FLIGHT * PART_NBYTES
"""Number of bytes that one member gives, and that a joining worker reads, at a time."""
WINDOW = 4
"""Number of batches in a window. Two windows of the state are in the store at a time; 10 MB in total."""
LOOK_S = 0.5
"""Seconds between two checks by a waiting member whether a worker that takes part has left."""


class TransferRestarted(Exception):
    """Error: the transfer of a state begins again, because a worker that takes part has left, or no member gives it yet."""


class NewestEpoch:
    """The coordinator's newest epoch on one rank."""

    def __init__(self, newest: Callable[[], Epoch], notice_s: float, away_s: float = 0.0) -> None:
        """`newest` returns the newest epoch that has arrived. `notice_s`: seconds to wait for a new epoch from the coordinator.
        `away_s`: seconds for which requests to an unresponsive coordinator are repeated."""
        self._newest, self._notice_s, self.away_s = newest, notice_s, away_s

    @property
    def epoch(self) -> Epoch:
        return self._newest()

    def run(self, act: Callable[[Epoch], T]) -> T:
        """Runs `act` with the newest epoch, and again from its start whenever it raises TransferRestarted."""
        while True:
            try:
                return act(self.epoch)
            except TransferRestarted:
                continue

    def any_not_member(self, workers: Iterable[int]) -> bool:
        """Returns True if one of these workers is no member."""
        return not {*workers} <= {member.rank for member in self.epoch.members}

    def will_lack(self, workers: Iterable[int]) -> bool:
        """Returns True if one of these workers is soon no member. The coordinator removes a member that it declares dead."""
        until = time.monotonic() + self._notice_s
        while not (lacks := self.any_not_member(workers)) and time.monotonic() < until:
            time.sleep(0.05)
        return lacks


class _Transfer(NamedTuple):
    """One transfer of the state. The state is sent in batches of parts: first the parts that only the first member has."""

    name: str
    own_nbytes: int
    common_nbytes: int
    givers: list[int]
    joining: list[int]

    @property
    def own_batches(self) -> int:
        return -(-self.own_nbytes // BATCH_NBYTES)

    @property
    def common_batches(self) -> int:
        return -(-self.common_nbytes // BATCH_NBYTES)

    @property
    def windows(self) -> int:
        return -(-(self.own_batches + self.common_batches) // WINDOW)

    def window(self, number: int) -> tuple[range, range]:
        """Returns the batches of a window: those of the first member's own state, and of the common one. Each window has an
        equal part of both, so that no member waits until another member has given its own state."""
        first, common = (range(min(number * most, count), min((number + 1) * most, count))
                         for count in (self.own_batches, self.common_batches) for most in [-(-count // self.windows)])
        return first, range(self.own_batches + common.start, self.own_batches + common.stop)

    def bounds(self, batch: int) -> tuple[int, int]:
        """Returns where a batch begins and ends, in bytes of the first member's own state or of the common one."""
        own = batch < self.own_batches
        begin = (batch if own else batch - self.own_batches) * BATCH_NBYTES
        return begin, min(begin + BATCH_NBYTES, self.own_nbytes if own else self.common_nbytes)

    def parts(self, batch: int, giver: int) -> list[StoreKey]:
        begin, end = self.bounds(batch)
        return [(f"{self.name}/{batch}.{part}", giver) for part in range(-(-(end - begin) // PART_NBYTES))]

    def giver_key(self, batch: int) -> StoreKey:
        return f"{self.name}/giver{batch}", ANY

    def end(self, window: int, member: int) -> StoreKey:
        """Returns the key that a member writes when it has given or read its part of a window; after the last window, when it
        has completed the transfer."""
        return f"{self.name}/end{window}", member

    def end_keys(self, window: int) -> list[StoreKey]:
        """Returns the end keys of all members: if one member hangs, all others wait for its key."""
        return [self.end(window, member) for member in (*self.givers, *self.joining)]


class StateRelay:
    """Sends the state for joining workers through the store. Each other member calls `give`, and each joining worker calls
    `take`. The first member gives what only it has; givers share the rest, which is equal on all of them: each gives the next
    batch when it has uploaded one. The transfer therefore uses the uplinks of all givers, and everything is uploaded once,
    however many workers join.

    If a worker that takes part leaves the job, the others begin another transfer, with other keys. No other change of the
    members disturbs it. Either all who take part complete a transfer, or none does: the store answers the calls that complete
    it only if all of them were made before one of the callers was lost.
    """

    def __init__(
        self, newest: NewestEpoch, epoch: Epoch, rank: int, limit_s: float, continue_wait_s: float, most_nbytes: int,
        name: str = "state", check: Callable[[], None] = ignore,
    ) -> None:
        """`name`: names this transfer among those to the same workers. `check`: called during waits; an error that it raises
        ends them.

        `rank`: number of this rank. `limit_s`: longest wait for others, in seconds; the coordinator receives this limit.
        `continue_wait_s`: further seconds in which the coordinator decides whether missing members are lost. `most_nbytes`:
        largest state that this rank receives or waits for."""
        self._newest, self._rank, self._most_nbytes = newest, rank, most_nbytes
        self._first, self._name, self._check_wait = epoch.members[0].rank, name, check
        self._partners = {rank, self._first}
        """The workers that take part, as far as this rank knows."""
        self._limit_s, self._deadline_s = limit_s, limit_s + continue_wait_s
        self._written = defaultdict[int, list[StoreKey]](list)
        """Keys of this rank that nobody reads after a window has ended, by window."""
        self.announced = False
        """True: the members have begun to give the state."""

    def give(self, own: bytes, common: bytes, givers: Sequence[int], joining: Sequence[int]) -> None:
        """Sends the state. Returns when all joining workers have entered. `own`: what only the first member sends."""
        self._partners |= {*givers, *joining}
        try:
            if self._rank == self._first:
                announced = msgspec.msgpack.encode((len(own), len(common), givers, joining))
                self._write(0, [(self._announcement(member), announced) for member in joining])
            transfer = self._announced(joining[0])
            for window in self._windows(transfer):
                for batch in self._batches_to_give(transfer, window, len(common)):
                    self._give(transfer, window, batch, own if batch < transfer.own_batches else common)
            self._wait_for_completion(transfer)
        finally:
            self._drop_all()

    def _windows(self, transfer: _Transfer) -> Iterator[int]:
        """Yields each window when all have completed the last but one."""
        for window in range(transfer.windows):
            if window > 1:
                self._read(transfer.end_keys(window - 2))
                self._drop(self._written.pop(window - 2, ()))
            yield window
            self._write(window + 2, [(transfer.end(window, self._rank), b"")])

    def _give(self, transfer: _Transfer, window: int, batch: int, data: bytes) -> None:
        """Sends one batch."""
        self._write(window, [(transfer.giver_key(batch), msgspec.msgpack.encode(self._rank))])
        begin, end = transfer.bounds(batch)
        for key, start in zip(transfer.parts(batch, self._rank), range(begin, end, PART_NBYTES), strict=True):
            self._write(window, [(key, data[start : min(start + PART_NBYTES, end)])])

    def _batches_to_give(self, transfer: _Transfer, window: int, common_nbytes: int) -> Iterator[int]:
        """Yields the next batch for this rank to give, as long as the window has one. A rank with a common state of another
        size gives none."""
        own, shared = transfer.window(window)
        if self._rank == self._first:
            yield from own
        given = f"{transfer.name}/given{window}", ANY
        while shared and common_nbytes == transfer.common_nbytes:
            number = self._put([], add=(given, 1)) - 1
            if not number:  # the number belongs to the site that was the first to add to it
                self._written[window].append(given)
            if number >= len(shared):
                return
            yield shared[number]

    def take(self, enter: Callable[[bytes, bytes], T]) -> T:
        """Receives the complete state and calls `enter` with the first member's own state and the common one, before the others
        are told of its arrival. Returns the result of `enter`."""
        try:
            transfer, own, common = self._announced(self._rank), bytearray(), bytearray()
            for window in self._windows(transfer):
                for batch in chain(*transfer.window(window)):
                    (own if batch < transfer.own_batches else common).extend(self._batch(transfer, batch))
            entered = enter(bytes(own), bytes(common))
            self._wait_for_completion(transfer)
            return entered
        finally:
            self._drop_all()

    def _batch(self, transfer: _Transfer, batch: int) -> bytes:
        """Waits for one batch and reads it."""
        (row,) = self._read([transfer.giver_key(batch)])
        if (giver := unpack(row, int, peer_name(self._first), "a giver")) not in transfer.givers:
            raise CorruptFrame(f"names worker {giver} as a giver of the state, but these are {transfer.givers}",
                               peer=peer_name(self._first))
        begin, end = transfer.bounds(batch)
        rows = self._read(transfer.parts(batch, giver))
        self._check(sum(map(len, rows)), end - begin, giver)
        return b"".join(rows)

    def _announced(self, joining: int) -> _Transfer:
        """Waits until the first member has announced the transfer for `joining` among the present members, and this rank knows
        of all of them."""
        until = time.monotonic() + self._deadline_s
        while True:
            # The wait is as long as training takes up to that exchange, so no worker is late.
            (row,) = self._read([self._announcement(joining)], limit_s=0.0)
            own, common, givers, new = unpack(row, tuple[int, int, list[int], list[int]], peer_name(self._first), "a size")
            self.announced = True
            among = *givers, *new
            fits = self._first in givers and joining in new and len({*among}) == len(among)
            if fits and not self._newest.any_not_member(among) and self._partners <= {*among}:
                break
            if self._newest.any_not_member(self._partners):
                raise TransferRestarted
            if not fits or time.monotonic() >= until:
                present = sorted(member.rank for member in self._newest.epoch.members)
                raise CorruptFrame(f"names workers {[*among]} for the transfer of a state, but the members are {present}",
                                   peer=peer_name(self._first))
            time.sleep(LOOK_S)
        self._partners |= {*among}
        self._check(own, self._most_nbytes, self._first)
        self._check(common, self._most_nbytes - own, self._first)
        # The first new worker and the numbers of givers and new workers identify a transfer in this epoch.
        return _Transfer(f"{self._name}/{new[0]}.{len(givers)}.{len(new)}", own, common, givers, new)

    def _check(self, nbytes: int, most_nbytes: int, giver: int) -> int:
        return check_nbytes(nbytes, most_nbytes, "the state for a joining worker", peer_name(giver))

    def _announcement(self, joining: int) -> StoreKey:
        return f"{self._name}/{joining}", self._first

    def _wait_for_completion(self, transfer: _Transfer) -> None:
        """Waits until all who take part in the transfer have completed it."""
        self._read(transfer.end_keys(transfer.windows), put=[(transfer.end(transfer.windows, self._rank), b"")])

    def _read(
        self, want: Sequence[StoreKey], put: Sequence[tuple[StoreKey, bytes]] = (), limit_s: float | None = None,
    ) -> list[bytes]:
        """Waits for values in the store and returns them. `want`: their keys. `put`: keys and values to write first. `limit_s`:
        seconds after which their writers count as hung; 0: never. None: the usual limit."""
        if limit_s is None:
            limit_s = 0.0 if any(rank == ANY for _, rank in want) else self._limit_s
        begin, give_up = time.monotonic(), math.inf
        until = begin + self._deadline_s
        while True:
            self._check_wait()
            try:
                lost, store = self._newest.any_not_member(self._partners), site_process_group.kv_client()
                rows = store.request(
                    min(until, time.monotonic() + LOOK_S), put=put, want=want, wait=not lost, rank=self._rank, since=begin,
                    generation=self._newest.epoch.generation, limit_s=limit_s, call_s=BYTES_S).values
            except CommError as error:
                if store is not site_process_group.kv_client():
                    continue  # this rank has continued with other members
                now = time.monotonic()
                give_up = min(give_up, now + self._newest.away_s)
                # The request is sent even if a worker has left, because only a reply shows whether others have found all
                # values.
                if _unanswered(error) and now < min(until, give_up):
                    continue
                if not self._newest.will_lack(self._partners):
                    raise
                raise TransferRestarted from None
            put, give_up = (), math.inf
            if None not in rows:
                return [row for row in rows if row is not None]
            if lost:
                raise TransferRestarted
            if time.monotonic() >= until:
                late = [peer_name(self._first if rank == ANY else rank)
                        for (_, rank), row in zip(want, rows, strict=True) if row is None]
                raise DeadlineExceeded("has not sent or received the state for a joining worker before the deadline",
                                       peer=", ".join(late))

    def _write(self, window: int, rows: Sequence[tuple[StoreKey, bytes]]) -> None:
        """Writes values that nobody reads after this window has ended."""
        self._written[window] += [key for key, _ in rows]
        self._put(rows)

    def _drop_all(self) -> None:
        while self._written:
            self._drop(self._written.popitem()[1])

    def _drop(self, keys: Sequence[StoreKey]) -> None:
        """Drops keys. If that fails, the coordinator drops them when all members have changed to another epoch."""
        with contextlib.suppress(CommError):
            if keys:
                site_process_group.kv_client().request(time.monotonic() + self._deadline_s, drop=keys)

    def _put(self, rows: Sequence[tuple[StoreKey, bytes]], add: tuple[StoreKey, int] | None = None) -> int:
        """Writes values to the store. Returns the number that `add` has increased."""
        once = secrets.token_hex(8)
        while True:
            store = site_process_group.kv_client()
            try:
                # Belongs to the coordinator's newest epoch, which no worker of this transfer leaves before it is over.
                return store.request(time.monotonic() + self._deadline_s, put=rows, add=add, once=once,
                                     generation=self._newest.epoch.generation).sum
            except CommError:
                if store is not site_process_group.kv_client():
                    continue  # this rank has continued with other members
                if not self._newest.will_lack(self._partners):
                    raise
                raise TransferRestarted from None


def _unanswered(error: CommError) -> bool:
    """Returns True if an error means that the coordinator did not reply. The coordinator might be restarting. In this case its
    store still contains all values."""
    return isinstance(error, (PeerLost, DeadlineExceeded)) and error.peer.startswith("coordinator ")
