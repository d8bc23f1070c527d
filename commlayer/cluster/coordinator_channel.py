"""A gRPC channel to the coordinator: mutually authenticated calls, plans in parts. Errors are CommErrors with its address."""

from __future__ import annotations

import logging
import socket
import threading
import time
from concurrent import futures
from typing import Any, TypeVar

from commlayer import config as settings
from commlayer.cluster import grpc_channel, messages
from commlayer.cluster.messages import MAX_NBYTES, MAX_PLAN_NBYTES, MAX_REPLY_NBYTES, PART_NBYTES, SERVICE
from commlayer.cluster.proved_calls import Asker, Unproved
from commlayer.cluster.tls_check import check
from commlayer.errors import CommError, DeadlineExceeded, InvalidInput, PeerLost, Refused
from commlayer.records import Record
from commlayer.transport.key_folder import SERVICE as NAMED
from commlayer.transport.key_folder import Certified, Keys
from commlayer.transport.secret import unproved

settings.quiet_grpc()
import grpc  # noqa: E402  (after quiet_grpc: it reads its settings once)

log = logging.getLogger("commlayer")

AHEAD = 8
"""Parts of a plan in flight at once, so that a distant coordinator costs few round trips."""
LATER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
"""The coordinator is not up yet, is overloaded, or was stopped while it answered."""
WATCHED_S = 1.0
"""How long close() waits for gRPC's thread that watches a channel, which polls every 0.2 s."""
RESOLVE_S = 5.0
RETRY_S = 0.25
R = TypeVar("R", bound=Record)


def check_name(address: str) -> None:
    """CommError if the host of this address has a name that cannot be resolved within RESOLVE_S.

    Lookups are repeated until then, because containers get their names only after they have started. Behind a proxy, which
    resolves names itself, nothing is checked.
    """
    host, port = settings.host_port(address)
    if settings.has_proxy():
        return
    deadline, why = time.monotonic() + RESOLVE_S, ["no answer of the name service"]

    def ask() -> None:
        while True:
            try:
                socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                why.clear()
                return
            except OSError as error:
                if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
                    why.clear()  # no name service yet, as after a power cut: the call itself retries until its own deadline
                    return
                why[:] = [error.strerror or str(error)]
            if time.monotonic() > deadline - RETRY_S:
                return
            time.sleep(RETRY_S)

    asking = threading.Thread(target=ask, name="commlayer-resolve", daemon=True)  # a lookup may block for a minute
    asking.start()
    asking.join(RESOLVE_S)
    if why:
        raise CommError(f"its host name {host!r} cannot be resolved ({why[0]}): correct the address, or give an IP address",
                        peer=f"coordinator {address}", code="E-ADDRESS")


def options(address: str) -> list[tuple[str, Any]]:
    """gRPC options of a channel to that coordinator."""
    host, _ = settings.host_port(address)
    arguments: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MAX_REPLY_NBYTES), ("grpc.max_send_message_length", MAX_NBYTES),
        ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000),
    ]
    if settings.is_loopback(host):
        arguments.append(("grpc.enable_http_proxy", 0))
    return arguments


def shown(keys: Keys | None) -> grpc_channel.Shown | None:
    if keys is None:
        return None
    return grpc_channel.Shown(keys.ca.decode(), keys.certificate.decode(), keys.key.decode(), NAMED)


def fingerprint(keys: Keys | None) -> bytes:
    """Fingerprint of this node's certificate, which its proofs are bound to."""
    return keys.me.fingerprint if keys else b""


