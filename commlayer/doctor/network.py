"""Checks a machine's network: interfaces, names and ports.

Name lookups use the system's resolver and have no time limit: call them on a thread that can be abandoned.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from commlayer.callbacks import ignore
from commlayer.config import is_loopback, join_host
from commlayer.doctor.findings import Finding, fail, failure_from_error, ok, warn
from commlayer.errors import join_names
from commlayer.records import Record
from commlayer.transport import own_address
from commlayer.transport.own_address import Interface

CONNECT_S = 3.0
IDLE, CONTROL = (Path("/proc/sys/net/ipv4", name) for name in ("tcp_slow_start_after_idle", "tcp_congestion_control"))
IDLE_BPS = 20e6
"""Links of fewer bit/s are checked for slow starts after pauses."""
NO_LINK = "check cable, Wi-Fi or VPN, and `ip route`"
INSIDE = ("docker", "br-", "veth", "virbr", "cni", "podman", "lxcbr", "vEthernet")
"""Prefixes of interface names that lead to containers and virtual machines of this machine."""


ADVERTISED = "advertised name"


class Addresses(Record, frozen=True):
    """This machine's addresses. `chosen`: the address from which packets to the host `towards` are sent (empty: to the default
    route). `resolves`: addresses of the host name."""

    interfaces: tuple[Interface, ...]
    towards: str
    chosen: str
    host: str = ""
    resolves: tuple[str, ...] = ()

    @property
    def outside(self) -> list[Interface]:
        """Interfaces that lead to other machines, the one with the chosen address first."""
        leading = (one for one in self.interfaces if not is_loopback(one.address) and not one.name.startswith(INSIDE))
        return sorted(leading, key=lambda one: one.address != self.chosen)


def check_addresses(f: Addresses, bind: str, interface: str, *, alone: bool, advertise: Sequence[str] = ()
                    ) -> Iterator[Finding]:
    """Checks the machine's addresses. `alone`: True if the job seems to run on this machine only. `interface`: the value of
    GLOO_SOCKET_IFNAME. `advertise`: addresses of the advertised name."""
    yield _route(f, alone)
    uses = {"bind": bind, **{f"advertise ({one})": one for one in advertise}}
    uses |= {} if alone else {"the route to other machines": f.chosen}
    uses |= {} if alone or interface else {f"the host name {f.host}": next(iter(f.resolves), "")}
    for what, address in uses.items():
        if (bridge := next((one for one in f.interfaces if one.address == address and one.name.startswith(INSIDE)), None)):
            yield fail("address", f"{what} is {bridge.address} of {bridge.name}, a bridge to containers of this machine; other "
                                  "machines cannot reach it",
                       f"use {_join_interfaces(f.outside) or 'the address of a network interface'}")
    names = sorted({one.name for one in f.interfaces})
    if interface and interface not in names:
        yield fail("address", f"GLOO_SOCKET_IFNAME={interface}: no interface with an address has this name",
                   f"unset it, or set it to one of {', '.join(names)}")
    elif not interface and not alone:
        yield _own_name(f)
    if is_address(bind) and not is_loopback(bind) and bind not in {"0.0.0.0", "::", *(one.address for one in f.interfaces)}:
        yield fail("address", f"bind is {bind}, which is not an address of this machine",
                   f"set bind to one of {_join_interfaces(f.outside)}; if a router translates addresses, set advertise to "
                   f"{bind}")


def _route(f: Addresses, alone: bool) -> Finding:
    others = [one for one in f.outside if one.address != f.chosen]
    also = f"; also {_join_interfaces(others)}" if others else ""
    if not f.chosen:
        return (fail("address", f"no route to {f.towards}", NO_LINK) if f.towards else
                warn("address", "no default route: this machine cannot reach other networks", NO_LINK))
    if not is_loopback(f.chosen):
        name = next((f" of {one.name}" for one in f.interfaces if one.address == f.chosen), "")
        return ok("address", f"{f.chosen}{name}, {f'towards {f.towards}' if f.towards else 'on the default route'}{also}",
                  chosen=f.chosen)
    if alone:
        return ok("address", f"{f.chosen}: this job stays on this machine")
    if f.towards and is_loopback(f.towards):
        return fail("address", f"the rendezvous address {f.towards} means a different machine on each node (loopback)",
                    f"use an address that all machines can reach, such as "
                    f"{_join_interfaces(others) or 'that of a network interface'}")
    return ok("address", f"{f.towards} is this machine{also}")


def _own_name(f: Addresses) -> Finding:
    """Checks the host name, which Gloo uses if a script creates its process group itself."""
    interface = f.outside[0].name if f.outside else "INTERFACE"
    remedy = f"export GLOO_SOCKET_IFNAME={interface}, or give {f.host} its address in /etc/hosts"
    if not f.resolves:
        return warn("hostname", f"this machine's host name {f.host} does not resolve", remedy)
    address = next((one for one in f.resolves if not is_loopback(one)), "")
    if not address:
        return warn("hostname", f"this machine's host name {f.host} resolves to {f.resolves[0]} (/etc/hosts)", remedy)
    return ok("hostname", f"{f.host} resolves to {address}")


def check_name(role: str, name: str, addresses: Sequence[str] | str) -> Iterator[Finding]:
    """Checks the lookup of a name. `role`: the name's role in the job. `addresses`: result of the lookup, or its error."""
    if isinstance(addresses, str):
        yield fail("dns", f"{role} {name} does not resolve: {addresses}", "check the spelling, or use the address")
    elif not is_address(name):
        line = f"{role} {name} is {', '.join(addresses[:3])}"
        if name == "localhost" or not all(map(is_loopback, addresses)):
            yield ok("dns", line)
        else:  # others resolve an advertised name too, and would dial themselves
            yield (fail if role == ADVERTISED else warn)("dns", f"{line}: loopback, which is right only for this machine",
                                                         "correct the name's line in /etc/hosts, or use the address")


