"""The list of checks for given settings, and the deadline of each."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from commlayer.cluster import messages
from commlayer.config import Config, check_plain_text, host_port, is_loopback, launcher_says, read_launch
from commlayer.doctor import machine, network, nodes, security, server
from commlayer.doctor.nodes import NodeFacts, Pair
from commlayer.doctor.report import Check, Finding, of_error, warn
from commlayer.errors import CommError, InvalidInput, RecordError
from commlayer.transport import framing, own_address, tls
from commlayer.transport.key_folder import Keys

QUICK_S, NAMES_S, SERVER_S, LINK_S = 5.0, 8.0, 17.0, 2.0
ALONE_S = 30.0
"""Every check of one machine ends by then. The link check runs last, in the time that the slowest other check leaves."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SLOW_NAMES = "a name service does not answer: check /etc/resolv.conf, or use addresses"
SLOW_DISK = "the disk does not answer: check network file systems"
F = TypeVar("F")


class Options(NamedTuple):
    """Options of the command. `problem`: an error in the settings; `config` then holds the settings that could be read.

    `master`: the rendezvous address of a cluster's ranks, with port 0 if none is set. `launched`: torchrun started this
    process, and torchrun already listens at that address.
    """

    config: Config
    problem: str = ""
    master: tuple[str, int] = ("", 0)
    launched: bool = False
    nodes: int = 0
    plan: Path | None = None
    save: Path = Path(".")


