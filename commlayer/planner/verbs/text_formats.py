"""Parses clusters and profiles that users write: TOML, JSON, or a line of text."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from commlayer.errors import InvalidInput, RecordError
from commlayer.planner.model.cluster import Cluster, Link, Node, Profile
from commlayer.planner.pricing.input_checks import cluster_problems, learning_problems, profile_problems
from commlayer.planner.tables import machines
from commlayer.records import Record

T = TypeVar("T")

RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?))?([MG])b")
GROUP = re.compile(r"(?:(\d+)x)?(?:(\d+)\*)?([A-Za-z0-9-]+)@(\S+)")
GROUP_FORM = '"3xrtx3060@100/20Mb" (down/up), "rtx4090@1Gb", "2x8*v100@25g" (2 nodes of 8 ranks)'

EXAMPLE = """\
# The machines. Rates in bit/s and seconds, or links by name: "home-DOWN/UP" and "fiber-BOTH" in Mb/s, "10g", "100m".
reachable = false             # whether nodes reach one another; over the internet they do not

[[node]]
name = "anna"
device = "rtx3060"            # a GPU of the tables, or "cpu"
link = "fiber-200"
server = true                 # others can dial it: it may host a summation server

[[node]]
name = "home"
count = 2                     # home-0 and home-1
device = "rtx3060"
link = { up_bps = 20e6, down_bps = 100e6, alpha_s = 0.01 }
server = false
"""


class WrittenNode(Record, frozen=True):
    """A node in a file: a Node with optional fields."""

    device: str
    link: str | Link
    name: str = ""
    count: int = 1
    ranks: int = 1
    intra: str = "pcie3"
    intra_bps: float = 0.0
    intra_alpha_s: float = 0.0
    speed: float = 0.0
    """Relative to a V100; 0: the table's value."""
    server: bool = True


class WrittenCluster(Record, frozen=True):
    node: tuple[WrittenNode, ...]
    reachable: bool = True


def cluster_of(text: str, what: str, *, toml: bool) -> Cluster:
    """Parses a cluster; a one-line error for the first problem."""
    data = _read(text, what, toml)
    if isinstance(data, dict) and "nodes" in data:
        cluster = _convert(data, Cluster, what)
    else:
        written = _convert(data, WrittenCluster, what)
        cluster = Cluster(tuple(n for i, w in enumerate(written.node) for n in _nodes(w, i, what)), written.reachable)
    _refuse(cluster_problems(cluster), what)
    return cluster


def profile_of(text: str, what: str, *, toml: bool) -> Profile:
    profile = _convert(_read(text, what, toml), Profile, what)
    _refuse([*profile_problems(profile), *learning_problems(profile)], what)
    return profile


def nodes_of(text: str, *, first: int = 0, what: str = "nodes") -> tuple[Node, ...]:
    """Parses nodes from a line; `what` names the text in errors.

    >>> [(n.name, n.link.up_bps) for n in nodes_of("2xrtx3060@100/20Mb,rtx4090@1Gb")]
    [('rtx3060-0', 20000000.0), ('rtx3060-1', 20000000.0), ('rtx4090-2', 1000000000.0)]
    """
    nodes: list[Node] = []
    for group in filter(None, (part.strip() for part in text.split(","))):
        match = GROUP.fullmatch(group)
        if match is None:
            raise InvalidInput("E-PLAN-INPUT", f"{what}: got {group!r}, allowed: {GROUP_FORM}")
        count, ranks, device, net = int(match[1] or 1), int(match[2] or 1), match[3].lower(), match[4]
        for _ in range(count):
            nodes.append(machines.node(f"{device}-{first + len(nodes)}", device, _table_link(net), ranks=ranks))
    if not nodes:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: got {text!r}, allowed: {GROUP_FORM}")
    return tuple(nodes)


def cluster_from_line(text: str) -> Cluster:
    """Nodes from a line. They can reach each other if all links are rack links ("10g")."""
    nodes = nodes_of(text)
    return Cluster(nodes, all(node.link.alpha_s <= machines.RACK_ALPHA_S for node in nodes))


def cluster_of_homes(text: str, server: str) -> Cluster:
    """Machines behind NAT that cannot be dialed, and a rented server that all dial; it sums and does not train. `server`: its
    link.

    >>> [(n.name, n.ranks, n.server) for n in cluster_of_homes("2xrtx3060@100/20Mb", "1Gb").nodes]
    [('server', 0, True), ('home-0', 1, False), ('home-1', 1, False)]
    """
    homes = (structs.replace(node, name=f"home-{place}", server=False)
             for place, node in enumerate(nodes_of(text, what="homes")))
    return Cluster((machines.node("server", "cpu", _table_link(server), ranks=0), *homes), reachable=False)


def rate_of(text: str) -> float:
    """
    >>> rate_of("20Mb"), rate_of("1Gb")
    (20000000.0, 1000000000.0)
    """
    match = RATE.fullmatch(text.strip())
    if match is None or match[2]:
        raise InvalidInput("E-PLAN-INPUT", f'rate: got {text!r}, allowed: a number with its unit, such as "20Mb" or "1Gb"')
    return float(match[1]) * (1e9 if match[3] == "G" else 1e6)


def _table_link(text: str) -> str:
    """The tables' name for "100/20Mb" and "1Gb"; any other text is returned unchanged."""
    match = RATE.fullmatch(text)
    if match is None:
        return text
    unit = 1000 if match[3] == "G" else 1
    down, up = float(match[1]) * unit, float(match[2] or match[1]) * unit
    return f"home-{down:g}/{up:g}" if match[2] else f"fiber-{down:g}"


def _nodes(written: WrittenNode, place: int, what: str) -> Iterator[Node]:
    name = written.name or f"{written.device}-{place}"
    if written.count < 1:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: node {name}: count is {written.count}, allowed: 1 or more")
    try:
        link = machines.link(written.link) if isinstance(written.link, str) else written.link
        speed = written.speed or machines.speed(written.device)
        if written.intra not in machines.INTRA:
            raise InvalidInput("E-PLAN-INPUT", f"intra {written.intra!r}: allowed are {', '.join(machines.INTRA)}")
    except ValueError as error:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: node {name}: {error}") from None
    intra_bps, intra_alpha_s = machines.INTRA[written.intra] if written.ranks > 1 else (0.0, 0.0)
    node = Node(name, written.ranks, written.device, link, written.intra_bps or intra_bps,
                written.intra_alpha_s or intra_alpha_s, speed, written.server)
    for i in range(written.count):
        yield structs.replace(node, name=f"{name}-{i}") if written.count > 1 else node


def _read(text: str, what: str, toml: bool) -> Any:
    try:
        return tomllib.loads(text) if toml else msgspec.json.decode(text)
    except (tomllib.TOMLDecodeError, msgspec.MsgspecError) as error:
        raise RecordError("E-PLAN-INPUT", f"{what}: {error}") from None


def _convert(data: Any, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(data, kind)
    except msgspec.MsgspecError as error:
        raise RecordError("E-PLAN-INPUT", f"{what}: {error}{remedy(error)}") from None


def remedy(error: Exception) -> str:
    """The remedy for a profile with the former field `loss`: guesses from tables, which would now count as measured."""
    guessed = "unknown field `loss`" in str(error) and "codecs[" in str(error)
    return "; an earlier version made this profile: measure again (`commlayer profile`)" if guessed else ""


def _refuse(problems: Iterable[str], what: str) -> None:
    for problem in problems:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: {problem}")
