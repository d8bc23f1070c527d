"""Messages between workers when the members of a job change, through the store of their rendezvous.

A message is a row that stays, so late readers get it, too. A wait ends as soon as there is a newer view. After that, no message
of this view is accepted. So of the members of both views, either all have read all messages that they wait for, or none has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec

from commlayer.cluster import site_process_group
from commlayer.cluster.messages import ANY
from commlayer.engine.agreement import Word, name_of
from commlayer.errors import CommError, DeadlineExceeded, PeerLost
from commlayer.records import View
from commlayer.transport.protocol import peer_name

LOOK_S = 0.5
"""Seconds between two checks of a waiting member: for a newer view, and for all results of its step."""


class Newer(Exception):
    """There is a newer view than the one to which this rank is switching."""


def never() -> bool:
    return False


class ViewWords:
    """The messages of one rank. `newest` is set from the heartbeat thread."""

    def __init__(self, view: View, notice_s: float, away_s: float = 0.0) -> None:
        """`away_s`: for how long requests to an unresponsive coordinator are repeated."""
        self.newest, self._notice_s, self._away_s = view, notice_s, away_s
        self._said: set[str] = set()
        """Names of the messages that this rank has sent; these do not change."""

    def tell(self, view: View, what: str, mine: int, word: Word, until: float, *, among: Sequence[int] = (),
             here: Callable[[], bool] = never, limit_s: float = 0.0) -> list[Word]:
        """Sends a message, and returns those of `among` (all of the view if empty), in the view's order.

        Returns none if all results of the step are `here` before the messages. Raises Newer if there is another view before.
        `limit_s`: how long the others may wait for this one, as sent to the coordinator (messages.Ask). The wait includes the
        coordinator's verdict, until `until`."""
        ranks = [m.rank for m in view.members if not among or m.rank in among]
        own = name_of(view, what, mine)
        put = [(own, msgspec.msgpack.encode(word))] if own not in self._said else []
        rows = self.read(view, [(name_of(view, what, rank), rank) for rank in ranks], until, step=word.step, put=put, here=here,
                         waits=(mine, limit_s))
        self._said.add(own)
        return [Word(*msgspec.msgpack.decode(row, type=tuple[int, float])) for row in rows]

    def read(self, view: View, want: Sequence[tuple[str, int]], until: float, *, step: int,
             put: Sequence[tuple[str, bytes]] = (), here: Callable[[], bool] = never,
             waits: tuple[int, float] = (ANY, 0.0)) -> list[bytes]:
        """The rows under these names, which those ranks are to write. `waits`: the waiting rank and its limit."""
        give_up = math.inf
        while True:
            try:
                newer = self.newest is not view
                rows = site_process_group.kv_client().request(min(until, time.monotonic() + LOOK_S), put=put, want=want,
                                                              wait=not newer,
                                              view=view.generation, rank=waits[0], limit_s=waits[1]).found
            except CommError as error:
                now = time.monotonic()
                give_up = min(give_up, now + self._away_s)
                # Also if there is a newer view: only a reply shows whether others have found all messages of this one.
                if _unanswered(error) and now < min(until, give_up):
                    continue
                if self.newest is view and not self.hears_of(view):
                    raise
                raise Newer from None
            put, give_up = (), math.inf
            if None not in rows:
                return [row for row in rows if row is not None]
            if here():
                return []
            if newer:
                raise Newer
            if time.monotonic() >= until:
                late = [peer_name(rank) for (_, rank), row in zip(want, rows, strict=True) if row is None]
                raise DeadlineExceeded("has not come to the step in which members of the job change, before the deadline",
                                       peer=", ".join(late), step=step)

    def put(self, view: View, rows: Sequence[tuple[str, bytes]], until: float, *, drop: Sequence[str] = ()) -> None:
        """Writes these rows, and deletes the others."""
        try:
            site_process_group.kv_client().request(until, put=rows, drop=drop, view=view.generation)
        except CommError:
            if not self.hears_of(view):
                raise
            raise Newer from None

    def hears_of(self, view: View) -> bool:
        """Whether a newer view arrives: the coordinator makes it when it declares a member dead."""
        until = time.monotonic() + self._notice_s
        while self.newest is view and time.monotonic() < until:
            time.sleep(0.05)
        return self.newest is not view


def _unanswered(error: CommError) -> bool:
    """Whether the coordinator did not reply. It may be restarted, and then has all messages."""
    return isinstance(error, (PeerLost, DeadlineExceeded)) and error.peer.startswith("coordinator ")
