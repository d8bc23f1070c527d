"""By which address and interface this machine reaches another, and which machine this is. Knows sockets; no settings."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

FAR = ("203.0.113.1", "2001:db8::1")
"""Addresses of documentation, which nobody has: the way to them is the default route."""
PORT = 9
SIOCGIFADDR = 0x8915


def address_to(host: str) -> str:
    """This machine's address on the way to that host, as others see it; empty if there is no way. Sends nothing.

    Of a name the first address that is not loopback counts: many systems give a machine's own name 127.0.1.1.
    """
    found = ""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(host, PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                address = str(probe.getsockname()[0])
                found = found or address
                if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                    return address
    return found


def default_address() -> str:
    """On the default route."""
    return next((address for far in FAR if (address := address_to(far))), "")


def interface_of(address: str) -> str:
    """The network interface that has that address; empty where it cannot be told."""
    if ":" in address:
        wanted = ipaddress.ip_address(address.partition("%")[0]).exploded.replace(":", "")
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                if line.split()[0] == wanted:
                    return line.split()[5]
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                row = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(row[20:24]) == address:
                    return name
    return ""


def machine() -> str:
    """Equal for processes that share a network stack, and for no others: names of machines in several homes may be equal."""
    told = [socket.gethostname()]
    with contextlib.suppress(OSError):
        told.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        told.append(os.readlink("/proc/self/ns/net"))
    return " ".join(told)
