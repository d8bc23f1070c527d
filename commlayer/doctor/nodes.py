"""Compares nodes that run the doctor at the same time: versions, plans, and the links between them.

Nodes exchange facts through the launcher's store. Then each node sends zeros to every other node for a second, one after the
other, while it counts the bytes that it receives from a third. Both directions of every link are busy, as in training. The
zeros are neither encrypted nor authenticated.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import platform
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from commlayer.config import Launch, host_port, is_loopback, join_host, launcher_variable
from commlayer.doctor.findings import Finding, fail, judge, ok
from commlayer.doctor.machine import own_version
from commlayer.doctor.network import INSIDE, connect_problem, own_addresses
from commlayer.doctor.server import rate_text
from commlayer.errors import CommError, join_names
from commlayer.records import Record, complete
from commlayer.transport import own_address

UNEVEN = 4.0
"""A warning is given for a link this many times slower than the median, because such a link alone limits collectives."""
SEND_S, SETTLE_S, PATIENCE_S = 1.0, 0.3, 8.0
"""Seconds for which a node sends, the first seconds that are not counted, and seconds without progress after which it gives
up."""
CHUNK_NBYTES = 128 << 10


class NodeFacts(Record, frozen=True):
    """Facts about one node. `plan`: digest of its plan file, empty without one."""

    host: str
    address: str
    version: str
    python: str
    torch: str
    plan: str = ""
    machine: str = ""
    """Identity of the machine; equal only for nodes that share a network stack."""
    own_name: str = ""
    """Address that the node's host name resolves to, unless GLOO_SOCKET_IFNAME is set. Gloo uses it."""
    bridges: tuple[str, ...] = ()
    """Addresses of bridges to containers, such as docker0."""


Link = float | str
"""Rate of a link in bit/s, or the reason why no bytes arrived."""


def limit_s(nodes: int, join_deadline_s: float) -> float:
    """Seconds for the complete comparison, from a node's start."""
    return join_deadline_s + PATIENCE_S + 2 * SEND_S * (nodes - 1) + 15.0


