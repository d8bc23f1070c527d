"""Client of the coordinator: a channel for calls, the registration of this process, and its heartbeats."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from commlayer import config as settings
from commlayer.cluster import child_processes, messages
from commlayer.cluster.messages import (
    MAX_EVENTS,
    MAX_EVENTS_NBYTES,
    MAX_NBYTES,
    MAX_PLAN_NBYTES,
    MAX_REPLY_NBYTES,
    PART_NBYTES,
    SERVICE,
    Heartbeat,
    HeartbeatReply,
    Join,
    JoinReply,
    PeerExit,
)
from commlayer.config import Config, host_port
from commlayer.errors import CommError, CorruptFrame, DeadlineExceeded, InvalidInput, PeerLost, Refused, without_code
from commlayer.observe.events import Batch, EventLog
from commlayer.records import Record, View
from commlayer.transport import framing
from commlayer.transport.connection import close_channel, track
from commlayer.transport.crc import crc32c
from commlayer.transport.grpc_library import grpc
from commlayer.transport.grpc_stream import TlsCredentials, open_channel
from commlayer.transport.handshake import Hello
from commlayer.transport.key_folder import SERVICE as NAMED
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import Header, Kind
from commlayer.transport.reconnect import Backoff
from commlayer.transport.secret import AuthenticationFailed, CallAuthenticator, new_nonce, wrong_secret
from commlayer.transport.tls import CONTROL, TlsSocket

log = logging.getLogger("commlayer")

CALL_S, MIN_CALL_S = 5.0, 0.05
"""Usual timeout of a call, and the shortest one that is left at the end of a wait, in seconds."""
MIN_BEAT_S = 2.0
"""Shortest timeout of a heartbeat, in seconds. On a new connection a heartbeat takes five round trips: TCP, TLS, a call whose
proof is too old, the new challenge, and the call. At a round trip of 150 ms two segments may be lost meanwhile."""
CHECK_S = 1.0
NAME_S = 5.0
"""Seconds for which a host name may be unresolvable before that is an error. The name of a container exists only after the
container has started."""
PROGRESS_S = 10.0
"""Seconds between two equal lines about a wait."""
RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
"""gRPC status codes after which a call is retried: the coordinator is not up yet, is overloaded, or was stopped while it
answered."""
ROUND_TRIPS = 16
"""Number of latest heartbeats whose shortest round-trip time is that of the link."""
LAST_EVENTS_S = 1.0
"""Timeout of the call with a leaving process's last events."""
CHANNEL_CLOSE_S = 1.0
"""How long close() waits for gRPC's thread that watches a channel. The thread polls every 0.2 s."""
OnSilence = Callable[[float], None]
"""Called after every failed heartbeat once the coordinator has not answered for dead_after_s, with the seconds since its last
answer."""
OnLeft = Callable[[PeerExit], None]
OnView = Callable[[View], None]
"""Function that is called with a newer epoch when the coordinator reports one. Only the members of that epoch continue."""
R = TypeVar("R", bound=Record)


# ---- The channel to the coordinator: mutually authenticated calls, plans in parts. Errors are CommErrors with its address.

def channel_options(address: str) -> list[tuple[str, Any]]:
    """Returns the gRPC options of a channel to that coordinator."""
    arguments: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MAX_REPLY_NBYTES), ("grpc.max_send_message_length", MAX_NBYTES),
        # After an interruption the connection is used again within a second or two, however long the interruption was. A
        # kernel that retransmits waits for half as long again: TCP_USER_TIMEOUT, which gRPC sets to the keepalive's timeout,
        # ends that connection. Attempts to connect, which gRPC would give 20 s, end soon for the same reason.
        ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", int(1000 * MIN_BEAT_S)),
        ("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", int(1000 * CALL_S)),
    ]
    return [*arguments, *([("grpc.enable_http_proxy", 0)] if settings.is_loopback(host_port(address)[0]) else [])]


def tls_credentials(keys: Keys | None) -> TlsCredentials | None:
    return None if keys is None else TlsCredentials(keys.ca.decode(), keys.certificate.decode(), keys.key.decode(), NAMED)


def fingerprint(keys: Keys | None) -> bytes:
    """Returns the fingerprint of this node's certificate; b"" without keys. Every proof that this node knows the job's secret
    covers the fingerprint."""
    return keys.own.fingerprint if keys else b""


