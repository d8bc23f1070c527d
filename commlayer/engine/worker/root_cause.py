"""Finds the peer that caused an error, once the coordinator has had time to report it."""

from __future__ import annotations

import threading
from typing import NamedTuple

from commlayer.cluster.membership.client import root_cause
from commlayer.cluster.processes.bounded_calls import ANY_PEER
from commlayer.cluster.servers.worker_client import WorkerClient
from commlayer.engine.components import Component, ComponentOrder
from commlayer.errors import CommError, PeerLost
from commlayer.transport.protocol import peer_name


class WaitsFor(NamedTuple):
    """Numbers of seconds that this rank waits for other ranks after an error or at the end."""

    notice_s: float = 0.0
    """Seconds to wait for the coordinator's report of which rank left or died."""
    verdict_s: float = 0.0
    """Seconds to wait for the coordinator's report of a lost rank after a failed collective. A collective names no rank, so
    this time includes the seconds without heartbeats after which a worker counts as dead."""
    stay_s: float = 0.0
    """Seconds that the servers hosted by this rank continue after the rank's end, because other ranks may still use them."""
    silent_s: float = 0.0
    """Seconds without heartbeats after which a peer counts as dead."""


class RootCause(Component):
    """Stores which peer the coordinator first reported as lost, or that the coordinator itself does not respond."""

    order = ComponentOrder.JOB

    def __init__(self, uplink: WorkerClient, waits: WaitsFor) -> None:
        self._uplink, self._waits = uplink, waits
        self.error: CommError | None = None
        self._reported = threading.Event()

    def record(self, error: CommError) -> None:
        self.error = self.error or error
        self._reported.set()

    def interrupted(self, cause: str) -> None:
        self._uplink.close(cause)  # the other ranks fail at once; servers of this rank continue until close()

    def explain(self, error: BaseException) -> BaseException:
        """Returns a more precise error for a failed collective, or for a server that ended with the job, if one is known; else
        the same error. Peers have their display names.

        A collective names no peer, so this function waits up to `verdict_s` seconds for the coordinator to report a dead
        worker. After an error of a server it waits up to `notice_s` seconds.
        """
        if isinstance(error, CommError):
            error = self._with_root_cause(error)
            error.call(", ".join(map(self._uplink.display_name, error.peer.split(", "))))
        return error

    def _with_root_cause(self, error: CommError) -> CommError:
        uplink = self._uplink
        if error.peer == ANY_PEER:
            self._reported.wait(self._waits.verdict_s)
        elif error.peer.startswith("server"):
            self._reported.wait(self._waits.notice_s)
        if self.error is not None:
            # The reported peer might have lost the same peer first, and have left because of that.
            return self.error if error.peer in ("", ANY_PEER) else root_cause((self.error, error))
        if error.peer == ANY_PEER and uplink.embedded and not uplink.coordinated:
            silent = f"the coordinator {uplink.address} that it hosts does not respond"
            return PeerLost(f"{silent} ({error.what})", peer=peer_name(0), step=error.step, bucket=error.bucket)
        return uplink.with_address(error)
