"""Messages between workers when the members of a job change, through the store of their rendezvous."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from commlayer.cluster.calls.messages import ANY, StoreKey, unpack
from commlayer.cluster.processes import site_process_group
from commlayer.engine.epochs import agreement
from commlayer.engine.epochs.agreement import Vote
from commlayer.errors import CommError, DeadlineExceeded, PeerLost
from commlayer.records import Epoch
from commlayer.transport.protocol import peer_name

T = TypeVar("T")
LOOK_S = 0.5
"""Seconds between two checks by a waiting member whether there is a newer epoch, or all results of its step have arrived."""


class NewerEpoch(Exception):
    """Error: the coordinator has defined a newer epoch than the one to which this rank is switching."""


def never() -> bool:
    return False


class EpochMessages:
    """Sends and receives one rank's messages to other members during an epoch change, through the store of the rendezvous. The
    heartbeat thread sets `newest`.

    A message stays in the store, so late readers receive it, too. A wait ends as soon as there is a newer epoch. After that, no
    message of this epoch is accepted. So either all members of both epochs have read all messages that they wait for, or none
    has.
    """

    def __init__(self, epoch: Epoch, notice_s: float, away_s: float = 0.0) -> None:
        """`notice_s`: seconds to wait for a new epoch from the coordinator. `away_s`: seconds for which requests to an
        unresponsive coordinator are repeated."""
        self.newest, self._notice_s, self._away_s = epoch, notice_s, away_s
        self._sent: set[StoreKey] = set()
        """Keys of the messages that this rank has sent. Their content does not change."""

    def in_newest_epoch(self, act: Callable[[Epoch], T]) -> T:
        """Runs `act` with the newest epoch; again, from its start, whenever the coordinator defines a newer one meanwhile."""
        while True:
            try:
                return act(self.newest)
            except NewerEpoch:
                continue

    def exchange_votes(self, epoch: Epoch, what: str, mine: int, vote: Vote, until: float, *, among: Sequence[int] = (),
                       complete: Callable[[], bool] = never, limit_s: float = 0.0) -> list[Vote]:
        """Sends a vote, and returns the votes of the members `among` (empty: all members of the epoch), in the epoch's
        order.

        Returns an empty list if `complete` first reports that all results of the step have arrived. Raises NewerEpoch if a
        newer epoch starts first. `limit_s`: how long the others might wait for this rank; the coordinator receives this limit.
        The wait ends at `until`, which includes time for the coordinator to decide who is lost.
        """
        ranks = [m.rank for m in epoch.members if not among or m.rank in among]
        own = agreement.key_of(epoch, what, mine)
        put = [(own, msgspec.msgpack.encode(vote))] if own not in self._sent else []
        rows = self.read(epoch, [agreement.key_of(epoch, what, rank) for rank in ranks], until, step=vote.step, put=put,
                         complete=complete, waits=(mine, limit_s))
        self._sent.add(own)
        return [Vote(*unpack(row, tuple[int], peer_name(rank), "a vote"))
                for row, rank in zip(rows, ranks, strict=bool(rows))]

    def read(self, epoch: Epoch, want: Sequence[StoreKey], until: float, *, step: int,
             put: Sequence[tuple[StoreKey, bytes]] = (), complete: Callable[[], bool] = never,
             waits: tuple[int, float] = (ANY, 0.0)) -> list[bytes]:
        """Waits for values in the store and returns them. `want`: their keys. `put`: keys and values to write first. `waits`:
        the waiting rank, and how long others might wait for it."""
        give_up, begin = math.inf, time.monotonic()
        while True:
            try:
                newer = self.newest is not epoch
                rows = site_process_group.kv_client().request(min(until, time.monotonic() + LOOK_S), put=put, want=want,
                                                              wait=not newer, generation=epoch.generation, rank=waits[0],
                                                              limit_s=waits[1], since=begin).values
            except CommError as error:
                now = time.monotonic()
                give_up = min(give_up, now + self._away_s)
                # The request is sent even if there is a newer epoch, because only a reply shows whether other members have
                # found all messages of this one.
                if _unanswered(error) and now < min(until, give_up):
                    continue
                if self.newest is epoch and not self.is_outdated(epoch):
                    raise
                raise NewerEpoch from None
            put, give_up = (), math.inf
            if None not in rows:
                return [row for row in rows if row is not None]
            if complete():
                return []
            if newer:
                raise NewerEpoch
            if time.monotonic() >= until:
                late = [peer_name(rank) for (_, rank), row in zip(want, rows, strict=True) if row is None]
                raise DeadlineExceeded("has not reached the step in which the members change before the deadline",
                                       peer=", ".join(late), step=step)

    def put(self, epoch: Epoch, rows: Sequence[tuple[StoreKey, bytes]], until: float, *, drop: Sequence[StoreKey] = ()) -> None:
        """Writes values into the store, and deletes those with the keys `drop`."""
        try:
            site_process_group.kv_client().request(until, put=rows, drop=drop, generation=epoch.generation)
        except CommError:
            if not self.is_outdated(epoch):
                raise
            raise NewerEpoch from None

    def is_outdated(self, epoch: Epoch) -> bool:
        """Returns True if a newer epoch than `epoch` arrives soon. The coordinator defines one when it declares a member dead.
        """
        until = time.monotonic() + self._notice_s
        while self.newest is epoch and time.monotonic() < until:
            time.sleep(0.05)
        return self.newest is not epoch


def _unanswered(error: CommError) -> bool:
    """Returns True if an error means that the coordinator did not reply. It might be restarting; its store then still contains
    all messages."""
    return isinstance(error, (PeerLost, DeadlineExceeded)) and error.peer.startswith("coordinator ")
