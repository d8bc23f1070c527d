"""Checks a machine's network: interfaces, names, ports, packet sizes.

Name lookups use the system's resolver and may take as long as it does: call them on a thread that may be abandoned.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from commlayer.config import is_loopback, join_host
from commlayer.doctor.report import Finding, at_least, fail, ok, warn
from commlayer.records import Record
from commlayer.transport import own_address

SLOW_S = 2.0
"""A slower name lookup delays every start, and may come from a resolver that is about to fail."""
LEAST_MTU = 1280
"""The packet size in bytes that IPv6 and most VPNs pass."""
SIOCGIFADDR, SIOCGIFMTU = 0x8915, 0x8921
IP_MTU_DISCOVER, IP_PMTUDISC_DO, IP_MTU = 10, 2, 14
UDP_HEADERS_NBYTES = 28
CONNECT_S = 3.0
ICMP_S = 0.3
"""How long to wait for a router on the path to report that a packet is too large."""
NO_LINK = "check cable, Wi-Fi or VPN, and `ip route`"


class Interface(Record, frozen=True):
    """One address of one interface. `kind`: "loopback", "bridge" (inside this machine), "tunnel" (a VPN), else "link"."""

    name: str
    address: str
    mtu: int = 1500
    kind: str = "link"


class Addresses(Record, frozen=True):
    """This machine's addresses, and the one that it would use to reach `towards` (empty: the default route)."""

    interfaces: tuple[Interface, ...]
    towards: str
    chosen: str
    host: str = ""
    resolves: tuple[str, ...] = ()
    """The addresses of this machine's own name."""

    @property
    def interface(self) -> Interface | None:
        return next((one for one in self.interfaces if one.address == self.chosen), None)

    @property
    def outside(self) -> list[Interface]:
        """Interfaces that lead outside, the chosen one first."""
        leading = (one for one in self.interfaces if one.kind in ("link", "tunnel"))
        return sorted(leading, key=lambda one: one.address != self.chosen)


def check_addresses(f: Addresses, bind: str, variables: Mapping[str, str], *, alone: bool) -> Iterator[Finding]:
    """`alone`: the job seems to be on this machine only. `variables`: those that name interfaces to Gloo and NCCL."""
    yield _chosen(f, alone)
    if not alone and "GLOO_SOCKET_IFNAME" not in variables:
        yield _own_name(f)
    names = sorted({one.name for one in f.interfaces})
    for variable, value in variables.items():
        # Gloo takes one name; NCCL takes a list of prefixes, names after =, or exclusions after ^.
        exact = variable == "GLOO_SOCKET_IFNAME" or value.startswith("=")
        wanted = [part.strip() for part in value.lstrip("=").split(",")]
        if not value.startswith("^") and not any(name == want if exact else name.startswith(want)
                                                 for name in names for want in wanted):
            yield fail("address", f"{variable}={value}, no interface with an address has that name",
                       f"unset it, or name one of {', '.join(names)}")
    if _is_address(bind) and not is_loopback(bind) and bind not in {"0.0.0.0", "::", *(one.address for one in f.interfaces)}:
        yield fail("address", f"bind names {bind}, which is no address of this machine",
                   f"bind one of {_listed(f.interfaces)}, and advertise the other where a router translates it")


def _chosen(f: Addresses, alone: bool) -> Finding:
    others = [one for one in f.outside if one.address != f.chosen]
    also = f"; also {_listed(others)}" if others else ""
    if not f.chosen and f.towards:
        return fail("address", f"no route to {f.towards}", NO_LINK)
    if not f.chosen:
        return warn("address", "no default route: other networks cannot be reached", NO_LINK)
    if is_loopback(f.chosen):
        if alone:
            return ok("address", f"{f.chosen}: this job stays on this machine")
        if f.towards and is_loopback(f.towards):
            return fail("address", f"ranks would meet at {f.towards}, which on each machine is that machine itself",
                        f"use an address that all can reach, such as {_listed(others) or 'that of a network interface'}")
        return ok("address", f"{f.towards} is this machine{also}")
    name, kind = (f" of {f.interface.name}", f.interface.kind) if f.interface else ("", "")
    line = f"{f.chosen}{name}, {f'towards {f.towards}' if f.towards else 'on the default route'}{also}"
    if kind == "bridge":
        return warn("address", f"{line}: a bridge inside this machine", "set COMMLAYER_BIND to an address that others reach")
    if ipaddress.ip_address(f.chosen.partition("%")[0]).is_link_local:
        return warn("address", f"{line}: a link-local address, which routers do not forward",
                    "check why DHCP assigned no address")
    return ok("address", line + (", a tunnel" if kind == "tunnel" else ""), chosen=f.chosen)


