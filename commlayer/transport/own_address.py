"""Finds this machine's own address and interface on the route to another host, and an identity of the machine."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

FAR = ("203.0.113.1", "2001:db8::1")
"""Documentation addresses that no host has, so the route to them is the default route."""
PORT = 9
SIOCGIFADDR = 0x8915


def address_to(host: str) -> str:
    """Returns this machine's address on the route to `host`; "" if there is no route. Sends nothing.

    If `host` resolves to several addresses, the first route that is not loopback counts. Many systems resolve a machine's own
    name to 127.0.1.1.
    """
    first = ""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(host, PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                address = str(probe.getsockname()[0])
                first = first or address
                if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                    return address
    return first


def default_address() -> str:
    """Returns this machine's address on the default route; "" if there is no such route."""
    return next((address for far in FAR if (address := address_to(far))), "")


class Interface(NamedTuple):
    """An address of a network interface."""

    name: str
    address: str
    everywhere: bool = True
    """False: an IPv6 address that is valid only on this machine or on one link."""


def own_addresses() -> Iterator[Interface]:
    """Yields this machine's addresses: the first IPv4 address of each interface, and all IPv6 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                row = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield Interface(name, socket.inet_ntoa(row[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            yield Interface(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), scope == "00")


def find_interface(address: str) -> str:
    """Returns the name of the network interface that has the address; "" if unknown."""
    return next((own.name for own in own_addresses() if own.address == address.partition("%")[0]), "")


def interface_towards(hosts: Iterable[str]) -> str:
    """Returns the network interface on the route to the first of these hosts that is on another machine; "" if there is
    none."""
    for host in hosts:
        address = address_to(host)
        local = not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback
        name = "" if local else find_interface(address)
        if name:
            return name
    return ""


def gateway() -> str:
    """Returns an identity of the network that this machine is in; "" if there is none. It is the address of the default route's
    gateway, with its hardware address, because many networks use the same addresses."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
        name = next((route[2] for route in routes if route[1] == "00000000"), "")
        if name:
            address = socket.inet_ntoa(struct.pack("=L", int(name, 16)))
            neighbours = [line.split() for line in Path("/proc/net/arp").read_text().splitlines()[1:]]
            return " ".join([address, *(near[3] for near in neighbours if near[0] == address)])
    return ""


def machine() -> str:
    """Returns an identity that is equal only for processes that share a network stack. Host names at different sites may be
    equal."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)
