"""Opens a gRPC channel, in TLS where there are keys. Loads little: the heartbeat child waits for it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shown(NamedTuple):
    """In PEM: the CA, this node's certificate and its key; and the name that every coordinator's bears."""

    ca: str
    certificate: str
    key: str
    name: str


def opened(address: str, options: list[tuple[str, Any]], shown: Shown | None, *, on_loop: bool = False) -> Any:
    """Call config.quiet_grpc() first where processes are forked. `on_loop`: one of grpc.aio, for the running loop."""
    import grpc

    kind: Any = grpc
    if on_loop:
        import grpc.aio

        kind = grpc.aio
    if shown is None:
        return kind.insecure_channel(address, options=options)
    ca, certificate, key = (part.encode() for part in shown[:3])
    # Certificates say which node it is, and addresses which one is dialled: those need not agree.
    options = [*options, ("grpc.ssl_target_name_override", shown.name)]
    return kind.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=options)
