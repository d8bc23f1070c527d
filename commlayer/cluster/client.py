"""Client of the coordinator: joins a job, then sends heartbeats from a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, TypeVar

import msgspec

from commlayer import config as settings
from commlayer.cluster import child_processes, messages
from commlayer.cluster.messages import MAX_NBYTES, MAX_PLAN_NBYTES, MAX_REPLY_NBYTES, PART_NBYTES, SERVICE
from commlayer.cluster.tls_terminator import MOST_NBYTES, reason_of
from commlayer.config import Config, host_port
from commlayer.errors import CommError, CorruptFrame, DeadlineExceeded, InvalidInput, PeerLost, Refused, without_code
from commlayer.records import Record, View
from commlayer.transport import framing
from commlayer.transport.connection import close_channel, track
from commlayer.transport.crc import crc32c
from commlayer.transport.grpc_stream import TlsCredentials, open_channel
from commlayer.transport.handshake import Hello
from commlayer.transport.key_folder import SERVICE as NAMED
from commlayer.transport.key_folder import Keys, PeerCertificate
from commlayer.transport.protocol import Header, Kind
from commlayer.transport.secret import AuthenticationFailed, CallAuthenticator, new_nonce, wrong_secret
from commlayer.transport.tls import CONTROL, TlsSocket

settings.quiet_grpc()
import grpc  # noqa: E402  (after quiet_grpc(): grpc reads its settings once)
import grpc.aio  # noqa: E402

POLL_S = (0.02, 0.25)
"""First and longest pause between two join requests, in seconds."""
CALL_S = 5.0
CHECK_S = 1.0
CLOCK_S = 300.0
"""Seconds of difference between this machine's clock and the coordinator's above which a warning is logged. No reply takes that
long."""
ASK_S = 0.05
"""Shortest timeout of a heartbeat call, in seconds."""
OnSilence = Callable[[float], None]
"""Called after every failed heartbeat once the coordinator has not answered for dead_after_s, with the seconds since its last
answer."""
OnLeft = Callable[[messages.PeerExit], None]
OnView = Callable[[View], None]
"""Called when the coordinator reports a newer epoch. Only the members of that epoch continue."""


class Membership:
    """This process's registration in the job. The heartbeat thread calls `on_failure` at most once, with the first peer failure
    that the coordinator reports.

    `keep`: a child process continues the heartbeats while this process's threads wait for the GIL (child_processes.py).
    """

    def __init__(self, link: CoordinatorChannel, request: messages.Join, seat: messages.JoinReply, config: Config,
                 on_failure: Callable[[CommError], None], ended: threading.Event, on_silence: OnSilence, on_left: OnLeft, *,
                 keep: bool) -> None:
        assert seat.view is not None
        self.view: View = seat.view
        """The epoch that this process has switched to."""
        self.newest: View = seat.view
        """The newest epoch that the coordinator has sent; this process may not have switched to it yet."""
        self.on_view: OnView = lambda _: None
        self.plan = seat.plan
        self.rank = seat.rank
        self.name = f"{request.kind} {seat.rank}"
        self.left: dict[str, messages.PeerExit] = {}
        """Peers that left in order, by peer name. An orderly leave is a failure only if another process waits for that peer."""
        self.over = ended
        """Set when every worker has left or died, so a server may end."""
        self.failed = False
        """Whether the job ended with an error: not all of its last workers finished."""
        self.remaining: tuple[str, ...] = ()
        """Names of workers that were still in the job when this process left."""
        self._channel, self._token = link, request.token
        self._on_failure, self._on_silence, self._on_left = on_failure, on_silence, on_left
        self._every_s, self._dead_after_s = config.heartbeat_s, config.dead_after_s
        # Shorter than dead_after_s, so after a stuck call there is time for another one.
        self._call_s = min(CALL_S, config.dead_after_s / 3)
        self.reachable = True
        """Whether the coordinator answered the last heartbeat."""
        self.missed: Callable[[], tuple[str, ...]] = tuple
        """Returns the peers whose data connection their machine closed without an orderly end. Set by the owner of the data
        connections."""
        self.ended: Callable[[], tuple[str, ...]] = tuple
        """Set by a server: returns the workers that closed their data connections in order."""
        self.dropped: Callable[[], tuple[messages.PeerExit, ...]] = tuple
        """Set by a server: returns the workers that it disconnected because they broke the protocol."""
        self.overdue: Callable[[], messages.Overdue | None] = lambda: None
        """Set by a server: returns its report of workers whose missing contributions keep sums waiting; None if no sum
        waits."""
        self._closing = threading.Event()
        self._failed = False
        beats = [messages.pack(messages.Heartbeat(self._token, parent=parent)) for parent in ("", "stopped", "ended")]
        self._keeper = child_processes.start_sidecar(link.address, link.secret, beats, channel_options(link.address),
                                                     self._every_s,
                                             self._call_s, tls_credentials(link.keys), fingerprint(link.keys)) if keep else None
        self._thread = threading.Thread(target=self._beat, name="commlayer-heartbeat", daemon=True)
        self._thread.start()

    def leave(self, reason: str = messages.FINISHED, exchanges: int = -1) -> bool:
        """Leaves the job, then closes. `exchanges`: number of completed exchanges, -1 if unknown. Returns whether the
        coordinator was reached; an unreachable coordinator is not an error."""
        if self._closing.is_set():
            self.close()
            return False
        self._stop()
        # The coordinator counts a process as dead if its orderly leave is not delivered, so the call is retried when the link
        # is full.
        patience_s = self._dead_after_s if reason == messages.FINISHED and self.reachable else 0.0
        delivered, until = False, time.monotonic() + patience_s
        while not delivered:
            try:
                pulse = self._channel.call("Leave", messages.Leave(self._token, reason, exchanges), messages.HeartbeatReply,
                                        self._call_s)
            except CommError as error:
                if isinstance(error, DeadlineExceeded) and time.monotonic() < until:
                    continue
                log.info("left the job, but could not notify the coordinator: %s", error)
                break
            exits = {g.peer for g in (*pulse.failed, *pulse.departed)} | {self.name}
            self.remaining = tuple(f"worker {m.rank}" for m in self.view.members if f"worker {m.rank}" not in exits)
            delivered = True
        self.close()
        return delivered

    def close(self) -> None:
        """Stops the heartbeats without leaving, so the coordinator will detect this process as dead. Idempotent."""
        self._stop()
        if self._keeper is not None:
            self._keeper.close()
        self._channel.close()

    def _stop(self) -> None:
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * self._call_s)

    def _beat(self) -> None:
        known, silent_s, mark = True, 0.0, time.monotonic()
        while not self._closing.is_set():
            began = time.monotonic()
            wait_s = max(ASK_S, min(self._call_s, self._dead_after_s - silent_s))
            try:
                beat = messages.Heartbeat(self._token, self.missed(), generation=self.newest.generation, ended=self.ended(),
                                          active_generation=self.view.generation, dropped=self.dropped(),
                                          overdue=self.overdue())
                pulse = self._channel.call("Heartbeat", beat, messages.HeartbeatReply, wait_s)
            except CommError as error:
                if self.reachable and not self._failed and not self._closing.is_set():
                    log.warning("%s; training continues, but while the coordinator does not answer, a peer that dies is "
                                "detected only when it stops responding",
                                without_code(error))
                self.reachable = False
                # A longer gap means that this process was stopped or waited for the GIL; only the usual interval counts as
                # silence.
                silent_s += min(time.monotonic() - mark, self._call_s + self._every_s)
                if silent_s >= self._dead_after_s and not self._closing.is_set():
                    self._on_silence(silent_s)
            else:
                if pulse.unknown_token and known:
                    log.warning("coordinator %s was restarted and has lost this job; training continues without failure "
                                "detection",
                                self._channel.address)
                elif not self.reachable and not self._failed:
                    log.warning("coordinator %s answers again", self._channel.address)
                self.reachable, silent_s = True, 0.0
                known = not pulse.unknown_token
                self._on_reply(pulse)
            mark = time.monotonic()
            if self._keeper is not None and not self._closing.is_set():
                self._keeper.check_running()
            self._closing.wait(max(0.0, self._every_s - (time.monotonic() - began)))

    def _on_reply(self, pulse: messages.HeartbeatReply) -> None:
        new = [departure for departure in pulse.departed if departure.peer not in self.left]
        self.left |= {departure.peer: departure for departure in new}
        if pulse.view is not None and pulse.view.generation > self.newest.generation:
            self.newest = pulse.view
            self.on_view(pulse.view)
        for departure in new:
            self._on_left(departure)
        if pulse.job_done:
            self.failed = pulse.job_failed
            self.over.set()
        failures = [PeerLost(departure.reason, peer=departure.peer) for departure in pulse.failed]
        # A peer that leaves with an error is a failure at once; one that has finished only if another process waits for it.
        unfinished = [departure for departure in pulse.departed
                      if departure.reason != messages.FINISHED and self.is_expected(departure.peer)]
        failures += [PeerLost(f"left the job: {departure.reason}", peer=departure.peer) for departure in unfinished]
        if pulse.dead:
            failures.insert(0, PeerLost(f"declared this {self.name} dead: {pulse.dead}",
                                    peer=f"coordinator {self._channel.address}"))
        if failures and not self._failed and not self._closing.is_set():
            self._failed = True
            self._on_failure(root_cause(failures))

    def is_expected(self, peer: str) -> bool:
        """Returns whether the peer is a server, or a worker of the newest epoch."""
        return not peer.startswith("worker ") or any(peer == f"worker {m.rank}" for m in self.newest.members)


def root_cause(lost: Sequence[CommError]) -> CommError:
    """Returns the failure, among several reported at once, that no other reported failure caused; the first one if all name
    another."""
    return next((one for one in lost if not any(messages.names(one.what, other.peer) for other in lost if other is not one)),
                lost[0])


def join(address: str, request: messages.Join, config: Config, on_failure: Callable[[CommError], None], *,
         deadline_s: float | None = None, ended: threading.Event | None = None, on_silence: OnSilence = lambda _: None,
         on_left: OnLeft = lambda *_: None, keep: bool = False) -> Membership:
    """Registers this process and waits until all processes have joined. `keep`: see Membership.

    Raises Refused with the coordinator's reason, and DeadlineExceeded if processes are missing or the coordinator does not
    answer. `deadline_s` (default: config.join_deadline_s) limits the wait for the other processes. The wait for the
    coordinator's answer is always limited by config.join_deadline_s. Setting `ended` stops the wait early; the event becomes
    Membership.over.
    """
    deadline_s = config.join_deadline_s if deadline_s is None else deadline_s
    answered_s = time.monotonic()
    deadline = answered_s + deadline_s
    ended = ended or threading.Event()
    check_name(address)
    keys = Keys(config.keys) if config.keys else None
    link = CoordinatorChannel(address, config.token, keys)
    missing, pause_s, wrong_clock = "", POLL_S[0], False
    # A plan may be large, and the request is repeated often.
    short = msgspec.structs.replace(request, plan=b"")
    known = keys is None  # whether the coordinator's certificate was checked against the revocation list, which gRPC ignores
    try:
        while not ended.is_set():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                link.leave_quietly(request.token, "other processes did not join in time")
                raise _join_timeout(address, missing, deadline_s)
            if time.monotonic() > answered_s + config.join_deadline_s:
                raise _join_timeout(address, "", config.join_deadline_s)
            if not known:
                known = link.verify_coordinator(min(CALL_S, max(0.001, left_s)))
                if not known:
                    ended.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
                    pause_s = min(2 * pause_s, POLL_S[1])
                    continue
            try:
                seat = link.call("Join", short, messages.JoinReply, min(CALL_S, left_s))
                if seat.plan_wanted:
                    link.send_plan(request.plan, min(CALL_S, left_s))
            except (PeerLost, DeadlineExceeded):
                # The coordinator may not be up yet, or the network is down: wait until the deadline. But a bad certificate,
                # which gRPC does not report, is an error at once.
                diagnose(address, keys, min(deadline, time.monotonic() + CHECK_S))
            else:
                if seat.error:
                    raise Refused(seat.error, peer=f"coordinator {address}")
                missing, answered_s = seat.missing, time.monotonic()
                wrong_clock = wrong_clock or _check_clock(seat.time_s, address)
                if seat.plan_wanted:
                    continue
                if seat.view is not None:
                    if messages.digest_of(seat.plan) != seat.view.plan:
                        raise CorruptFrame("sent a plan that does not match its digest", peer=f"coordinator {address}")
                    return Membership(link, request, seat, config, on_failure, ended, on_silence, on_left, keep=keep)
            ended.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, POLL_S[1])
        link.leave_quietly(request.token, "stopped while waiting")
        raise CommError("stopped while waiting for the others to join", peer=f"coordinator {address}")
    except BaseException:
        link.close()
        raise


def _check_clock(time_s: float, address: str) -> bool:
    """Logs a warning if this machine's clock differs by more than CLOCK_S from the coordinator's. Returns whether it does."""
    off_s = time.time() - time_s
    if abs(off_s) < CLOCK_S:
        return False
    log.warning("this machine's clock is %.1f hours %s compared with coordinator %s, so valid "
                "certificates may be rejected: synchronize it (timedatectl set-ntp true)",
                abs(off_s) / 3600, "fast" if off_s > 0 else "slow", address)
    return True


def _join_timeout(address: str, missing: str, deadline_s: float) -> DeadlineExceeded:
    peer = f"coordinator {address}"
    if not missing:
        return DeadlineExceeded(f"did not answer within {deadline_s:g} s: check that the coordinator is running at "
                                "this address", peer=peer)
    head, semicolon, tail = missing.partition(";")
    return DeadlineExceeded(f"{head} before the deadline of {deadline_s:g} s{semicolon}{tail}", peer=peer)


# ---- The channel to the coordinator: mutually authenticated calls, plans in parts. Errors are CommErrors with its address.

log = logging.getLogger("commlayer")

PARTS_IN_FLIGHT = 8
"""How many chunks of a plan are sent concurrently, so uploading to a distant coordinator takes few round trips."""
RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
"""gRPC status codes after which a call is retried: the coordinator is not up yet, is overloaded, or was stopped while it
answered."""
CHANNEL_CLOSE_S = 1.0
"""How long close() waits for gRPC's thread that watches a channel. The thread polls every 0.2 s."""
RESOLVE_S = 5.0
RETRY_S = 0.25
R = TypeVar("R", bound=Record)


