"""Gathers facts of a machine's network: interfaces, names, ports, packet sizes.

Name lookups use the system's resolver and may take as long as it does: call them on a thread that may be abandoned.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from commlayer.config import is_loopback, join_host
from commlayer.records import Record
from commlayer.transport import own_address

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
    told: tuple[tuple[str, str], ...] = ()
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
    """A remote address that was dialled. `answer`: "open", "refused", "silent", "no way" or the system's error."""

    what: str
    address: str
    answer: str
    took_s: float = 0.0
    path_mtu: int = 0
    mss: int = 0
    """The kernel's values for that connection: the largest packet, and the largest TCP segment."""


def interfaces() -> tuple[Interface, ...]:
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


def addresses(towards: str, bind: str, told: Sequence[tuple[str, str]], *, alone: bool) -> Addresses:
    """`towards`: the host, such as the master, for which this machine's address is chosen."""
    host = socket.gethostname()
    chosen = own_address.address_to(towards) if towards else own_address.default_address()
    return Addresses(host, look_up("", host).addresses, interfaces(), towards, chosen, bind, alone, tuple(told))


def own_towards(host: str) -> str:
    """This machine's address as `host` sees it. If this machine is `host`, its name's address, which others use."""
    local = own_address.address_to(host)
    if not is_loopback(local or "localhost") or is_loopback(host):
        return local
    own = {one.address for one in interfaces()}
    return next((one for one in look_up("", host).addresses if one in own and not is_loopback(one)), "")


def look_up(role: str, name: str) -> Name:
    begin = time.monotonic()
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Name(role, name, took_s=time.monotonic() - begin, error=getattr(error, "strerror", "") or str(error))
    took_s = time.monotonic() - begin
    result = tuple(dict.fromkeys(str(row[4][0]) for row in rows))
    own = {one.address for one in interfaces()}
    return Name(role, name, result, took_s, own=any(one in own or one.startswith("127.") for one in result))


def port(what: str, host: str, number: int) -> Port:
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


def reach(what: str, host: str, number: int, limit_s: float = CONNECT_S,
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
        answer = "no way" if no_way else error.strerror or str(error)
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

