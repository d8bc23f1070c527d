"""Checks a coordinator and the connection to it, without registering as a member of its job."""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from commlayer.autotune.measure import link_rates
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.coordinator_channel import CoordinatorChannel, connect
from commlayer.cluster.calls.diagnosis import diagnose
from commlayer.cluster.calls.messages import MAX_STATUS_NBYTES, StatusReply, StatusRequest
from commlayer.cluster.servers import dialing
from commlayer.config import Config, host_port, is_loopback
from commlayer.doctor.findings import Finding, fail, failure_from_error, judge, ok, warn
from commlayer.doctor.network import check_idle, dial, restarts_idle
from commlayer.errors import CommError, DeadlineExceeded, PeerLost, RecordError
from commlayer.records import ServerInfo
from commlayer.transport import framing, own_address
from commlayer.transport.keys import tls
from commlayer.transport.keys.key_folder import Keys

CLOCK_S, CLOCK_FAIL_S = 5.0, 3000.0
"""Clock differences in seconds for a warning and a failure. Certificates are valid from one hour before their creation: a clock
that is almost an hour slow rejects new ones."""
FAR_S = 0.3
SLOW_BPS = 2e6
CALL_S = 3.0
PINGS = 4
FULL_NBYTES = 16 << 10
"""Bytes of a probe that needs several full-size packets at any MTU; a second at 128 kb/s."""
MOST_SERVERS = 8
"""Maximum number of servers whose connections are checked."""
WORKERS = 12
"""Number of concurrent calls while the link is measured."""


class ServerCheck:
    """Checks one coordinator. `status` is its last reply. The value is None until the server has answered."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.status: StatusReply | None = None
        self.round_trip_s = 0.0

    def run(self, plan: str) -> Iterator[Finding]:
        """Runs all checks except the link's rate. `plan`: digest of the local plan file, empty without one."""
        config = self._config
        try:
            with contextlib.closing(connect(config, CALL_S)) as channel:
                status, round_trip_s, ahead_s = _query(channel)
                blocked = _blocked_directions(channel, status)
                keys = channel.keys
        except (PeerLost, DeadlineExceeded) as error:
            yield fail("server", f"{config.join} does not answer as a coordinator: {error.what}",
                       "start `commlayer serve` on that machine (it prints this address), then run this again")
            return
        except (CommError, ValueError) as error:
            yield failure_from_error("server", f"{config.join}: {str(error).removeprefix(f'coordinator {config.join}: ')}")
            return
        self.status, self.round_trip_s = status, round_trip_s
        yield check_status(config.join, status)
        forwarded = is_forwarded(config.join, own_address.address_to(host_port(config.join)[0]), status)
        if forwarded:
            yield check_tunnel(config.join, status, _connect_s(config.join), round_trip_s)
        with ThreadPoolExecutor(MOST_SERVERS, "doctor") as pool:
            yield from pool.map(lambda one: check_connection(one, config, keys, forwarded=forwarded),
                                status.servers[:MOST_SERVERS])
        yield check_clock(ahead_s, round_trip_s / 2, keys=bool(config.keys))
        yield judge("latency", f"{1e3 * round_trip_s:.3g} ms round trip to the server",
                    "use a server nearer to all workers: each step waits for at least one round trip",
                    doubtful=round_trip_s > FAR_S, round_trip_s=round_trip_s)
        yield judge("packets", f"full-size packets {' and '.join(blocked)} the server are lost" if blocked else
                    f"full-size packets pass {'to the server' if status.begun else 'both ways'}",
                    "a link on the path has a smaller MTU and does not report it: ip link set dev INTERFACE mtu 1280 on both"
                    " ends", failed=bool(blocked))
        if plan and status.plan and status.plan != plan:
            yield fail("plan", f"hash {plan} on this machine, {status.plan} at the server",
                       "give all workers the same plan file")

    def link(self, budget_s: float) -> Iterator[Finding]:
        """Measures both directions, each for half of `budget_s`, over the control connection, which is as fast as a data
        connection."""
        if self.status is not None and self.status.begun:
            yield warn("link", "not measured: the server is running a job", "measure before the job starts")
            return
        try:
            with contextlib.closing(connect(self._config, CALL_S)) as channel, ThreadPoolExecutor(WORKERS, "doctor") as pool:
                network = link_rates.RequestNetwork(lambda _, up, down, done: _probe(channel, pool, up, down, done))
                round_trip_s, each_s = self.round_trip_s, budget_s / 2
                up_bps = link_rates.rate(network, link_rates.UP, [0], round_trip_s, each_s, CALL_S)
                down_bps = link_rates.rate(network, link_rates.DOWN, [0], round_trip_s, each_s, CALL_S, expected_bps=up_bps)
        except (CommError, ValueError) as error:
            yield warn("link", f"not measured: {error}", "run this again")
            return
        yield judge("link", f"{rate_text(up_bps)} up, {rate_text(down_bps)} down",
                    "stop other traffic; `commlayer plan whatif` shows what this link allows",
                    doubtful=min(up_bps, down_bps) < SLOW_BPS, up_bps=up_bps, down_bps=down_bps)
        yield from check_idle(min(up_bps, down_bps), restarts=restarts_idle())


