"""Addresses of processes, as text."""

from __future__ import annotations

import ipaddress

from commlayer.errors import InvalidInput, RecordError, without_code


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


def split_port(text: str, name: str) -> tuple[str, int]:
    """Splits "host" or "host:port"; without a port it is 0. `name`: the setting's, for the error."""
    if text.count(":") != 1 and not text.startswith("["):
        return text, 0
    if text.endswith("]"):
        return text[1:-1], 0
    try:
        return host_port(text)
    except InvalidInput as error:
        raise RecordError("E-ADDRESS", f"{name}: {without_code(error)}") from None


def reachable_address(advertise: str, bind: str, port: int) -> str:
    """Returns the address at which other machines reach `port`. `advertise`: may have the port of a tunnel, which forwards to
    `port`."""
    host, forwarded = split_port(advertise or bind, "advertise")
    return join_host(host, forwarded or port)


def is_loopback(host: str) -> bool:
    """True: the host is this machine's loopback. Names are never resolved: any name except "localhost" counts as remote."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
