"""The list of checks, each with its deadline, and the settings that they check."""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from commlayer import last_run, native
from commlayer.cluster.servers.server_journal import NAME
from commlayer.config import Config, host_port, is_loopback, launcher_variable, master, own_cores, read_launch, split_port
from commlayer.doctor import machine, network, nodes, server
from commlayer.doctor.findings import Check, Finding, failure_from_error
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


class Doctor:
    """The settings that checks read. `nodes` and `links`: results of the comparison of nodes. A check of settings that are not
    used returns no findings."""

    def __init__(self, config: Config, plan: Path | None = None, script: Path | None = None, *, enrolled: bool = True) -> None:
        """`script`: the training script. `enrolled`: False: this home has no keys yet, so `doctor` cannot query the server."""
        self.config, self.plan, self.launch = config, plan, read_launch()
        self._script, self._enrolled = script, enrolled
        self.server = server.ServerCheck(config)
        self.nodes: list[nodes.NodeFacts] = []
        self.links: list[list[nodes.Link]] = []
        joined = config.join
        self._hosts = {"server": host_port(joined)[0] if joined else "", "master": "" if joined else master(),
                       network.ADVERTISED: split_port(config.advertise, "advertise")[0]}

    def phases(self) -> Iterator[Sequence[Check[Doctor]]]:
        """Yields groups of checks; the checks of a group run at the same time. The link to the server is measured alone, after
        the other checks. If a launcher runs this command on several nodes, the links between them are measured last."""
        yield CHECKS
        yield [LINK] if self.server.status is not None else []
        limit_s = nodes.limit_s(self.launch.world, self.config.join_deadline_s)
        yield [Check("nodes", Doctor.compare, limit_s, SLOW_NODES)] if self.launch.world > 1 else []

    def machine(self) -> Iterator[Finding]:
        yield from machine.check_versions(platform.python_version(), native.core.isa() if native.core is not None else "")
        yield machine.check_processor(own_cores(), machine.core_limit())
        yield machine.check_file_limits(*resource.getrlimit(resource.RLIMIT_NOFILE))
        if sys.platform == "linux":
            yield machine.check_shared_memory()

    def system(self) -> Iterable[Finding]:
        container = any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
        serves = not self.config.join and not is_loopback(self.config.bind)
        return machine.check_system(platform.release(), container=container, serves=serves)

    def disk(self) -> Iterable[Finding]:
        return [machine.check_folder("checkpoints in", Path(), machine.free_space(Path()))]

    def journal(self) -> Iterable[Finding]:
        path, required = Path(self.config.journal), self.config.journal_required
        return machine.check_journal(path, machine.free_space(path), present=(path / NAME).exists(),
                                     required=required) if self.config.journal else ()

    def address(self) -> Iterable[Finding]:
        # A worker that joins a server has no process group across machines.
        peer, config = self._hosts["server"] or self._hosts["master"], self.config
        one_machine = self.launch.world <= self.launch.local_world and (not peer or is_loopback(peer))
        named = network.lookup_addresses(name) if (name := self._hosts[network.ADVERTISED]) else ()
        return network.check_addresses(network.own_addresses(peer), config.bind, launcher_variable("GLOO_SOCKET_IFNAME"),
                                       alone=bool(config.join) or one_machine,
                                       advertise=() if isinstance(named, str) else named)

    def names(self) -> Iterator[Finding]:
        for role, name in self._hosts.items():
            if name:
                yield from network.check_name(role, name, network.lookup_addresses(name))

    def port(self) -> Iterator[Finding]:
        host, number, joined = self.config.bind, self.config.port, self.config.join
        if joined:
            yield network.check_reachable("server", joined, server.dial_coordinator(self.config))
            return
        ports = [("coordinator" if number else "a port of", number), *([("server", number + 1)] if 0 < number < 65535 else [])]
        for what, each in ports:
            yield network.check_port(what, host, each, network.listen_error(host, each))

    def keys(self) -> Iterable[Finding]:
        keys = self.config.keys
        return machine.check_keys(Path(keys), time.time(), serves=not self.config.join) if keys else ()

    def security(self) -> Iterable[Finding]:
        return machine.check_settings(self.config) if self._enrolled else ()

    def script(self) -> Iterable[Finding]:
        return [machine.check_script(self._script)] if self._script else ()

    def plan_file(self) -> Iterable[Finding]:
        return [machine.check_plan(self.plan, machine.own_plan(self.plan))] if self.plan else ()

    def coordinator(self) -> Iterable[Finding]:
        return self.server.run(machine.own_digest(self.plan)) if self.config.join and self._enrolled else ()

    def link(self) -> Iterable[Finding]:
        return self.server.link(LINK_S)

    def torch(self) -> Iterable[Finding]:
        return machine.check_torch(machine.own_torch())

    def last_runs(self) -> Iterable[Finding]:
        return machine.check_last_runs(last_run.folder(self.config.cache))

    def compare(self) -> Iterator[Finding]:
        try:
            self.nodes, self.links = nodes.compare_nodes(self.launch, nodes.own_facts(machine.own_digest(self.plan)),
                                                         network.address_towards(master()), self.config.join_deadline_s)
        except (CommError, ValueError, OSError) as error:
            yield failure_from_error("nodes", error)
            return
        yield from nodes.check_alike(self.nodes)
        yield from nodes.check_distinct(self.nodes)
        yield from nodes.check_links(self.nodes, self.links)
        rates = [link for a, row in enumerate(self.links) for b, link in enumerate(row) if a != b and not isinstance(link, str)]
        yield from network.check_idle(min(rates, default=math.inf), restarts=network.restarts_idle())


CHECKS: tuple[Check[Doctor], ...] = (
    Check("machine", Doctor.machine, QUICK_S, BUSY),
    Check("system", Doctor.system, QUICK_S, BUSY),
    Check("disk", Doctor.disk, QUICK_S, SLOW_DISK),
    Check("journal", Doctor.journal, QUICK_S, SLOW_DISK),
    Check("address", Doctor.address, NAMES_S, SLOW_NAMES),
    Check("dns", Doctor.names, NAMES_S, SLOW_NAMES),
    Check("port", Doctor.port, NAMES_S, SLOW_NAMES),
    Check("keys", Doctor.keys, QUICK_S, BUSY),
    Check("secure", Doctor.security, QUICK_S, BUSY),
    Check("script", Doctor.script, QUICK_S, SLOW_DISK),
    Check("plan", Doctor.plan_file, QUICK_S, BUSY),
    Check("last runs", Doctor.last_runs, QUICK_S, SLOW_DISK),
    Check("server", Doctor.coordinator, SERVER_S, SLOW_SERVER),
    Check("torch", Doctor.torch, machine.CHILD_S + 2, BUSY),
)
"""The checks of this machine in the order of display, the slowest last."""
LINK = Check("link", Doctor.link, ALONE_S - SERVER_S, SLOW_LINK)
