"""Nodes exchange descriptions and measure their links, in rounds in which no two pairs share a node.

Nodes meet in a store of torch, so this module loads torch. Each node listens as a summation server without buckets, which
answers probes, and dials all others as a worker does. So probes take the path of a job's data, with its keys, framing and
pacing.
"""

from __future__ import annotations

import datetime
import math
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import msgspec
import torch

from commlayer.autotune.measure import link_rates
from commlayer.cluster.members import exchange
from commlayer.cluster.summation import Summation
from commlayer.cluster.summation_server import SumServer
from commlayer.config import Config, host_port, join_host
from commlayer.doctor import machine_facts
from commlayer.doctor.node_checks import Node, Pair, limit_s, one_commlayer, turns
from commlayer.errors import CommError, InvalidInput
from commlayer.records import Record
from commlayer.transport import secret
from commlayer.transport.hello import Hello
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, key
from commlayer.transport.stream_transport import Settings, StreamTransport

JOB = "doctor"
WAY_S = 0.5
"""Measuring time per direction of a link."""
PATIENCE_S = 5.0
DIAL_S = 4.0
MEETINGS = 4
"""Barriers at which clocks are read. Nodes reach the first one at different times, so the later ones give tighter bounds."""


class Word(Record, frozen=True):
    """A node's first message to the others. `token`: the secret for links, sent by node 0 if the job has none."""

    node: Node
    token: str = ""


class Meeting(NamedTuple):
    """A store of torch, this node's number, and whether this process hosts the store."""

    store: Any
    number: int
    keeps: bool = False


def store_at(host: str, port: int, nodes: int, own: bool, limit_s: float) -> Meeting:
    """Connects to the store. `own`: the address is this machine's, where the first process hosts the store."""
    from torch import distributed

    dist: Any = distributed
    kept, keeps, why, limit = None, False, "", datetime.timedelta(seconds=limit_s)
    for keeps in (True, False) if own else (False,):
        try:
            kept = dist.TCPStore(host, port, is_master=keeps, timeout=limit, wait_for_workers=False)
            break
        except RuntimeError as error:
            why = str(error).splitlines()[0]
    if kept is None:
        raise CommError(f"no store to meet at: {why}", peer=f"{join_host(host, port)}")
    store = dist.PrefixStore(JOB, kept)
    number = int(store.add("number", 1)) - 1
    if number >= nodes:
        raise InvalidInput("E-DOCTOR",
                           f"--nodes {nodes}: {number + 1} nodes have come to {join_host(host, port)}: start anew on all, "
                           "with the same number")
    return Meeting(store, number, keeps)


def launched_store(rank: int, world: int, limit_s: float) -> Meeting:
    """The store of torchrun, whose address is in the environment."""
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=datetime.timedelta(seconds=limit_s)))
    except (RuntimeError, ValueError) as error:
        raise CommError(f"no store to meet at: {str(error).splitlines()[0]}", peer="MASTER_ADDR") from None
    dist: Any = distributed
    return Meeting(dist.PrefixStore(JOB, store), rank)


def of_this(address: str, plan: str) -> Node:
    """This node's description. `address`: to listen on, without a port. `plan`: the hash of the local plan file."""
    return Node(socket.gethostname(), address, machine_facts.software(), str(torch.__version__), plan)


