"""Compares nodes that run the doctor at the same time: versions, plans, clocks, and the links between them.

Nodes exchange their facts through a torch store. Each node then listens as a summation server without buckets, which answers
probes, and dials all others as a worker does: probes take the path of a job's data, with its keys, framing and pacing.
"""

from __future__ import annotations

import datetime
import math
import socket
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
from commlayer.doctor.machine import Software
from commlayer.doctor.report import Finding, fail, ok, warn
from commlayer.doctor.server import CLOCK_FAIL_S, CLOCK_S, duration_text, rate_text
from commlayer.errors import CommError, InvalidInput
from commlayer.records import Record
from commlayer.transport import secret
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key


class NodeFacts(Record, frozen=True):
    """A node's description of itself. `plan`: the hash of its plan file, empty for none.

    `clock`: for each of some barriers, the node's time when it arrived, and its time when it learned that all had arrived. On
    the clock of every node, the arrival of the last node lies between the two.
    """

    host: str
    address: str
    software: Software | None = None
    torch: str = ""
    plan: str = ""
    clock: tuple[tuple[float, float], ...] = ()


class Pair(Record, frozen=True):
    """A measurement from node `a` to node `b`. `error`: why it failed."""

    a: int
    b: int
    up_bps: float = 0.0
    down_bps: float = 0.0
    round_trip_s: float = 0.0
    error: str = ""


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in as few rounds as possible. In a round each node is in at most one pair.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> [len(one) for one in rounds(5)]
    [2, 2, 2, 2, 2]
    """
    places = nodes + nodes % 2
    ring = [*range(1, places)]
    result = []
    for shift in range(places - 1):
        row = [0, *ring[len(ring) - shift :], *ring[: len(ring) - shift]]
        pairs = [tuple(sorted((row[i], row[places - 1 - i]))) for i in range(places // 2)]
        result.append(sorted((a, b) for a, b in pairs if b < nodes))
    return result


LINKS_S, ROUND_S = 30.0, 3.0
"""Time limits for links that answer late, and for each round."""


def limit_s(nodes: int, join_deadline_s: float = 0.0) -> float:
    """The limit for the whole measurement: from a node's arrival, or with deadline 0 from the arrival of all nodes."""
    return join_deadline_s + LINKS_S + ROUND_S * len(rounds(nodes))


def slowest(pairs: Sequence[Pair]) -> Pair:
    return min((pair for pair in pairs if not pair.error), key=lambda pair: min(pair.up_bps, pair.down_bps))


def one_commlayer(nodes: Sequence[NodeFacts]) -> bool:
    """Whether all nodes speak the same protocol, which measuring links needs."""
    return len({_commlayer(node) for node in nodes}) == 1


