"""Checks a coordinator and the connection to it, without registering with its job."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from msgspec import structs

from commlayer.autotune.measure import link_rates
from commlayer.cluster import messages, uplink
from commlayer.cluster.client import CoordinatorChannel, diagnose
from commlayer.cluster.messages import MAX_STATUS_NBYTES, StatusReply, StatusRequest
from commlayer.config import Config, host_port
from commlayer.doctor import network
from commlayer.doctor.network import Reached, dial
from commlayer.doctor.report import Finding, fail, of_error, ok, warn
from commlayer.doctor.security import PlanFile
from commlayer.errors import CommError, DeadlineExceeded, PeerLost
from commlayer.records import Record, ServerInfo
from commlayer.transport import tls
from commlayer.transport.key_folder import Keys

CLOCK_S, CLOCK_FAIL_S = 5.0, 3000.0
"""Certificates are valid from an hour before they are made: a clock that lags nearly as much fails with the next one."""
FAR_S = 0.3
SLOW_BPS = 2e6


def check_server(f: ServerFacts, *, keys: bool) -> Iterator[Finding]:
    if f.silent:
        yield fail("server", f"{f.address} does not answer as a coordinator",
                   "start `commlayer serve` there (it prints this address), then run this again")
        return
    if f.error or f.status is None:
        yield of_error("server", f"{f.address}: {f.error.removeprefix(f'coordinator {f.address}: ')}")
        return
    info = f.status
    intro = f"{f.address} coordinates, with commlayer {info.version}"
    both = (("version", f.version, info.version), ("control protocol", f.protocol, info.protocol),
            ("wire format", f.wire, info.wire))
    differ = [what for what, mine, its in both if mine != its]
    if differ:
        yield fail("server", f"{intro}; here it is {f.version}: other {' and '.join(differ)}",
                   "install the same version on all machines")
    elif info.begun and info.free_seats:
        yield ok("server",
                 f"{intro}: its job is running; {info.free_seats} of its {info.workers} places are free (commlayer launch)")
    elif info.begun and info.full:
        yield warn("server", f"{intro}: its job is running with all {info.workers} workers",
                   "wait until a worker has left; a lost worker keeps its place for reconnect_s")
    elif info.begun:
        yield warn("server", f"{intro}: its job is running with {info.workers} workers",
                   f"it admits no more workers ({info.closed_reason}): wait for its end, or start another job")
    else:
        of = f"{info.seated} of {info.workers} workers" if info.workers else f"{info.seated} workers"
        yield ok("server", f"{intro}: {of} and {len(info.servers)} server{'s' if len(info.servers) != 1 else ''} are connected")
    yield from _carriers(f)
    yield _clock(f, keys)
    yield _round_trip(f)
    yield _full(f)


def _carriers(f: ServerFacts) -> Iterator[Finding]:
    """Checks the transport that gradients would use to each server."""
    for path in f.paths:
        if path.tcp is not None and path.tcp.answer == "open":
            yield ok("carrier", f"TCP to {path.tcp.what} {path.address}")
        elif path.streams == "open" and path.tcp is None:
            yield ok("carrier", f"gRPC streams at {path.streams_at}")
        elif path.streams == "open":
            yield warn("carrier", f"gRPC streams at {path.streams_at}, since TCP to server {path.address} is blocked",
                       "open that port: TCP costs less, and the start waits 5 s for it")
        elif path.tcp is not None:
            yield from network.check_reachable(path.tcp)
        elif path.streams:
            yield of_error("carrier", path.streams)
        else:
            takes = "accepts gRPC streams only" if path.streams_at else "accepts no gRPC streams"
            yield fail("carrier", f"server {path.address} {takes}, and carrier is \"{f.carrier}\" here",
                       "use the same carrier setting on server and workers, or leave it out")


def _clock(f: ServerFacts, keys: bool) -> Finding:
    off = abs(f.clock_s)
    side = "ahead of" if f.clock_s > 0 else "behind"
    if off - f.clock_error_s < CLOCK_S:
        return ok("clock", f"within {max(off, f.clock_error_s, 0.001):.3g} s of the server's")
    line = f"{duration_text(off)} {side} the server's"
    remedy = "synchronize it with a time server: timedatectl set-ntp true"
    if keys and off > CLOCK_FAIL_S:
        return fail("clock", f"{line}; certificates depend on the clock", remedy)
    return warn("clock", f"{line}; log times will not match", remedy)


def _round_trip(f: ServerFacts) -> Finding:
    line = f"{1e3 * f.round_trip_s:.3g} ms round trip to the server"
    if f.round_trip_s > FAR_S:
        return warn("latency", line, "use a server nearer to all workers: each step waits for at least one round trip")
    return ok("latency", line)


def _full(f: ServerFacts) -> Finding:
    directions = [side for side, why in (("to", f.full_up), ("from", f.full_down)) if why]
    if not directions:
        return ok("packets", "full-size packets pass both ways" if f.status and not f.status.begun
                  else "full-size packets pass to the server")
    return fail("packets", f"small packets pass, full-size packets {' and '.join(directions)} the server do not",
                "a link on the path has a smaller MTU and does not report it: ip link set dev INTERFACE mtu 1280 on both ends")


def check_link(f: LinkFacts) -> Iterator[Finding]:
    if f.error:
        yield warn("link", f"not measured: {f.error}", "start the job later, or use --no-bandwidth")
    elif min(f.up_bps, f.down_bps) < SLOW_BPS:
        yield warn("link", f"{rate_text(f.up_bps)} up, {rate_text(f.down_bps)} down",
                   "stop other traffic; `commlayer plan whatif` shows what this link allows")
    else:
        yield ok("link", f"{rate_text(f.up_bps)} up, {rate_text(f.down_bps)} down")


def check_same_plan(mine: PlanFile | None, f: ServerFacts) -> Iterator[Finding]:
    """Checks that the local plan file equals the job's."""
    if mine and mine.digest and f.status and f.status.plan and f.status.plan != mine.digest:
        yield fail("plan", f"hash {mine.digest} here, {f.status.plan} at the server", "give all workers the same plan file")


