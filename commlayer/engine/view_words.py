"""What workers tell each other where the members of a job change, through the store of their meeting. Decides nothing.

A word is a row that stays, so who comes late reads it, too. Whoever waits for one stops as soon as there is a newer view. From
then on nothing more can be said in this one, so either all who are of both have read all words that they wait for, or none has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec

from commlayer.cluster import home_world
from commlayer.cluster.world_store import ANY
from commlayer.engine.agreement import Word, name_of
from commlayer.errors import CommError, DeadlineExceeded, PeerLost
from commlayer.records import View
from commlayer.transport.protocol import peer_name

LOOK_S = 0.5
"""How often who waits for another's word looks whether there is a newer view, without that one, or all of its step is here."""


class Newer(Exception):
    """There is a newer view than the one that is gone over to."""


def never() -> bool:
    return False


class ViewWords:
    """One rank's. `newest` is set from the heartbeats' thread."""

    def __init__(self, view: View, notice_s: float, away_s: float = 0.0) -> None:
        """`away_s`: for so long a coordinator that does not answer is asked again."""
        self.newest, self._notice_s, self._away_s = view, notice_s, away_s
        self._said: set[str] = set()
        """Under which names it has: nothing of that changes."""

    def tell(self, view: View, what: str, mine: int, word: Word, until: float, *, among: Sequence[int] = (),
             here: Callable[[], bool] = never, limit_s: float = 0.0) -> list[Word]:
        """The words of `among` (all of the view if empty), in the view's order; none where all of the step is `here` before
        they have spoken. Newer if there is another view before. `limit_s`: for how long the others may wait for one, as said to
        the coordinator (messages.Ask), whose verdict is waited for, too, until `until`."""
        who = [m.rank for m in view.members if not among or m.rank in among]
        own = name_of(view, what, mine)
        put = [(own, msgspec.msgpack.encode(word))] if own not in self._said else []
        rows = self.read(view, [(name_of(view, what, rank), rank) for rank in who], until, step=word.step, put=put, here=here,
                         waits=(mine, limit_s))
        self._said.add(own)
        return [Word(*msgspec.msgpack.decode(row, type=tuple[int, float])) for row in rows]

    def read(self, view: View, want: Sequence[tuple[str, int]], until: float, *, step: int,
             put: Sequence[tuple[str, bytes]] = (), here: Callable[[], bool] = never,
             waits: tuple[int, float] = (ANY, 0.0)) -> list[bytes]:
        """What is there under these names, which those ranks are to write. `waits`: who does, and its limit."""
        give_up = math.inf
        while True:
            try:
                newer = self.newest is not view
                found = home_world.desk().ask(min(until, time.monotonic() + LOOK_S), put=put, want=want, wait=not newer,
                                              view=view.generation, rank=waits[0], limit_s=waits[1]).found
            except CommError as error:
                now = time.monotonic()
                give_up = min(give_up, now + self._away_s)
                # Also where there is a newer view: only an answer tells whether others have found all words of this one.
                if _unanswered(error) and now < min(until, give_up):
                    continue
                if self.newest is view and not self.hears_of(view):
                    raise
                raise Newer from None
            put, give_up = (), math.inf
            if None not in found:
                return [row for row in found if row is not None]
            if here():
                return []
            if newer:
                raise Newer
            if time.monotonic() >= until:
                late = [peer_name(rank) for (_, rank), row in zip(want, found, strict=True) if row is None]
                raise DeadlineExceeded("has not come to the step in which members of the job change, before the deadline",
                                       peer=", ".join(late), step=step)

    def put(self, view: View, rows: Sequence[tuple[str, bytes]], until: float, *, drop: Sequence[str] = ()) -> None:
        """Leaves these, and takes away those."""
        try:
            home_world.desk().ask(until, put=rows, drop=drop, view=view.generation)
        except CommError:
            if not self.hears_of(view):
                raise
            raise Newer from None

    def hears_of(self, view: View) -> bool:
        """Whether a newer one than this comes: the coordinator makes it as it judges somebody dead."""
        until = time.monotonic() + self._notice_s
        while self.newest is view and time.monotonic() < until:
            time.sleep(0.05)
        return self.newest is not view


def _unanswered(error: CommError) -> bool:
    """Whether nobody was there to answer: the coordinator may be started again, and then knows what was said."""
    return isinstance(error, (PeerLost, DeadlineExceeded)) and error.peer.startswith("coordinator ")
