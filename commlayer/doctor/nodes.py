"""Compares nodes that run the doctor at the same time: versions, plans, clocks, and the links between them.

Nodes exchange their facts through a torch store. Each node then listens as a summation server without buckets, which answers
probes, and dials all others as a worker does: probes take the path of a job's data, with its keys, framing and pacing.
"""

from __future__ import annotations

import datetime
import math
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import msgspec

from commlayer.autotune.measure import link_rates
from commlayer.cluster.summation import Summation
from commlayer.cluster.summation_server import SumServer
from commlayer.config import Config, host_port, join_host
from commlayer.doctor import machine
from commlayer.doctor.report import Finding, fail, ok, warn
from commlayer.doctor.server import CLOCK_FAIL_S, CLOCK_S, duration_text, rate_text
from commlayer.errors import CommError, InvalidInput
from commlayer.records import Record
from commlayer.transport import secret
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key

LINKS_S, ROUND_S = 30.0, 3.0
"""Time limits for links that answer late, and for each round."""
UNEVEN = 4.0
"""A link this many times slower than the median alone sets the pace of collectives."""
JOB = "doctor"
HOST_WIDTH = 14
DIRECTION_S = 0.5
"""Measuring time per direction of a link."""
PATIENCE_S = 5.0
DIAL_S = 4.0


class NodeFacts(Record, frozen=True):
    """A node's description of itself. `plan`: the hash of its plan file, empty for none. `clock_s`: its time when it learned
    that all nodes had arrived, which is the same moment on all of them within a network delay."""

    host: str
    address: str
    version: str
    python: str
    torch: str
    plan: str = ""
    clock_s: float = 0.0
    token: str = ""
    """The secret for links, sent by node 0 if the job has none."""


class Pair(Record, frozen=True):
    """A measurement from node `a` to node `b`. `error`: why it failed."""

    a: int
    b: int
    up_bps: float = 0.0
    down_bps: float = 0.0
    round_trip_s: float = 0.0
    error: str = ""

    @property
    def slower_bps(self) -> float:
        return min(self.up_bps, self.down_bps)


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in as few rounds as possible. In a round each node is in at most one pair.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 1), (2, 3)], [(0, 2), (1, 3)]]
    """
    count = nodes - 1 + nodes % 2
    result: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for a in range(nodes):
        for b in range(a + 1, nodes):
            result[(a + b if b < count else 2 * a) % count].append((a, b))
    return result


def limit_s(nodes: int, join_deadline_s: float = 0.0) -> float:
    """The limit for the whole measurement: from a node's arrival, or with deadline 0 from the arrival of all nodes."""
    return join_deadline_s + LINKS_S + ROUND_S * len(rounds(nodes))