def rate_text(bps: float) -> str:
    """
    >>> rate_text(94.1e6), rate_text(3.2e9), rate_text(800e3)
    ('94 Mb/s', '3.2 Gb/s', '0.8 Mb/s')
    """
    if bps >= 1e9:
        return f"{bps / 1e9:.2g} Gb/s"
    return f"{bps / 1e6:.0f} Mb/s" if bps >= 10e6 else f"{bps / 1e6:.1f} Mb/s"


def duration_text(seconds: float) -> str:
    """
    >>> duration_text(7.2), duration_text(600), duration_text(7300), duration_text(3 * 86400)
    ('7 s', '10 minutes', '2.0 hours', '3.0 days')
    """
    for unit, of, digits in (("days", 86400.0, 1), ("hours", 3600.0, 1), ("minutes", 60.0, 0)):
        if seconds >= 1.5 * of:
            return f"{seconds / of:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


CALL_S = 3.0
PINGS = 4
FULL_NBYTES = 16 << 10
"""Several packets at any MTU, and a second at 128 kb/s."""
MOST_SERVERS = 8
"""The most servers to which connections are checked."""
WORKERS = 12
"""Concurrent calls while the link is measured."""


class DialedServer(Record, frozen=True):
    """The connection to one summation server, as a worker would make it."""

    address: str
    tcp: Reached | None = None
    """The result of dialling TCP; None if the server takes gRPC streams only, or the local `carrier` setting excludes TCP."""
    streams_at: str = ""
    """The address for gRPC streams; empty if the server takes none."""
    streams: str = ""
    """Checked only if a worker would need gRPC streams: "open", or why they fail."""


class ServerFacts(Record, frozen=True):
    """`error`: why the query failed (`silent`: no answer at all); other fields are then unset. `clock_s`: seconds by which this
    machine's clock exceeds the server's, with error `clock_error_s`."""

    address: str
    error: str = ""
    status: StatusReply | None = None
    version: str = ""
    protocol: int = 0
    wire: int = 0
    round_trip_s: float = 0.0
    clock_s: float = 0.0
    clock_error_s: float = 0.0
    full_up: str = ""
    full_down: str = ""
    """Why full-size packets do not pass in that direction; empty if they do."""
    paths: tuple[DialedServer, ...] = ()
    """The connections to its summation servers."""
    carrier: str = "auto"
    """The local setting."""
    silent: bool = False


class LinkFacts(Record, frozen=True):
    """The link of this machine to the server. `error`: why it was not measured."""

    up_bps: float = 0.0
    down_bps: float = 0.0
    error: str = ""


def open_channel(config: Config) -> CoordinatorChannel:
    """Raises CommError or RecordError if the coordinator cannot be reached or refuses."""
    keys = Keys(config.keys) if config.keys else None
    diagnose(config.join, keys, time.monotonic() + CALL_S)
    return CoordinatorChannel(config.join, config.token, keys)


