"""Revocation lists that reach running processes: both ends apply them, and a file cannot stop the process that lists."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.attached import assert_refused, outcome
from support.coordinators import Failures, quick
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)
from support.meshes import exchange_pair, soon

from commlayer.cluster import authority, client, messages
from commlayer.cluster.client import CoordinatorChannel
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.grpc_server import GrpcPort
from commlayer.errors import DeadlineExceeded, PeerLost, Refused
from commlayer.transport import tls
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.key_folder import Keys, PeerCertificate
from commlayer.transport.protocol import SERVER_BASE

SECRET = "correct-horse-battery"


@pytest.fixture
def ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("os.fsync", lambda _: None)
    authority.init(tmp_path / "job")
    for name in ("server-1", "gpu-1", "gpu-2"):
        authority.add(tmp_path / "job", name)
    return tmp_path / "job" / "nodes"


def joined(address: str, folder: Path) -> None:
    client.join(address, messages.worker_request("job", 0, 1, plan=b"a plan"), quick(token=SECRET, keys=str(folder)),
                Failures()).leave()


def test_a_revoked_coordinator_is_refused_ahead_of_the_first_word(folders: Folders) -> None:
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.revoked)), workers=1)
    assert_refused(outcome(lambda: joined(coordinator.address, folders.worker)), "E-CERTIFICATE-REVOKED")
    assert not coordinator._state.registrations, "it has no list yet"
    coordinator.close()


def test_a_worker_without_a_coordinator_waits_for_it(folders: Folders) -> None:
    config = quick(token=SECRET, keys=str(folders.worker), join_deadline_s=0.5)
    line = outcome(lambda: client.join("127.0.0.1:1", messages.worker_request("job", 0, 1), config, Failures()))
    assert_refused(line, "E-DEADLINE", "DeadlineExceeded: ", "127.0.0.1:1", "0.5 s")


@pytest.mark.parametrize("kind", ["cut off", "of another job", "empty"])
def test_a_bad_list_keeps_nobody_out(ca: Path, kind: str, folders: Folders) -> None:
    place = ca / "server-1"
    server = StreamTransport(Hello("job", SERVER_BASE), settings=Settings(secret=SECRET, keys=Keys(place)))
    address = server.listen()
    coordinator = Coordinator(quick(token=SECRET, keys=str(place)), workers=1)
    good = (place / "crl.pem").read_bytes()
    bad = {"cut off": good[:-100], "of another job": (folders.foreign / "crl.pem").read_bytes(), "empty": b""}[kind]
    (place / "crl.pem").write_bytes(bad)
    worker = StreamTransport(Hello("job", 1), settings=Settings(secret=SECRET, keys=Keys(ca / "gpu-1")))
    worker.dial(SERVER_BASE, address, soon())
    assert exchange_pair(worker, server)
    joined(coordinator.address, ca / "gpu-1")
    for each in (worker, server, coordinator):
        each.close()


def test_a_certificate_replaced_in_use_is_taken_with_the_next_start(ca: Path) -> None:
    keys = Keys(ca / "gpu-1")
    authority.add(ca.parent, "gpu-1", again=True)
    keys.revoked()
    other = Keys(ca / "gpu-2")
    assert Keys(ca / "gpu-1").own != keys.own
    local, present = (tls.TlsSocket(sock, k, tls.DATA, server=side)
                   for sock, k, side in zip(socket.socketpair(), (keys, other), (False, True), strict=True))

    def refuse() -> None:
        with pytest.raises(Refused):
            present.handshake(soon())

    thread = threading.Thread(target=refuse)
    thread.start()
    local.handshake(soon())
    assert_refused(outcome(lambda: local.recv_into(bytearray(1))), "E-CERTIFICATE-REVOKED", "gpu-1 ")
    thread.join()
    for sock in (local, present):
        sock.close()


def test_an_older_list_brings_nobody_back(ca: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys, older = Keys(ca / "gpu-1"), (ca / "gpu-1" / "crl.pem").read_bytes()
    gone = Keys(ca / "gpu-2").own.serial
    authority.revoke(ca.parent, "gpu-2")
    assert keys.revoked() == {gone}
    (ca / "gpu-1" / "crl.pem").write_bytes(older)
    assert keys.revoked() == {gone}
    assert "it is list 1 of the CA, older than list 2, which is in use" in caplog.text


def test_bytes_that_trickle_keep_no_handshake_alive(folders: Folders) -> None:
    mine, theirs = socket.socketpair()
    over = threading.Event()

    def trickle() -> None:
        rest = iter(b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc" + bytes(1000))
        until = time.monotonic() + 8.0
        while not over.wait(0.02) and time.monotonic() < until:
            theirs.sendall(bytes([next(rest)]))
        theirs.close()

    thread = threading.Thread(target=trickle)
    thread.start()
    sock = tls.TlsSocket(mine, Keys(folders.server), tls.DATA, server=True)
    assert_refused(outcome(lambda: sock.handshake(time.monotonic() + 0.3)), "E-DEADLINE", "DeadlineExceeded: ", "TLS")
    over.set()
    thread.join()
    sock.close()


def test_a_handshake_that_outran_the_list_does_not_last(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list comes when the handshake is over, and who is to be dropped has been looked through already."""
    front = GrpcPort(Keys(ca / "server-1"), "127.0.0.1", 0, lambda *_: None)
    inner = socket.create_server(("127.0.0.1", 0))
    handshake = tls.TlsSocket.handshake

    def outrun(sock: tls.TlsSocket, deadline: float) -> PeerCertificate:
        results = handshake(sock, deadline)
        if sock._server:
            authority.revoke(ca.parent, "gpu-1")
            front.drop(front._keys.revoked())
        return results

    monkeypatch.setattr(tls.TlsSocket, "handshake", outrun)
    behind: Any = SimpleNamespace(start=lambda _: inner.getsockname()[1], close=lambda: None)
    front.start(behind)
    dialled = socket.create_connection(("127.0.0.1", front.number), 5.0)
    sock = tls.TlsSocket(dialled, Keys(ca / "gpu-1"), tls.CONTROL, server=False)
    sock.handshake(soon())
    sock.settimeout(5.0)
    assert sock.recv_into(bytearray(1)) == 0
    for each in (sock, inner, front):
        each.close()


