"""A site's client of the coordinator: its registration, and the key-value store through which sites exchange bytes."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from commlayer.cluster import messages
from commlayer.cluster.client import CoordinatorChannel, check_name, diagnose
from commlayer.config import Config, reconnect_window_s
from commlayer.errors import CommError, DeadlineExceeded, PeerLost, Refused
from commlayer.transport.key_folder import Keys

log = logging.getLogger("commlayer")

CALL_S = 5.0
BYTES_S = 60.0
"""Timeout in seconds of calls that carry values. Several calls may share a slow link, and a call that times out is sent again
completely."""
WAIT_S = 2.0
"""Seconds for which one call waits for keys that are not written yet."""
PAUSE_S = 0.25
CHECK_S = 1.0
Tell = Callable[[str], None]


class KvClient:
    """Client of the coordinator's key-value store for the ranks of this site. Thread-safe."""

    def __init__(self, address: str, config: Config, home: str) -> None:
        self.address, self._home = address, home
        self._link = CoordinatorChannel(address, config.token, Keys(config.keys) if config.keys else None, own=True)
        self._closed = False
        self._patience_s = max(CALL_S, reconnect_window_s(config))

    def request(
        self, deadline: float, *, put: Sequence[tuple[str, bytes]] = (), drop: Sequence[str] = (),
        want: Sequence[tuple[str, int]] = (), add: tuple[str, int] | None = None, wait: bool = True, without: bool = False,
        view: int = 0, rank: int = messages.ANY, limit_s: float = 0.0,
    ) -> messages.KvReply:
        """Writes and drops keys, then reads the keys in `want`. With `wait`, returns when all values are present, or at
        `deadline`; missing values are None.

        `add`: key and amount of a number to increase. `without`: does not wait for values of writers that are gone. `view`,
        `rank`, `limit_s`: see messages.KvRequest. Raises CommError for keys that will never be written. Also raises it if the
        coordinator does not answer until `deadline`, or has refused connections for reconnect_s.
        """
        once = None if add is None else (*add, secrets.token_hex(8))
        request = messages.KvRequest(self._home, tuple(put), tuple(drop), once, tuple(want), without=without, view=view,
                                     rank=rank,
                               limit_s=limit_s)
        lost_s = math.inf  # since when connections are refused
        while True:
            if self._closed:
                raise CommError("this process has left the job")
            left_s = max(0.0, deadline - time.monotonic())
            call_s = max(CALL_S, min(left_s, BYTES_S)) if request.put or request.want else CALL_S
            try:
                reply = self._link.call("KvRequest",
                                        msgspec.structs.replace(request, wait_s=min(WAIT_S, left_s) if wait else 0.0),
                                        messages.KvReply, call_s)
            except (PeerLost, DeadlineExceeded) as error:  # a network failure; the request is idempotent
                now = time.monotonic()
                lost_s = min(lost_s, now) if isinstance(error, PeerLost) else math.inf
                if left_s <= 0 or now - lost_s > self._patience_s:
                    raise
                time.sleep(min(PAUSE_S, left_s))
                continue
            lost_s = math.inf
            if reply.lost:  # the lost peer is the cause, not the coordinator that reports it
                raise PeerLost(reply.error, peer=reply.lost)
            if reply.error:
                raise CommError(reply.error, peer=f"coordinator {self.address}")
            if None not in reply.values or reply.over or not wait or left_s <= 0:
                return reply
            request = msgspec.structs.replace(request, put=(), drop=())  # these have been applied

    def close(self) -> None:
        """Closes the connection. Pending calls raise an error."""
        self._closed = True
        self._link.close()


class SiteLease:
    """Keeps a site registered by repeated calls. `ended` is set when the coordinator ends the registration; `why` is then the
    reason."""

    def __init__(self, address: str, config: Config, request: messages.RegisterSite, tell: Tell) -> None:
        self.address, self.request, self._config, self._tell = address, request, config, tell
        self.ended, self.why = threading.Event(), ""
        self._keys = Keys(config.keys) if config.keys else None
        self._link = CoordinatorChannel(address, config.token, self._keys)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._answered = False

    def meet(self, wait_s: float) -> messages.SiteReply:
        """Registers the site and waits for its ranks. Raises Refused, or DeadlineExceeded: if the coordinator does not answer
        within join_deadline_s, or the other sites have not joined within `wait_s`."""
        peer, join_s = f"coordinator {self.address}", self._config.join_deadline_s
        check_name(self.address)
        begin = answered = time.monotonic()
        logged, known = "", self._keys is None
        while True:
            now = time.monotonic()
            try:
                known = known or diagnose(self.address, self._keys, now + CALL_S) is not None
                request = msgspec.structs.replace(self.request, waited_s=now - begin)
                answer = self._link.call("RegisterSite", request, messages.SiteReply, CALL_S) if known else None
            except (PeerLost, DeadlineExceeded):
                answer = None
                diagnose(self.address, self._keys, now + CHECK_S)  # raises for bad certificates, which gRPC does not report
            if answer is None:
                if now - answered > join_s:
                    raise DeadlineExceeded(f"did not answer within {join_s:g} s: check that `commlayer serve` is "
                                           "running at this address and port, and that firewalls allow connections "
                                           "to it", peer=peer)
                line = f"waiting up to {join_s:g} s for the coordinator at {self.address} to answer"
            else:
                answered, self._answered = now, True
                if answer.error:
                    raise Refused(answer.error, peer=peer)
                if answer.first != messages.ANY:
                    return self._go_on(answer)
                if now - begin > wait_s:
                    raise DeadlineExceeded(f"{answer.missing} after {wait_s:g} s: start the others, or wait longer (--wait)",
                                           peer=peer)
                line = f"{answer.missing}; waiting for the others"
            if line != logged:
                self._tell(line)
                logged = line
            time.sleep(PAUSE_S)

    def _go_on(self, answer: messages.SiteReply) -> messages.SiteReply:
        self.request = msgspec.structs.replace(self.request, meeting=answer.meeting)
        self._thread = threading.Thread(target=self._stay, name="commlayer-home", daemon=True)
        self._thread.start()
        return answer

    def _stay(self) -> None:
        while not self._closing.wait(self._config.heartbeat_s):
            try:
                answer = self._link.call("RegisterSite", self.request, messages.SiteReply, CALL_S)
            except CommError as error:  # the job may be over, or continue without coordinator; workers detect which
                log.debug("%s", error)
                continue
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
            if self._answered:
                self._link.call("RegisterSite", msgspec.structs.replace(self.request, leave=reason), messages.SiteReply, 1.0)
        except CommError as error:
            log.debug("left the job, but could not notify the coordinator: %s", error)
        if self._thread is not None:
            self._thread.join(2 * CALL_S)
        self._link.close()