def _own_name(f: Addresses) -> Finding:
    """Checks the host name: Gloo uses it where a script creates its process group itself."""
    interface = f.outside[0].name if f.outside else "INTERFACE"
    remedy = f"export GLOO_SOCKET_IFNAME={interface}, or give {f.host} its address in /etc/hosts"
    if not f.resolves:
        return warn("hostname", f"this machine's host name {f.host} does not resolve", remedy)
    address = next((one for one in f.resolves if not is_loopback(one)), "")
    if not address:
        return warn("hostname", f"this machine's host name {f.host} resolves to {f.resolves[0]} (/etc/hosts)", remedy)
    return ok("hostname", f"{f.host} resolves to {address}")


def check_name(role: str, name: str, addresses: Sequence[str] | str, elapsed_s: float) -> Iterator[Finding]:
    """`role`: the name's role in the job. `addresses`: the result of its lookup, or the error."""
    if isinstance(addresses, str):
        yield fail("dns", f"{role} {name} does not resolve: {addresses}", "check the spelling, or use the address")
        return
    if _is_address(name):
        return
    line = f"{role} {name} is {', '.join(addresses[:3])}"
    if elapsed_s > SLOW_S:
        yield warn("dns", f"{line}, found in {elapsed_s:.1f} s", "use the address, or correct /etc/resolv.conf")
    elif name != "localhost" and all(map(is_loopback, addresses)):
        yield warn("dns", f"{line}: loopback, right only if it is this machine", "correct its line in /etc/hosts")
    else:
        yield ok("dns", line)


def check_port(what: str, address: str, error: OSError | None) -> Iterator[Finding]:
    """`error`: why the port cannot be listened on."""
    host, number = address.rpartition(":")[::2]
    if error is None:
        yield ok("port", f"{what} {address} is free" if number != "0" else f"{host} can be listened on")
    elif error.errno == errno.EADDRINUSE:
        yield fail("port", f"{what} {address} is in use",
                   f"`ss -ltnp sport = :{number}` shows which process: end it, or set another port")
    else:
        yield fail("port", f"{what} {address} cannot be listened on: {error.strerror or error}",
                   "bind an address of this machine and a port above 1023")


REACHED = {
    "refused": ("refuses: nothing listens there", "start it there, or check the port and on which address it listens"),
    "silent": ("does not answer", "open that port in its firewall and router, and check the address"),
    "no route": ("cannot be reached: no route", NO_LINK),
}


def check_reachable(what: str, address: str, answer: str, *, expected: bool = True) -> Iterator[Finding]:
    """`answer`: that of `dial`. `expected`: whether a process must already listen at that address."""
    if answer == "open":
        yield ok("port", f"{what} {address} answers")
    elif answer == "refused" and not expected:
        yield ok("port", f"{what} {address}: nothing listens there yet, its machine answers")
    else:
        seen, remedy = REACHED.get(answer, (f"cannot be reached: {answer}", "check the address"))
        yield fail("port", f"{what} {address} {seen}", remedy)


def check_mtu(host: str, interface: Interface | None, path_mtu: int) -> Iterator[Finding]:
    """`path_mtu`: the kernel's value for the path to `host`, 0 if unknown."""
    if interface is None or interface.kind == "loopback":
        return
    line = f"{interface.name} sends packets of {interface.mtu} bytes"
    if 0 < path_mtu < interface.mtu:
        line += f", the path to {host} allows {path_mtu}"
    remedy = f"raise it to {LEAST_MTU} or more: ip link set {interface.name} mtu 1500, if the network allows it"
    yield at_least("mtu", line, remedy, min(interface.mtu, path_mtu or interface.mtu), LEAST_MTU)