class CoordinatorChannel:
    """A channel to one coordinator, authenticated with the job's secret, and encrypted with TLS if keys are given."""

    def __init__(self, address: str, secret: str = "", keys: Keys | None = None, *, own: bool = False) -> None:
        """Opens the channel. `own`: uses a connection that no other channel of this process shares."""
        self.address, self.secret, self.keys = address, secret, keys
        self.peer = f"coordinator {address}"
        apart = [("grpc.use_local_subchannel_pool", 1)] if own else []
        self._channel = open_channel(address, channel_options(address) + apart, tls_credentials(keys))
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
        answer: bytes = self._channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=timeout_s)
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
                 ended: threading.Event | None = None, log_wait: Callable[[str], None] = lambda _: None) -> JoinReply:
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
                    if reply.view is not None and messages.digest_of(reply.plan) != reply.view.plan:
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
        digest = messages.digest_of(plan)
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


def _unproved(error: Exception) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED


# ---- This process's membership.

class MembershipEvents(NamedTuple):
    """Functions that the heartbeat thread calls. `failure` is called at most once, with the first peer failure that the
    coordinator reports."""

    failure: Callable[[CommError], None]
    silence: OnSilence
    left: OnLeft


class HeartbeatReport:
    """What a process adds to its heartbeats. The worker's Uplink or the server's DataServer sets `fields`, a function that
    returns fields about data connections and sums. The session of a worker sets `events`, its newest events."""

    def __init__(self) -> None:
        self.fields: Callable[[], Mapping[str, Any]] = dict
        self.events = EventLog(most=0)
        self._sent = Batch((), 0)
        """The events of the last heartbeat."""
        self._acknowledged = 0
        """Number of the first event that the coordinator might not have."""
        self._round_trips_s: deque[float] = deque(maxlen=ROUND_TRIPS)

    @property
    def rtt_s(self) -> float:
        """The shortest round-trip time of recent heartbeats; 0: unknown."""
        return min(self._round_trips_s, default=0.0)

    def next(self) -> dict[str, Any]:
        """Returns the fields of the next heartbeat."""
        fields = dict(self.fields())
        self._sent = batch = self.events.since(self._acknowledged, most=MAX_EVENTS, most_nbytes=MAX_EVENTS_NBYTES)
        if batch.lines:
            fields |= {"events": batch.lines, "first_event": batch.cursor - len(batch.lines), "time_s": time.time()}
        return fields

    def answered(self, round_trip_s: float) -> None:
        """Called when the coordinator has answered the last heartbeat."""
        self._acknowledged = self._sent.cursor
        self._round_trips_s.append(round_trip_s)

    @property
    def unsent(self) -> bool:
        return bool(self.events.since(self._acknowledged, most=1).lines)


def beat_timeout_s(config: Config) -> float:
    """Returns the timeout of a heartbeat: another one fits into dead_after_s after one that got no answer. However long the
    coordinator has been silent, the timeout is long enough for a new connection, or no heartbeat would ever arrive again."""
    return max(MIN_BEAT_S, min(CALL_S, config.dead_after_s / 3))