def check_status(address: str, status: StatusReply) -> Finding:
    intro, workers = f"coordinator at {address} has commlayer {status.version}", status.workers
    versions = (("version", messages.version(), status.version), ("control protocol", messages.PROTOCOL, status.protocol),
                ("wire format", framing.VERSION, status.wire))
    differ = [what for what, own, other in versions if own != other]
    if differ:
        return fail("server", f"{intro}, this machine has {messages.version()}; different: {' and '.join(differ)}",
                    "install the same version on all machines")
    if not status.begun:
        of = f" of at least {status.min_workers}" if status.min_workers else f" of {workers}" if workers else ""
        return ok("server", f"{intro}: {status.seated}{of} workers and "
                  f"{len(status.servers)} server{'s' if len(status.servers) != 1 else ''} are connected")
    if status.free_seats:
        return ok("server",
                  f"{intro}: its job is running; {status.free_seats} of its {workers} places are free (commlayer join)")
    return warn("server", f"{intro}: its job is running with {workers} workers",
                "wait until a worker has left; a lost worker keeps its place for reconnect_s" if status.full else
                f"it admits no more workers ({status.closed_reason}): wait for its end, or start another job")


def is_forwarded(address: str, own: str, status: StatusReply) -> bool:
    """Returns whether a program forwards the connections to the coordinator at `address`, as far as the addresses at both ends
    show it. `own`: this machine's address on the route there. A router that translates addresses does not count."""
    near, seen = is_loopback(own), is_loopback(_strip_port(status.caller))
    return bool(own and status.caller) and (near != seen or (near and host_port(address)[1] != status.port))


def check_tunnel(address: str, status: StatusReply, connect_s: float, round_trip_s: float) -> Finding:
    """`connect_s`: see `_connect_s`."""
    accepts = f"{address} accepts them in {1e3 * connect_s:.3g} ms, and " if math.isfinite(connect_s) else ""
    return ok("tunnel",
              f"a program forwards connections to the server, which sees this machine as {_strip_port(status.caller)}; "
              f"{accepts}the server answers in {1e3 * round_trip_s:.3g} ms",
              round_trip_s=round_trip_s, **({"connect_s": connect_s} if accepts else {}))


