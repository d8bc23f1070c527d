"""Opens a listening socket, with an error message that names the remedy."""

from __future__ import annotations

import errno
import socket

from commlayer.errors import InvalidInput


def listening(host: str, port: int) -> socket.socket:
    """Port 0 lets the system choose one. Raises InvalidInput with a remedy."""
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(where[:2], family=family, backlog=128)
    except OSError as error:
        raise InvalidInput("E-ADDRESS", f"cannot listen on {host}:{port}: {_remedy(error)}") from None


def wake(listener: socket.socket) -> None:
    """Makes the thread blocked in accept() return."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _remedy(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use: stop the process that holds it, choose another port, or 0 for any free one"
    if error.errno == errno.EADDRNOTAVAIL:
        return "the address is not of this machine: bind one that is, or 0.0.0.0 for all"
    if error.errno == errno.EACCES:
        return "not allowed: choose a port above 1023"
    return error.strerror or str(error)