def check_alike(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Checks versions and plans, which must be equal on all ranks: otherwise the job does not start."""
    rows = [
        ([node.version for node in nodes], "install the same version of commlayer on all machines"),
        ([f"torch {node.torch.partition('+')[0]}" for node in nodes], "install the same version of torch on all machines"),
        ([f"Python {node.python.rpartition('.')[0]}" for node in nodes], "use the same version of Python on all machines"),
        ([f"plan with hash {node.plan}" if node.plan else "no plan" for node in nodes], "give all nodes the same plan file"),
    ]
    differ = [(values, remedy) for values, remedy in rows if len(set(values)) > 1]
    for values, remedy in differ:
        where = {value: [number for number, each in enumerate(values) if each == value] for value in dict.fromkeys(values)}
        yield fail("nodes", ", ".join(f"{value} on {_names(nodes, numbers)}" for value, numbers in where.items()), remedy)
    if not differ:
        yield ok("nodes", f"the same versions{' and the same plan' if nodes[0].plan else ''} on all {len(nodes)}")


def check_distinct(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Checks that nodes on different machines have different addresses. Bridges of Docker have the same one everywhere, and
    traffic to it never leaves the machine."""
    def shared(addresses: Sequence[str]) -> dict[str, list[int]]:
        where = {address: [n for n, each in enumerate(addresses) if each == address] for address in addresses if address}
        return {address: numbers for address, numbers in where.items() if len({nodes[n].machine for n in numbers}) > 1}

    rows = [("the address", [host_port(node.address)[0] for node in nodes],
             "set MASTER_ADDR to an address of another interface, so that each node has a route to it"),
            ("the address of their host names", [node.own_name for node in nodes],
             "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface towards the other nodes, or correct /etc/hosts")]
    found = [(what, address, numbers, remedy) for what, each, remedy in rows for address, numbers in shared(each).items()]
    for what, address, numbers, remedy in found:
        yield fail("nodes", f"{what} {address} is the same on {_names(nodes, numbers)}: each would dial itself", remedy)
    same = sorted(set.intersection(*(set(node.bridges) for node in nodes)))
    if same and not found and len({node.machine for node in nodes}) > 1:
        yield ok("nodes", f"bridges with equal addresses ({', '.join(same)}) on all nodes are not used")


def _names(nodes: Sequence[NodeFacts], numbers: Sequence[int]) -> str:
    return join_names([f"node {number} ({nodes[number].host})" for number in numbers], 3)


def check_links(nodes: Sequence[NodeFacts], links: Sequence[Sequence[Link]]) -> Iterator[Finding]:
    """Checks the measured links. `links[a][b]`: link from node a to node b."""
    good = []
    for a, row in enumerate(links):
        for b, link in enumerate(row):
            if isinstance(link, str):
                yield fail("nodes", f"from {_names(nodes, [a])} {nodes[b].address} of {_names(nodes, [b])} {link}",
                           "open ports between them, or let both join one server: commlayer serve, commlayer join")
            elif a != b:
                good.append((link, a, b))
    if good:
        (slowest_bps, a, b), median_bps = min(good), statistics.median(link for link, *_ in good)
        line = f"slowest link: {rate_text(slowest_bps)} from {_names(nodes, [a])} to {_names(nodes, [b])}"
        uneven = slowest_bps * UNEVEN < median_bps
        yield judge("nodes", f"{line}, the median {rate_text(median_bps)}" if uneven else line,
                    "repair that link, or plan for it: commlayer plan create", doubtful=uneven)


def own_facts(plan: str) -> NodeFacts:
    """Collects this node's facts. `plan`: digest of the local plan file."""
    import torch

    f = own_addresses("")
    outside = [one for one in f.resolves if not is_loopback(one)]  # the check of the host name reports loopback addresses
    named = "" if launcher_variable("GLOO_SOCKET_IFNAME") else next(iter(outside), "")
    return NodeFacts(socket.gethostname(), "", own_version(), platform.python_version(), str(torch.__version__), plan,
                     own_address.machine(), named, tuple(one.address for one in f.interfaces if one.name.startswith(INSIDE)))


def compare_nodes(launch: Launch, node: NodeFacts, host: str, join_s: float) -> tuple[list[NodeFacts], list[list[Link]]]:
    """Exchanges facts between all nodes and measures their links. All ranks must call it together; all get the same result.
    `host`: the address to listen on."""
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    from commlayer.cluster.processes.process_groups import exchange

    dist: Any = distributed
    count, rank = launch.world, launch.rank
    try:
        base, _, _ = next(rendezvous("env://", rank, count, timeout=datetime.timedelta(seconds=join_s)))
    except (RuntimeError, ValueError) as error:
        raise CommError(f"no store for the rendezvous: {str(error).splitlines()[0]}", peer="MASTER_ADDR") from None
    store = dist.PrefixStore("doctor", base)

    def share(value: Any, what: str, limit_s: float, kind: Any = None) -> list[Any]:
        rows = exchange(store, range(count), rank, msgspec.json.encode(value), math.ceil(limit_s), f"doctor, {what}")
        try:
            return [msgspec.json.decode(row, type=complete(kind or Any)) for row in rows]
        except msgspec.DecodeError:
            raise CommError("a node sent facts in an unknown format; install the same version of commlayer on all machines",
                            peer="doctor") from None

    with ByteCounter(host) as counter:
        nodes: list[NodeFacts] = share(msgspec.structs.replace(node, address=counter.address), "arrival", join_s, NodeFacts)
        row: list[Link] = [0.0] * count
        for distance in range(1, count):
            other = (rank + distance) % count
            row[other] = send_zeros(nodes[other].address)
            share("", f"links, round {distance} of {count - 1}", 2 * PATIENCE_S)
        links: list[list[Link]] = share(row, "results", PATIENCE_S, list[Link])
    store.set(f"end/{rank}", b"")
    if rank == 0:  # rank 0 may host the store, so it waits until all ranks have read the results
        with contextlib.suppress(RuntimeError):
            store.wait([f"end/{one}" for one in range(count)], datetime.timedelta(seconds=PATIENCE_S))
    return nodes, links


class ByteCounter:
    """Listens for connections, discards the received bytes, and replies with their rate in bit/s at the end of each
    connection."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = join_host(host, self._listener.getsockname()[1])

    def __enter__(self) -> ByteCounter:
        threading.Thread(target=self._accept, name="doctor links", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._count, args=(sock,), name="doctor link", daemon=True).start()

    def _count(self, sock: socket.socket) -> None:
        buffer, first, begin, nbytes = bytearray(CHUNK_NBYTES), 0.0, 0.0, 0
        with contextlib.suppress(OSError), sock:
            sock.settimeout(PATIENCE_S)
            while count := sock.recv_into(buffer):
                now = time.monotonic()
                first = first or now
                nbytes += count
                if not begin and now - first >= SETTLE_S:
                    begin, nbytes = now, 0
            sock.sendall(struct.pack("<d", 8 * nbytes / max(time.monotonic() - (begin or first), 1e-6)))


def send_zeros(address: str) -> Link:
    """Sends zeros to another node's ByteCounter. Returns the rate at which they arrived, or the problem."""
    try:
        with socket.create_connection(host_port(address), PATIENCE_S / 2) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CHUNK_NBYTES)  # few unsent bytes remain at the end
            sock.settimeout(PATIENCE_S)
            chunk, until = bytes(CHUNK_NBYTES), time.monotonic() + SEND_S
            while time.monotonic() < until:
                sock.sendall(chunk)
            sock.shutdown(socket.SHUT_WR)
            answer = sock.recv(8, socket.MSG_WAITALL)
    except OSError as error:
        return connect_problem(error).partition(";")[0]
    return float(struct.unpack("<d", answer)[0]) if len(answer) == 8 else "closed the connection"