def test_a_connection_made_anew_is_looked_at_as_the_first_one_is(folders: Folders) -> None:
    """A stolen key that was revoked takes the coordinator's place while a job runs: gRPC connects again, and knows no list."""
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=1)
    address, port = coordinator.address, int(coordinator.address.rsplit(":", 1)[1])
    member = client.join(address, messages.worker_request("job", 0, 1, plan=b"a plan"),
                         quick(token=SECRET, keys=str(folders.worker)),
                         Failures())
    link = member._channel
    request = messages.Heartbeat("unknown")
    assert link.call("Heartbeat", request, messages.HeartbeatReply, 5.0).unknown_token
    # A restarted one, with a key as good as before, is taken.
    coordinator.close()
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.second), port=port), workers=1)
    assert until_answered(link).unknown_token
    coordinator.close()
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.revoked), port=port), workers=1)
    received: list[str] = []
    heartbeat = coordinator._judge.opened
    coordinator._judge.opened = lambda *args: (received.append(args[1]), heartbeat(*args))[1]  # type: ignore[method-assign]
    for _ in range(3):  # and every thread's call, not only the first one's that finds out
        assert_refused(outcome(lambda: until_answered(link)), "E-CERTIFICATE-REVOKED")
    assert received == [], "and hears nothing"
    member.close()
    coordinator.close()


def test_a_coordinator_that_is_revoked_while_one_is_connected(ca: Path) -> None:
    coordinator = Coordinator(quick(token=SECRET, keys=str(ca / "server-1")), workers=1)
    member = client.join(coordinator.address, messages.worker_request("job", 0, 1, plan=b"a plan"),
                         quick(token=SECRET, keys=str(ca / "gpu-1")), Failures())
    request = messages.Heartbeat("unknown")
    assert member._channel.call("Heartbeat", request, messages.HeartbeatReply, 5.0).unknown_token
    authority.revoke(ca.parent, "server-1")
    line = outcome(lambda: member._channel.call("Heartbeat", request, messages.HeartbeatReply, 5.0))
    assert_refused(line, "E-CERTIFICATE-REVOKED", "(server-1)")
    member.close()
    coordinator.close()


def until_answered(link: CoordinatorChannel) -> messages.HeartbeatReply:
    """Past the time that it takes to connect again."""
    until = time.monotonic() + 20.0
    while True:
        try:
            return link.call("Heartbeat", messages.Heartbeat("unknown"), messages.HeartbeatReply, 2.0)
        except (PeerLost, DeadlineExceeded):
            assert time.monotonic() < until
            time.sleep(0.05)
