"""A site's client of the coordinator: its registration, and the key-value store through which sites exchange bytes."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from commlayer.cluster.calls import messages
from commlayer.cluster.calls.coordinator_channel import CALL_S, CoordinatorChannel
from commlayer.cluster.calls.messages import StoreKey
from commlayer.config import Config, reconnect_window_s
from commlayer.errors import CommError, PeerLost
from commlayer.transport.keys.key_folder import Keys

log = logging.getLogger("commlayer")

BYTES_S = 60.0
"""Timeout in seconds of calls that carry values. Several calls may share a slow link, and a call that times out is sent again
completely."""
WAIT_S = 2.0
"""Seconds for which one call waits for keys that are not written yet."""


def _channel(address: str, config: Config, *, own: bool) -> CoordinatorChannel:
    return CoordinatorChannel(address, config.token, Keys(config.keys) if config.keys else None, own=own)


class KvClient:
    """Client of the coordinator's key-value store for the ranks of this site. Thread-safe."""

    def __init__(self, address: str, config: Config, home: str, generation: int = 1) -> None:
        """`generation`: generation of the epoch to which this client's written values belong."""
        self.address, self._home, self._generation = address, home, generation
        self._link = _channel(address, config, own=True)
        self._patience_s = max(CALL_S, reconnect_window_s(config))

    def request(
        self, deadline: float, *, put: Sequence[tuple[StoreKey, bytes]] = (), drop: Sequence[StoreKey] = (),
        want: Sequence[StoreKey] = (), add: tuple[StoreKey, int] | None = None, once: str = "", wait: bool = True,
        without: bool = False, generation: int = 0, rank: int = messages.ANY, limit_s: float = 0.0, since: float = 0.0,
        call_s: float = CALL_S,
    ) -> messages.KvReply:
        """Writes and drops keys, then reads the keys in `want`. With `wait`, returns when all values are present, or at
        `deadline`; missing values are None.

        `add`: key and amount of a number to increase. `once`: a random token of this addition. Repeated requests carry the same
        token, so the number is added once. `call_s`: least timeout of a call that reads or writes values. `without`: does not
        wait for values of writers that are gone. `generation`: generation of the epoch to which the writes belong; 0: the
        generation of this client. `rank`, `limit_s`: see messages.KvRequest. `since`: the time.monotonic() at which an earlier
        call began to wait for these keys; 0: this call is the first. Raises CommError for keys that will never be written. Also
        raises it if the coordinator does not answer until `deadline`, or has refused connections for reconnect_s.
        """
        added = None if add is None else (*add, once or secrets.token_hex(8))
        request = messages.KvRequest(self._home, tuple(put), tuple(drop), added, tuple(want), without=without,
                                     generation=generation or self._generation, rank=rank, limit_s=limit_s)
        begin = since or time.monotonic()
        while True:
            now = time.monotonic()
            left_s = max(0.0, deadline - now)
            timeout_s = max(call_s, min(left_s, BYTES_S)) if request.put or request.want else CALL_S
            request = msgspec.structs.replace(request, wait_s=min(WAIT_S, left_s) if wait else 0.0, waited_s=now - begin)
            reply = self._link.request("KvRequest", request, messages.KvReply, deadline, timeout_s, self._patience_s)
            if reply.lost:  # the lost peer is the cause, not the coordinator that reports it
                raise PeerLost(reply.error, peer=reply.lost)
            if reply.error:
                raise CommError(reply.error, peer=self._link.peer)
            if None not in reply.values or reply.over or not wait or left_s <= 0:
                return reply
            request = msgspec.structs.replace(request, put=(), drop=())  # these have been applied

    def close(self) -> None:
        """Closes the connection. Pending calls raise an error."""
        self._link.close()


class SiteLease:
    """Keeps a site registered by repeated calls. `ended` is set when the coordinator ends the registration; `why` is then the
    reason. `begun`: whether the job had begun at the coordinator's last answer."""

    def __init__(self, address: str, config: Config, request: messages.Join, log_wait: Callable[[str], None]) -> None:
        self.address, self.request, self._config, self._log_wait = address, request, config, log_wait
        self.ended, self.why, self.begun = threading.Event(), "", False
        self._link = _channel(address, config, own=False)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def register_and_wait(self, wait_s: float, answer_s: float = 0.0) -> messages.JoinReply:
        """Registers the site and waits for its ranks, at most `wait_s`; for the coordinator's answer at most `answer_s`, 0: the
        setting join_deadline_s. See CoordinatorChannel.register."""
        reply = self._link.register(lambda waited_s: msgspec.structs.replace(self.request, waited_s=waited_s), wait_s,
                                    answer_s or self._config.join_deadline_s, log_wait=self._log_wait)
        self.request = msgspec.structs.replace(self.request, meeting=reply.meeting)
        self._thread = threading.Thread(target=self._renew, name="commlayer-home", daemon=True)
        self._thread.start()
        return reply

    def _renew(self) -> None:
        while not self._closing.wait(self._config.heartbeat_s):
            try:
                answer = self._link.call("Join", self.request, messages.JoinReply, CALL_S)
            except CommError as error:  # the job may be over, or continue without coordinator; workers detect which
                log.debug("%s", error)
                continue
            self.begun = answer.begun
            if answer.error and not self._closing.is_set():
                self.why = answer.error
                self.ended.set()
                return

    def close(self, reason: str) -> None:
        """Leaves the job with this reason. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            leave = msgspec.structs.replace(self.request, leave=reason)
            self.begun = self._link.call("Join", leave, messages.JoinReply, 1.0).begun
        except CommError as error:
            log.debug("left the job, but could not notify the coordinator: %s", error)
        if self._thread is not None:
            self._thread.join(2 * CALL_S)
        self._link.close()
