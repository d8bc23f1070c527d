"""A process's side of the control plane: join, then heartbeats on a thread of their own. Decides nothing about the training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from commlayer import config as settings
from commlayer.config import Config
from commlayer.control import messages
from commlayer.control.messages import MAX_NBYTES, SERVICE
from commlayer.errors import CommError, CorruptFrame, DeadlineExceeded, PeerLost, Refused
from commlayer.records import Record, View

settings.quiet_forks()
import grpc  # noqa: E402  (after the fork setting, which grpc reads once)

log = logging.getLogger("commlayer")

POLL_S = (0.02, 0.25)
"""First and longest pause between two askings of one that waits for the others."""
CALL_S = 5.0
R = TypeVar("R", bound=Record)


class Membership:
    """A seat in the job. `on_failure` is called at most once, on the heartbeat thread, with the first death."""

    def __init__(self, link: _Link, request: messages.Join, seat: messages.Seat, config: Config,
                 on_failure: Callable[[CommError], None], ended: threading.Event) -> None:
        assert seat.view is not None
        self.view: View = seat.view
        self.plan = seat.plan
        self.rank = seat.rank
        self.name = f"{request.kind} {seat.rank}"
        self.left: dict[str, str] = {}
        """Peers that left in order, and why. Not a failure unless one waits for them."""
        self.over = ended
        """Every worker has left or died: a server may end."""
        self._link, self._token, self._on_failure = link, request.token, on_failure
        self._every_s = config.heartbeat_s
        # Shorter than the silence that kills, so that a stuck call leaves time for another.
        self._call_s = min(CALL_S, config.dead_after_s / 3)
        self.reachable = True
        """Whether the coordinator answered the last heartbeat."""
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._beat, name="commlayer-heartbeat", daemon=True)
        self._thread.start()

    def leave(self, reason: str = messages.FINISHED) -> None:
        """Says that this process takes no part any more, then closes. An unreachable coordinator is no error."""
        if not self._closing.is_set():
            self._stop()
            try:
                self._link.call("Leave", messages.Leave(self._token, reason), messages.Pulse, self._call_s)
            except CommError as error:
                log.info("left without notice: %s", error)
        self.close()

    def close(self) -> None:
        """Ends the heartbeats without a word: the others will find this process dead. Twice is once."""
        self._stop()
        self._link.close()

    def _stop(self) -> None:
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * self._call_s)

    def _beat(self) -> None:
        known = True
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                pulse = self._link.call("Heartbeat", messages.Heartbeat(self._token), messages.Pulse, self._call_s)
            except CommError as error:
                if self.reachable and not self._closing.is_set():
                    log.warning("%s; training goes on, but a peer that dies now is noticed only by its silence", error)
                self.reachable = False
            else:
                self.reachable = True
                if pulse.stranger and known:
                    log.warning("coordinator %s was restarted and does not know this job; training goes on", self._link.address)
                known = not pulse.stranger
                self._take(pulse)
            self._closing.wait(max(0.0, self._every_s - (time.monotonic() - began)))

    def _take(self, pulse: messages.Pulse) -> None:
        self.left.update({gone.peer: gone.reason for gone in pulse.left})
        if pulse.over:
            self.over.set()
        lost = [PeerLost(gone.reason, peer=gone.peer) for gone in pulse.lost]
        # Who leaves with an error will be missed at once; who has finished only if somebody waits for it.
        unfinished = [gone for gone in pulse.left if gone.reason != messages.FINISHED]
        lost += [PeerLost(f"left the job: {gone.reason}", peer=gone.peer) for gone in unfinished]
        if pulse.dead:
            lost.insert(0, PeerLost(f"declared this {self.name} dead: {pulse.dead}", peer=f"coordinator {self._link.address}"))
        if lost and not self._failed and not self._closing.is_set():
            self._failed = True
            self._on_failure(lost[0])


def join(address: str, request: messages.Join, config: Config, on_failure: Callable[[CommError], None], *,
         deadline_s: float | None = None, ended: threading.Event | None = None) -> Membership:
    """Takes a seat and waits until everyone is in.

    Raises Refused with the coordinator's reason, or DeadlineExceeded naming who is missing or that nobody answers there.
    `deadline_s` is config.join_deadline_s unless given; one that is longer bounds the wait for the others, never the
    coordinator's silence. `ended` ends the wait early; it is also taken for Membership.over.
    """
    deadline_s = config.join_deadline_s if deadline_s is None else deadline_s
    heard = time.monotonic()
    deadline = heard + deadline_s
    ended = ended or threading.Event()
    link = _Link(address)
    missing, pause_s, sent = "", POLL_S[0], request
    try:
        while not ended.is_set():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                link.leave_quietly(request.token, "waited in vain")
                raise _late(address, missing, deadline_s)
            if time.monotonic() > heard + config.join_deadline_s:
                raise _late(address, "", config.join_deadline_s)
            try:
                seat = link.call("Join", sent, messages.Seat, min(CALL_S, left_s))
            except (PeerLost, DeadlineExceeded):
                pass  # not up yet, or a short break of the network: the same deadline covers it
            else:
                if seat.error:
                    raise Refused(seat.error, peer=f"coordinator {address}")
                missing, heard = seat.missing, time.monotonic()
                # A plan may be large and asking again is frequent.
                sent = request if seat.plan_wanted else msgspec.structs.replace(request, plan=b"")
                if seat.view is not None:
                    if messages.digest_of(seat.plan) != seat.view.plan:
                        raise CorruptFrame("sent a plan that does not match its digest", peer=f"coordinator {address}")
                    return Membership(link, request, seat, config, on_failure, ended)
            ended.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, POLL_S[1])
        link.leave_quietly(request.token, "stopped while waiting")
        raise CommError("stopped while waiting for the others to join", peer=f"coordinator {address}")
    except BaseException:
        link.close()
        raise


def _late(address: str, missing: str, deadline_s: float) -> DeadlineExceeded:
    peer = f"coordinator {address}"
    if not missing:
        return DeadlineExceeded(f"did not answer within {deadline_s:g} s: is it running, and is that its address?", peer=peer)
    head, semicolon, tail = missing.partition(";")
    return DeadlineExceeded(f"{head} before the deadline of {deadline_s:g} s{semicolon}{tail}", peer=peer)


class _Link:
    """A channel to the coordinator. Calls raise CommError with its address."""

    def __init__(self, address: str) -> None:
        host, _ = settings.host_port(address)
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", MAX_NBYTES), ("grpc.max_send_message_length", MAX_NBYTES),
            ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000),
        ]
        if settings.is_loopback(host):
            options.append(("grpc.enable_http_proxy", 0))
        self.address = address
        self._channel = grpc.insecure_channel(address, options=options)

    def call(self, method: str, request: Record, kind: type[R], timeout_s: float) -> R:
        peer = f"coordinator {self.address}"
        try:
            reply = self._channel.unary_unary(f"/{SERVICE}/{method}")(messages.pack(request), timeout=timeout_s)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(f"no answer within {timeout_s:.1f} s", peer=peer) from None
            if code is grpc.StatusCode.UNAVAILABLE:
                raise PeerLost(f"not reachable: {details}", peer=peer) from None
            raise Refused(f"{method} failed: {details} ({code.name})", peer=peer) from None
        except ValueError:
            raise PeerLost("the channel is closed", peer=peer) from None
        return messages.unpack(reply, kind, peer)

    def leave_quietly(self, token: str, reason: str) -> None:
        """Frees a seat for which the wait was given up; if that fails the coordinator notices by silence."""
        try:
            self.call("Leave", messages.Leave(token, reason), messages.Pulse, 1.0)
        except CommError as error:
            log.info("left without notice: %s", error)

    def close(self) -> None:
        self._channel.close()