def check_name(address: str) -> None:
    """Raises CommError if the host name in this address cannot be resolved within RESOLVE_S.

    The lookup is repeated until then, because the name of a container exists only after the container has started. If a proxy
    is configured nothing is checked, since the proxy resolves names.
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
        raise CommError(f"its host name {host!r} cannot be resolved ({why[0]}): correct the address, or use an IP address",
                        peer=f"coordinator {address}", code="E-ADDRESS")


def channel_options(address: str) -> list[tuple[str, Any]]:
    """Returns the gRPC options of a channel to that coordinator."""
    host, _ = settings.host_port(address)
    arguments: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MAX_REPLY_NBYTES), ("grpc.max_send_message_length", MAX_NBYTES),
        ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000),
    ]
    if settings.is_loopback(host):
        arguments.append(("grpc.enable_http_proxy", 0))
    return arguments


def tls_credentials(keys: Keys | None) -> TlsCredentials | None:
    if keys is None:
        return None
    return TlsCredentials(keys.ca.decode(), keys.certificate.decode(), keys.key.decode(), NAMED)


def fingerprint(keys: Keys | None) -> bytes:
    """Returns the fingerprint of this node's certificate, to which its proofs of the secret are bound; b"" without keys."""
    return keys.own.fingerprint if keys else b""