def _listed(interfaces: Sequence[Interface]) -> str:
    names = [f"{one.name} {one.address}" for one in interfaces if one.kind != "loopback"]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def own_interfaces() -> tuple[Interface, ...]:
    """One entry per address: the first IPv4 address of each interface, and IPv6 addresses of global scope."""
    result = []
    for _, name in socket.if_nameindex():
        if row := _interface_value(SIOCGIFADDR, name):
            result.append(Interface(name, socket.inet_ntoa(row[20:24]), mtu_of(name), kind_of(name)))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == "00":
                address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
                result.append(Interface(name, address, mtu_of(name), kind_of(name)))
    return tuple(result)


def mtu_of(name: str) -> int:
    """The MTU from the kernel itself: /sys may show another network namespace."""
    row = _interface_value(SIOCGIFMTU, name)
    return int(struct.unpack("16xi", row[:20])[0]) if row else 0


def _interface_value(request: int, name: str) -> bytes:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[:15]))
    return b""


def kind_of(name: str, system: Path = Path("/sys/class/net")) -> str:
    place = system / name
    if (place / "bridge").is_dir():
        # A bridge with a network card leads outside, as on hosts of virtual machines.
        return "link" if any((system / port.name / "device").exists() for port in (place / "brif").glob("*")) else "bridge"
    with contextlib.suppress(OSError, ValueError):
        if int((place / "type").read_text()) == 772:
            return "loopback"
    return "tunnel" if (place / "tun_flags").exists() or name.startswith(("wg", "tailscale", "zt")) else "link"


def own_addresses(towards: str) -> Addresses:
    """`towards`: the host, such as the master, for which this machine's address is chosen."""
    host = socket.gethostname()
    resolves, _ = resolve(host)
    chosen = own_address.address_to(towards) if towards else own_address.default_address()
    return Addresses(own_interfaces(), towards, chosen, host, () if isinstance(resolves, str) else resolves)


def address_towards(host: str) -> str:
    """This machine's address as `host` sees it. If this machine is `host`, its name's address, which others use."""
    local = own_address.address_to(host)
    if not is_loopback(local or "localhost") or is_loopback(host):
        return local
    f = own_addresses(host)
    own = {one.address for one in f.interfaces}
    return next((one for one in f.resolves if one in own and not is_loopback(one)), "")


def resolve(name: str) -> tuple[tuple[str, ...] | str, float]:
    """The addresses of a name, or the error; and seconds."""
    begin = time.monotonic()
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(row[4][0]) for row in rows)), time.monotonic() - begin
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", "") or str(error), time.monotonic() - begin


def is_own(name: str) -> bool:
    """Whether one of the name's addresses belongs to this machine."""
    addresses, _ = resolve(name)
    own = {one.address for one in own_interfaces()}
    return not isinstance(addresses, str) and any(one in own or one.startswith("127.") for one in addresses)


def listen_error(host: str, number: int) -> OSError | None:
    """Binds the port for a moment, without SO_REUSEPORT, as a server would."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
            probe.listen(1)
    except OSError as error:
        return error
    return None


def check_listening(ports: Iterable[tuple[str, str, int]]) -> Iterator[Finding]:
    for what, host, number in ports:
        yield from check_port(what, join_host(host, number), listen_error(host, number))


def dial(host: str, number: int, limit_s: float = CONNECT_S, greet: Callable[[socket.socket], None] = lambda _: None) -> str:
    """Dials an address: "open", "refused", "silent", "no route" or the system's error. `greet` sends a valid first message,
    so that the listener does not log a stranger."""
    try:
        with socket.create_connection((host, number), limit_s) as sock:
            greet(sock)
            return "open"
    except TimeoutError:
        return "silent"
    except ConnectionRefusedError:
        return "refused"
    except socket.gaierror as error:
        return f"its name does not resolve ({error.strerror})"
    except OSError as error:
        return "no route" if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH) else error.strerror or str(error)


def path_mtu(host: str) -> int:
    """The largest packet that routers report for the path to that host; 0 if unknown.

    Sends unfragmented full-size packets to an unused port: a router that cannot pass them reports their size.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, own_address.PORT, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
            probe.connect(where)
            for _ in range(2):
                mtu = probe.getsockopt(socket.IPPROTO_IP, IP_MTU)
                with contextlib.suppress(OSError):  # too large for the known MTU, or a closed port: both are expected
                    probe.send(bytes(mtu - UDP_HEADERS_NBYTES))
                time.sleep(ICMP_S / 2)
            return int(probe.getsockopt(socket.IPPROTO_IP, IP_MTU))
    except OSError:
        return 0
