"""The list of checks for given settings, and the deadline of each."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from commlayer.cluster import messages
from commlayer.config import Config, check_plain_text, host_port, is_loopback, launcher_says, read_launch
from commlayer.doctor import (
    machine_checks,
    machine_facts,
    network_checks,
    network_facts,
    node_checks,
    security_checks,
    security_facts,
    server_checks,
    server_facts,
)
from commlayer.doctor.examination import Look
from commlayer.doctor.finding import Finding, of_error, warn
from commlayer.doctor.node_checks import Node, Pair
from commlayer.errors import CommError, InvalidInput, RecordError
from commlayer.transport import framing, own_address, tls
from commlayer.transport.key_folder import Keys

QUICK_S, NAMES_S, SERVER_S, LINK_S = 5.0, 8.0, 17.0, 2.0
ALONE_S = 30.0
"""All checks except those of several nodes end by then. The link's check is last and has the time that the slowest leaves."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SLOW_NAMES = "a name service does not answer: see /etc/resolv.conf, or use addresses"
F = TypeVar("F")


class Asked(NamedTuple):
    """The options of the command. `problem`: an error in the settings; `config` is then the part that could be read.

    `master`: the rendezvous address of a cluster's ranks, with port 0 if none is set. `launched`: whether torchrun started this
    process; torchrun then already listens at that address.
    """

    config: Config
    problem: str = ""
    master: tuple[str, int] = ("", 0)
    launched: bool = False
    nodes: int = 0
    plan: Path | None = None
    save: Path = Path(".")


class Seen:
    """All facts, by the name of their check: for the JSON report, and for checks that need facts of two checks."""

    def __init__(self) -> None:
        self.facts: dict[str, list[Any]] = {}
        self.nodes: list[Node] = []
        self.pairs: list[Pair] = []

    def first(self, check: str) -> Any:
        """The first fact of a check; None if there is none, or not yet."""
        return next(iter(self.facts.get(check, ())), None)

    def look(self, check: str, gather: Callable[[], F], judge: Callable[[F], Iterable[Finding]], deadline_s: float = QUICK_S,
             remedy: str = "see what keeps this machine busy") -> Look:
        def run() -> Iterable[Finding]:
            result = gather()
            self.facts.setdefault(check, []).append(result)
            return judge(result)

        return Look(check, run, deadline_s, remedy)


def looks(asked: Asked, seen: Seen) -> Iterator[Look]:
    """The checks in the order of their display, the slowest last."""
    config = asked.config
    yield seen.look("version", machine_facts.software, machine_checks.software)
    yield seen.look("cpu", machine_facts.processor, machine_checks.processor)
    yield seen.look("files", machine_facts.files, machine_checks.files)
    yield seen.look("shm", machine_facts.shared, machine_checks.shared)
    for what, place in _folders(asked):
        yield seen.look("disk", functools.partial(machine_facts.folder, what, place), machine_checks.folder,
                        remedy="the disk does not answer: is a network file system gone?")
    if config.journal:
        yield seen.look("journal", lambda: machine_facts.journal(Path(config.journal)),
                        lambda f: machine_checks.journal(f, required=config.journal_required),
                        remedy="the disk does not answer: is a network file system gone?")
    yield from _network(asked, seen)
    if config.keys:
        yield seen.look("keys", lambda: security_facts.keys(Path(config.keys), time.time()),
                        lambda f: security_checks.keys(f, serves=not config.join))
    yield Look("secure", lambda: security_checks.settings(config), QUICK_S, "")
    if asked.plan is not None:
        path = asked.plan
        yield seen.look("plan", lambda: security_facts.plan(path), lambda f: security_checks.plan(f, nodes=asked.nodes))
    if config.join:
        yield seen.look("server", lambda: server_facts.server(config, messages.version(), framing.VERSION),
                        lambda f: [*server_checks.server(f, keys=bool(config.keys)),
                                   *server_checks.plans(seen.first("plan"), f)],
                        SERVER_S, "its machine is overloaded, or large packets are lost on the way: try an MTU of 1280")
    yield seen.look("torch", machine_facts.torch, machine_checks.torch, machine_facts.CHILD_S + 2)


def _folders(asked: Asked) -> Iterator[tuple[str, Path]]:
    yield "checkpoints in", asked.save
    if asked.config.audit:
        yield "the audit log in", Path(asked.config.audit).absolute().parent