def check_alike(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Checks what must be equal on all ranks of a job: otherwise the job does not start."""
    differ = [
        (_differences(nodes, [_commlayer(node) for node in nodes]), "; links are not measured",
         "install the same version of commlayer on all machines"),
        (_differences(nodes, [f"torch {node.torch.partition('+')[0]}" for node in nodes]), "",
         "install the same version of torch on all machines"),
        (_differences(nodes, [_python(node) for node in nodes]), "", "use the same version of Python on all machines"),
        (_differences(nodes, [f"plan with hash {node.plan}" if node.plan else "no plan" for node in nodes]), "",
         "give all nodes the same plan file"),
    ]
    failed = [fail("nodes", line + note, remedy) for line, note, remedy in differ if line]
    yield from failed or [ok("nodes", f"the same versions{' and the same plan' if nodes[0].plan else ''} on all {len(nodes)}")]


def _commlayer(node: NodeFacts) -> str:
    f = node.software
    return f"commlayer {f.commlayer} (control protocol {f.protocol}, wire format {f.wire})" if f else "another commlayer"


def _python(node: NodeFacts) -> str:
    return f"Python {node.software.python.rpartition('.')[0]}" if node.software else "another Python"


def _differences(nodes: Sequence[NodeFacts], values: Sequence[str]) -> str:
    """Lists differing values with their nodes, the rarest first. Empty if all are equal.

    >>> nodes = [Node(host, "") for host in "abcd"]
    >>> _differences(nodes, ["x", "y", "x", "x"]), _differences(nodes[:2], ["x", "y"]), _differences(nodes[:2], ["x", "x"])
    ('y on node 1 (b), x on the 3 others', 'x on node 0 (a), y on node 1 (b)', '')
    """
    by = {what: [number for number, each in enumerate(values) if each == what] for what in dict.fromkeys(values)}
    *few, (most, of) = sorted(by.items(), key=lambda row: len(row[1]))
    if not few:
        return ""
    last = f"the {len(of)} others" if len(of) > 2 else _names(nodes, of)
    return ", ".join([*(f"{what} on {_names(nodes, numbers)}" for what, numbers in few), f"{most} on {last}"])


def _names(nodes: Sequence[NodeFacts], numbers: Sequence[int]) -> str:
    return " and ".join(f"node {number} ({nodes[number].host})" for number in numbers)


def check_clocks(nodes: Sequence[NodeFacts], *, keys: bool) -> Iterator[Finding]:
    """Compares clocks with the median one, so that the wrong ones are named. `keys`: certificates depend on the clocks."""
    if not all(node.clock for node in nodes):
        return
    middle = sorted(range(len(nodes)), key=lambda number: ahead(nodes[number], nodes[0])[0])[(len(nodes) - 1) // 2]
    off = [ahead(node, nodes[middle]) for node in nodes]
    wrong = [number for number, (by_s, error_s) in enumerate(off) if number != middle and abs(by_s) - error_s >= CLOCK_S]
    if not wrong:
        within_s = max(max(abs(by_s), error_s) for number, (by_s, error_s) in enumerate(off) if number != middle)
        yield ok("nodes", f"clocks within {max(within_s, 0.001):.3g} s of that of {_names(nodes, [middle])}")
        return
    each = [f"{_names(nodes, [number])} {duration_text(abs(off[number][0]))} {'ahead of' if off[number][0] > 0 else 'behind'}"
            for number in wrong]
    line = f"clocks: {', '.join(each)} {_names(nodes, [middle])}"
    remedy = "synchronize them with a time server: timedatectl set-ntp true"
    if keys and any(abs(off[number][0]) > CLOCK_FAIL_S for number in wrong):
        yield fail("nodes", f"{line}; certificates depend on clocks", remedy)
    else:
        yield warn("nodes", f"{line}; log times will not match", remedy)


def ahead(a: NodeFacts, b: NodeFacts) -> tuple[float, float]:
    """Seconds by which the clock of `a` exceeds that of `b`, and the error of that, by the barrier with the tightest bounds.

    >>> ahead(Node("a", "", clock=((100.0, 109.0), (110.0, 110.2))), Node("b", "", clock=((8.0, 8.2), (9.0, 9.2))))
    (101.0, 0.2)
    """
    bounds = [(mine[0] - its[1], mine[1] - its[0]) for mine, its in zip(a.clock, b.clock, strict=True)]
    low, high = min(bounds, key=lambda bound: bound[1] - bound[0])
    return round((low + high) / 2, 6), round((high - low) / 2, 6)


UNEVEN = 4.0
"""A link this many times slower than the median alone sets the pace of collectives."""


def check_links(nodes: Sequence[NodeFacts], pairs: Sequence[Pair]) -> Iterator[Finding]:
    names = [f"{number} ({node.host})" for number, node in enumerate(nodes)]
    for pair in (pair for pair in pairs if pair.error):
        yield fail("nodes", f"node {names[pair.a]} to node {names[pair.b]} at {nodes[pair.b].address}: {pair.error}",
                   "open ports between them, or have both join one server: commlayer serve, --join")
    good = [pair for pair in pairs if not pair.error]
    if not good:
        return
    rates = sorted(min(pair.up_bps, pair.down_bps) for pair in good)
    slow, median = slowest(good), rates[len(rates) // 2]
    count = "1 link" if len(good) == 1 else f"{len(good)} links"
    line = f"{count}, slowest {rate_text(rates[0])} between node {names[slow.a]} and node {names[slow.b]}"
    if len(good) > 2 and rates[0] * UNEVEN < median:
        yield warn("nodes", f"{line}, the median {rate_text(median)}", "look at that link, or plan for it: commlayer plan make")
    else:
        yield ok("nodes", line)


def table(nodes: Sequence[NodeFacts], pairs: Sequence[Pair]) -> list[str]:
    """Rates in Mb/s from the node of each row to the node of each column, then the longest round trip."""
    flow: dict[tuple[int, int], str] = {}
    for pair in pairs:
        flow[pair.a, pair.b] = "-" if pair.error else _mbps(pair.up_bps)
        flow[pair.b, pair.a] = "-" if pair.error else _mbps(pair.down_bps)
    wide = max(5, *(len(one) for one in flow.values())) + 1
    head = f"{'Mb/s from, to':{HOST_WIDTH + 3}}" + "".join(f"{i:>{wide}}" for i in range(len(nodes)))
    rows = [head]
    for i, node in enumerate(nodes):
        cells = "".join(f"{flow.get((i, j), ''):>{wide}}" for j in range(len(nodes)))
        rows.append(f"{i:>2} {node.host[:HOST_WIDTH]:{HOST_WIDTH}}{cells}")
    far = max((pair for pair in pairs if not pair.error), key=lambda p: p.round_trip_s, default=None)
    if far is not None:
        rows.append(f"longest round trip: {far.a} and {far.b}, {1e3 * far.round_trip_s:.3g} ms")
    return rows


def _mbps(bps: float) -> str:
    """
    >>> _mbps(1.2345e9), _mbps(94.23e6), _mbps(3e5)
    ('1234', '94.2', '0.3')
    """
    return f"{bps / 1e6:.0f}" if bps >= 1e8 else f"{bps / 1e6:.3g}"


JOB = "doctor"
HOST_WIDTH = 14
DIRECTION_S = 0.5
"""Measuring time per direction of a link."""
PATIENCE_S = 5.0
DIAL_S = 4.0
CLOCK_READINGS = 4
"""Barriers at which clocks are read. Nodes reach the first one at different times, so the later ones give tighter bounds."""


class Introduction(Record, frozen=True):
    """A node's first message to the others. `token`: the secret for links, sent by node 0 if the job has none."""

    node: NodeFacts
    token: str = ""


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


def describe_this_node(address: str, plan: str) -> NodeFacts:
    """`address`: to listen on, without a port. `plan`: the hash of the local plan file."""
    import torch

    return NodeFacts(socket.gethostname(), address, machine.read_software(), str(torch.__version__), plan)


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

    def share(data: bytes, what: str) -> list[bytes]:
        return exchange(store, range(nodes), number, data, max(1, math.ceil(deadline - time.monotonic())), what)

    with ExitStack() as stack:
        # Without TLS the store is as safe a channel for the secret as the job's own connections.
        token = secret.new_secret() if number == 0 and not config.token else ""
        rows = share(msgspec.json.encode(Introduction(node, token)), JOB)
        deadline = time.monotonic() + limit_s(nodes)
        introductions = [_introduction(row, other) for other, row in enumerate(rows)]
        if not one_commlayer([each.node for each in introductions]):
            _end(store, number, nodes, hosts_store)
            return [each.node for each in introductions], []
        settings = Settings(secret=config.token or introductions[0].token, keys=Keys(config.keys) if config.keys else None)
        listener, to_peers = (StreamTransport(Hello(JOB, peer), settings=settings) for peer in (SERVER_BASE + number, number))
        listening = listener.listen(node.address)
        server = SumServer(Summation(number, 1, {}, {}), listener, range(nodes), stall_s=PATIENCE_S)
        stack.callback(server.close)
        stack.callback(to_peers.close)
        clock = tuple(_clock(lambda: share(b"", f"{JOB}, clocks")) for _ in range(CLOCK_READINGS))
        mine = msgspec.structs.replace(node, address=join_host(*listening), clock=clock)
        all_nodes = [msgspec.json.decode(row, type=NodeFacts) for row in share(msgspec.json.encode(mine), JOB)]
        links: list[Pair] = []
        for index, pairs in enumerate(rounds(nodes)):
            links += [_pair(to_peers, a, b, all_nodes[b].address) for a, b in pairs if a == number]
            share(b"", f"{JOB}, round {index + 1}")
        rows = share(msgspec.json.encode(links), JOB)
        _end(store, number, nodes, hosts_store)
    return all_nodes, [pair for row in rows for pair in msgspec.json.decode(row, type=list[Pair])]


def _introduction(row: bytes, number: int) -> Introduction:
    try:
        return msgspec.json.decode(row, type=Introduction)
    except msgspec.DecodeError:
        raise CommError("sent an unknown description; install the same version of commlayer on all machines",
                        peer=f"node {number}") from None


def _clock(meet: Callable[[], object]) -> tuple[float, float]:
    begin_s = time.time()
    meet()
    return begin_s, time.time()


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
