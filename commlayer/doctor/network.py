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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from commlayer.config import is_loopback, join_host
from commlayer.doctor.report import Finding, fail, ok, warn
from commlayer.records import Record
from commlayer.transport import own_address

SLOW_S = 2.0
"""A slower name lookup delays every start, and may come from a resolver that is about to fail."""
LEAST_MTU = 1280
"""The packet size in bytes that IPv6 and most VPNs pass."""


def check_addresses(f: Addresses) -> Iterator[Finding]:
    yield _chosen(f)
    yield from _own_name(f)
    yield from _variables(f)
    mine = {"0.0.0.0", "::"} | {one.address for one in f.interfaces}
    if f.bind not in mine and not is_loopback(f.bind) and _is_address(f.bind):
        yield fail("address", f"bind names {f.bind}, which is no address of this machine",
                   f"bind one of {_listed(f.interfaces)}, and advertise the other where a router translates it")


def _chosen(f: Addresses) -> Finding:
    interface = next((one for one in f.interfaces if one.address == f.chosen), None)
    why = f"towards {f.towards}" if f.towards else "on the default route"
    others = [one for one in f.interfaces if one.address != f.chosen and one.kind in ("link", "tunnel")]
    beside = f"; also {_listed(tuple(others))}" if others else ""
    if not f.chosen:
        if f.towards:
            return fail("address", f"no route to {f.towards}", "check cable, Wi-Fi or VPN, and `ip route`")
        return warn("address", "no default route: other networks cannot be reached", "check cable or Wi-Fi, and `ip route`")
    if is_loopback(f.chosen):
        if f.alone:
            return ok("address", f"{f.chosen}: this job stays on this machine")
        if f.towards and is_loopback(f.towards):
            return fail("address", f"ranks would meet at {f.towards}, which on each machine is that machine itself",
                        f"use an address that all can reach, such as {_listed(tuple(others)) or 'that of a network interface'}")
        return ok("address", f"{f.towards} is this machine{beside}")
    name = f" of {interface.name}" if interface else ""
    line = f"{f.chosen}{name}, {why}{beside}"
    if interface and interface.kind == "bridge":
        return warn("address", f"{line}: a bridge inside this machine", "set COMMLAYER_BIND to an address that others reach")
    if ipaddress.ip_address(f.chosen.partition("%")[0]).is_link_local:
        return warn("address", f"{line}: a link-local address, which routers do not forward",
                    "check why DHCP assigned no address")
    return ok("address", line + (", a tunnel" if interface and interface.kind == "tunnel" else ""))


def _own_name(f: Addresses) -> Iterator[Finding]:
    """Checks the host name: Gloo uses it where a script creates its process group itself."""
    local = [one for one in f.resolves if is_loopback(one)]
    outside = sorted((one for one in f.interfaces if one.kind in ("link", "tunnel")), key=lambda one: one.address != f.chosen)
    interface = outside[0].name if outside else "INTERFACE"
    remedy = f"export GLOO_SOCKET_IFNAME={interface}, or give {f.host} its address in /etc/hosts"
    if f.alone or any(name == "GLOO_SOCKET_IFNAME" for name, _ in f.variables):
        return
    if not f.resolves:
        yield warn("hostname", f"this machine's host name {f.host} does not resolve", remedy)
    elif local and len(local) == len(f.resolves):
        yield warn("hostname", f"this machine's host name {f.host} resolves to {local[0]} (/etc/hosts)", remedy)
    else:
        yield ok("hostname", f"{f.host} resolves to {next(one for one in f.resolves if not is_loopback(one))}")


def _variables(f: Addresses) -> Iterator[Finding]:
    """Checks interface variables. Gloo takes one name; NCCL takes a list of prefixes, names after =, or exclusions after ^."""
    names = {one.name for one in f.interfaces}
    for variable, value in f.variables:
        prefixes = [part.strip() for part in value.lstrip("=").split(",")]
        exact = variable == "GLOO_SOCKET_IFNAME" or value.startswith("=")
        if value.startswith("^"):
            continue
        if not any(name == want if exact else name.startswith(want) for name in names for want in prefixes):
            yield fail("address", f"{variable}={value}, no interface with an address has that name",
                       f"unset it, or name one of {', '.join(sorted(names))}")


