"""A home's side of what it asks a coordinator: its place in the job, and the store in which homes meet. Knows no training."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from commlayer.cluster import messages
from commlayer.cluster.coordinator_channel import CoordinatorChannel, check_name
from commlayer.cluster.tls_check import check
from commlayer.config import Config, reconnect_window_s
from commlayer.errors import CommError, DeadlineExceeded, PeerLost, Refused
from commlayer.transport.key_folder import Keys

log = logging.getLogger("commlayer")

CALL_S = 5.0
BYTES_S = 60.0
"""As CALL_S where bytes go up or down: several calls share a link that may be slow, and what is late is sent all over again."""
WAIT_S = 2.0
"""How long one asking waits for what is not there yet."""
PAUSE_S = 0.25
CHECK_S = 1.0
Tell = Callable[[str], None]


class Desk:
    """Where ranks of homes leave bytes for each other. Any number of threads may ask."""

    def __init__(self, address: str, config: Config, home: str) -> None:
        self.address, self._home = address, home
        self._link = CoordinatorChannel(address, config.token, Keys(config.keys) if config.keys else None, own=True)
        self._closed = False
        self._patience_s = max(CALL_S, reconnect_window_s(config))

    def ask(
        self, deadline: float, *, put: Sequence[tuple[str, bytes]] = (), drop: Sequence[str] = (),
        want: Sequence[tuple[str, int]] = (), add: tuple[str, int] | None = None, wait: bool = True, without: bool = False,
        view: int = 0, rank: int = messages.ANY, limit_s: float = 0.0,
    ) -> messages.Kept:
        """What is there of what it wants: all of it, if it waits, by `deadline`; else `found` has gaps. `without`: all but what
        those would have left who are gone. `view`, `rank`, `limit_s`: see messages.Ask.

        CommError for what will never be there, or where nobody answers until then, or nothing listens for reconnect_s.
        """
        once = None if add is None else (*add, secrets.token_hex(8))
        asked = messages.Ask(self._home, tuple(put), tuple(drop), once, tuple(want), without=without, view=view, rank=rank,
                             limit_s=limit_s)
        lost_s = math.inf  # since when nothing listens there
        while True:
            if self._closed:
                raise CommError("this process takes no part any more")
            left_s = max(0.0, deadline - time.monotonic())
            call_s = max(CALL_S, min(left_s, BYTES_S)) if asked.put or asked.want else CALL_S
            try:
                kept = self._link.call("Ask", msgspec.structs.replace(asked, wait_s=min(WAIT_S, left_s) if wait else 0.0),
                                       messages.Kept, call_s)
            except (PeerLost, DeadlineExceeded) as error:  # a break of the network; what is said again changes nothing
                now = time.monotonic()
                lost_s = min(lost_s, now) if isinstance(error, PeerLost) else math.inf
                if left_s <= 0 or now - lost_s > self._patience_s:
                    raise
                time.sleep(min(PAUSE_S, left_s))
                continue
            lost_s = math.inf
            if kept.lost:  # that one is the cause, not who tells of it
                raise PeerLost(kept.error, peer=kept.lost)
            if kept.error:
                raise CommError(kept.error, peer=f"coordinator {self.address}")
            if None not in kept.found or kept.over or not wait or left_s <= 0:
                return kept
            asked = msgspec.structs.replace(asked, put=(), drop=())  # they are there

    def close(self) -> None:
        """Whoever waits here waits no longer."""
        self._closed = True
        self._link.close()


class Attendance:
    """That a home is there, told again and again. `ended` is set, with `why`, when its meeting has come to nothing."""

    def __init__(self, address: str, config: Config, request: messages.Attend, tell: Tell) -> None:
        self.address, self.request, self._config, self._tell = address, request, config, tell
        self.ended, self.why = threading.Event(), ""
        self._keys = Keys(config.keys) if config.keys else None
        self._link = CoordinatorChannel(address, config.token, self._keys)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._answered = False

    def meet(self, wait_s: float) -> messages.Attended:
        """This home's ranks, once all homes are there. Refused, or DeadlineExceeded: the coordinator does not answer within
        join_deadline_s, or the others have not come within `wait_s`."""
        peer, join_s = f"coordinator {self.address}", self._config.join_deadline_s
        check_name(self.address)
        begin = heard = time.monotonic()
        said, known = "", self._keys is None
        while True:
            now = time.monotonic()
            try:
                known = known or check(self.address, self._keys, now + CALL_S) is not None
                asked = msgspec.structs.replace(self.request, waited_s=now - begin)
                answer = self._link.call("Attend", asked, messages.Attended, CALL_S) if known else None
            except (PeerLost, DeadlineExceeded):
                answer = None
                check(self.address, self._keys, now + CHECK_S)  # of certificates gRPC does not tell
            if answer is None:
                if now - heard > join_s:
                    raise DeadlineExceeded(f"did not answer within {join_s:g} s: is `commlayer serve` running there, is "
                                           "that its address and port, and do firewalls let it through?", peer=peer)
                line = f"waits for the coordinator at {self.address} to answer, for {join_s:g} s at most"
            else:
                heard, self._answered = now, True
                if answer.error:
                    raise Refused(answer.error, peer=peer)
                if answer.first != messages.ANY:
                    return self._go_on(answer)
                if now - begin > wait_s:
                    raise DeadlineExceeded(f"{answer.missing} after {wait_s:g} s: start the others, or wait longer (--wait)",
                                           peer=peer)
                line = f"{answer.missing}; waits for the others"
            if line != said:
                self._tell(line)
                said = line
            time.sleep(PAUSE_S)

    def _go_on(self, answer: messages.Attended) -> messages.Attended:
        self.request = msgspec.structs.replace(self.request, meeting=answer.meeting)
        self._thread = threading.Thread(target=self._stay, name="commlayer-home", daemon=True)
        self._thread.start()
        return answer

    def _stay(self) -> None:
        while not self._closing.wait(self._config.heartbeat_s):
            try:
                answer = self._link.call("Attend", self.request, messages.Attended, CALL_S)
            except CommError as error:  # the job may be over, or goes on without: its own heartbeats tell
                log.debug("%s", error)
                continue
            if answer.error and not self._closing.is_set():
                self.why = answer.error
                self.ended.set()
                return

    def close(self, reason: str) -> None:
        """Twice is once."""
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            if self._answered:
                self._link.call("Attend", msgspec.structs.replace(self.request, leave=reason), messages.Attended, 1.0)
        except CommError as error:
            log.debug("left without notice: %s", error)
        if self._thread is not None:
            self._thread.join(2 * CALL_S)
        self._link.close()