def _network(asked: Asked, seen: Seen) -> Iterator[Look]:
    config, master = asked.config, asked.master[0]
    joined = host_port(config.join)[0] if config.join else ""
    towards = joined or master
    overrides = [(name, value) for name in INTERFACES if (value := launcher_says(name))]
    # A worker that joins a server has no process group across machines.
    alone = bool(joined) or (asked.nodes < 2 and (not towards or is_loopback(towards)))
    yield seen.look("address", lambda: network_facts.addresses(towards, config.bind, overrides, alone=alone),
                    network_checks.addresses, NAMES_S, SLOW_NAMES)
    for role, name in (("server", joined), ("master", master), ("advertised name", config.advertise)):
        if name:
            yield seen.look("dns", functools.partial(network_facts.look_up, role, name), network_checks.name,
                            NAMES_S, SLOW_NAMES)
    if joined:
        yield seen.look("port", lambda: _server(config), network_checks.reached, NAMES_S, SLOW_NAMES)
    elif master:
        yield Look("port", lambda: _master(asked), NAMES_S, SLOW_NAMES)
    if not joined:
        for what, number in _ports(config):
            yield seen.look("port", functools.partial(network_facts.port, what, config.bind, number),
                            network_checks.port, NAMES_S, SLOW_NAMES)
    if towards:
        yield Look("mtu", lambda: _mtu(towards), NAMES_S, SLOW_NAMES)


def _server(config: Config) -> network_facts.Reached:
    try:
        known = Keys(config.keys) if config.keys else None
    except RecordError:
        known = None  # the check of keys reports it; the port can be checked all the same
    return server_facts.dialled(config.join, known, tls.CONTROL)


def _ports(config: Config) -> list[tuple[str, int]]:
    """The ports at which this machine would serve a job."""
    if not config.port:
        return [("a port of", 0)]
    return [("coordinator", config.port), *([("server", config.port + 1)] if config.port < 65535 else [])]


def _master(asked: Asked) -> Iterable[Finding]:
    host, number = asked.master
    if not number:
        return []
    if not network_facts.look_up("", host).own:
        return network_checks.reached(network_facts.reach("master", host, number), expected=False)
    return [] if asked.launched else network_checks.port(network_facts.port("master", host, number))


def _mtu(host: str) -> Iterable[Finding]:
    local = network_facts.addresses(host, "", (), alone=True)
    interface = next((one for one in local.interfaces if one.address == local.chosen), None)
    return network_checks.mtu(host, interface, network_facts.path_mtu(host))


def link(asked: Asked, seen: Seen) -> Look | None:
    """The check of the link. It runs last, since checks would slow each other. None without a server to measure with."""
    server = seen.first("server")
    if server is None or server.error:
        return None
    if server.said.begun:
        why = [warn("link", "not measured: a job is running there", "measure before it begins")]
        return Look("link", lambda: why, QUICK_S, "")
    return seen.look("link", lambda: server_facts.link(asked.config, server.round_trip_s, LINK_S), server_checks.link,
                     ALONE_S - SERVER_S, "the link is slower than any that training is worth over, or another uses it")


def between(asked: Asked, seen: Seen) -> Look:
    """Compares nodes that run this command at the same time, and measures links between them. Failures become findings."""

    def run() -> Iterable[Finding]:
        try:
            seen.nodes, seen.pairs = _met(asked, seen)
        except (CommError, ValueError, OSError) as error:
            return [of_error("nodes", error)]
        nodes = seen.nodes
        return [*node_checks.alike(nodes), *node_checks.clocks(nodes, keys=bool(asked.config.keys)),
                *node_checks.links(nodes, seen.pairs)]

    count = read_launch().world if asked.launched else asked.nodes
    slack_s = NAMES_S  # for name lookups, and for loading torch
    limit_s = node_checks.limit_s(count, asked.config.join_deadline_s) + slack_s
    return Look("nodes", run, limit_s, "a node or the store where they meet does not answer: look at the lines of the others")


def _met(asked: Asked, seen: Seen) -> tuple[list[Node], list[Pair]]:
    from commlayer.doctor import node_facts  # loads torch

    (host, number), limit_s = asked.master, asked.config.join_deadline_s
    until = time.monotonic() + limit_s
    if asked.problem:
        raise InvalidInput("E-DOCTOR", "nodes are not compared, nor links measured: mend the settings first")
    if not number:
        raise InvalidInput("E-DOCTOR",
                           "links between nodes: nobody says where they meet: start with torchrun, or say --master HOST:PORT")
    address = network_facts.own_towards(host) or own_address.default_address()
    check_plain_text("address of this node", address, asked.config)
    if asked.launched:
        launch = read_launch()
        meeting, count = node_facts.launched_store(launch.rank, launch.world, limit_s), launch.world
    else:
        own, count = network_facts.look_up("", host).own, asked.nodes
        meeting = node_facts.store_at(host, number, count, own, limit_s)
    plan = seen.first("plan")
    me = node_facts.of_this(address, plan.digest if plan else "")
    return node_facts.measured(meeting, count, me, asked.config, until)
