"""Judges a machine's network: pure functions over network_facts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from commlayer.config import is_loopback
from commlayer.doctor.finding import Finding, fail, ok, warn
from commlayer.doctor.network_facts import Addresses, Interface, Name, Port, Reached

SLOW_S = 2.0
"""A slower name lookup delays every start, and may come from a resolver that is about to fail."""
LEAST_MTU = 1280
"""The packet size in bytes that IPv6 and most VPNs pass."""


def addresses(f: Addresses) -> Iterator[Finding]:
    yield _chosen(f)
    yield from _own_name(f)
    yield from _told(f)
    mine = {"0.0.0.0", "::"} | {one.address for one in f.interfaces}
    if f.bind not in mine and not is_loopback(f.bind) and _is_address(f.bind):
        yield fail("address", f"bind names {f.bind}, which is no address of this machine",
                   f"bind one of {_listed(f.interfaces)}, and advertise the other where a router translates it")


def _chosen(f: Addresses) -> Finding:
    interface = next((one for one in f.interfaces if one.address == f.chosen), None)
    why = f"on the way to {f.towards}" if f.towards else "on the default route"
    others = [one for one in f.interfaces if one.address != f.chosen and one.kind in ("link", "tunnel")]
    beside = f"; also {_listed(tuple(others))}" if others else ""
    if not f.chosen:
        if f.towards:
            return fail("address", f"no way from here to {f.towards}", "check cable, Wi-Fi or VPN, and `ip route`")
        return warn("address", "no default route: other networks cannot be reached", "check cable or Wi-Fi, and `ip route`")
    if is_loopback(f.chosen):
        if f.alone:
            return ok("address", f"{f.chosen}: this job stays on this machine")
        if f.towards and is_loopback(f.towards):
            return fail("address", f"ranks would meet at {f.towards}, which is this machine to each of them",
                        f"name an address that all reach, as {_listed(tuple(others)) or 'that of a network interface'}")
        return ok("address", f"{f.towards} is this machine: its address on the way to the others counts{beside}")
    name = f" of {interface.name}" if interface else ""
    seen = f"{f.chosen}{name}, {why}{beside}"
    if interface and interface.kind == "bridge":
        return warn("address", f"{seen}: a bridge inside this machine", "set COMMLAYER_BIND to an address that others reach")
    if ipaddress.ip_address(f.chosen.partition("%")[0]).is_link_local:
        return warn("address", f"{seen}: a link-local address, which no router passes on",
                    "see why no address was assigned (DHCP)")
    return ok("address", seen + (", a tunnel" if interface and interface.kind == "tunnel" else ""))


def _own_name(f: Addresses) -> Iterator[Finding]:
    """Checks the host name: Gloo uses it where a script creates its process group itself."""
    local = [one for one in f.resolves if is_loopback(one)]
    outside = sorted((one for one in f.interfaces if one.kind in ("link", "tunnel")), key=lambda one: one.address != f.chosen)
    interface = outside[0].name if outside else "INTERFACE"
    mend = f"export GLOO_SOCKET_IFNAME={interface}, or give {f.host} its address in /etc/hosts"
    if f.alone or any(name == "GLOO_SOCKET_IFNAME" for name, _ in f.told):
        return
    if not f.resolves:
        yield warn("hostname", f"this machine's own name, {f.host}, does not resolve", mend)
    elif local and len(local) == len(f.resolves):
        yield warn("hostname", f"this machine's own name, {f.host}, leads to {local[0]} (/etc/hosts)", mend)
    else:
        yield ok("hostname", f"{f.host} leads to {next(one for one in f.resolves if not is_loopback(one))}")


def _told(f: Addresses) -> Iterator[Finding]:
    """Checks interface variables. Gloo takes one name; NCCL takes a list of prefixes, names after =, or exclusions after ^."""
    names = {one.name for one in f.interfaces}
    for variable, value in f.told:
        wanted = [part.strip() for part in value.lstrip("=").split(",")]
        exact = variable == "GLOO_SOCKET_IFNAME" or value.startswith("=")
        if value.startswith("^"):
            continue
        if not any(name == want if exact else name.startswith(want) for name in names for want in wanted):
            yield fail("address", f"{variable}={value}, and no interface with an address is called so",
                       f"unset it, or name one of {', '.join(sorted(names))}")


def name(f: Name) -> Iterator[Finding]:
    if f.error:
        yield fail("dns", f"{f.role} {f.name} does not resolve: {f.error}", "check its spelling, or use the address itself")
        return
    if _is_address(f.name):
        return
    seen = f"{f.role} {f.name} is {', '.join(f.addresses[:3])}"
    if f.took_s > SLOW_S:
        yield warn("dns", f"{seen}, found in {f.took_s:.1f} s", "use the address itself, or mend /etc/resolv.conf")
    elif f.name != "localhost" and all(is_loopback(one) for one in f.addresses):
        yield warn("dns", f"{seen}: loopback, right only if it is this machine", "mend its line in /etc/hosts")
    else:
        yield ok("dns", seen)


def port(f: Port) -> Iterator[Finding]:
    host, number = f.address.rpartition(":")[::2]
    if not f.error:
        yield ok("port", f"{f.what} {f.address} is free" if number != "0" else f"{host} can be listened on")
    elif f.taken:
        yield fail("port", f"{f.what} {f.address} is taken",
                   f"`ss -ltnp sport = :{number}` says by whom: end it, or set another port")
    else:
        yield fail("port", f"{f.what} {f.address} cannot be listened on: {f.error}",
                   "bind an address of this machine and a port above 1023")


REACHED = {
    "silent": ("does not answer", "open that port in its firewall and router, and check the address"),
    "no way": ("cannot be reached: no route", "check cable, Wi-Fi or VPN, and `ip route`"),
}


def reached(f: Reached, *, expected: bool = True) -> Iterator[Finding]:
    """`expected`: whether a process must already listen at that address."""
    if f.answer == "open":
        yield ok("port", f"{f.what} {f.address} answers")
    elif f.answer == "refused" and not expected:
        yield ok("port", f"{f.what} {f.address}: nothing listens there yet, its machine answers")
    elif f.answer == "refused":
        yield fail("port", f"{f.what} {f.address} refuses: nothing listens there",
                   "start it there, or check the port and on which address it listens")
    else:
        what, remedy = REACHED.get(f.answer, (f"cannot be reached: {f.answer}", "check the address"))
        yield fail("port", f"{f.what} {f.address} {what}", remedy)


def mtu(host: str, interface: Interface | None, path_mtu: int) -> Iterator[Finding]:
    """`path_mtu`: the kernel's value for the path to `host`, 0 if unknown."""
    if interface is None or interface.kind == "loopback":
        return
    seen = f"{interface.name} sends packets of {interface.mtu} bytes"
    if path_mtu and path_mtu < interface.mtu:
        seen += f", the way to {host} takes {path_mtu}"
    smallest = min(interface.mtu, path_mtu or interface.mtu)
    if smallest < LEAST_MTU:
        yield warn("mtu", seen, f"raise it to {LEAST_MTU} or more: ip link set {interface.name} mtu 1500, if the network takes "
                   "that")
    else:
        yield ok("mtu", seen)


def _listed(found: tuple[Interface, ...]) -> str:
    names = [f"{one.name} {one.address}" for one in found if one.kind != "loopback"]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