def check_alike(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Checks what must be equal on all ranks of a job: otherwise the job does not start."""
    rows = [
        ([node.version for node in nodes], "; links are not measured", "install the same version of commlayer on all machines"),
        ([f"torch {node.torch.partition('+')[0]}" for node in nodes], "", "install the same version of torch on all machines"),
        ([f"Python {node.python.rpartition('.')[0]}" for node in nodes], "", "use the same version of Python on all machines"),
        ([f"plan with hash {node.plan}" if node.plan else "no plan" for node in nodes], "",
         "give all nodes the same plan file"),
    ]
    differ = [(values, note, remedy) for values, note, remedy in rows if len(set(values)) > 1]
    for values, note, remedy in differ:
        yield fail("nodes", _differences(nodes, values) + note, remedy)
    if not differ:
        yield ok("nodes", f"the same versions{' and the same plan' if nodes[0].plan else ''} on all {len(nodes)}")


def _differences(nodes: Sequence[NodeFacts], values: Sequence[str]) -> str:
    """Lists differing values with their nodes, the rarest first."""
    by = {what: [number for number, each in enumerate(values) if each == what] for what in dict.fromkeys(values)}
    *few, (most, of) = sorted(by.items(), key=lambda row: len(row[1]))
    last = f"the {len(of)} others" if len(of) > 2 else _names(nodes, of)
    return ", ".join([*(f"{what} on {_names(nodes, numbers)}" for what, numbers in few), f"{most} on {last}"])


def _names(nodes: Sequence[NodeFacts], numbers: Sequence[int]) -> str:
    return " and ".join(f"node {number} ({nodes[number].host})" for number in numbers)


def check_clocks(nodes: Sequence[NodeFacts], *, keys: bool) -> Iterator[Finding]:
    """Compares clocks with the median one, so that the wrong ones are named. `keys`: certificates depend on the clocks."""
    clocks_s = [node.clock_s for node in nodes]
    middle = clocks_s.index(statistics.median_low(clocks_s))
    off_s = [clock_s - clocks_s[middle] for clock_s in clocks_s]
    wrong = [number for number, by_s in enumerate(off_s) if abs(by_s) >= CLOCK_S]
    if not wrong:
        yield ok("nodes", f"clocks within {max(*map(abs, off_s), 0.001):.3g} s of that of {_names(nodes, [middle])}")
        return
    each = [f"{_names(nodes, [number])} {duration_text(abs(off_s[number]))} {'ahead of' if off_s[number] > 0 else 'behind'}"
            for number in wrong]
    line = f"clocks: {', '.join(each)} {_names(nodes, [middle])}"
    remedy = "synchronize them with a time server: timedatectl set-ntp true"
    if keys and any(abs(off_s[number]) > CLOCK_FAIL_S for number in wrong):
        yield fail("nodes", f"{line}; certificates depend on clocks", remedy)
    else:
        yield warn("nodes", f"{line}; log times will not match", remedy)


def check_links(nodes: Sequence[NodeFacts], pairs: Sequence[Pair]) -> Iterator[Finding]:
    names = [f"{number} ({node.host})" for number, node in enumerate(nodes)]
    for pair in (pair for pair in pairs if pair.error):
        yield fail("nodes", f"node {names[pair.a]} to node {names[pair.b]} at {nodes[pair.b].address}: {pair.error}",
                   "open ports between them, or have both join one server: commlayer serve, --join")
    good = sorted((pair for pair in pairs if not pair.error), key=lambda pair: pair.slower_bps)
    if not good:
        return
    slowest, median_bps = good[0], good[len(good) // 2].slower_bps
    line = (f"{'1 link' if len(good) == 1 else f'{len(good)} links'}, slowest {rate_text(slowest.slower_bps)} between node "
            f"{names[slowest.a]} and node {names[slowest.b]}")
    if len(good) > 2 and slowest.slower_bps * UNEVEN < median_bps:
        yield warn("nodes", f"{line}, the median {rate_text(median_bps)}",
                   "look at that link, or plan for it: commlayer plan make")
    else:
        yield ok("nodes", line)


def table(nodes: Sequence[NodeFacts], pairs: Sequence[Pair]) -> list[str]:
    """Rates in Mb/s from the node of each row to the node of each column, then the longest round trip."""
    cells = {(pair.a, pair.b): _mbps(pair.up_bps, pair.error) for pair in pairs}
    cells |= {(pair.b, pair.a): _mbps(pair.down_bps, pair.error) for pair in pairs}
    wide = max(5, *map(len, cells.values())) + 1
    rows = [f"{'Mb/s from, to':{HOST_WIDTH + 3}}" + "".join(f"{i:>{wide}}" for i in range(len(nodes)))]
    for i, node in enumerate(nodes):
        row = "".join(f"{cells.get((i, j), ''):>{wide}}" for j in range(len(nodes)))
        rows.append(f"{i:>2} {node.host[:HOST_WIDTH]:{HOST_WIDTH}}{row}")
    far = max((pair for pair in pairs if not pair.error), key=lambda p: p.round_trip_s, default=None)
    return rows if far is None else [*rows, f"longest round trip: {far.a} and {far.b}, {1e3 * far.round_trip_s:.3g} ms"]


def _mbps(bps: float, error: str) -> str:
    return "-" if error else f"{bps / 1e6:.0f}" if bps >= 1e8 else f"{bps / 1e6:.3g}"


class NodeStore(NamedTuple):
    """A store of torch, this node's number, and whether this process hosts the store."""

    store: Any
    number: int
    hosts_store: bool = False


def store_at(host: str, port: int, nodes: int, own: bool, limit_s: float) -> NodeStore:
    """Connects to the store. `own`: the address is this machine's, where the first process hosts the store."""
    from torch import distributed

    dist: Any = distributed
    base, hosts_store, reason, limit = None, False, "", datetime.timedelta(seconds=limit_s)
    for hosts_store in (True, False) if own else (False,):
        try:
            base = dist.TCPStore(host, port, is_master=hosts_store, timeout=limit, wait_for_workers=False)
            break
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
    if base is None:
        raise CommError(f"no store for the rendezvous: {reason}", peer=f"{join_host(host, port)}")
    store = dist.PrefixStore(JOB, base)
    number = int(store.add("number", 1)) - 1
    if number >= nodes:
        raise InvalidInput("E-DOCTOR", f"--nodes {nodes}: node {number + 1} connected to {join_host(host, port)}; start "
                           "again on all nodes, with the same number")
    return NodeStore(store, number, hosts_store)


def launched_store(rank: int, world: int, limit_s: float) -> NodeStore:
    """The store of torchrun, whose address is in the environment."""
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=datetime.timedelta(seconds=limit_s)))
    except (RuntimeError, ValueError) as error:
        raise CommError(f"no store for the rendezvous: {str(error).splitlines()[0]}", peer="MASTER_ADDR") from None
    dist: Any = distributed
    return NodeStore(dist.PrefixStore(JOB, store), rank)


