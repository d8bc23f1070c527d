"""Connects a worker to a server over TCP or gRPC: the configured one, or the one that works."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from commlayer import config as settings
from commlayer.cluster import grpc_channel
from commlayer.cluster.coordinator_channel import fingerprint, shown
from commlayer.cluster.tls_check import check
from commlayer.config import Config, check_plain_text, host_port
from commlayer.errors import CommError, RecordError, Refused
from commlayer.records import ServerInfo
from commlayer.transport import grpc_ends
from commlayer.transport.grpc_stream import GrpcStream
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, peer_name
from commlayer.transport.stream_transport import Address, StreamTransport

log = logging.getLogger("commlayer")

TCP_S = 5.0
"""How long to wait for an answer over TCP if gRPC can be tried next: firewalls drop packets silently."""
Dial = Callable[[float], None]
"""Connects before the given deadline."""


def dialler(transport: StreamTransport, server: ServerInfo, joined: str, config: Config, keys: Keys | None) -> Dial:
    """Returns a function that connects to that server. With carrier "auto" it tries TCP, then gRPC, and later calls use the one
    that worked. `joined`: the address by which this process reached the coordinator."""
    peer, name = SERVER_BASE + server.id, f"server {server.id}"
    plain = _checked(server.address, f"address of {name}", config)
    where, alone = streams_at(server, joined), streams_alone(server, joined)
    streams = _checked(where, f"address of {name} for gRPC", config) if where else None
    carrier = "grpc" if alone and config.carrier == "auto" else config.carrier

    def dial(deadline: float) -> None:
        nonlocal carrier
        either = carrier == "auto" and streams is not None
        if carrier == "grpc" or alone:
            if carrier == "tcp" or streams is None:
                offered = "takes gRPC streams alone" if streams else "takes no gRPC streams"
                raise Refused(f"{offered} (setting carrier): set it alike here and there, or leave it out", peer=name,
                              code="E-SETTING")
            over_grpc(transport, peer, streams, keys, deadline)
            log.info("%s: over gRPC at %s", name, where)
            return
        try:
            transport.dial(peer, plain, deadline, time.monotonic() + TCP_S if either else deadline)
        except CommError as error:
            # With keys, a refusal may also come from a machine in between, so gRPC is tried.
            if not either or (isinstance(error, Refused) and keys is None):
                raise
            first = error
        else:
            log.info("%s: over TCP at %s", name, server.address)
            carrier = "tcp"
            return
        assert streams is not None
        try:
            over_grpc(transport, peer, streams, keys, deadline)
        except CommError as error:
            also = "" if error.what == first.what else f"; nor over gRPC: {error.what}"
            raise first.located(what=first.what + also) from first
        log.warning("%s: over gRPC at %s, since TCP did not get through: %s", name, where, first.what)
        carrier = "grpc"

    return dial


def streams_at(server: ServerInfo, joined: str) -> str:
    """The server's address for gRPC streams, for a process that reached the coordinator at `joined`; "" for none."""
    # The coordinator's own address may not be reachable from here (proxy, router), but `joined` is.
    return joined if server.beside and server.streams else server.streams


def streams_alone(server: ServerInfo, joined: str) -> bool:
    """Whether the server accepts only gRPC streams."""
    return bool(server.streams) and server.address in (server.streams, streams_at(server, joined))


def over_grpc(transport: StreamTransport, peer: int, address: Address, keys: Keys | None, deadline: float) -> None:
    """Connects to that peer over a gRPC stream."""
    if keys is not None:
        # checks the revocation list, which gRPC does not do
        check(settings.join_host(*address), keys, deadline, peer_name(peer))
    transport.dial_over(lambda until: stream_to(address, keys, until), peer, deadline)


def stream_to(address: Address, keys: Keys | None, deadline: float) -> GrpcStream:
    """Opens a stream that the server has accepted, before the handshake. CommError with the address if it fails."""
    options = [*grpc_ends.OPTIONS, *([("grpc.enable_http_proxy", 0)] if settings.is_loopback(address[0]) else [])]
    opened = functools.partial(grpc_channel.opened, settings.join_host(*address), options, shown(keys), on_loop=True)
    return grpc_ends.dialled(opened, *address, deadline, fingerprint(keys))


def _checked(address: str, name: str, config: Config) -> Address:
    """Parses an address from the coordinator. Checks that plaintext to it is allowed, which the coordinator may not decide."""
    try:
        host, port = host_port(address)
    except ValueError as error:
        raise RecordError("E-SETTING", f"{name}: {error}") from None
    check_plain_text(name, host, config)
    return host, port