def check_name(f: Name) -> Iterator[Finding]:
    if f.error:
        yield fail("dns", f"{f.role} {f.name} does not resolve: {f.error}", "check the spelling, or use the address")
        return
    if _is_address(f.name):
        return
    line = f"{f.role} {f.name} is {', '.join(f.addresses[:3])}"
    if f.took_s > SLOW_S:
        yield warn("dns", f"{line}, found in {f.took_s:.1f} s", "use the address, or correct /etc/resolv.conf")
    elif f.name != "localhost" and all(is_loopback(one) for one in f.addresses):
        yield warn("dns", f"{line}: loopback, right only if it is this machine", "correct its line in /etc/hosts")
    else:
        yield ok("dns", line)


def check_port(f: Port) -> Iterator[Finding]:
    host, number = f.address.rpartition(":")[::2]
    if not f.error:
        yield ok("port", f"{f.what} {f.address} is free" if number != "0" else f"{host} can be listened on")
    elif f.taken:
        yield fail("port", f"{f.what} {f.address} is in use",
                   f"`ss -ltnp sport = :{number}` shows which process: end it, or set another port")
    else:
        yield fail("port", f"{f.what} {f.address} cannot be listened on: {f.error}",
                   "bind an address of this machine and a port above 1023")


REACHED = {
    "silent": ("does not answer", "open that port in its firewall and router, and check the address"),
    "no route": ("cannot be reached: no route", "check cable, Wi-Fi or VPN, and `ip route`"),
}


def check_reachable(f: Reached, *, expected: bool = True) -> Iterator[Finding]:
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


def check_mtu(host: str, interface: Interface | None, path_mtu: int) -> Iterator[Finding]:
    """`path_mtu`: the kernel's value for the path to `host`, 0 if unknown."""
    if interface is None or interface.kind == "loopback":
        return
    line = f"{interface.name} sends packets of {interface.mtu} bytes"
    if path_mtu and path_mtu < interface.mtu:
        line += f", the path to {host} allows {path_mtu}"
    smallest = min(interface.mtu, path_mtu or interface.mtu)
    if smallest < LEAST_MTU:
        yield warn("mtu", line, f"raise it to {LEAST_MTU} or more: ip link set {interface.name} mtu 1500, if the network "
                   "allows it")
    else:
        yield ok("mtu", line)


def _listed(found: tuple[Interface, ...]) -> str:
    names = [f"{one.name} {one.address}" for one in found if one.kind != "loopback"]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


SYSTEM = Path("/sys/class/net")
SIOCGIFADDR, SIOCGIFMTU = 0x8915, 0x8921
IP_MTU_DISCOVER, IP_PMTUDISC_DO, IP_MTU = 10, 2, 14
TCP_MAXSEG = 2
UDP_HEADERS_NBYTES = 28
CONNECT_S = 3.0
ICMP_S = 0.3
"""How long to wait for a router on the path to report that a packet is too large."""


class Interface(Record, frozen=True):
    """One address of one interface. `kind`: the type of the interface."""

    name: str
    address: str
    mtu: int = 1500
    kind: str = "link"
    """"loopback", "bridge" (inside this machine), "tunnel" (a VPN), else "link"."""


class Addresses(Record, frozen=True):
    """This machine's addresses, and the one that it would use to reach `towards` (empty: the default route)."""

    host: str
    resolves: tuple[str, ...] = ()
    """The addresses of this machine's own name."""
    interfaces: tuple[Interface, ...] = ()
    towards: str = ""
    chosen: str = ""
    bind: str = "127.0.0.1"
    alone: bool = True
    """Whether the job seems to be on this machine only."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables that name interfaces to Gloo and NCCL."""


class Name(Record, frozen=True):
    """The result of a name lookup. `role`: the name's role in the job."""

    role: str
    name: str
    addresses: tuple[str, ...] = ()
    took_s: float = 0.0
    error: str = ""
    own: bool = False
    """Whether one of the addresses belongs to this machine."""