def own_facts(address: str, plan: str) -> NodeFacts:
    """`address`: to listen on, without a port. `plan`: the hash of the local plan file."""
    import torch

    return NodeFacts(socket.gethostname(), address, machine.own_version(), platform.python_version(), str(torch.__version__),
                     plan)


def compare_nodes(
    rendezvous: NodeStore, nodes: int, node: NodeFacts, config: Config, until: float,
) -> tuple[list[NodeFacts], list[Pair]]:
    """Runs the comparison. All nodes call it together, each with its number, and all return the same result.

    `until`: the deadline for the arrival of all nodes. Links are measured only between nodes with the same commlayer version,
    since another version may not understand the messages.
    """
    store, number, hosts_store = rendezvous
    from commlayer.cluster.process_groups import exchange  # loads torch

    deadline = until

    def share(data: Any, what: str, kind: Any = None) -> list[Any]:
        rows = exchange(store, range(nodes), number, msgspec.json.encode(data),
                        max(1, math.ceil(deadline - time.monotonic())), what)
        return [_decoded(row, kind, other) for other, row in enumerate(rows)]

    def facts() -> list[NodeFacts]:
        return share(node, JOB, NodeFacts)

    with ExitStack() as stack:
        # Without TLS the store is as safe a channel for the secret as the job's own connections.
        node = msgspec.structs.replace(node, token=secret.new_secret() if number == 0 and not config.token else "")
        all_nodes, pairs = facts(), list[Pair]()
        node = msgspec.structs.replace(node, clock_s=time.time())
        deadline = time.monotonic() + limit_s(nodes)
        alike = len({each.version for each in all_nodes}) == 1
        if alike:
            settings = Settings(secret=config.token or all_nodes[0].token, keys=Keys(config.keys) if config.keys else None)
            listener = StreamTransport(Hello(JOB, SERVER_BASE + number), settings=settings)
            to_peers = StreamTransport(Hello(JOB, number), settings=settings)
            address = join_host(*listener.listen(node.address))
            server = SumServer(Summation(number, 1, {}, {}), listener, range(nodes), stall_s=PATIENCE_S)
            stack.callback(server.close)
            stack.callback(to_peers.close)
            node = msgspec.structs.replace(node, address=address)
        all_nodes = [msgspec.structs.replace(each, token="") for each in facts()]
        if alike:
            measured: list[Pair] = []
            for index, turn in enumerate(rounds(nodes)):
                measured += [_pair(to_peers, a, b, all_nodes[b].address) for a, b in turn if a == number]
                share(0, f"{JOB}, round {index + 1}")
            pairs = [pair for row in share(measured, JOB, list[Pair]) for pair in row]
        _end(store, number, nodes, hosts_store)
    return all_nodes, pairs


def _decoded(row: bytes, kind: Any, number: int) -> Any:
    try:
        return msgspec.json.decode(row, type=kind or Any)
    except msgspec.DecodeError:
        raise CommError("sent an unknown description; install the same version of commlayer on all machines",
                        peer=f"node {number}") from None


def _end(store: Any, number: int, nodes: int, hosts_store: bool) -> None:
    """Marks this node's end. The host of the store waits until all nodes have read what they need."""
    ends = [f"end/{one}" for one in range(nodes)]
    store.set(ends[number], b"")
    if hosts_store:
        with suppress(RuntimeError):
            store.wait(ends, datetime.timedelta(seconds=PATIENCE_S))


def _pair(transport: StreamTransport, a: int, b: int, address: str) -> Pair:
    server = SERVER_BASE + b
    try:
        transport.dial(server, host_port(address), time.monotonic() + DIAL_S)
        network = link_rates.RequestNetwork(_prober(transport, server))
        round_trip_s = link_rates.round_trip(network, b, PATIENCE_S)
        up_bps = link_rates.rate(network, link_rates.UP, [b], round_trip_s, DIRECTION_S, PATIENCE_S)
        down_bps = link_rates.rate(network, link_rates.DOWN, [b], round_trip_s, DIRECTION_S, PATIENCE_S, expected_bps=up_bps)
    except CommError as error:
        return Pair(a, b, error=error.what)
    finally:
        with suppress(CommError):
            transport.abort(CommError("measured"), server)
    return Pair(a, b, up_bps, down_bps, round_trip_s)


def _prober(transport: StreamTransport, peer: int) -> Callable[[int, int, int, Callable[[Exception | None], None]], None]:
    count = [0]

    def probe(_: int, up: int, down: int, done: Callable[[Exception | None], None]) -> None:
        count[0] += 1
        header = Header(Kind.PROBE, 1, step=count[0], used=down, sender=transport.rank)
        transport.recv(peer, key(header._replace(kind=Kind.PROBE_OK))).on_done(lambda answer: done(answer.error()))
        transport.send(peer, header, bytes(up))

    return probe
