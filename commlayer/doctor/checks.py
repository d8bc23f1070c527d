"""The table of checks for given settings, with the deadline of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from commlayer.config import Config, check_plain_text, host_port, is_loopback, join_host, launcher_says, read_launch
from commlayer.doctor import machine, network, nodes, security, server
from commlayer.doctor.nodes import NodeFacts, Pair
from commlayer.doctor.report import Check, Finding, of_error
from commlayer.errors import CommError, InvalidInput
from commlayer.transport import own_address

QUICK_S, NAMES_S, SERVER_S, LINK_S = 5.0, 8.0, 17.0, 2.0
ALONE_S = 30.0
"""Every check of one machine ends by then. The link check runs last, in the time that the slowest other check leaves."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
BUSY = "the machine is overloaded: check its load"
SLOW_NAMES = "a name service does not answer: check /etc/resolv.conf, or use addresses"
SLOW_DISK = "the disk does not answer: check network file systems"
SLOW_SERVER = "the server is overloaded, or large packets are lost: try an MTU of 1280"
Run = Callable[[], Iterable[Finding]]


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
    """The checks for given options. `nodes` and `pairs` are the results of the comparison of nodes."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.server = server.ServerCheck(options.config)
        self.nodes: list[NodeFacts] = []
        self.pairs: list[Pair] = []

    def checks(self) -> list[Check]:
        """The checks of this machine in the order of display, the slowest last."""
        options, config, master = self.options, self.options.config, self.options.master[0]
        joined = host_port(config.join)[0] if config.join else ""
        peer, audit, journal, plan = joined or master, config.audit, Path(config.journal), options.plan
        names = [(role, name) for role, name in (("server", joined), ("master", master), ("advertised name", config.advertise))
                 if name]
        rows: list[tuple[object, str, Run, float, str]] = [
            (True, "version", lambda: machine.check_versions(*machine.own_versions()), QUICK_S, BUSY),
            (True, "cpu", lambda: machine.check_processor(*machine.own_processor()), QUICK_S, BUSY),
            (True, "files", lambda: machine.check_file_limits(*machine.own_file_limits()), QUICK_S, BUSY),
            (True, "shm", machine.check_shared_memory, QUICK_S, BUSY),
            (True, "disk", lambda: _folder("checkpoints in", options.save), QUICK_S, SLOW_DISK),
            (audit, "disk", lambda: _folder("the audit log in", Path(audit).absolute().parent), QUICK_S, SLOW_DISK),
            (config.journal, "journal", lambda: machine.check_journal(journal, *machine.own_journal(journal),
                                                                      required=config.journal_required), QUICK_S, SLOW_DISK),
            (True, "address", lambda: self._addresses(peer), NAMES_S, SLOW_NAMES),
            *((True, "dns", lambda role=role, name=name: network.check_name(role, name, *network.resolve(name)), NAMES_S,
               SLOW_NAMES) for role, name in names),
            (joined, "port", lambda: network.check_reachable("server", config.join, server.dial_coordinator(config)), NAMES_S,
             SLOW_NAMES),
            (not joined and options.master[1], "port", self._master, NAMES_S, SLOW_NAMES),
            (not joined, "port", lambda: network.check_listening(self._own_ports()), NAMES_S, SLOW_NAMES),
            (peer, "mtu", lambda: network.check_mtu(peer, network.own_addresses(peer).interface, network.path_mtu(peer)),
             NAMES_S, SLOW_NAMES),
            (config.keys, "keys", lambda: security.check_keys(Path(config.keys), time.time(), serves=not joined), QUICK_S,
             BUSY),
            (True, "secure", lambda: security.check_settings(config), QUICK_S, BUSY),
            (plan, "plan", lambda: security.check_plan(plan or Path(), security.own_plan(plan), options.nodes), QUICK_S, BUSY),
            (joined, "server", lambda: self.server.run(security.own_digest(plan)), SERVER_S, SLOW_SERVER),
            (True, "torch", lambda: machine.check_torch(machine.own_torch()), machine.CHILD_S + 2, BUSY),
        ]
        return [Check(*row[1:]) for row in rows if row[0]]

    def link_check(self) -> list[Check]:
        """The check of the link, to run after the others, since they would slow each other. None without a usable server."""
        remedy = "the link is too slow, or other traffic fills it"
        check = Check("link", lambda: self.server.link(LINK_S), ALONE_S - SERVER_S, remedy)
        return [] if self.server.status is None else [check]

    def node_check(self) -> Check:
        """Compares nodes that run this command at the same time, and measures links between them."""
        options = self.options

        def run() -> Iterator[Finding]:
            try:
                self.nodes, self.pairs = self._compare_nodes()
            except (CommError, ValueError, OSError) as error:
                yield of_error("nodes", error)
                return
            yield from nodes.check_alike(self.nodes)
            yield from nodes.check_clocks(self.nodes, keys=bool(options.config.keys))
            yield from nodes.check_links(self.nodes, self.pairs)

        count = read_launch().world if options.launched else options.nodes
        slack_s = NAMES_S  # for name lookups, and for loading torch
        return Check("nodes", run, nodes.limit_s(count, options.config.join_deadline_s) + slack_s,
                     "a node or the rendezvous store does not answer: see the other nodes' output")

    def _addresses(self, peer: str) -> Iterator[Finding]:
        variables = {name: value for name in INTERFACES if (value := launcher_says(name))}
        # A worker that joins a server has no process group across machines.
        alone = bool(self.options.config.join) or (self.options.nodes < 2 and (not peer or is_loopback(peer)))
        return network.check_addresses(network.own_addresses(peer), self.options.config.bind, variables, alone=alone)

    def _own_ports(self) -> list[tuple[str, str, int]]:
        config = self.options.config
        if not config.port:
            return [("a port of", config.bind, 0)]
        data = [("server", config.bind, config.port + 1)] if config.port < 65535 else []
        return [("coordinator", config.bind, config.port), *data]

    def _master(self) -> Iterable[Finding]:
        host, number = self.options.master
        if not network.is_own(host):
            return network.check_reachable("master", join_host(host, number), network.dial(host, number), expected=False)
        return [] if self.options.launched else network.check_listening([("master", host, number)])

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
        launch, count = read_launch(), options.nodes
        if options.launched:
            rendezvous, count = nodes.launched_store(launch.rank, launch.world, limit_s), launch.world
        else:
            rendezvous = nodes.store_at(host, number, count, network.is_own(host), limit_s)
        node = nodes.own_facts(address, security.own_digest(options.plan))
        return nodes.compare_nodes(rendezvous, count, node, options.config, deadline)


def _folder(what: str, path: Path) -> Iterator[Finding]:
    return machine.check_folder(what, path, machine.free_space(path))