class Doctor:
    """The checks for given options. `facts`, by the name of the check, are for the JSON report and for later checks."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.facts: dict[str, list[Any]] = {}
        self.nodes: list[NodeFacts] = []
        self.pairs: list[Pair] = []

    def checks(self) -> Iterator[Check]:
        """The checks of this machine in the order of display, the slowest last."""
        options, config = self.options, self.options.config
        yield self._check("version", machine.read_software, machine.check_software)
        yield self._check("cpu", machine.read_processor, machine.check_processor)
        yield self._check("files", machine.read_file_limits, machine.check_file_limits)
        yield self._check("shm", machine.read_shared_memory, machine.check_shared_memory)
        folders = [("checkpoints in", options.save)]
        if config.audit:
            folders.append(("the audit log in", Path(config.audit).absolute().parent))
        for role, path in folders:
            yield self._check("disk", functools.partial(machine.read_folder, role, path), machine.check_folder,
                              remedy=SLOW_DISK)
        if config.journal:
            yield self._check("journal", lambda: machine.read_journal(Path(config.journal)),
                              lambda f: machine.check_journal(f, required=config.journal_required), remedy=SLOW_DISK)
        yield from self._network_checks()
        if config.keys:
            yield self._check("keys", lambda: security.read_keys(Path(config.keys), time.time()),
                              lambda f: security.check_keys(f, serves=not config.join))
        yield Check("secure", lambda: security.check_settings(config), QUICK_S, "")
        if options.plan is not None:
            path = options.plan
            yield self._check("plan", lambda: security.read_plan(path), lambda f: security.check_plan(f, nodes=options.nodes))
        if config.join:
            yield self._check("server", lambda: server.query_server(config, messages.version(), framing.VERSION),
                              lambda f: [*server.check_server(f, keys=bool(config.keys)),
                                         *server.check_same_plan(self._first("plan"), f)],
                              SERVER_S, "the server is overloaded, or large packets are lost: try an MTU of 1280")
        yield self._check("torch", machine.read_torch, machine.check_torch, machine.CHILD_S + 2)

    def link_check(self) -> Check | None:
        """The check of the link, to run after the others, since they would slow each other. None without a usable server."""
        facts = self._first("server")
        if facts is None or facts.error:
            return None
        if facts.status.begun:
            findings = [warn("link", "not measured: a job is running there", "measure before the job starts")]
            return Check("link", lambda: findings, QUICK_S, "")
        config = self.options.config
        return self._check("link", lambda: server.measure_link(config, facts.round_trip_s, LINK_S),
                           server.check_link, ALONE_S - SERVER_S, "the link is too slow, or other traffic fills it")

    def node_check(self) -> Check:
        """Compares nodes that run this command at the same time, and measures links between them. Failures become findings."""
        options = self.options

        def run() -> Iterable[Finding]:
            try:
                self.nodes, self.pairs = self._compare_nodes()
            except (CommError, ValueError, OSError) as error:
                return [of_error("nodes", error)]
            return [*nodes.check_alike(self.nodes), *nodes.check_clocks(self.nodes, keys=bool(options.config.keys)),
                    *nodes.check_links(self.nodes, self.pairs)]

        count = read_launch().world if options.launched else options.nodes
        slack_s = NAMES_S  # for name lookups, and for loading torch
        deadline_s = nodes.limit_s(count, options.config.join_deadline_s) + slack_s
        return Check("nodes", run, deadline_s, "a node or the rendezvous store does not answer: see the other nodes' output")

    def _first(self, check: str) -> Any:
        """The first fact of a check; None if there is none, or not yet."""
        return next(iter(self.facts.get(check, ())), None)

    def _check(self, name: str, read: Callable[[], F], judge: Callable[[F], Iterable[Finding]], deadline_s: float = QUICK_S,
               remedy: str = "the machine is overloaded: check its load") -> Check:
        def run() -> Iterable[Finding]:
            facts = read()
            self.facts.setdefault(name, []).append(facts)
            return judge(facts)

        return Check(name, run, deadline_s, remedy)

    def _network_checks(self) -> Iterator[Check]:
        config, master = self.options.config, self.options.master[0]
        joined = host_port(config.join)[0] if config.join else ""
        peer = joined or master
        overrides = [(name, value) for name in INTERFACES if (value := launcher_says(name))]
        # A worker that joins a server has no process group across machines.
        alone = bool(joined) or (self.options.nodes < 2 and (not peer or is_loopback(peer)))
        yield self._check("address", lambda: network.read_addresses(peer, config.bind, overrides, alone=alone),
                          network.check_addresses, NAMES_S, SLOW_NAMES)
        for role, name in (("server", joined), ("master", master), ("advertised name", config.advertise)):
            if name:
                yield self._check("dns", functools.partial(network.resolve_name, role, name), network.check_name, NAMES_S,
                                  SLOW_NAMES)
        if joined:
            yield self._check("port", self._dial_coordinator, network.check_reachable, NAMES_S, SLOW_NAMES)
        elif master:
            yield Check("port", self._check_master, NAMES_S, SLOW_NAMES)
        if not joined:
            ports = [("coordinator", config.port), *([("server", config.port + 1)] if config.port < 65535 else [])]
            for role, number in ports if config.port else [("a port of", 0)]:
                yield self._check("port", functools.partial(network.probe_port, role, config.bind, number), network.check_port,
                                  NAMES_S, SLOW_NAMES)
        if peer:
            yield Check("mtu", lambda: _check_mtu(peer), NAMES_S, SLOW_NAMES)

    def _dial_coordinator(self) -> network.Reached:
        config = self.options.config
        try:
            keys = Keys(config.keys) if config.keys else None
        except RecordError:
            keys = None  # the check of keys reports it; the port can be checked without
        return server.dial_tls(config.join, keys, tls.CONTROL)

    def _check_master(self) -> Iterable[Finding]:
        host, number = self.options.master
        if not number:
            return []
        if not network.resolve_name("", host).own:
            return network.check_reachable(network.dial("master", host, number), expected=False)
        return [] if self.options.launched else network.check_port(network.probe_port("master", host, number))

    def _compare_nodes(self) -> tuple[list[NodeFacts], list[Pair]]:
        options = self.options
        (host, number), limit_s = options.master, options.config.join_deadline_s
        deadline = time.monotonic() + limit_s
        if options.problem:
            raise InvalidInput("E-DOCTOR", "nodes are not compared, and links not measured: correct the settings first")
        if not number:
            raise InvalidInput("E-DOCTOR", "comparing nodes needs a rendezvous: start with torchrun, or use --master HOST:PORT")
        address = network.address_towards(host) or own_address.default_address()
        check_plain_text("address of this node", address, options.config)
        if options.launched:
            launch = read_launch()
            rendezvous, count = nodes.launched_store(launch.rank, launch.world, limit_s), launch.world
        else:
            own, count = network.resolve_name("", host).own, options.nodes
            rendezvous = nodes.store_at(host, number, count, own, limit_s)
        plan = self._first("plan")
        node = nodes.describe_this_node(address, plan.digest if plan else "")
        return nodes.compare_nodes(rendezvous, count, node, options.config, deadline)


def _check_mtu(host: str) -> Iterable[Finding]:
    local = network.read_addresses(host, "", (), alone=True)
    interface = next((one for one in local.interfaces if one.address == local.chosen), None)
    return network.check_mtu(host, interface, network.path_mtu(host))
