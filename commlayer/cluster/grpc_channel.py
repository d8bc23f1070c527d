"""Opens gRPC channels, with TLS if there are keys. Imports little, since the heartbeat child waits for it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shown(NamedTuple):
    """In PEM: CA, this node's certificate and its key. `name`: the name in every coordinator's certificate."""

    ca: str
    certificate: str
    key: str
    name: str


def opened(address: str, options: list[tuple[str, Any]], shown: Shown | None, *, on_loop: bool = False) -> Any:
    """Call config.quiet_grpc() first in processes that fork. `on_loop`: opens a grpc.aio channel on the running loop."""
    import grpc

    kind: Any = grpc
    if on_loop:
        import grpc.aio

        kind = grpc.aio
    if shown is None:
        return kind.insecure_channel(address, options=options)
    ca, certificate, key = (part.encode() for part in shown[:3])
    # Certificates name nodes, not addresses, so the two need not agree.
    options = [*options, ("grpc.ssl_target_name_override", shown.name)]
    return kind.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=options)