class CoordinatorChannel:
    """A channel to one coordinator, authenticated with the job's secret, and encrypted with TLS if keys are given."""

    def __init__(self, address: str, secret: str = "", keys: Keys | None = None, *, own: bool = False) -> None:
        """Opens the channel. `own`: uses a connection that no other channel of this process shares."""
        self.address, self.secret, self.keys = address, secret, keys
        apart = [("grpc.use_local_subchannel_pool", 1)] if own else []
        self._channel = open_channel(address, channel_options(address) + apart, tls_credentials(keys))
        self._asker = CallAuthenticator(secret, self._send, _unproved, fingerprint(keys))
        self._seen: PeerCertificate | None = None
        self._connected, self._times, self._looked = False, 0, 0
        if keys is not None:
            self._channel.subscribe(self._changed)

    def _changed(self, state: Any) -> None:
        """Counts reconnects. gRPC reconnects by itself and then checks only the CA, so the coordinator's certificate must be
        checked again."""
        ready = state is grpc.ChannelConnectivity.READY
        self._times += self._connected and not ready
        self._connected = ready

    def verify_coordinator(self, timeout_s: float) -> bool:
        """Checks the coordinator's certificate over a separate connection. Returns whether the coordinator answered. Raises
        Refused if the certificate is not of this job or was revoked."""
        # `times` is read first: if the connection is lost during the check, the next call checks again. After a refusal
        # `_looked` stays -1, so every call is refused.
        times = self._times
        self._looked = -1
        self._seen = certificate = diagnose(self.address, self.keys, time.monotonic() + timeout_s)
        if certificate is not None:
            self._looked = times
        return certificate is not None

    def _check_certificate(self, timeout_s: float) -> None:
        peer = f"coordinator {self.address}"
        if self._looked != self._times and not self.verify_coordinator(timeout_s):
            raise PeerLost("not reachable: no answer to a connection that checks its certificate", peer=peer)
        if self.keys is not None and self._seen is not None and self._seen.serial in self.keys.revoked():
            raise Refused(f"its certificate ({self._seen.name}) was revoked", peer=peer, code="E-CERTIFICATE-REVOKED")

    def _send(self, method: str, data: bytes, timeout_s: float) -> bytes:
        answer: bytes = self._channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=timeout_s)
        return answer

    def call(self, method: str, request: Record, kind: type[R], timeout_s: float) -> R:
        peer = f"coordinator {self.address}"
        self._check_certificate(timeout_s)
        try:
            reply = self._asker.ask(method, messages.pack(request), timeout_s)
        except AuthenticationFailed:
            raise Refused(wrong_secret(self.secret), peer=peer, code="E-SECRET") from None
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(f"no answer within {timeout_s:.1f} s", peer=peer) from None
            if code in RETRYABLE:
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
            part = messages.PlanPart(digest, len(plan), begin, plan[begin : begin + PART_NBYTES])
            self.call("PlanPart", part, messages.HeartbeatReply, timeout_s)

        with futures.ThreadPoolExecutor(PARTS_IN_FLIGHT, "commlayer-plan") as pool:
            for _ in pool.map(send, range(0, len(plan), PART_NBYTES)):
                pass

    def leave_quietly(self, token: str, reason: str) -> None:
        """Removes a registration after this process has stopped waiting for the job to begin. If the call fails, the
        coordinator removes the registration after missing heartbeats."""
        try:
            self.call("Leave", messages.Leave(token, reason), messages.HeartbeatReply, 1.0)
        except CommError as error:
            log.info("left the job, but could not notify the coordinator: %s", error)

    def close(self) -> None:
        if self.keys is not None:
            self._channel.unsubscribe(self._changed)
            # gRPC's thread raises an exception, which Python prints, if its channel is closed while it polls.
            watched, until = getattr(self._channel, "_connectivity_state", None), time.monotonic() + CHANNEL_CLOSE_S
            while getattr(watched, "polling", False) and time.monotonic() < until:
                time.sleep(0.005)
        self._channel.close()


