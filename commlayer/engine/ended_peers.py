"""Tells a worker that waits for one that has ended in order. Knows names and counts of exchanges; no network.

Who has ended has sent its part of every exchange that it counted. So only who is in a later one waits in vain: ranks that make
unequal numbers of backward passes would wait for each other until the deadline.
"""

from __future__ import annotations

from commlayer.errors import PeerLost

UNEQUAL = ("ranks have made unequal numbers of backward passes (a loader that is a batch shorter, a pass that raised, an "
           "optimizer such as LBFGS that goes by its rank's own loss): give all the same number")


class Ended:
    """One worker's knowledge of them. The training thread tells where it is, the heartbeats' who has ended: each writes its own
    before it reads the other's, so at least one of them finds what is missed."""

    def __init__(self) -> None:
        self._first: tuple[int, str] | None = None
        self._at: int | None = None

    def hear(self, peer: str, exchanges: int) -> PeerLost | None:
        """That worker has ended after so many exchanges. The error, if this one waits in a later one."""
        self._first = min(self._first or (exchanges, peer), (exchanges, peer))
        return self._missed()

    def begin(self, exchange: int) -> PeerLost | None:
        """This worker begins that exchange, counted from 0. The error, if somebody will not take part."""
        self._at = exchange
        return self._missed()

    def over(self) -> None:
        """It is in none."""
        self._at = None

    def _missed(self) -> PeerLost | None:
        at, first = self._at, self._first
        if at is None or first is None or at < first[0]:
            return None
        exchanges, peer = first
        return PeerLost(f"has ended in order after {exchanges} exchanges, and this worker is in exchange {at + 1}: {UNEQUAL}",
                        code="E-UNEQUAL-PASSES", peer=peer)
