"""Detects that a worker waits for a peer that has finished."""

from __future__ import annotations

from commlayer.errors import PeerLost

UNEQUAL = ("ranks have made unequal numbers of backward passes, because a data loader is shorter, a pass raised an exception, "
           "or LBFGS uses each rank's own loss: make the same number on all ranks")


class FinishedPeers:
    """Detects that this worker waits for a peer that has closed its session normally and will not take part. The training
    thread stores its current exchange, a membership thread stores finished peers. Each thread writes before it reads. At least
    one of the threads therefore finds a missed exchange."""

    def __init__(self) -> None:
        self._first: tuple[int, str] | None = None
        self._at: int | None = None

    def add(self, peer: str, exchanges: int) -> PeerLost | None:
        """Records that a peer has finished after `exchanges` exchanges. Returns an error if this worker is in a later exchange.
        """
        self._first = min(self._first or (exchanges, peer), (exchanges, peer))
        return self._missed()

    def begin(self, exchange: int) -> PeerLost | None:
        """Records that this worker begins an exchange, counted from 0. Returns an error if a finished peer will not take part
        in it."""
        self._at = exchange
        return self._missed()

    def end(self) -> None:
        self._at = None

    def _missed(self) -> PeerLost | None:
        at, first = self._at, self._first
        if at is None or first is None or at < first[0]:
            return None
        exchanges, peer = first
        return PeerLost(f"left after {exchanges} exchanges, but this worker is in exchange {at + 1}: {UNEQUAL}",
                        code="E-UNEQUAL-PASSES", peer=peer)
