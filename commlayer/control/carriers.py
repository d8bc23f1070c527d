"""Which carrier a worker reaches a server by: TCP, gRPC, or what gets through. Knows addresses and settings; no frames."""

from __future__ import annotations

import functools
import logging
import time

from commlayer import config as settings
from commlayer.config import Config, check_plain_text, host_port
from commlayer.control import grpc_channel
from commlayer.control.coordinator_channel import fingerprint, shown
from commlayer.errors import CommError, RecordError, Refused
from commlayer.records import ServerInfo
from commlayer.transport import grpc_ends
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE
from commlayer.transport.tcp import Address, TcpTransport

log = logging.getLogger("commlayer")

TCP_S = 5.0
"""For so long TCP may take where gRPC may be tried behind it: what firewalls swallow gets no answer at all."""


def dial(transport: TcpTransport, server: ServerInfo, joined: str, config: Config, keys: Keys | None, deadline: float) -> None:
    """Connects to that server. `joined`: the address by which this process reached the coordinator."""
    peer, name = SERVER_BASE + server.id, f"server {server.id}"
    plain = _checked(server.address, f"address of {name}", config)
    # What others reach need not be what the coordinator calls itself: there is a proxy between, or a router.
    where = joined if server.beside and server.streams else server.streams
    streams = _checked(where, f"address of {name} for gRPC", config) if where else None
    if config.carrier != "grpc" and server.address != server.streams:
        try:
            transport.dial(peer, plain, min(deadline, time.monotonic() + TCP_S) if _either(config, streams) else deadline)
        except CommError as error:
            # Where there are keys, who refuses may also be somebody in between.
            if not _either(config, streams) or (isinstance(error, Refused) and keys is None):
                raise
            first = error
        else:
            log.info("%s: over TCP at %s", name, server.address)
            return
    else:
        first = None
    if streams is None or config.carrier == "tcp":
        offered = "takes gRPC streams alone (setting carrier)" if streams else "takes no gRPC streams (setting carrier)"
        raise Refused(f"{offered}: set carrier alike here and there, or leave it out", peer=name)
    try:
        over_grpc(transport, peer, streams, keys, deadline)
    except CommError as error:
        if first is None:
            raise
        raise type(first)(f"{first.what}; nor over gRPC: {error.what}", peer=first.peer) from None
    if first is None:
        log.info("%s: over gRPC at %s", name, where)
    else:
        log.warning("%s: over gRPC at %s, since TCP did not get through: %s", name, where, first.what)


def over_grpc(transport: TcpTransport, peer: int, address: Address, keys: Keys | None, deadline: float) -> None:
    """Connects to that peer by a gRPC stream."""
    where = settings.join_host(*address)
    options = [*grpc_ends.OPTIONS, *([("grpc.enable_http_proxy", 0)] if settings.is_loopback(address[0]) else [])]
    opened = functools.partial(grpc_channel.opened, where, options, shown(keys), on_loop=True)
    transport.dial_over(lambda until: grpc_ends.dialled(opened, *address, until, fingerprint(keys)), peer, deadline)


def _either(config: Config, streams: Address | None) -> bool:
    return config.carrier == "auto" and streams is not None


def _checked(address: str, name: str, config: Config) -> Address:
    """The coordinator is believed as to where servers are, not as to where plain text may go."""
    try:
        host, port = host_port(address)
    except ValueError as error:
        raise RecordError(f"{name}: {error}") from None
    check_plain_text(name, host, config)
    return host, port