def _unproved(error: Exception) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED


# ---- Diagnosis of a failed connection, which gRPC does not explain: certificates of either end, or the wrong port.

HANDSHAKE = b"\x16\x03"


def diagnose(address: str, keys: Keys | None, deadline: float, who: str = "") -> PeerCertificate | None:
    """Connects to the address in order to explain a failed connection. Raises Refused with the reason if either end rejects the
    other's certificate, if only one end uses TLS, or if the address is a data port.

    Returns the other end's certificate if there is no problem. Returns None without keys, or if there is no answer, which may
    be temporary.
    """
    where = who or f"coordinator {address}"
    try:
        sock = track(socket.create_connection(host_port(address), max(0.001, deadline - time.monotonic())))
    except OSError:
        return None
    good = None
    try:
        if keys is None:
            if not _expect_plain(sock, deadline):
                _refuse_data_port(address, deadline)
            return None
        tls = TlsSocket(sock, keys, CONTROL, server=False)
        close_channel(sock)
        sock = track(tls)
        good = tls.handshake(deadline)  # checks their certificate; what follows shows whether they accept ours
        tls.settimeout(max(0.001, deadline - time.monotonic()))
        first = bytearray(2 * MOST_NBYTES)
        n = tls.recv_into(first)  # the other end decides last: either gRPC sends its settings, or it refuses
        if why := reason_of(bytes(first[:n])):
            raise Refused(why)
    except Refused as error:
        raise error.located(peer=where) from None
    except (CommError, OSError):
        pass
    finally:
        close_channel(sock)
    return good


