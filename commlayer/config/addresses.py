"""Addresses of processes, as text."""

from __future__ import annotations

import ipaddress

from commlayer.errors import InvalidInput


def host_port(address: str) -> tuple[str, int]:
    """Splits an address "host:port" or "[IPv6 address]:port" into host and port."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInput("E-ADDRESS",
                           f"got {address!r}, but it must be host:port with a port from 1 to 65535, as in "
                           "10.0.0.1:7000 or [::1]:7000")
    return bare, int(port)


def join_host(host: str, port: int) -> str:
    """Joins host and port to "host:port"; the inverse of host_port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True: the host is this machine's loopback. Names are never resolved: any name except "localhost" counts as remote."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
