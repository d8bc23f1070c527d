"""Asks a coordinator who it is, what time it has, and how the way there is. Judges nothing; takes no seat in its job."""

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
"""Several packets of any size, and a second of a link of 128 kb/s."""
MOST_SERVERS = 8
"""Of which ways are looked at."""
WORKERS = 12
"""Calls under way at once while the link is measured."""


class Way(Record, frozen=True):
    """To one summation server, as a worker would take it."""

    address: str
    tcp: Reached | None = None
    """Dialled; None where that is not the way: it takes gRPC streams alone, or the setting here says so."""
    streams_at: str = ""
    """Where it takes gRPC streams; empty: nowhere."""
    streams: str = ""
    """Whether they get through, where a worker would have to do with them: "open", or why they do not."""


class Server(Record, frozen=True):
    """`error`: why it did not answer (`silent`: nobody did); then no more is known. `clock_s`: how far this machine's clock is
    ahead of its, and `clock_error_s` how wrong that may be."""

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
    """Why full-size packets do not pass that way; empty where they do."""
    ways: tuple[Way, ...] = ()
    """To its summation servers."""
    carrier: str = "auto"
    """As it is set here."""
    silent: bool = False


class Link(Record, frozen=True):
    """Of this machine to the server. `error`: why it was not measured."""

    up_bps: float = 0.0
    down_bps: float = 0.0
    error: str = ""


def opened(config: Config) -> CoordinatorChannel:
    """CommError or RecordError with the reason why it would not be any good."""
    keys = Keys(config.keys) if config.keys else None
    check(config.join, keys, time.monotonic() + CALL_S)
    return CoordinatorChannel(config.join, config.token, keys)


def server(config: Config, version: str, wire: int) -> Server:
    """`version` and `wire` are this machine's."""
    mine = Server(config.join, version=version, protocol=messages.PROTOCOL, wire=wire)
    try:
        link = opened(config)
    except (CommError, ValueError) as error:
        return structs.replace(mine, error=str(error))
    try:
        said, round_trip_s, clock_s = _asked(link)
        up = _passes(link, About(data=secrets.token_bytes(FULL_NBYTES)))
        # In a job that has begun nothing comes down but what is its own.
        down = "" if said.begun else _passes(link, About(wanted=FULL_NBYTES))
    except CommError as error:
        return structs.replace(mine, error=str(error), silent=isinstance(error, PeerLost | DeadlineExceeded))
    finally:
        link.close()
    with ThreadPoolExecutor(MOST_SERVERS, "doctor") as pool:
        ways = tuple(pool.map(lambda one: _way(one, config, link.keys), said.servers[:MOST_SERVERS]))
    return structs.replace(mine, said=said, round_trip_s=round_trip_s, clock_s=clock_s, clock_error_s=round_trip_s / 2,
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
    """The quickest answer tells most of the clock."""
    said = link.call("About", About(), Told, CALL_S)  # the first makes the connection
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        begin_s, begin = time.time(), time.monotonic()
        said = link.call("About", About(), Told, CALL_S)
        took_s = time.monotonic() - begin
        best = min(best, (took_s, begin_s + took_s / 2 - said.time_s))
    return said, *best


def _passes(link: CoordinatorChannel, request: About) -> str:
    try:
        link.call("About", request, Told, CALL_S)
    except CommError as error:
        return error.what
    return ""


def dialled(address: str, keys: Keys | None, protocol: str) -> Reached:
    """Where there are keys up to who answers, which of a coordinator `server` tells."""

    def greet(sock: socket.socket) -> None:
        if keys is not None:
            with tls.TlsSocket(sock, keys, protocol, server=False) as made:
                made.handshake(time.monotonic() + CALL_S)

    try:
        return reach("server", *host_port(address), CALL_S, greet)
    except CommError as error:
        return Reached("server", address, "open" if protocol == tls.CONTROL else str(error))


def link(config: Config, round_trip_s: float, budget_s: float) -> Link:
    """Both ways, each in about half of that time, over the control connection: what it carries, the data's will, too."""
    try:
        with contextlib.closing(opened(config)) as made, ThreadPoolExecutor(WORKERS, "doctor") as pool:
            network = link_rates.Asking(lambda _, up, down, done: _ask(made, pool, up, down, done))
            up_bps = link_rates.rate(network, link_rates.UP, [0], round_trip_s, budget_s / 2, CALL_S)
            down_bps = link_rates.rate(network, link_rates.DOWN, [0], round_trip_s, budget_s / 2, CALL_S, expected_bps=up_bps)
    except (CommError, ValueError) as error:
        return Link(error=str(error))
    return Link(up_bps, down_bps)


def _ask(made: CoordinatorChannel, pool: ThreadPoolExecutor, up: int, down: int,
         done: Callable[[Exception | None], None]) -> None:
    """A chunk in as many calls as it takes."""
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