def check_port(what: str, host: str, number: int, error: OSError | None) -> Finding:
    """Checks a port. `error`: the reason why this process cannot listen on the port."""
    address = join_host(host, number)
    if error is None:
        return ok("port", f"{what} {address} is free" if number else f"{host} can be listened on")
    if error.errno == errno.EADDRINUSE:
        return fail("port", f"{what} {address} is in use",
                    f"`ss -ltnp sport = :{number}` shows which process: end it, or set another port")
    return fail("port", f"{what} {address} cannot be listened on: {error.strerror or error}",
                "bind an address of this machine and a port above 1023")


def check_reachable(what: str, address: str, problem: str) -> Finding:
    """Checks an address. `problem`: the result of `dial`."""
    return failure_from_error("port", f"{what} {address} {problem}") if problem else ok("port", f"{what} {address} answers")


def restarts_idle() -> bool:
    """Returns whether this machine's TCP connections start slowly again after they were idle. They do not under BBR."""
    try:
        return IDLE.read_text().strip() == "1" and CONTROL.read_text().strip() != "bbr"
    except OSError:
        return False


def check_idle(bps: float, *, restarts: bool) -> Iterator[Finding]:
    """Checks whether idle TCP connections start slowly again, if the link is slow. `restarts`: see `restarts_idle`."""
    if bps < IDLE_BPS and restarts:
        yield warn("tcp", f"Linux slows down connections that were idle, which can make steps 1.7 times as long on links below "
                          f"{IDLE_BPS / 1e6:.0f} Mb/s", f"sysctl -w net.ipv4.{IDLE.name}=0, as root on all machines")


def dial(host: str, number: int, limit_s: float = CONNECT_S, greet: Callable[[socket.socket], None] = ignore) -> str:
    """Connects to an address and returns the problem with its remedy; "" if there is none. `greet` sends a valid first message,
    so the listener does not log an unknown connection."""
    try:
        with socket.create_connection((host, number), limit_s) as sock:
            greet(sock)
            return ""
    except OSError as error:
        return connect_problem(error)


def connect_problem(error: OSError) -> str:
    """Describes why a connection failed, with the remedy."""
    if isinstance(error, TimeoutError):
        return "does not answer; open the port in the firewall and router of that machine, and check the address"
    if isinstance(error, ConnectionRefusedError):
        return "refuses connections, since no process listens on the port; start the process, or check address and port"
    if isinstance(error, socket.gaierror):
        return f"does not resolve: {error.strerror}; check the spelling, or use the address"
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return f"cannot be reached, no route; {NO_LINK}"
    return f"cannot be reached: {error.strerror or error}; check the address"


def listen_error(host: str, number: int) -> OSError | None:
    """Listens on the port for a moment, without SO_REUSEPORT, as a server would. Returns the error, or None."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
            probe.listen(1)
    except OSError as error:
        return error
    return None


def _join_interfaces(interfaces: Sequence[Interface]) -> str:
    return join_names([f"{one.name} {one.address}" for one in interfaces], 4)


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def own_addresses(towards: str) -> Addresses:
    """Collects this machine's addresses. `towards`: the host for which the machine's own address is chosen, such as
    MASTER_ADDR."""
    host, resolves = socket.gethostname(), lookup_addresses(socket.gethostname())
    chosen = own_address.address_to(towards) if towards else own_address.default_address()
    interfaces = tuple(own for own in own_address.own_addresses() if own.everywhere)
    return Addresses(interfaces, towards, chosen, host, () if isinstance(resolves, str) else resolves)


def address_towards(host: str) -> str:
    """The address under which other nodes of the job reach this machine. `host`: MASTER_ADDR, which may be this machine."""
    f = own_addresses(host)
    if not is_loopback(f.chosen or "localhost") or is_loopback(host):
        return f.chosen
    own = [one.address for one in f.outside]
    return next((one for one in f.resolves if one in own), own_address.default_address() or "127.0.0.1")


def lookup_addresses(name: str) -> tuple[str, ...] | str:
    """The addresses of a name, or the lookup's error."""
    try:
        return tuple(dict.fromkeys(str(row[4][0]) for row in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", "") or str(error)