def measured(meeting: Meeting, nodes: int, node: Node, config: Config, until: float) -> tuple[list[Node], list[Pair]]:
    """Runs the comparison. All nodes call it together, each with its number, and all return the same result.

    `until`: the deadline for the arrival of all nodes. Links are measured only between nodes with the same commlayer version,
    since another version may not understand the messages.
    """
    store, number, keeps = meeting
    over = [until]

    def told(data: bytes, what: str) -> list[bytes]:
        return exchange(store, range(nodes), number, data, max(1, math.ceil(over[0] - time.monotonic())), what)

    with ExitStack() as stack:
        # Without TLS the store is as safe a channel for the secret as the job's own connections.
        token = secret.new() if number == 0 and not config.token else ""
        rows = told(msgspec.json.encode(Word(node, token)), JOB)
        over[0] = time.monotonic() + limit_s(nodes)
        words = [_word(row, other) for other, row in enumerate(rows)]
        if not one_commlayer([each.node for each in words]):
            _end(store, number, nodes, keeps)
            return [each.node for each in words], []
        settings = Settings(secret=config.token or words[0].token, keys=Keys(config.keys) if config.keys else None)
        listener, to_peers = (StreamTransport(Hello(JOB, who), settings=settings) for who in (SERVER_BASE + number, number))
        listening = listener.listen(node.address)
        server = SumServer(Summation(number, 1, {}, {}), listener, range(nodes), stall_s=PATIENCE_S)
        stack.callback(server.close)
        stack.callback(to_peers.close)
        clock = tuple(_clock(lambda: told(b"", f"{JOB}, clocks")) for _ in range(MEETINGS))
        mine = msgspec.structs.replace(node, address=join_host(*listening), clock=clock)
        all_nodes = [msgspec.json.decode(row, type=Node) for row in told(msgspec.json.encode(mine), JOB)]
        links: list[Pair] = []
        for turn, pairs in enumerate(turns(nodes)):
            links += [_pair(to_peers, a, b, all_nodes[b].address) for a, b in pairs if a == number]
            told(b"", f"{JOB}, turn {turn + 1}")
        rows = told(msgspec.json.encode(links), JOB)
        _end(store, number, nodes, keeps)
    return all_nodes, [pair for row in rows for pair in msgspec.json.decode(row, type=list[Pair])]


def _word(row: bytes, number: int) -> Word:
    try:
        return msgspec.json.decode(row, type=Word)
    except msgspec.DecodeError:
        raise CommError("says of itself what is not understood here; install the same version of commlayer on all machines",
                        peer=f"node {number}") from None


def _clock(meet: Callable[[], object]) -> tuple[float, float]:
    begin_s = time.time()
    meet()
    return begin_s, time.time()


def _end(store: Any, number: int, nodes: int, keeps: bool) -> None:
    """Marks this node's end. The host of the store waits until all nodes have read what they need."""
    ends = [f"end/{one}" for one in range(nodes)]
    store.set(ends[number], b"")
    if keeps:
        with suppress(RuntimeError):
            store.wait(ends, datetime.timedelta(seconds=PATIENCE_S))


def _pair(transport: StreamTransport, a: int, b: int, address: str) -> Pair:
    server = SERVER_BASE + b
    try:
        transport.dial(server, host_port(address), time.monotonic() + DIAL_S)
        network = link_rates.Asking(_asking(transport, server))
        round_trip_s = link_rates.round_trip(network, b, PATIENCE_S)
        up_bps = link_rates.rate(network, link_rates.UP, [b], round_trip_s, WAY_S, PATIENCE_S)
        down_bps = link_rates.rate(network, link_rates.DOWN, [b], round_trip_s, WAY_S, PATIENCE_S, expected_bps=up_bps)
    except CommError as error:
        return Pair(a, b, error=error.what)
    finally:
        with suppress(CommError):
            transport.abort(CommError("measured"), server)
    return Pair(a, b, up_bps, down_bps, round_trip_s)


def _asking(transport: StreamTransport, peer: int) -> Callable[[int, int, int, Callable[[Exception | None], None]], None]:
    count = [0]

    def ask(_: int, up: int, down: int, done: Callable[[Exception | None], None]) -> None:
        count[0] += 1
        header = Header(Kind.PROBE, 1, step=count[0], used=down, sender=transport.rank)
        transport.recv(peer, key(header._replace(kind=Kind.PROBE_OK))).on_done(lambda answer: done(answer.error()))
        transport.send(peer, header, bytes(up))

    return ask