def query_server(config: Config, version: str, wire: int) -> ServerFacts:
    """`version` and `wire` are those of this machine."""
    mine = ServerFacts(config.join, version=version, protocol=messages.PROTOCOL, wire=wire)
    try:
        link = open_channel(config)
    except (CommError, ValueError) as error:
        return structs.replace(mine, error=str(error))
    try:
        status, round_trip_s, clock_s = _query_status(link)
        up = _passes(link, StatusRequest(data=secrets.token_bytes(FULL_NBYTES)))
        # A running job sends nothing down but its own data.
        down = "" if status.begun else _passes(link, StatusRequest(wanted=FULL_NBYTES))
    except CommError as error:
        return structs.replace(mine, error=str(error), silent=isinstance(error, PeerLost | DeadlineExceeded))
    finally:
        link.close()
    with ThreadPoolExecutor(MOST_SERVERS, "doctor") as pool:
        paths = tuple(pool.map(lambda one: _path(one, config, link.keys), status.servers[:MOST_SERVERS]))
    return structs.replace(mine, status=status, round_trip_s=round_trip_s, clock_s=clock_s, clock_error_s=round_trip_s / 2,
                           full_up=up, full_down=down, paths=paths, carrier=config.carrier)


def _path(one: ServerInfo, config: Config, keys: Keys | None) -> DialedServer:
    where, alone = uplink.streams_at(one, config.join), uplink.only_streams(one, config.join)
    tcp = None if alone or config.carrier == "grpc" else dial_tls(one.address, keys, tls.DATA)
    needed = where and config.carrier != "tcp" and (tcp is None or tcp.answer != "open")
    return DialedServer(one.address, tcp, where, _streams(where, keys) if needed else "")


def _streams(address: str, keys: Keys | None) -> str:
    deadline = time.monotonic() + CALL_S
    try:
        if keys is not None:
            diagnose(address, keys, deadline, f"server {address}")
        uplink.open_stream(host_port(address), keys, deadline).close()
    except CommError as error:
        return error.what
    return "open"


def _query_status(link: CoordinatorChannel) -> tuple[StatusReply, float, float]:
    """Returns (status, round trip, clock difference) of the fastest of several calls, which bounds the clock most tightly."""
    status = link.call("Status", StatusRequest(), StatusReply, CALL_S)  # the first call opens the connection
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        begin_s, begin = time.time(), time.monotonic()
        status = link.call("Status", StatusRequest(), StatusReply, CALL_S)
        took_s = time.monotonic() - begin
        best = min(best, (took_s, begin_s + took_s / 2 - status.time_s))
    return status, *best


def _passes(link: CoordinatorChannel, request: StatusRequest) -> str:
    try:
        link.call("Status", request, StatusReply, CALL_S)
    except CommError as error:
        return error.what
    return ""


def dial_tls(address: str, keys: Keys | None, protocol: str) -> Reached:
    """Dials an address, with a TLS handshake if there are keys. For a coordinator, `server` reports who it is."""

    def greet(sock: socket.socket) -> None:
        if keys is not None:
            with tls.TlsSocket(sock, keys, protocol, server=False) as channel:
                channel.handshake(time.monotonic() + CALL_S)

    try:
        return dial("server", *host_port(address), CALL_S, greet)
    except CommError as error:
        return Reached("server", address, "open" if protocol == tls.CONTROL else str(error))


def measure_link(config: Config, round_trip_s: float, budget_s: float) -> LinkFacts:
    """Measures both directions, each for half of `budget_s`, over the control connection, which is as fast as the data's."""
    try:
        with contextlib.closing(open_channel(config)) as channel, ThreadPoolExecutor(WORKERS, "doctor") as pool:
            network = link_rates.RequestNetwork(lambda _, up, down, done: _probe(channel, pool, up, down, done))
            up_bps = link_rates.rate(network, link_rates.UP, [0], round_trip_s, budget_s / 2, CALL_S)
            down_bps = link_rates.rate(network, link_rates.DOWN, [0], round_trip_s, budget_s / 2, CALL_S, expected_bps=up_bps)
    except (CommError, ValueError) as error:
        return LinkFacts(error=str(error))
    return LinkFacts(up_bps, down_bps)


def _probe(channel: CoordinatorChannel, pool: ThreadPoolExecutor, up: int, down: int,
         done: Callable[[Exception | None], None]) -> None:
    """Sends a probe, split into as many calls as needed."""
    each = max(1, -(-max(up, down) // MAX_STATUS_NBYTES))
    left, lock = [each], threading.Lock()

    def call() -> None:
        error: Exception | None = None
        try:
            channel.call("Status", StatusRequest(secrets.token_bytes(-(-up // each)), -(-down // each) if down > 1 else 0),
                         StatusReply, CALL_S)
        except CommError as failure:
            error = failure
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last or error is not None:
            done(error)

    for _ in range(each):
        pool.submit(call)