class CoordinatorChannel:
    """A channel to one coordinator, authenticated with the job's secret, and using TLS if keys are given."""

    def __init__(self, address: str, secret: str = "", keys: Keys | None = None, *, own: bool = False) -> None:
        """`own`: uses a connection that no other channel of this process shares."""
        self.address, self.secret, self.keys = address, secret, keys
        apart = [("grpc.use_local_subchannel_pool", 1)] if own else []
        self._channel = grpc_channel.opened(address, options(address) + apart, shown(keys))
        self._asker = Asker(secret, self._send, _unproved, fingerprint(keys))
        self._seen: Certified | None = None
        self._connected, self._times, self._looked = False, 0, 0
        if keys is not None:
            self._channel.subscribe(self._changed)

    def _changed(self, state: Any) -> None:
        """gRPC reconnects by itself and then checks only the CA, so the server's certificate must be checked again."""
        ready = state is grpc.ChannelConnectivity.READY
        self._times += self._connected and not ready
        self._connected = ready

    def look(self, timeout_s: float) -> bool:
        """Checks the coordinator's certificate over a separate connection. Whether it answered; Refused if the certificate is
        not of this job or was revoked."""
        # `times` is read first: if the connection is lost during the check, the next call checks again. After a refusal
        # `_looked` stays -1, so every call is refused.
        times = self._times
        self._looked = -1
        self._seen = seen = check(self.address, self.keys, time.monotonic() + timeout_s)
        if seen is not None:
            self._looked = times
        return seen is not None

    def _heed(self, timeout_s: float) -> None:
        peer = f"coordinator {self.address}"
        if self._looked != self._times and not self.look(timeout_s):
            raise PeerLost("not reachable: nobody answers there", peer=peer)
        if self.keys is not None and self._seen is not None and self._seen.serial in self.keys.revoked():
            raise Refused(f"its certificate ({self._seen.name}) was revoked", peer=peer, code="E-CERTIFICATE-REVOKED")

    def _send(self, method: str, data: bytes, timeout_s: float) -> bytes:
        answer: bytes = self._channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=timeout_s)
        return answer

    def call(self, method: str, request: Record, kind: type[R], timeout_s: float) -> R:
        peer = f"coordinator {self.address}"
        self._heed(timeout_s)
        try:
            reply = self._asker.ask(method, messages.pack(request), timeout_s)
        except Unproved:
            raise Refused(unproved(self.secret), peer=peer, code="E-SECRET") from None
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(f"no answer within {timeout_s:.1f} s", peer=peer) from None
            if code in LATER:
                raise PeerLost(f"not reachable: {details}", peer=peer) from None
            raise Refused(f"{method} failed: {details} ({code.name})", peer=peer) from None
        except ValueError:
            raise PeerLost("the channel is closed", peer=peer) from None
        return messages.unpack(reply, kind, peer)

    def send_plan(self, plan: bytes, timeout_s: float) -> None:
        """Uploads a plan in parts, each in a call of its own, because no call may be large."""
        if len(plan) > MAX_PLAN_NBYTES:
            raise InvalidInput("E-PLAN-REFUSED",
                               f"the plan has {len(plan)} bytes, allowed {MAX_PLAN_NBYTES}: let it fuse more into a bucket")
        digest = messages.digest_of(plan)

        def send(begin: int) -> None:
            part = messages.Part(digest, len(plan), begin, plan[begin : begin + PART_NBYTES])
            self.call("Part", part, messages.Pulse, timeout_s)

        with futures.ThreadPoolExecutor(AHEAD, "commlayer-plan") as pool:
            for _ in pool.map(send, range(0, len(plan), PART_NBYTES)):
                pass

    def leave_quietly(self, token: str, reason: str) -> None:
        """Removes a registration after waiting was given up. If that fails, the coordinator detects the silence."""
        try:
            self.call("Leave", messages.Leave(token, reason), messages.Pulse, 1.0)
        except CommError as error:
            log.info("left without notice: %s", error)

    def close(self) -> None:
        if self.keys is not None:
            self._channel.unsubscribe(self._changed)
            # gRPC's thread raises an exception, which Python prints, if its channel is closed while it polls.
            watched, until = getattr(self._channel, "_connectivity_state", None), time.monotonic() + WATCHED_S
            while getattr(watched, "polling", False) and time.monotonic() < until:
                time.sleep(0.005)
        self._channel.close()


def _unproved(error: Exception) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED
