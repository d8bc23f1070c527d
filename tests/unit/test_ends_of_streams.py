"""How the end of a TCP stream is classified: only a close by the peer's machine counts as closed by the peer."""

from __future__ import annotations

import socket
import struct
import sys

import pytest

from commlayer.transport.protocol import closed_by_peer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not report the state of a connection")


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.settimeout(10.0)
    return near, far


def test_stream_closed_by_the_peer() -> None:
    near, far = connected()
    with near:
        far.close()
        assert near.recv(1) == b""
        assert closed_by_peer(near)


def test_stream_whose_error_was_consumed_by_another_thread() -> None:
    near, far = connected()
    with near:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        with pytest.raises(ConnectionResetError):
            near.recv(1)
        assert near.recv(1) == b""
        assert not closed_by_peer(near)


def test_non_tcp_connection_counts_as_closed() -> None:
    near, far = socket.socketpair()
    with near:
        far.close()
        assert closed_by_peer(near)