class Membership:
    """This process's registration in the job.

    `keep`: True: a child process continues the heartbeats while this process's threads wait for the GIL (child_processes.py).
    """

    def __init__(self, link: CoordinatorChannel, request: Join, reply: JoinReply, config: Config,
                 events: MembershipEvents, ended: threading.Event, *, keep: bool) -> None:
        assert reply.view is not None
        self.view: View = reply.view
        """The epoch that this process has switched to."""
        self.newest: View = reply.view
        """The newest epoch that the coordinator has sent; this process may not have switched to it yet."""
        self.on_view: OnView = lambda _: None
        self.plan = reply.plan
        self.rank = reply.rank
        self.name = f"{request.kind} {reply.rank}"
        self.left: dict[str, PeerExit] = {}
        """Peers that left in order, by peer name. An orderly leave is a failure only if another process waits for that peer."""
        self.over = ended
        """Event that is set when every worker has left or died. A server may end then."""
        self.failed = False
        """True: the job ended before all of its last workers had finished."""
        self.remaining: tuple[str, ...] = ()
        """Names of workers that were still in the job when this process left."""
        self._channel, self._token, self._config, self._events = link, request.token, config, events
        self.reachable = True
        """Whether the coordinator answered the last heartbeat."""
        self.report = HeartbeatReport()
        self._closing = threading.Event()
        self._failed = False
        self._keeper = child_processes.start_sidecar({
            "address": link.address, "secret": link.secret, "keys": str(link.keys.folder) if link.keys else "",
            "token": self._token, "every_s": config.heartbeat_s, "call_s": beat_timeout_s(config)}) if keep else None
        self._thread = threading.Thread(target=self._beat, name="commlayer-heartbeat", daemon=True)
        self._thread.start()

    def leave(self, reason: str = messages.FINISHED, exchanges: int = -1) -> bool:
        """Leaves the job, then closes. `exchanges`: number of completed exchanges, -1 if unknown. Returns whether the
        coordinator was reached; an unreachable coordinator is not an error."""
        if self._closing.is_set():
            self.close()
            return False
        self._stop()
        if self.reachable and self.report.unsent:
            with contextlib.suppress(CommError):
                self._send_beat(LAST_EVENTS_S)
        # The coordinator counts a process as dead if its orderly leave is not delivered, so the call is retried.
        patience_s = self._config.dead_after_s if reason == messages.FINISHED and self.reachable else 0.0
        pulse = self._channel.leave(self._token, reason, exchanges, deadline=time.monotonic() + patience_s,
                                    timeout_s=beat_timeout_s(self._config))
        if pulse is not None:
            exits = {g.peer for g in (*pulse.failed, *pulse.departed)} | {self.name}
            self.remaining = tuple(f"worker {m.rank}" for m in self.view.members if f"worker {m.rank}" not in exits)
        self.close()
        return pulse is not None

    def close(self) -> None:
        """Stops the heartbeats without leaving, so the coordinator will detect this process as dead. Idempotent."""
        self._stop()
        if self._keeper is not None:
            self._keeper.close()
        self._channel.close()

    def _stop(self) -> None:
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * beat_timeout_s(self._config))

    def _send_beat(self, timeout_s: float) -> HeartbeatReply:
        beat = Heartbeat(self._token, generation=self.newest.generation, active_generation=self.view.generation,
                         **self.report.next())
        begin = time.monotonic()
        pulse = self._channel.call("Heartbeat", beat, HeartbeatReply, timeout_s)
        self.report.answered(time.monotonic() - begin)
        return pulse

    def _beat(self) -> None:
        known, silent_s, mark, timeout_s = True, 0.0, time.monotonic(), beat_timeout_s(self._config)
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                pulse = self._send_beat(timeout_s)
            except CommError as error:
                if self.reachable and not self._failed and not self._closing.is_set():
                    log.warning("%s; training continues, but while the coordinator does not answer, a peer that dies is "
                                "detected only when it stops responding", without_code(self._channel.explain(error)))
                self.reachable = False
                # A longer gap means that this process was stopped or waited for the GIL; only the usual interval counts as
                # silence.
                silent_s += min(time.monotonic() - mark, timeout_s + self._config.heartbeat_s)
                if silent_s >= self._config.dead_after_s and not self._closing.is_set():
                    self._events.silence(silent_s)
            else:
                if pulse.unknown_token and known:
                    log.warning("coordinator %s was restarted and has lost this job; training continues without failure "
                                "detection", self._channel.address)
                elif not self.reachable and not self._failed:
                    log.warning("coordinator %s answers again", self._channel.address)
                self.reachable, silent_s = True, 0.0
                known = not pulse.unknown_token
                self._on_reply(pulse)
            mark = time.monotonic()
            if self._keeper is not None and not self._closing.is_set():
                self._keeper.check_running()
            self._closing.wait(max(0.0, self._config.heartbeat_s - (time.monotonic() - began)))

    def _on_reply(self, pulse: HeartbeatReply) -> None:
        new = [departure for departure in pulse.departed if departure.peer not in self.left]
        self.left |= {departure.peer: departure for departure in new}
        if pulse.view is not None and pulse.view.generation > self.newest.generation:
            self.newest = pulse.view
            self.on_view(pulse.view)
        for departure in new:
            self._events.left(departure)
        if pulse.job_done:
            self.failed = pulse.job_failed
            self.over.set()
        failures = [PeerLost(departure.reason, peer=departure.peer) for departure in pulse.failed]
        # A peer that leaves with an error is a failure at once; one that has finished only if another process waits for it.
        unfinished = [departure for departure in pulse.departed
                      if departure.reason != messages.FINISHED and self.is_expected(departure.peer)]
        failures += [PeerLost(f"left the job: {departure.reason}", peer=departure.peer) for departure in unfinished]
        if pulse.dead:
            failures.insert(0, PeerLost(f"declared this {self.name} dead: {pulse.dead}", peer=self._channel.peer))
        if failures and not self._failed and not self._closing.is_set():
            self._failed = True
            self._events.failure(root_cause(failures))

    def is_expected(self, peer: str) -> bool:
        """Returns whether the peer is a server, or a worker of the newest epoch."""
        return not peer.startswith("worker ") or any(peer == f"worker {m.rank}" for m in self.newest.members)


