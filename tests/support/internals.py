"""Private parts of production objects that tests inspect or break: the only place to change when one is renamed."""

from __future__ import annotations

import subprocess
from typing import Any

from commlayer.cluster.membership import membership
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.transport import connection as connections


def leave_silently(coordinator: Coordinator, token: str) -> None:
    """Removes a member as after its silence."""
    with coordinator._lock:
        coordinator._state = membership.leave(coordinator._state, token, "silent")


def watches_of(coordinator: Coordinator) -> Any:
    """The Watch calls that wait, by token."""
    return coordinator._watches


def rendezvous_of(coordinator: Coordinator) -> Any:
    return coordinator._rendezvous


def store_of(coordinator: Coordinator) -> Any:
    """The sites' key-value store."""
    return rendezvous_of(coordinator)._store


def hang_suspects(coordinator: Coordinator) -> Any:
    return coordinator._hangs.suspects


def port_of(coordinator: Coordinator) -> Any:
    """The TLS port."""
    return coordinator._port


def known_connections(coordinator: Coordinator) -> Any:
    """Connections of the TLS port, by the address of their inner end."""
    return port_of(coordinator)._known


def judge_of(coordinator: Coordinator) -> Any:
    """The part that verifies calls."""
    return coordinator._verifier


def broken_peers(transport: Any) -> list[int]:
    """The peers whose connections have left something unfinished."""
    return [*transport._former]


def connections_of(transport: Any) -> Any:
    """The connections of a StreamTransport, by peer."""
    return transport._connections


def socket_of(connection: Any) -> Any:
    return connection._sock


def open_sockets() -> set[Any]:
    """The sockets of this process's data connections."""
    return set(connections._sockets)


def asker_of(channel: Any) -> Any:
    """The part of a CoordinatorChannel that proves calls."""
    return channel._asker


def send_unchecked(channel: Any, method: str, data: bytes, timeout_s: float) -> Any:
    """Makes a call with any bytes as its message."""
    return channel._send(method, data, timeout_s)


def channel_of(member: Any) -> Any:
    """The channel of a Membership."""
    return member._channel


def sidecar_of(member: Any) -> Any:
    """The process that sends the heartbeats of a Membership."""
    return member._keeper


def config_from_options(owner: Any) -> Any:
    """The settings of a coordinator or an uplink."""
    return owner._config


def process_of(server: Any) -> subprocess.Popen[Any]:
    """The process of an EmbeddedServer."""
    return server._process  # type: ignore[no-any-return]