def _strip_port(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _connect_s(address: str) -> float:
    """Returns the time until the address has accepted a connection; nan if it has not."""
    begin = time.monotonic()
    return math.nan if dial(*host_port(address), CALL_S) else time.monotonic() - begin


def check_clock(ahead_s: float, error_s: float, *, keys: bool) -> Finding:
    """Checks the clock. `ahead_s`: seconds by which this clock is ahead of the server's. `keys`: True if the job uses
    certificates, whose validity depends on the clock."""
    off_s = abs(ahead_s)
    if off_s - error_s < CLOCK_S:
        return ok("clock", f"within {max(off_s, error_s, 0.001):.3g} s of the server's")
    return judge("clock", f"{clock_text(ahead_s)} the server's", "synchronize it with a time server: timedatectl set-ntp true",
                 doubtful=True, failed=keys and off_s > CLOCK_FAIL_S)


def check_connection(server: ServerInfo, config: Config, keys: Keys | None, *, forwarded: bool = False) -> Finding:
    """Checks the connection for gradients to a summation server, with the transport protocol that a worker would use.
    `forwarded`: see `is_forwarded`."""
    streams = dialing.streams_at(server, config.join)
    tcp = config.carrier != "grpc" and not dialing.only_streams(server, config.join)
    problem = dial_tls(server.address, keys, tls.DATA) if tcp else ""
    if tcp and not problem:
        return ok("carrier", f"TCP to server {server.address}")
    if streams and config.carrier != "tcp":
        error = dial_streams(streams, keys)
        if not error:
            blocked = f", since TCP to server {server.address} is blocked" if tcp else ""
            remedy = f"start the server with --advertise {config.join}: its homes then use this one port at once" \
                if forwarded else "open that port: TCP costs less, and each start waits 5 s for TCP"
            return judge("carrier", f"gRPC streams at {streams}{blocked}", remedy, doubtful=tcp)
        problem = problem or error
    if problem:
        return failure_from_error("carrier", f"server {server.address} {problem}")
    offer = "accepts gRPC streams only" if streams else "accepts no gRPC streams"
    return fail("carrier", f"server {server.address} {offer}, but the setting carrier is \"{config.carrier}\"",
                "use the same carrier setting on server and workers, or remove the setting")


def dial_streams(address: str, keys: Keys | None) -> str:
    """Opens and closes a gRPC stream. Returns the error; "" if there is none."""
    deadline = time.monotonic() + CALL_S
    try:
        if keys is not None:
            diagnose(address, keys, deadline, f"server {address}")
        dialing.open_stream(host_port(address), keys, deadline).close()
    except CommError as error:
        return error.what
    return ""


def dial_tls(address: str, keys: Keys | None, protocol: str) -> str:
    """Connects to an address, with a TLS handshake if there are keys. A coordinator that refuses the handshake counts as
    reached, because the server check reports the reason."""

    def greet(sock: socket.socket) -> None:
        if keys is not None:
            with tls.TlsSocket(sock, keys, protocol, server=False) as channel:
                channel.handshake(time.monotonic() + CALL_S)

    try:
        return dial(*host_port(address), CALL_S, greet)
    except CommError as error:
        return "" if protocol == tls.CONTROL else str(error)


def dial_coordinator(config: Config) -> str:
    try:
        keys = Keys(config.keys) if config.keys else None
    except RecordError:
        keys = None  # the key check reports the error; the port check needs no keys
    return dial_tls(config.join, keys, tls.CONTROL)


def _query(channel: CoordinatorChannel) -> tuple[StatusReply, float, float]:
    """Queries the coordinator several times. Returns (status, round trip, clock difference) of the fastest call, whose clock
    difference is the most exact."""
    status = channel.call("Status", StatusRequest(), StatusReply, CALL_S)  # the first call opens the connection
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        begin_s, begin = time.time(), time.monotonic()
        status = channel.call("Status", StatusRequest(), StatusReply, CALL_S)
        elapsed_s = time.monotonic() - begin
        best = min(best, (elapsed_s, begin_s + elapsed_s / 2 - status.time_s))
    return status, *best


def _blocked_directions(channel: CoordinatorChannel, status: StatusReply) -> list[str]:
    """Directions ("to", "from" the server) in which full-size packets are lost. A running job's server sends no probe data, so
    only "to" is checked then."""
    requests = {"to": StatusRequest(data=secrets.token_bytes(FULL_NBYTES))}
    if not status.begun:
        requests["from"] = StatusRequest(wanted=FULL_NBYTES)
    blocked = []
    for direction, request in requests.items():
        try:
            channel.call("Status", request, StatusReply, CALL_S)
        except CommError:
            blocked.append(direction)
    return blocked


def _probe(channel: CoordinatorChannel, pool: ThreadPoolExecutor, up: int, down: int,
           done: Callable[[Exception | None], None]) -> None:
    """Sends a probe of `up` and `down` bytes, split into as many calls as needed."""
    calls = max(1, -(-max(up, down) // MAX_STATUS_NBYTES))
    left, lock = [calls], threading.Lock()
    request = StatusRequest(secrets.token_bytes(-(-up // calls)), -(-down // calls) if down > 1 else 0)

    def call() -> None:
        error: Exception | None = None
        try:
            channel.call("Status", request, StatusReply, CALL_S)
        except CommError as failure:
            error = failure
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last or error is not None:
            done(error)

    for _ in range(calls):
        pool.submit(call)


def rate_text(bps: float) -> str:
    """
    >>> rate_text(94.1e6), rate_text(3.2e9), rate_text(800e3)
    ('94 Mb/s', '3.2 Gb/s', '0.8 Mb/s')
    """
    return f"{bps / 1e9:.2g} Gb/s" if bps >= 1e9 else f"{bps / 1e6:.{0 if bps >= 10e6 else 1}f} Mb/s"


def clock_text(ahead_s: float) -> str:
    """
    >>> clock_text(7.2), clock_text(-7300)
    ('7 s ahead of', '2.0 hours behind')
    """
    off_s = abs(ahead_s)
    return f"{f'{off_s / 3600:.1f} hours' if off_s >= 5400 else f'{off_s:.0f} s'} {'ahead of' if ahead_s > 0 else 'behind'}"
