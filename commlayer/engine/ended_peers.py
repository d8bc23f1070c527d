"""Detects that a worker waits for a peer that has finished.

A finished peer has sent its part of every exchange that it counted. So only workers in a later exchange wait in vain. Without
this check, ranks with unequal numbers of backward passes would wait for each other until the deadline.
"""

from __future__ import annotations

from commlayer.errors import PeerLost

UNEQUAL = ("ranks have made unequal numbers of backward passes (a loader that is a batch shorter, a pass that raised, an "
           "optimizer such as LBFGS that goes by its rank's own loss): give all the same number")


class Ended:
    """The finished peers, as one worker knows them. The training thread writes its exchange, and the heartbeat thread the
    finished peers. Each thread writes before it reads, so at least one of them finds a missed exchange."""

    def __init__(self) -> None:
        self._first: tuple[int, str] | None = None
        self._at: int | None = None

    def hear(self, peer: str, exchanges: int) -> PeerLost | None:
        """A peer has finished after `exchanges` exchanges. Returns the error if this worker waits in a later one."""
        self._first = min(self._first or (exchanges, peer), (exchanges, peer))
        return self._missed()

    def begin(self, exchange: int) -> PeerLost | None:
        """This worker begins that exchange, counted from 0. Returns the error if a peer will not take part."""
        self._at = exchange
        return self._missed()

    def over(self) -> None:
        """The exchange has ended."""
        self._at = None

    def _missed(self) -> PeerLost | None:
        at, first = self._at, self._first
        if at is None or first is None or at < first[0]:
            return None
        exchanges, peer = first
        return PeerLost(f"has ended in order after {exchanges} exchanges, and this worker is in exchange {at + 1}: {UNEQUAL}",
                        code="E-UNEQUAL-PASSES", peer=peer)