def root_cause(lost: Sequence[CommError]) -> CommError:
    """Returns the root cause among failures that were reported together: the first failure that names none of the other failed
    peers. If every failure names another peer, returns the first one."""
    return next((one for one in lost if not any(messages.names(one.what, other.peer) for other in lost if other is not one)),
                lost[0])


def join(address: str, request: Join, config: Config, on_failure: Callable[[CommError], None], *,
         deadline_s: float | None = None, ended: threading.Event | None = None, on_silence: OnSilence = lambda _: None,
         on_left: OnLeft = lambda *_: None, keep: bool = False) -> Membership:
    """Registers this process and waits until all processes have joined: see CoordinatorChannel.register and Membership.

    `deadline_s` (default: config.join_deadline_s) limits the wait for the other processes. The wait for the coordinator's
    answer is always limited by config.join_deadline_s. The event `ended` becomes Membership.over.
    """
    ended = ended or threading.Event()
    link = CoordinatorChannel(address, config.token, Keys(config.keys) if config.keys else None)
    short = msgspec.structs.replace(request, plan=b"")  # a plan may be large, and the request is repeated often
    try:
        reply = link.register(lambda _: short, config.join_deadline_s if deadline_s is None else deadline_s,
                              config.join_deadline_s, plan=request.plan, ended=ended)
    except BaseException as error:
        if isinstance(error, CommError) and not isinstance(error, Refused):
            link.leave(request.token, "stopped waiting for the others")
        link.close()
        raise
    return Membership(link, request, reply, config, MembershipEvents(on_failure, on_silence, on_left), ended, keep=keep)


def sidecar_main() -> None:
    """Entry point of a heartbeat sidecar (child_processes.py). Its argument is the parent's process id; all other settings are
    one JSON line on standard input."""
    line = child_processes.read_line()
    if not line:
        return
    setup = json.loads(line)
    link = CoordinatorChannel(setup["address"], setup["secret"], Keys(setup["keys"]) if setup["keys"] else None)

    def send(state: Literal["", "stopped", "ended"]) -> None:
        with contextlib.suppress(CommError):  # the worker's own thread has the same error, and logs it
            link.call("Heartbeat", Heartbeat(setup["token"], parent=state), HeartbeatReply, setup["call_s"])

    child_processes.run_heartbeats(int(sys.argv[1]), send, setup["every_s"])


# ---- Diagnosis of a failed connection, which gRPC does not explain: certificates of either end, or the wrong port.

HANDSHAKE = b"\x16\x03"


class Unresolved(Refused):
    """The host name of an address cannot be resolved."""


def diagnose(address: str, keys: Keys | None, deadline: float, who: str = "") -> None:
    """Connects to the address in order to explain a failed connection. Raises Refused with the reason if either end rejects the
    other's certificate, if only one end uses TLS, if the address is a data port, or if its host name cannot be resolved.

    Returns if there is no problem, or no answer, which may be temporary.
    """
    where = who or f"coordinator {address}"
    try:
        sock = track(socket.create_connection(host_port(address), max(0.001, deadline - time.monotonic())))
    except socket.gaierror as error:
        # Temporary if there is no name service yet, as after a power cut. A proxy, if there is one, resolves names.
        if error.errno == socket.EAI_AGAIN or settings.has_proxy():
            return
        raise Unresolved(f"its host name {host_port(address)[0]!r} cannot be resolved ({error.strerror}): correct the address, "
                         "or use an IP address", peer=where, code="E-ADDRESS") from None
    except OSError:
        return
    try:
        if keys is None:
            if not _expect_plain(sock, deadline):
                _refuse_data_port(address, deadline)
            return
        tls = TlsSocket(sock, keys, CONTROL, server=False)
        close_channel(sock)
        sock = track(tls)
        tls.handshake(deadline)  # checks their certificate; what follows shows whether they accept ours
        tls.settimeout(max(0.001, deadline - time.monotonic()))
        tls.recv_into(bytearray(1))  # the other end decides last: either gRPC sends its settings, or it refuses
    except Refused as error:
        raise error.located(peer=where) from None
    except (CommError, OSError):
        pass
    finally:
        close_channel(sock)


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
