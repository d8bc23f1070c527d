"""Queries a coordinator for its status and time, and measures the connection. Does not register with its job."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec import structs

from commlayer.autotune.measure import link_rates
from commlayer.cluster import carriers, messages
from commlayer.cluster.coordinator_channel import CoordinatorChannel
from commlayer.cluster.messages import ABOUT_NBYTES, About, Told
from commlayer.cluster.tls_check import check
from commlayer.config import Config, host_port
from commlayer.doctor.network_facts import Reached, reach
from commlayer.errors import CommError, DeadlineExceeded, PeerLost
from commlayer.records import Record, ServerInfo
from commlayer.transport import tls
from commlayer.transport.key_folder import Keys

CALL_S = 3.0
PINGS = 4
FULL_NBYTES = 16 << 10
"""Several packets at any MTU, and a second at 128 kb/s."""
MOST_SERVERS = 8
"""The most servers to which connections are checked."""
WORKERS = 12
"""Concurrent calls while the link is measured."""


class Way(Record, frozen=True):
    """The connection to one summation server, as a worker would make it."""

    address: str
    tcp: Reached | None = None
    """The result of dialling TCP; None if the server takes gRPC streams only, or the local `carrier` setting excludes TCP."""
    streams_at: str = ""
    """The address for gRPC streams; empty if the server takes none."""
    streams: str = ""
    """Checked only if a worker would need gRPC streams: "open", or why they fail."""


class Server(Record, frozen=True):
    """`error`: why the query failed (`silent`: no answer at all); other fields are then unset. `clock_s`: seconds by which this
    machine's clock exceeds the server's, with error `clock_error_s`."""

    address: str
    error: str = ""
    said: Told | None = None
    version: str = ""
    protocol: int = 0
    wire: int = 0
    round_trip_s: float = 0.0
    clock_s: float = 0.0
    clock_error_s: float = 0.0
    full_up: str = ""
    full_down: str = ""
    """Why full-size packets do not pass in that direction; empty if they do."""
    ways: tuple[Way, ...] = ()
    """The connections to its summation servers."""
    carrier: str = "auto"
    """The local setting."""
    silent: bool = False


class Link(Record, frozen=True):
    """The link of this machine to the server. `error`: why it was not measured."""

    up_bps: float = 0.0
    down_bps: float = 0.0
    error: str = ""


def opened(config: Config) -> CoordinatorChannel:
    """Opens a channel. CommError or RecordError with the reason if it cannot be used."""
    keys = Keys(config.keys) if config.keys else None
    check(config.join, keys, time.monotonic() + CALL_S)
    return CoordinatorChannel(config.join, config.token, keys)


def server(config: Config, version: str, wire: int) -> Server:
    """`version` and `wire` are those of this machine."""
    mine = Server(config.join, version=version, protocol=messages.PROTOCOL, wire=wire)
    try:
        link = opened(config)
    except (CommError, ValueError) as error:
        return structs.replace(mine, error=str(error))
    try:
        status, round_trip_s, clock_s = _asked(link)
        up = _passes(link, About(data=secrets.token_bytes(FULL_NBYTES)))
        # A running job sends nothing down but its own data.
        down = "" if status.begun else _passes(link, About(wanted=FULL_NBYTES))
    except CommError as error:
        return structs.replace(mine, error=str(error), silent=isinstance(error, PeerLost | DeadlineExceeded))
    finally:
        link.close()
    with ThreadPoolExecutor(MOST_SERVERS, "doctor") as pool:
        ways = tuple(pool.map(lambda one: _way(one, config, link.keys), status.servers[:MOST_SERVERS]))
    return structs.replace(mine, said=status, round_trip_s=round_trip_s, clock_s=clock_s, clock_error_s=round_trip_s / 2,
                           full_up=up, full_down=down, ways=ways, carrier=config.carrier)


def _way(one: ServerInfo, config: Config, keys: Keys | None) -> Way:
    where, alone = carriers.streams_at(one, config.join), carriers.streams_alone(one, config.join)
    tcp = None if alone or config.carrier == "grpc" else dialled(one.address, keys, tls.DATA)
    needed = where and config.carrier != "tcp" and (tcp is None or tcp.answer != "open")
    return Way(one.address, tcp, where, _streams(where, keys) if needed else "")


def _streams(address: str, keys: Keys | None) -> str:
    deadline = time.monotonic() + CALL_S
    try:
        if keys is not None:
            check(address, keys, deadline, f"server {address}")
        carriers.stream_to(host_port(address), keys, deadline).close()
    except CommError as error:
        return error.what
    return "open"


def _asked(link: CoordinatorChannel) -> tuple[Told, float, float]:
    """Returns (status, round trip, clock difference) of the fastest of several calls, which bounds the clock most tightly."""
    status = link.call("About", About(), Told, CALL_S)  # the first call opens the connection
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        begin_s, begin = time.time(), time.monotonic()
        status = link.call("About", About(), Told, CALL_S)
        took_s = time.monotonic() - begin
        best = min(best, (took_s, begin_s + took_s / 2 - status.time_s))
    return status, *best


def _passes(link: CoordinatorChannel, request: About) -> str:
    try:
        link.call("About", request, Told, CALL_S)
    except CommError as error:
        return error.what
    return ""


def dialled(address: str, keys: Keys | None, protocol: str) -> Reached:
    """Dials an address, with a TLS handshake if there are keys. For a coordinator, `server` reports who it is."""

    def greet(sock: socket.socket) -> None:
        if keys is not None:
            with tls.TlsSocket(sock, keys, protocol, server=False) as channel:
                channel.handshake(time.monotonic() + CALL_S)

    try:
        return reach("server", *host_port(address), CALL_S, greet)
    except CommError as error:
        return Reached("server", address, "open" if protocol == tls.CONTROL else str(error))


def link(config: Config, round_trip_s: float, budget_s: float) -> Link:
    """Measures both directions, each for half of `budget_s`, over the control connection, which is as fast as the data's."""
    try:
        with contextlib.closing(opened(config)) as channel, ThreadPoolExecutor(WORKERS, "doctor") as pool:
            network = link_rates.Asking(lambda _, up, down, done: _ask(channel, pool, up, down, done))
            up_bps = link_rates.rate(network, link_rates.UP, [0], round_trip_s, budget_s / 2, CALL_S)
            down_bps = link_rates.rate(network, link_rates.DOWN, [0], round_trip_s, budget_s / 2, CALL_S, expected_bps=up_bps)
    except (CommError, ValueError) as error:
        return Link(error=str(error))
    return Link(up_bps, down_bps)


def _ask(made: CoordinatorChannel, pool: ThreadPoolExecutor, up: int, down: int,
         done: Callable[[Exception | None], None]) -> None:
    """Sends a probe, split into as many calls as needed."""
    each = max(1, -(-max(up, down) // ABOUT_NBYTES))
    left, lock = [each], threading.Lock()

    def call() -> None:
        error: Exception | None = None
        try:
            made.call("About", About(secrets.token_bytes(-(-up // each)), -(-down // each) if down > 1 else 0), Told, CALL_S)
        except CommError as failure:
            error = failure
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last or error is not None:
            done(error)

    for _ in range(each):
        pool.submit(call)