def _expect_plain(sock: socket.socket, deadline: float) -> bool:
    """Returns whether the peer sends anything. gRPC without TLS sends its settings. Raises Refused if the peer is a TLS server,
    which sends its part of a handshake."""
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    begin, answer = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        stranger.wrap_bio(answer, begin).do_handshake()
    first = b""
    with contextlib.suppress(OSError):
        sock.sendall(begin.read())
        first = sock.recv(len(HANDSHAKE))
    if first == HANDSHAKE:
        raise Refused("the server requires TLS: set keys (COMMLAYER_KEYS) to a folder that `commlayer keys add "
                      "NAME` made", code="E-TLS")
    return bool(first)


def _refuse_data_port(address: str, deadline: float) -> None:
    """Raises Refused if the address is a data port: only a data port answers the first handshake message with a frame."""
    body = msgspec.msgpack.encode(Hello("", 0, nonce=new_nonce()))
    with track(socket.create_connection(host_port(address), max(0.001, deadline - time.monotonic()))) as sock:
        sock.sendall(framing.encode(Header(Kind.HELLO), len(body), crc32c(body)) + body)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        if sock.recv(len(framing.MAGIC)) == framing.MAGIC:
            raise Refused("this is a data port, not the coordinator's port: check the port (`commlayer "
                          "serve` prints both; the data port is the coordinator's port plus 1)", code="E-ADDRESS")
