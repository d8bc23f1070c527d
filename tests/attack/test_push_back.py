"""A connection reads nothing more from a peer that does not read, but unread results in the owner's memory block no
contribution.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from support.mailbox import InboxTransport
from support.meshes import data, frame, raw_peer, soon

from commlayer.errors import DeadlineExceeded
from commlayer.transport.connection import SizeLimits
from commlayer.transport.endpoint import Settings
from commlayer.transport.handshake import Hello

MESSAGES = 20
LARGE = 4 << 20
PEER = 5


@pytest.fixture
def server() -> Iterator[InboxTransport]:
    end = InboxTransport(Hello("test", 0x8000), settings=Settings(buffer_nbytes=1 << 16))
    end.limits = SizeLimits(messages=MESSAGES)
    yield end
    end.close(0.1)


@pytest.mark.parametrize(("body", "count", "taken"), [
    (memoryview(bytes(LARGE)), MESSAGES, True),
    (memoryview(bytes(LARGE)), 3 * MESSAGES, False),
    (bytes(LARGE), 2, False),
    (bytes(10), MESSAGES // 2, True),
], ids=["results of the job", "more results", "replies of their own", "small replies"])
def test_peer_that_does_not_read_is_read_only_as_far_as_the_job_needs(
    server: InboxTransport, body: bytes | memoryview, count: int, taken: bool,
) -> None:
    peer = raw_peer(server.listen(), PEER)
    peer.sendall(frame(data(PEER)))
    server.wait(server.recv(PEER), soon())  # the server's end is connected
    for number in range(count):
        server.send(PEER, data(0, bucket=number), body)
    received = [server.recv(PEER) for _ in range(3)]
    for number in range(3):
        peer.sendall(frame(data(PEER, bucket=number)))
    if not taken:
        with pytest.raises(DeadlineExceeded):
            server.wait(received[-1], time.monotonic() + 0.5)
        reader, left = bytearray(1 << 20), count * LARGE
        while left > 0:  # it reads, and is read again
            left -= peer.recv_into(reader)
    for handle in received:
        server.wait(handle, soon())
    peer.shutdown(socket.SHUT_RDWR)
    peer.close()