class Port(Record, frozen=True):
    """A local address to listen on."""

    what: str
    address: str
    error: str = ""
    """The system's error, empty if the port is free."""
    taken: bool = False


class Reached(Record, frozen=True):
    """A remote address that was dialled. `answer`: "open", "refused", "silent", "no route" or the system's error."""

    what: str
    address: str
    answer: str
    took_s: float = 0.0
    path_mtu: int = 0
    mss: int = 0
    """The kernel's values for that connection: the largest packet, and the largest TCP segment."""


def read_interfaces() -> tuple[Interface, ...]:
    """One entry per address: the first IPv4 address of each interface, and IPv6 addresses of global scope."""
    result = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                row = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
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
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        row = fcntl.ioctl(probe, SIOCGIFMTU, struct.pack("256s", name.encode()[:15]))
        return int(struct.unpack("16xi", row[:20])[0])
    return 0


def kind_of(name: str, system: Path = SYSTEM) -> str:
    place = system / name
    if (place / "bridge").is_dir():
        # A bridge with a network card leads outside, as on hosts of virtual machines.
        return "link" if any((system / port.name / "device").exists() for port in (place / "brif").glob("*")) else "bridge"
    with contextlib.suppress(OSError, ValueError):
        if int((place / "type").read_text()) == 772:
            return "loopback"
    if (place / "tun_flags").exists() or name.startswith(("wg", "tailscale", "zt")):
        return "tunnel"
    return "link"


def read_addresses(towards: str, bind: str, variables: Sequence[tuple[str, str]], *, alone: bool) -> Addresses:
    """`towards`: the host, such as the master, for which this machine's address is chosen."""
    host = socket.gethostname()
    address = own_address.address_to(towards) if towards else own_address.default_address()
    return Addresses(host, resolve_name("", host).addresses, read_interfaces(), towards, address, bind, alone, tuple(variables))


def address_towards(host: str) -> str:
    """This machine's address as `host` sees it. If this machine is `host`, its name's address, which others use."""
    local = own_address.address_to(host)
    if not is_loopback(local or "localhost") or is_loopback(host):
        return local
    own = {one.address for one in read_interfaces()}
    return next((one for one in resolve_name("", host).addresses if one in own and not is_loopback(one)), "")


def resolve_name(role: str, name: str) -> Name:
    begin = time.monotonic()
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Name(role, name, took_s=time.monotonic() - begin, error=getattr(error, "strerror", "") or str(error))
    took_s = time.monotonic() - begin
    result = tuple(dict.fromkeys(str(row[4][0]) for row in rows))
    own = {one.address for one in read_interfaces()}
    return Name(role, name, result, took_s, own=any(one in own or one.startswith("127.") for one in result))


def probe_port(what: str, host: str, number: int) -> Port:
    """Binds the port for a moment, without SO_REUSEPORT, as a server would."""
    where = join_host(host, number)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
            probe.listen(1)
        except OSError as error:
            return Port(what, where, error.strerror or str(error), error.errno == errno.EADDRINUSE)
    return Port(what, where)


def dial(what: str, host: str, number: int, limit_s: float = CONNECT_S,
          greet: Callable[[socket.socket], None] = lambda _: None) -> Reached:
    """Dials an address. `greet` sends a valid first message, so that the listener does not log a stranger."""
    where, begin = join_host(host, number), time.monotonic()
    try:
        with socket.create_connection((host, number), limit_s) as sock:
            took_s = time.monotonic() - begin
            mss = sock.getsockopt(socket.IPPROTO_TCP, TCP_MAXSEG)
            mtu = sock.getsockopt(socket.IPPROTO_IP, IP_MTU) if sock.family == socket.AF_INET else 0
            greet(sock)
            return Reached(what, where, "open", took_s, mtu, mss)
    except TimeoutError:
        answer = "silent"
    except ConnectionRefusedError:
        answer = "refused"
    except socket.gaierror as error:
        answer = f"its name does not resolve ({error.strerror})"
    except OSError as error:
        no_way = error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)
        answer = "no route" if no_way else error.strerror or str(error)
    return Reached(what, where, answer, time.monotonic() - begin)


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
