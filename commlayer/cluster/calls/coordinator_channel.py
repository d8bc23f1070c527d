"""The channel to the coordinator: mutually authenticated calls, plans in parts. Errors are CommErrors with its address."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from commlayer import config as settings
from commlayer.callbacks import ignore
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.call_proofs import AuthenticationFailed, CallAuthenticator
from commlayer.cluster.calls.diagnosis import Unresolved, diagnose
from commlayer.cluster.calls.messages import (
    MAX_NBYTES,
    MAX_PLAN_NBYTES,
    MAX_REPLY_NBYTES,
    PART_NBYTES,
    SERVICE,
    HeartbeatReply,
    Join,
    JoinReply,
)
from commlayer.config import Config, host_port
from commlayer.errors import CommError, CorruptFrame, DeadlineExceeded, InvalidInput, PeerLost, Refused
from commlayer.records import Record
from commlayer.transport.backoff import Backoff
from commlayer.transport.flow.traffic import TRAFFIC
from commlayer.transport.grpc.library import grpc
from commlayer.transport.grpc.stream_ends import open_channel
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.keys.secret import wrong_secret

log = logging.getLogger("commlayer")
R = TypeVar("R", bound=Record)
CALL_S, MIN_CALL_S = 5.0, 0.05
"""Usual timeout of a call, and the shortest one that is left at the end of a wait, in seconds."""
MIN_BEAT_S = 2.0
"""Shortest timeout of a heartbeat, in seconds. On a new connection a heartbeat takes five round trips: TCP, TLS, a call whose
proof is too old, the new challenge, and the call. At a round trip of 150 ms two segments may be lost meanwhile."""
CHECK_S = 1.0
LARGE_NBYTES = 16 << 10
"""Size of a message from which on a limit of this process's rate delays it."""
NAME_S = 5.0
"""Seconds for which a host name may be unresolvable before that is an error. The name of a container exists only after the
container has started."""
PROGRESS_S = 10.0
"""Seconds between two equal lines about a wait."""
RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
"""gRPC status codes after which a call is retried: the coordinator is not up yet, is overloaded, or was stopped while it
answered."""
CHANNEL_CLOSE_S = 1.0
"""How long close() waits for gRPC's thread that watches a channel. The thread polls every 0.2 s."""


def channel_options(address: str) -> list[tuple[str, Any]]:
    """Returns the gRPC options of a channel to that coordinator."""
    arguments: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MAX_REPLY_NBYTES), ("grpc.max_send_message_length", MAX_NBYTES),
        # The channel must work again within two seconds after an interruption of any length. TCP alone would continue only
        # after another half of the interruption's length, because its retransmission intervals grow. TCP_USER_TIMEOUT, which
        # gRPC sets to the keepalive timeout, ends such a connection. Attempts to connect, for which gRPC allows 20 s, end soon
        # for the same reason.
        ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", int(1000 * MIN_BEAT_S)),
        ("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", int(1000 * CALL_S)),
    ]
    return [*arguments, *([("grpc.enable_http_proxy", 0)] if settings.is_loopback(host_port(address)[0]) else [])]


def fingerprint(keys: Keys | None) -> bytes:
    """Returns the fingerprint of this node's certificate; b"" without keys. Every proof that this node knows the job's secret
    covers the fingerprint."""
    return keys.own.fingerprint if keys else b""


