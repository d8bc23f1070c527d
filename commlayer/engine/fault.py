"""Finds the peer that caused an error, once the coordinator has had time to report it."""

from __future__ import annotations

import threading

from commlayer.cluster.client import root_cause
from commlayer.cluster.process_groups import ANY_PEER
from commlayer.cluster.uplink import Uplink
from commlayer.errors import CommError, PeerLost
from commlayer.transport.protocol import peer_name


class FaultVerdict:
    """The first death that the coordinator reported, or the coordinator's own silence."""

    def __init__(self) -> None:
        self.error: CommError | None = None
        self._heard = threading.Event()

    def fall(self, error: CommError) -> None:
        self.error = self.error or error
        self._heard.set()

    def explain(self, error: BaseException, link: Uplink | None, *, notice_s: float, verdict_s: float) -> BaseException:
        """Returns a more precise error for a broken collective, or for a server that ended with the job, if there is one.

        A collective names no peer, so its verdict waits for a dead worker's heartbeat timeout, `verdict_s`. Others wait
        `notice_s`.
        """
        if link is None or not isinstance(error, CommError):
            return error
        if error.peer == ANY_PEER:
            self._heard.wait(verdict_s)
        elif error.peer.startswith("server"):
            self._heard.wait(notice_s)
        if self.error is not None:
            # The reported peer may have met the same loss first, and have left because of it.
            return self.error if error.peer in ("", ANY_PEER) else root_cause((self.error, error))
        if error.peer == ANY_PEER and link.embedded and not link.coordinated:
            silent = f"the coordinator {link.address} that it hosts no longer answers"
            return PeerLost(f"{silent} ({error.what})", peer=peer_name(0), step=error.step, bucket=error.bucket)
        return link.with_address(error)
