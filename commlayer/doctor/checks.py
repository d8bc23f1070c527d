"""Lists the checks for given settings, with the deadline of each check."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from commlayer.config import Config, host_port, is_loopback, launcher_says, master, read_launch
from commlayer.doctor import machine, network, nodes, server
from commlayer.doctor.findings import Check, Finding, of_error
from commlayer.errors import CommError

QUICK_S, NAMES_S, SERVER_S, LINK_S = 5.0, 8.0, 17.0, 2.0
ALONE_S = 30.0
"""Seconds within which every check of one machine ends. The link check runs last, in the time that the slowest other check
leaves."""
BUSY = "the machine is overloaded: check its load"
SLOW_NAMES = "a name service does not answer: check /etc/resolv.conf, or use addresses"
SLOW_DISK = "the disk does not answer: check network file systems"
SLOW_SERVER = "the server is overloaded, or large packets are lost: try an MTU of 1280"
SLOW_LINK = "the link is too slow, or other traffic fills it"
SLOW_NODES = "a node or the rendezvous store does not answer: see the other nodes' output"
Run = Callable[[], Iterable[Finding]]


class Doctor:
    """Runs the checks for the given settings. `nodes` and `links`: results of the comparison of nodes."""

    def __init__(self, config: Config, plan: Path | None = None, script: Path | None = None, *, enrolled: bool = True) -> None:
        """`script`: the training script. `enrolled`: False: this home has no keys yet, so the server cannot be asked."""
        self.config, self.plan, self.launch = config, plan, read_launch()
        self._script, self._enrolled = script, enrolled
        self.server = server.ServerCheck(config)
        self.nodes: list[nodes.NodeFacts] = []
        self.links: list[list[nodes.Link]] = []

    def checks(self) -> list[Check]:
        """The checks of this machine in the order of display, the slowest last."""
        config, plan, joined, script = self.config, self.plan, self.config.join, self._script
        hosts = {"server": host_port(joined)[0] if joined else "", "master": "" if joined else master(),
                 network.ADVERTISED: config.advertise}
        peer = hosts["server"] or hosts["master"]
        rows: list[tuple[Any, str, Run, float, str]] = [
            (True, "machine", machine.own_machine, QUICK_S, BUSY),
            (True, "system", lambda: machine.own_system(serves=not joined and not is_loopback(config.bind)), QUICK_S, BUSY),
            (True, "disk", lambda: [machine.check_folder("checkpoints in", Path(), machine.free_space(Path()))], QUICK_S,
             SLOW_DISK),
            (config.journal, "journal", lambda: machine.own_journal(Path(config.journal), required=config.journal_required),
             QUICK_S, SLOW_DISK),
            (True, "address", lambda: self._addresses(peer), NAMES_S, SLOW_NAMES),
            (True, "dns", lambda: (finding for role, name in hosts.items() if name
                                   for finding in network.check_name(role, name, network.resolve(name))), NAMES_S, SLOW_NAMES),
            (joined, "port", lambda: [network.check_reachable("server", joined, server.dial_coordinator(config))], NAMES_S,
             SLOW_NAMES),
            (not joined, "port", lambda: [network.check_port(*port, network.listen_error(*port[1:])) for port in self._ports()],
             QUICK_S, BUSY),
            (config.keys, "keys", lambda: machine.check_keys(Path(config.keys), time.time(), serves=not joined), QUICK_S, BUSY),
            (self._enrolled, "secure", lambda: machine.check_settings(config), QUICK_S, BUSY),
            (script, "script", lambda: [machine.check_script(script or Path())], QUICK_S, SLOW_DISK),
            (plan, "plan", lambda: [machine.check_plan(plan or Path(), machine.own_plan(plan))], QUICK_S, BUSY),
            (joined and self._enrolled, "server", lambda: self.server.run(machine.own_digest(plan)), SERVER_S, SLOW_SERVER),
            (True, "torch", lambda: machine.check_torch(machine.own_torch()), machine.CHILD_S + 2, BUSY),
        ]
        return [Check(*row[1:]) for row in rows if row[0]]

    def link_check(self) -> list[Check]:
        """The check of the link to the server, which runs after the other checks, since they would disturb each other. Empty
        without a usable server."""
        check = Check("link", lambda: self.server.link(LINK_S), ALONE_S - SERVER_S, SLOW_LINK)
        return [] if self.server.status is None else [check]

    def node_check(self) -> list[Check]:
        """Compares the nodes of a launcher that runs this command on all of them, and measures links between them."""
        limit_s = nodes.limit_s(self.launch.world, self.config.join_deadline_s)
        return [Check("nodes", self._compare, limit_s, SLOW_NODES)] if self.launch.world > 1 else []

    def _compare(self) -> Iterator[Finding]:
        try:
            self.nodes, self.links = nodes.compare_nodes(self.launch, nodes.own_facts(machine.own_digest(self.plan)),
                                                         network.address_towards(master()), self.config.join_deadline_s)
        except (CommError, ValueError, OSError) as error:
            yield of_error("nodes", error)
            return
        yield from nodes.check_alike(self.nodes)
        yield from nodes.check_distinct(self.nodes)
        yield from nodes.check_links(self.nodes, self.links)
        rates = [link for a, row in enumerate(self.links) for b, link in enumerate(row) if a != b and not isinstance(link, str)]
        yield from network.check_idle(min(rates, default=math.inf), network.idle_setting())

    def _addresses(self, peer: str) -> Iterator[Finding]:
        # A worker that joins a server has no process group across machines.
        one_machine = self.launch.world <= self.launch.local_world and (not peer or is_loopback(peer))
        named = network.resolve(self.config.advertise) if self.config.advertise else ()
        return network.check_addresses(network.own_addresses(peer), self.config.bind, launcher_says("GLOO_SOCKET_IFNAME"),
                                       alone=bool(self.config.join) or one_machine,
                                       advertise=() if isinstance(named, str) else named)

    def _ports(self) -> list[tuple[str, str, int]]:
        host, number = self.config.bind, self.config.port
        data = [("server", host, number + 1)] if 0 < number < 65535 else []
        return [("coordinator" if number else "a port of", host, number), *data]
