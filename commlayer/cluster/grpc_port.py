"""A port with a gRPC server, behind a TLS terminator if there are keys."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any

from commlayer.cluster.proved_calls import Unproved
from commlayer.cluster.rpc_server import Host
from commlayer.cluster.tls_front import Front
from commlayer.config import join_host
from commlayer.errors import InvalidInput
from commlayer.transport import event_loop, grpc_ends
from commlayer.transport.grpc_ends import Take
from commlayer.transport.key_folder import Certified, Keys
from commlayer.transport.stream_transport import MOST_EACH

LOOPBACK = "127.0.0.1"
HEARD_S = 1.0
"""How long a reply may take to reach a client before its connection is closed."""


class GrpcPort:
    """Without keys gRPC listens on the port. With keys the TLS terminator does, and gRPC listens on loopback."""

    def __init__(self, keys: Keys | None, bind: str, port: int, refused: Callable[[str, str], None]) -> None:
        self._bind, self.number = bind, port
        self._front = Front(keys, bind, port, refused) if keys else None
        self._host: Host | None = None

    def start(self, host: Host) -> None:
        self._host = host
        if self._front is None:
            self.number = host.start(join_host(self._bind, self.number))
        else:
            self._front.start(host.start(join_host(LOOPBACK, 0)))
            self.number = self._front.port

    def caller(self, peer: str) -> Certified | None:
        """The certificate of the connection that gRPC calls `peer`. Unproved if the connection did not come through TLS."""
        if self._front is None:
            return None
        caller = self._front.caller(peer)
        if caller is None:
            raise Unproved
        return caller

    def allow(self, most: int) -> None:
        """Raises the limit of connections per certificate; never lowers it."""
        if self._front is not None:
            self._front.allow(most)

    def streams(self, take: Take) -> Any:
        """The handler of data streams on this port."""

        def certified(peer: str) -> Certified | None:
            try:
                return self.caller(peer)
            except Unproved:
                raise PermissionError("it did not come through TLS") from None

        return grpc_ends.handler(take, certified)

    def where(self, peer: str) -> str:
        """Certificate name and address of the connection, for errors and logs. With TLS, gRPC's own name for it is a loopback
        address."""
        return (self._front.where(peer) if self._front is not None else "") or peer

    def let_go(self, peer: str) -> None:
        """Treats a TLS connection as unauthenticated, and closes it after the pending reply had time to arrive. On the event
        loop."""
        if self._front is not None:
            self._front.unheard(peer)
            event_loop.running().call_later(HEARD_S, self._front.end, peer)

    def end(self, peer: str) -> None:
        """Closes that connection, if it came through TLS."""
        if self._front is not None:
            self._front.end(peer)

    def drop(self, serials: frozenset[int]) -> None:
        """Closes all connections with these certificates."""
        if self._front is not None:
            self._front.drop(serials)

    def close(self) -> None:
        """Idempotent."""
        if self._host is not None:
            self._host.close()
        if self._front is not None:
            self._front.close()


def stream_port(keys: Keys | None, bind: str, port: int, take: Take, refused: Callable[[str, str], None]) -> GrpcPort:
    """A port for data streams only. InvalidInput if the port cannot be opened."""
    check_free(bind, port)
    opened = GrpcPort(keys, bind, port, refused)
    opened.allow(MOST_EACH)
    opened.start(Host({}, [opened.streams(take)]))
    return opened


def check_free(host: str, port: int) -> None:
    """InvalidInput with the reason if the port cannot be opened. gRPC's own error does not give it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            where = join_host(host, port)
            if error.errno == errno.EADDRINUSE:
                line = f"{where} is in use: stop what listens there, or choose another --port (0 for any free one)"
            else:
                line = f"cannot listen on {where}: {error.strerror}; bind an address of this machine"
            raise InvalidInput("E-ADDRESS", line) from None
