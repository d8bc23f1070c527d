"""Opens a gRPC channel to a coordinator, in TLS where there are keys. Loads little: the heartbeat child waits for it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shown(NamedTuple):
    """In PEM: the CA, this node's certificate and its key; and the name that every coordinator's bears."""

    ca: str
    certificate: str
    key: str
    name: str


def opened(address: str, options: list[tuple[str, Any]], shown: Shown | None) -> Any:
    """Call config.quiet_forks() first where processes are forked."""
    import grpc

    if shown is None:
        return grpc.insecure_channel(address, options=options)
    ca, certificate, key = (part.encode() for part in shown[:3])
    # Certificates say which node it is, and addresses which one is dialled: those need not agree.
    options = [*options, ("grpc.ssl_target_name_override", shown.name)]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=options)
