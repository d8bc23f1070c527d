"""A node with a revoked certificate serves at the job's address and still has the job's secret.

No member accepts it, with its own certificate or with that of the server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.coordinators import WAIT_S, quick
from support.internals import judge_of
from support.keys import (
    Folders,
)
from support.mailbox import InboxTransport
from support.meshes import GrpcEnd, exchange_pair, soon

from commlayer.cluster.calls import coordinator_channel, messages
from commlayer.cluster.keys import authority
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.servers import dialing
from commlayer.errors import CommError
from commlayer.transport.endpoint import Settings
from commlayer.transport.handshake import Hello
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE

SECRET = "correct-horse-battery"
Reach = Callable[[Keys], None]
"""Reaches the server as a member with these keys. Raises CommError if the member does not believe the server."""
Serve = Callable[[Keys], contextlib.AbstractContextManager[Reach]]


@contextlib.contextmanager
def calls(keys: Keys) -> Iterator[Reach]:
    coordinator = Coordinator(quick(token=SECRET, keys=str(keys.folder)), workers=1)
    judge_of(coordinator)._keys = keys

    def reach(mine: Keys) -> None:
        with contextlib.closing(coordinator_channel.CoordinatorChannel(coordinator.address, SECRET, mine, own=True)) as link:
            link.call("Heartbeat", messages.Heartbeat("unknown"), messages.HeartbeatReply, WAIT_S)

    with contextlib.closing(coordinator):
        yield reach


@contextlib.contextmanager
def data(keys: Keys, kind: type[InboxTransport] = InboxTransport) -> Iterator[Reach]:
    with contextlib.closing(kind(Hello("job", SERVER_BASE), settings=Settings(secret=SECRET, keys=keys))) as server:
        address = server.listen()

        def reach(mine: Keys) -> None:
            with contextlib.closing(kind(Hello("job", 1), settings=Settings(secret=SECRET, keys=mine))) as worker:
                worker.dial(SERVER_BASE, address, soon())
                assert exchange_pair(worker, server)

        yield reach


def streams(keys: Keys) -> contextlib.AbstractContextManager[Reach]:
    return data(keys, GrpcEnd)


SERVERS = {"calls": calls, "data": data, "streams": streams}


@pytest.fixture(params=SERVERS)
def serve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Serve:
    # The attacker forwards the connection that only looks at certificates to the server.
    monkeypatch.setattr(coordinator_channel, "diagnose", lambda *_: None)
    monkeypatch.setattr(dialing, "diagnose", lambda *_: None)
    return SERVERS[request.param]


def test_revoked_node_is_not_accepted_as_the_server(serve: Serve, folders: Folders) -> None:
    with serve(Keys(folders.revoked)) as reach, pytest.raises(CommError) as caught:
        reach(Keys(folders.worker))
    assert caught.value.code == "E-CERTIFICATE-REVOKED"


@pytest.mark.parametrize("kind", ["calls", "streams"])
def test_server_certificate_without_its_key_is_refused(
    kind: str, folders: Folders, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC does not report which certificate the connection uses. On data connections it is the one that TLS has checked."""
    monkeypatch.setattr(dialing, "diagnose", lambda *_: None)
    keys = Keys(folders.revoked)
    keys.der = Keys(folders.server).der
    with SERVERS[kind](keys) as reach, pytest.raises(CommError) as caught:
        reach(Keys(folders.worker))
    assert caught.value.code == "E-CERTIFICATE-KEY"


@pytest.mark.parametrize("kind", [InboxTransport, GrpcEnd])
def test_members_leave_a_server_that_is_revoked_later(kind: type[InboxTransport], tmp_path: Path) -> None:
    authority.init(tmp_path / "job")
    gone, mine = (Keys(authority.add(tmp_path / "job", name)) for name in ("server-1", "gpu-1"))
    server = kind(Hello("job", SERVER_BASE), settings=Settings(secret=SECRET, keys=gone))
    worker = kind(Hello("job", 1), settings=Settings(secret=SECRET, keys=mine))
    with contextlib.closing(server), contextlib.closing(worker):
        worker.dial(SERVER_BASE, server.listen(), soon())
        assert exchange_pair(worker, server)
        answer = worker.recv(SERVER_BASE)
        authority.revoke(tmp_path / "job", "server-1")
        with pytest.raises(CommError) as caught:
            worker.wait(answer, time.monotonic() + WAIT_S)
    assert caught.value.code in ("E-CERTIFICATE-REVOKED", "E-PEER-LOST")
    assert worker.peers == ()
