"""Connects to servers over TCP or gRPC: the configured protocol, or the one that works."""

from __future__ import annotations

import functools
import logging
import time

from commlayer import config as settings
from commlayer.cluster.calls.coordinator_channel import fingerprint
from commlayer.cluster.calls.diagnosis import diagnose
from commlayer.config import Config, check_plain_text, host_port
from commlayer.errors import CommError, RecordError, Refused
from commlayer.records import ServerInfo
from commlayer.transport.endpoint import Address, StreamTransport
from commlayer.transport.grpc import stream_ends
from commlayer.transport.grpc.stream import GrpcStream
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, peer_name
from commlayer.transport.reconnect import Dial

log = logging.getLogger("commlayer")
TCP_S = 5.0
"""Seconds to wait for an answer over TCP if gRPC can be tried next. Firewalls often drop packets without an error."""


def make_dial(transport: StreamTransport, server: ServerInfo, joined: str, config: Config, keys: Keys | None) -> Dial:
    """Returns a function that connects to `server`. With carrier "auto" it tries TCP, then gRPC; later calls use the
    protocol that worked. `joined`: the address by which this process reached the coordinator, used for servers that
    have none of their own."""
    peer, name = SERVER_BASE + server.id, f"server {server.id}"
    plain = _checked(server.address, f"address of {name}", config)
    where, alone = streams_at(server, joined), only_streams(server, joined)
    streams = _checked(where, f"address of {name} for gRPC", config) if where else None
    carrier = "grpc" if alone and config.carrier == "auto" else config.carrier

    def dial(deadline: float) -> None:
        nonlocal carrier
        first, either = None, carrier == "auto" and streams is not None
        if carrier != "grpc" and not alone:
            try:
                transport.dial(peer, plain, deadline, time.monotonic() + TCP_S if either else deadline)
            except CommError as error:
                # With keys, a device between the machines may also cause a refusal, so gRPC is tried.
                if not either or (isinstance(error, Refused) and keys is None):
                    raise
                first = error
            else:
                log.info("connected to %s over TCP at %s", name, server.address)
                carrier = "tcp"
                return
        if carrier == "tcp" or streams is None:
            offered = "accepts only gRPC streams" if streams else "accepts no gRPC streams"
            raise Refused(f"{offered}, which does not match this process's setting carrier: set the same value on both ends, "
                          "or leave it unset", peer=name, code="E-SETTING")
        try:
            dial_grpc(transport, peer, streams, keys, deadline)
        except CommError as error:
            if first is None:
                raise
            also = "" if error.what == first.what else f"; nor over gRPC: {error.what}"
            raise first.located(what=first.what + also) from first
        if first is None:
            log.info("connected to %s over gRPC at %s", name, where)
        else:
            log.warning("connected to %s over gRPC at %s, because TCP failed: %s", name, where, first.what)
            carrier = "grpc"

    return dial


def streams_at(server: ServerInfo, joined: str) -> str:
    """Returns the server's address for gRPC streams; "" if it accepts none. `joined`: the address by which this process reached
    the coordinator."""
    # The coordinator's advertised address may be unreachable from here (proxy, router), but `joined` works.
    return joined if server.colocated and server.streams else server.streams


def only_streams(server: ServerInfo, joined: str) -> bool:
    """Returns whether the server accepts only gRPC streams."""
    return bool(server.streams) and server.address in (server.streams, streams_at(server, joined))


def dial_grpc(transport: StreamTransport, peer: int, address: Address, keys: Keys | None, deadline: float) -> None:
    """Connects to that peer over a gRPC stream."""
    if keys is not None:
        # checks the revocation list, which gRPC does not do
        diagnose(settings.join_host(*address), keys, deadline, peer_name(peer))
    transport.dial_over(lambda until: open_stream(address, keys, until), peer, deadline)


def open_stream(address: Address, keys: Keys | None, deadline: float) -> GrpcStream:
    """Opens a gRPC stream to a server, before the handshake. Raises CommError with the address if that fails."""
    options = [*stream_ends.OPTIONS, *([("grpc.enable_http_proxy", 0)] if settings.is_loopback(address[0]) else [])]
    opened = functools.partial(stream_ends.open_channel, settings.join_host(*address), options, keys, on_loop=True)
    return stream_ends.dial(opened, *address, deadline, fingerprint(keys))


def _checked(address: str, name: str, config: Config) -> Address:
    """Parses an address that the coordinator sent. Checks that this process's settings allow plaintext to it, since the
    coordinator may not decide that."""
    try:
        host, port = host_port(address)
    except ValueError as error:
        raise RecordError("E-SETTING", f"{name}: {error}") from None
    check_plain_text(name, host, config)
    return host, port


NOTE_AFTER_S = 5.0
"""Seconds after which a warning names the workers that the process waits for."""
