"""Finds the peer that caused an error, once the coordinator has had time to report it."""

from __future__ import annotations

import threading

from commlayer.cluster.membership.client import root_cause
from commlayer.cluster.processes.bounded_calls import ANY_PEER
from commlayer.cluster.servers.worker_client import WorkerClient
from commlayer.errors import CommError, PeerLost
from commlayer.transport.protocol import peer_name


class RootCause:
    """Stores which peer the coordinator first reported as lost, or that the coordinator itself does not respond."""

    def __init__(self) -> None:
        self.error: CommError | None = None
        self._heard = threading.Event()

    def fall(self, error: CommError) -> None:
        self.error = self.error or error
        self._heard.set()

    def explain(self, error: BaseException, link: WorkerClient | None, *, notice_s: float, verdict_s: float) -> BaseException:
        """Returns a more precise error for a failed collective, or for a server that ended with the job, if one is known; else
        the same error.

        A collective names no peer, so this function waits up to `verdict_s` seconds for the coordinator to report a dead
        worker. After an error of a server it waits up to `notice_s` seconds.
        """
        if link is None or not isinstance(error, CommError):
            return error
        if error.peer == ANY_PEER:
            self._heard.wait(verdict_s)
        elif error.peer.startswith("server"):
            self._heard.wait(notice_s)
        if self.error is not None:
            # The reported peer might have lost the same peer first, and have left because of that.
            return self.error if error.peer in ("", ANY_PEER) else root_cause((self.error, error))
        if error.peer == ANY_PEER and link.embedded and not link.coordinated:
            silent = f"the coordinator {link.address} that it hosts does not respond"
            return PeerLost(f"{silent} ({error.what})", peer=peer_name(0), step=error.step, bucket=error.bucket)
        return link.with_address(error)