class CoordinatorChannel:
    """A channel to one coordinator, authenticated with the job's secret, and encrypted with TLS if keys are given."""

    def __init__(self, address: str, secret: str = "", keys: Keys | None = None, *, own: bool = False) -> None:
        """Opens the channel. `own`: True: uses a separate connection, which no other channel of this process shares."""
        self.address, self.secret, self.keys = address, secret, keys
        self.peer = f"coordinator {address}"
        apart = [("grpc.use_local_subchannel_pool", 1)] if own else []
        self._channel = open_channel(address, channel_options(address) + apart, keys)
        self._asker = CallAuthenticator(secret, self._send, _unproved, keys)
        self._closed, self._connected = threading.Event(), False
        if keys is not None:
            self._channel.subscribe(self._on_change)

    def _on_change(self, state: Any) -> None:
        """gRPC reconnects by itself and then checks only the CA, so the coordinator must prove itself before the next call."""
        before, self._connected = self._connected, state is grpc.ChannelConnectivity.READY
        if before and not self._connected:
            self._asker.forget()

    def _send(self, method: str, data: bytes, timeout_s: float) -> bytes:
        if len(data) > LARGE_NBYTES:  # of a state for a home that joins
            TRAFFIC.hold_state(len(data), CALL_S)
        answer: bytes = self._channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=timeout_s)
        TRAFFIC.call(len(data), len(answer))
        return answer

    def call(self, method: str, request: Record, kind: type[R], timeout_s: float) -> R:
        """Makes one call. Raises PeerLost or DeadlineExceeded if the call may succeed later, Refused if not."""
        try:
            reply = self._asker.ask(method, messages.pack(request), timeout_s)
        except AuthenticationFailed:
            raise Refused(wrong_secret(self.secret), peer=self.peer, code="E-SECRET") from None
        except Refused as error:
            raise error.located(peer=self.peer) from None
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(f"no answer within {timeout_s:.1f} s", peer=self.peer) from None
            if code in RETRYABLE:
                raise PeerLost(f"not reachable: {details}", peer=self.peer) from None
            raise Refused(f"{method} failed: {details} ({code.name})", peer=self.peer) from None
        except ValueError:
            raise PeerLost("the channel is closed", peer=self.peer) from None
        return messages.unpack(reply, kind, self.peer)

    def request(self, method: str, request: Record, kind: type[R], deadline: float, timeout_s: float = CALL_S,
                lost_s: float = math.inf) -> R:
        """Repeats an idempotent call until the coordinator answers. `timeout_s`: timeout of each call.

        Raises the last error after `deadline`, or when the coordinator has refused connections for `lost_s` seconds.
        """
        backoff, lost_since = Backoff(deadline, self._closed), math.inf
        while True:
            try:
                return self.call(method, request, kind, timeout_s)
            except (PeerLost, DeadlineExceeded) as error:
                now = time.monotonic()
                lost_since = min(lost_since, now) if isinstance(error, PeerLost) else math.inf
                if now - lost_since >= lost_s or not backoff.wait():
                    raise

    def register(self, request: Callable[[float], Join], wait_s: float, answer_s: float, *, plan: bytes = b"",
                 ended: threading.Event | None = None, log_wait: Callable[[str], None] = ignore) -> JoinReply:
        """Repeats a registration until all processes have joined. `request` gets the seconds since the first attempt, and
        returns the Join message to send.

        Raises Refused with the coordinator's reason; DeadlineExceeded if the coordinator does not answer for `answer_s`, or if
        other processes have not joined within `wait_s`. Setting `ended` stops the wait. `log_wait` is called with a line
        that says which processes are missing, when they change and every PROGRESS_S seconds.
        """
        begin = answered = time.monotonic()
        missing = logged = ""
        logged_s = 0.0
        ended = ended or threading.Event()
        backoff = Backoff(begin + wait_s, ended)
        while True:
            now = time.monotonic()
            call_s = max(MIN_CALL_S, min(CALL_S, begin + wait_s - now))
            try:
                reply = self.call("Join", request(now - begin), JoinReply, call_s)
                if reply.plan_wanted:
                    self.send_plan(plan, call_s)
            except (PeerLost, DeadlineExceeded):
                # The coordinator may not be up yet, or the network is down. But a bad certificate or a wrong port, which gRPC
                # does not report, is an error at once; so is a wrong host name, after some seconds.
                try:
                    diagnose(self.address, self.keys, now + CHECK_S)
                except Unresolved:
                    if now - begin > NAME_S:
                        raise
                line, since, limit_s = f"waiting for the coordinator at {self.address} to answer", answered, answer_s
            else:
                answered, missing = time.monotonic(), reply.missing
                if reply.error:
                    raise Refused(reply.error, peer=self.peer)
                if reply.plan_wanted:
                    continue
                if reply.complete:
                    if reply.epoch is not None and messages.hash_plan_bytes(reply.plan) != reply.epoch.plan:
                        raise CorruptFrame("sent a plan that does not match its digest", peer=self.peer)
                    return reply
                line, since, limit_s = missing if "waiting" in missing else f"{missing}; waiting", begin, wait_s
            now = time.monotonic()
            if line != logged or now >= logged_s + PROGRESS_S:
                log_wait(missing if missing.endswith(messages.STARTING) else f"{line}, {now - since:.0f} of {limit_s:g} s")
                logged, logged_s = line, now
            if now > answered + answer_s:
                missing = ""
                break
            if not backoff.wait():
                break
        if ended.is_set():
            raise CommError("stopped while waiting for the others to join", peer=self.peer)
        if missing:
            head, semicolon, tail = missing.partition(";")
            raise DeadlineExceeded(f"{head} before the deadline of {wait_s:g} s{semicolon}{tail}: start the others, or wait "
                                   "longer (join_deadline_s; --wait of `commlayer join`)", peer=self.peer)
        raise DeadlineExceeded(f"did not answer within {min(answer_s, wait_s):g} s: check that `commlayer serve` is running at "
                               "this address and port, and that firewalls allow connections to it", peer=self.peer)

    def send_plan(self, plan: bytes, timeout_s: float) -> None:
        """Uploads a plan in parts, each in a call of its own, because no call may be large."""
        if len(plan) > MAX_PLAN_NBYTES:
            raise InvalidInput("E-PLAN-REFUSED",
                               f"the plan has {len(plan)} bytes, allowed {MAX_PLAN_NBYTES}: create a plan with "
                               "fewer, larger buckets")
        digest = messages.hash_plan_bytes(plan)
        for begin in range(0, len(plan), PART_NBYTES):
            part = messages.PlanPart(digest, len(plan), begin, plan[begin : begin + PART_NBYTES])
            self.call("PlanPart", part, HeartbeatReply, timeout_s)

    def leave(self, token: str, reason: str, exchanges: int = -1, *, deadline: float = 0.0, timeout_s: float = 1.0
              ) -> HeartbeatReply | None:
        """Removes a registration; returns None if the coordinator cannot be reached, which is no error. A call that is not
        answered in time is repeated until `deadline`, since the link may be full."""
        try:
            return self.request("Leave", messages.Leave(token, reason, exchanges), HeartbeatReply, deadline, timeout_s, 0.0)
        except CommError as error:
            log.info("left the job, but could not notify the coordinator: %s", error)
            return None

    def explain(self, error: CommError) -> CommError:
        """Returns what `diagnose` finds as the reason of a failed call; `error` itself if it finds none."""
        try:
            diagnose(self.address, self.keys, time.monotonic() + CHECK_S)
        except Refused as reason:
            return reason
        return error

    def close(self) -> None:
        self._closed.set()
        if self.keys is not None:
            self._channel.unsubscribe(self._on_change)
            # gRPC's thread raises an exception, which Python prints, if its channel is closed while it polls.
            watched, until = getattr(self._channel, "_connectivity_state", None), time.monotonic() + CHANNEL_CLOSE_S
            while getattr(watched, "polling", False) and time.monotonic() < until:
                time.sleep(0.005)
        self._channel.close()


def connect(config: Config, timeout_s: float = CALL_S) -> CoordinatorChannel:
    """Opens a channel to the coordinator of the setting `join`. Raises CommError or RecordError if the coordinator refuses, or
    if the address is wrong. A coordinator that does not answer is no error here."""
    keys = Keys(config.keys) if config.keys else None
    diagnose(config.join, keys, time.monotonic() + timeout_s)
    return CoordinatorChannel(config.join, config.token, keys)


def _unproved(error: Exception) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED
