"""Peers without a valid key are refused and logged with the reason, over real sockets; revocation lists reach running
processes.
"""

from __future__ import annotations

import logging
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from support.attached import assert_refused, outcome
from support.coordinators import WAIT_S, Failures, quick, until
from support.internals import asker_of, channel_of, judge_of, known_connections, port_of, send_unchecked
from support.keys import (
    Folders,
    RawKeys,
)
from support.mailbox import InboxTransport
from support.meshes import GrpcEnd, exchange_pair, soon

from commlayer.cluster.calls import diagnosis, messages
from commlayer.cluster.calls.call_proofs import CallAuthenticator, CallVerifier
from commlayer.cluster.calls.coordinator_channel import CoordinatorChannel
from commlayer.cluster.calls.grpc_port import GrpcPort
from commlayer.cluster.keys import authority
from commlayer.cluster.membership import client, membership
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.membership.coordinator_journal import NAME, CoordinatorJournal
from commlayer.errors import CommError, Damaged, DeadlineExceeded, PeerLost, Refused
from commlayer.transport import handshake
from commlayer.transport.connection import shut_down
from commlayer.transport.endpoint import Settings
from commlayer.transport.framing import Reader
from commlayer.transport.handshake import Hello
from commlayer.transport.keys import tls
from commlayer.transport.keys.key_folder import CERTIFICATE, Keys, PeerCertificate
from commlayer.transport.protocol import SERVER_BASE

SECRET = "correct-horse-battery"


class End(NamedTuple):
    """A listener, and functions to talk to it as a stranger and as a member."""

    address: tuple[str, int]
    protocol: str
    talk: Callable[[Path, str], Any]
    """With these keys and that secret."""

    def friend(self, folder: Path) -> Any:
        return self.talk(folder, SECRET)


@pytest.fixture(params=["control", "data", "streams"])
def end(request: pytest.FixtureRequest, folders: Folders) -> Iterator[End]:
    if request.param == "control":
        coordinator = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=1)
        host, port = coordinator.address.rsplit(":", 1)

        def joined(folder: Path, secret: str) -> None:
            member = client.join(coordinator.address, messages.worker_request("job", 0, 1, plan=b"a plan"),
                                 quick(token=secret, keys=str(folder)), Failures())
            assert member.epoch.members[0].rank == 0
            member.leave()

        yield End((host, int(port)), tls.CONTROL, joined)
        coordinator.close()
    else:
        kind = InboxTransport if request.param == "data" else GrpcEnd
        server = kind(Hello("job", SERVER_BASE), settings=Settings(secret=SECRET, keys=Keys(folders.server)))
        address = server.listen()

        def dialled(folder: Path, secret: str) -> None:
            worker = kind(Hello("job", 1), settings=Settings(secret=secret, keys=Keys(folder)))
            try:
                worker.dial(SERVER_BASE, address, soon())
                assert exchange_pair(worker, server)
            finally:
                worker.close()

        yield End(address, tls.DATA if kind is InboxTransport else tls.CONTROL, dialled)
        server.close()


def plain(where: End, _: Folders) -> socket.socket:
    sock = socket.create_connection(where.address, WAIT_S)
    sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if where.protocol == tls.CONTROL else b"CML2" + bytes(84))
    return sock


def showing(node: str | None, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3, protocol: str = "",
            ) -> Callable[[End, Folders], socket.socket]:
    """Connects with the certificate of that node, or with none."""
    def connect(where: End, made_keys: Folders) -> socket.socket:
        keys: Any = RawKeys(made_keys.ca, getattr(made_keys, node) if node else None, newest)
        sock = tls.TlsSocket(socket.create_connection(where.address, WAIT_S), keys, protocol or where.protocol, server=False)
        sock.handshake(soon())
        sock.settimeout(WAIT_S)
        return sock

    return connect


CASES = {
    "plain text": (plain, "it uses plaintext, but this end uses TLS", ""),
    "no certificate": (showing(None), "it sent no certificate: set keys", ""),
    "foreign": (showing("foreign"), "its certificate was issued by a different CA than this job's", "E-CERTIFICATE-CA"),
    "expired": (showing("expired"), "its certificate has expired according to this machine's clock (2", "E-CERTIFICATE-DATE"),
    "early": (showing("early"), "its certificate is not valid yet according to this machine's clock (2", "E-CERTIFICATE-DATE"),
    "revoked": (showing("revoked"), "its certificate was revoked", "E-CERTIFICATE-REVOKED"),
    "an older TLS": (showing("worker", ssl.TLSVersion.TLSv1_2), "it uses a TLS version before 1.3", ""),
    "another protocol": (showing("worker", protocol="http/1.1"), "gpu-1 accepts TLS on this port, but not for", ""),
}
"""How a peer connects, what the server logs, and the code of the error that a member with these keys receives."""


@pytest.mark.parametrize("case", CASES)
def test_peers_without_a_valid_key_are_refused(end: End, case: str, folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    connect, reason, code = CASES[case]
    with caplog.at_level(logging.WARNING, "commlayer"):
        with pytest.raises((EndOfStream, Refused, PeerLost, Damaged)):
            read_to_end(connect(end, folders))
        logged(caplog, reason)
    if code:
        with pytest.raises((CommError, ValueError), match=code) as caught:
            end.friend(getattr(folders, case))
        assert "\n" not in str(caught.value)
    end.friend(folders.worker)


class EndOfStream(Exception):
    pass


def read_to_end(sock: socket.socket) -> None:
    """Nothing but an alert comes."""
    data = bytearray(1 << 16)
    try:
        while n := sock.recv_into(data):
            assert bytes(data[:n])[:1] == b"\x15", "an alert in front of plain text"
    except (Refused, ConnectionError):
        pass
    finally:
        sock.close()
    raise EndOfStream


def logged(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """The refusal is written on a thread of the listener's."""
    until(lambda: any(reason in line for line in caplog.messages), reason)
    assert all("127.0.0.1:" in line for line in caplog.messages if reason in line), "and says where from"


def test_client_key_cannot_serve(folders: Folders) -> None:
    server = InboxTransport(Hello("job", SERVER_BASE), settings=Settings(secret=SECRET, keys=Keys(folders.dials)))
    worker = InboxTransport(Hello("job", 1), settings=Settings(secret=SECRET, keys=Keys(folders.worker)))
    assert_refused(outcome(lambda: worker.dial(SERVER_BASE, server.listen(), soon())), "E-CERTIFICATE-USE")
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.dials)), workers=1)
    with pytest.raises(Refused, match="E-CERTIFICATE-USE"):
        client.join(coordinator.address, messages.worker_request("job", 0, 1), quick(token=SECRET, keys=str(folders.worker)),
                    Failures())
    for each in (worker, server, coordinator):
        each.close()


@pytest.mark.parametrize(("local", "present", "line"), [
    ("worker", "", "COMMLAYER_KEYS.*(E-TLS|E-PEER-LOST)"),
    ("", "server", r"(COMMLAYER_KEYS.*E-TLS|connection closed.*E-PEER-LOST)\]"),
])
def test_keys_on_one_end_only(local: str, present: str, line: str, folders: Folders) -> None:
    mine, theirs = (str(getattr(folders, name)) if name else "" for name in (local, present))
    server = InboxTransport(Hello("job", SERVER_BASE), settings=Settings(secret=SECRET, keys=Keys(theirs) if theirs else None))
    worker = InboxTransport(Hello("job", 1), settings=Settings(secret=SECRET, keys=Keys(mine) if mine else None))
    with pytest.raises(CommError, match=line):
        worker.dial(SERVER_BASE, server.listen(), soon())
    coordinator = Coordinator(quick(token=SECRET, keys=theirs), workers=1)
    with pytest.raises(CommError, match=line):
        client.join(coordinator.address, messages.worker_request("job", 0, 1), quick(token=SECRET, keys=mine), Failures())
    for each in (worker, server, coordinator):
        each.close()


def test_secret_of_another_job_is_refused_despite_a_valid_certificate(
    end: End, folders: Folders, caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "commlayer")
    assert_refused(outcome(lambda: end.talk(folders.worker, "another-jobs-secret")), "E-SECRET")
    logged(caplog, "secret")
    end.friend(folders.worker)


class Recorded(tls.TlsSocket):
    """Keeps what it sends, in plain text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.said: list[bytes] = []

    def sendall(self, data: Any, flags: int = 0) -> None:
        self.said.append(bytes(data))
        super().sendall(data, flags)


def greeted(where: tuple[str, int], keys: Keys, channel: bytes | None = None) -> Recorded:
    sock = Recorded(socket.create_connection(where, WAIT_S), keys, tls.DATA, server=False)
    sock.handshake(soon())
    try:
        handshake.dial_handshake(sock, Reader(), Hello("job", 1), SECRET, SERVER_BASE, soon(),
                                 sock.channel if channel is None else channel)
    except BaseException:
        sock.close()
        raise
    return sock


def test_handshake_cannot_be_replayed_on_another_connection(folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    server = InboxTransport(Hello("job", SERVER_BASE), settings=Settings(secret=SECRET, keys=Keys(folders.server)))
    address = server.listen()
    first = greeted(address, Keys(folders.worker))
    first.close()
    with caplog.at_level(logging.WARNING, "commlayer"):
        again = tls.TlsSocket(socket.create_connection(address, WAIT_S), Keys(folders.worker), tls.DATA, server=False)
        again.handshake(soon())
        again.settimeout(WAIT_S)
        for lines in first.said:
            again.sendall(lines)
        received = bytearray()
        with pytest.raises(EndOfStream):
            read_frames(again, received)
        assert handshake.NOT_AUTHENTICATED.encode() in received
        logged(caplog, handshake.NOT_AUTHENTICATED)
        # A proof for another connection, as a member would pass it on that sits between two others.
        for channel in (b"", bytes(64), Keys(folders.second).own.fingerprint + Keys(folders.server).own.fingerprint):
            assert_refused(outcome(lambda channel=channel: greeted(address, Keys(folders.worker), channel)), "E-SECRET")
    server.close()


def read_frames(sock: socket.socket, received: bytearray) -> None:
    data = bytearray(1 << 16)
    while n := sock.recv_into(data):
        received += data[:n]
    sock.close()
    raise EndOfStream


def test_call_with_the_proof_of_another_is_refused(folders: Folders) -> None:
    """Recorded on one connection and replayed on another, or forwarded by a member with its own certificate."""
    from commlayer.cluster.calls.coordinator_channel import CoordinatorChannel

    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=1)
    mine, other = (CoordinatorChannel(coordinator.address, SECRET, Keys(f)) for f in (folders.worker, folders.second))
    sent: list[bytes] = []
    send = asker_of(mine)._call
    asker_of(mine)._call = lambda method, data, timeout_s: (sent.append(data), send(method, data, timeout_s))[1]
    request = messages.Heartbeat("unknown")
    assert mine.call("Heartbeat", request, messages.HeartbeatReply, WAIT_S).unknown_token
    with pytest.raises(Exception, match="does not prove"):
        send_unchecked(other, "Heartbeat", sent[-1], WAIT_S)
    relay = CoordinatorChannel(coordinator.address, SECRET, Keys(folders.second))
    asker_of(relay)._channel = Keys(folders.worker).own.fingerprint
    assert_refused(outcome(lambda: relay.call("Heartbeat", request, messages.HeartbeatReply, WAIT_S)), "E-SECRET")
    for each in (mine, other, relay, coordinator):
        each.close()


def test_flood_of_handshakes_blocks_no_member(end: End, folders: Folders) -> None:
    """Silent ones, incomplete handshakes, and garbage; threads and sockets stay bounded. See tests/attack for more of them."""
    before = threading.active_count()
    rubbish = [b"", b"\x16\x03\x01\x02\x00\x01\x00", bytes(200)]
    flood = [socket.create_connection(end.address, WAIT_S) for _ in range(300)]
    for i, sock in enumerate(flood):
        if rubbish[i % 3]:
            sock.sendall(rubbish[i % 3])
    begin = time.monotonic()
    most = threading.active_count()
    end.friend(folders.worker)
    assert time.monotonic() - begin < WAIT_S
    assert most - before < handshake.MAX_PENDING + 30, "no more than may be unproved at a time, and a few"
    for sock in flood:
        sock.close()


def test_revoked_node_is_disconnected(folders: Folders, tmp_path: Path) -> None:
    from commlayer.cluster.keys import authority

    authority.init(tmp_path / "job")
    local, gone = (authority.add(tmp_path / "job", name) for name in ("server-1", "gpu-9"))
    server = InboxTransport(Hello("job", SERVER_BASE), settings=Settings(secret=SECRET, keys=Keys(local)))
    worker = InboxTransport(Hello("job", 1), settings=Settings(secret=SECRET, keys=Keys(gone)))
    worker.dial(SERVER_BASE, server.listen(), soon())
    assert exchange_pair(worker, server)
    coordinator = Coordinator(quick(token=SECRET, keys=str(local)), workers=2)
    requests = [messages.worker_request("job", rank, 2, plan=b"a plan") for rank in range(2)]
    failures, members = [Failures(), Failures()], []

    def join(rank: int) -> None:
        members.append(client.join(coordinator.address, requests[rank], quick(token=SECRET, keys=str((local, gone)[rank])),
                                   failures[rank]))

    joining = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join(WAIT_S)
    waiting = server.recv(1)
    authority.revoke(tmp_path / "job", "gpu-9")
    assert_refused(outcome(lambda: server.wait(waiting, soon())), "E-CERTIFICATE-REVOKED", "worker 1: ", "(gpu-9)")
    with pytest.raises(PeerLost):
        worker.wait(worker.recv(SERVER_BASE), soon())
    assert failures[0].came.wait(WAIT_S)
    error = failures[0].errors[0]
    assert (error.peer, error.code) == ("worker 1", "E-PEER-LOST")
    assert "certificate (gpu-9)" in error.what
    assert_refused(outcome(lambda: worker.dial(SERVER_BASE, server.listen(), soon())), "E-CERTIFICATE-REVOKED")
    for member in members:
        member.close()
    worker.close()
    server.close()
    coordinator.close()


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


def test_replaced_certificate_is_used_after_the_next_start(ca: Path) -> None:
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


def test_slow_bytes_do_not_extend_a_handshake(folders: Folders) -> None:
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


def test_connection_older_than_its_revocation_is_closed(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list arrives after the handshake, when connections to close have been searched already."""
    front = GrpcPort(Keys(ca / "server-1"), "127.0.0.1", 0, lambda *_: None)
    inner = socket.socket(socket.AF_UNIX)
    handshake = tls.TlsSocket.handshake

    def outrun(sock: tls.TlsSocket, deadline: float) -> PeerCertificate:
        results = handshake(sock, deadline)
        if sock._server:
            authority.revoke(ca.parent, "gpu-1")
            front.drop(Keys(ca / "server-1").revoked())
        return results

    monkeypatch.setattr(tls.TlsSocket, "handshake", outrun)
    def start(address: str, _: object) -> int:
        inner.bind(address.removeprefix("unix:"))
        inner.listen()
        return 1

    behind: Any = SimpleNamespace(start=start, close=lambda: None)
    front.start(behind)
    dialled = socket.create_connection(("127.0.0.1", front.number), 5.0)
    sock = tls.TlsSocket(dialled, Keys(ca / "gpu-1"), tls.CONTROL, server=False)
    sock.handshake(soon())
    sock.settimeout(5.0)
    assert sock.recv_into(bytearray(1)) == 0
    for each in (sock, inner, front):
        each.close()


def test_certificate_is_checked_again_after_a_reconnect(folders: Folders) -> None:
    """A stolen, revoked key replaces the coordinator while a job runs: gRPC reconnects and has no revocation list."""
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=1)
    address, port = coordinator.address, int(coordinator.address.rsplit(":", 1)[1])
    member = client.join(address, messages.worker_request("job", 0, 1, plan=b"a plan"),
                         quick(token=SECRET, keys=str(folders.worker)),
                         Failures())
    link = channel_of(member)
    request = messages.Heartbeat("unknown")
    assert link.call("Heartbeat", request, messages.HeartbeatReply, 5.0).unknown_token
    # A restarted one, with a key as good as before, is taken.
    coordinator.close()
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.second), port=port), workers=1)
    assert until_answered(link).unknown_token
    coordinator.close()
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.revoked), port=port), workers=1)
    received: list[str] = []
    heartbeat = judge_of(coordinator).opened
    judge_of(coordinator).opened = lambda *args: (received.append(args[1]), heartbeat(*args))[1]  # type: ignore[method-assign]
    for _ in range(3):  # and every thread's call, not only the first one's that finds out
        assert_refused(outcome(lambda: until_answered(link)), "E-CERTIFICATE-REVOKED")
    assert received == [], "and hears nothing"
    member.close()
    coordinator.close()


class Impostor:
    """Another machine at the coordinator's address. It knows the job's secret. `presents`: the certificate in its greeting;
    `signs`: the key of its greeting; `answers`: the key of its replies; `greets`: the node for whose certificate the greeting
    was signed."""

    def __init__(self, presents: Path, signs: Path, answers: Path, greets: Path) -> None:
        keys = Keys(signs)
        keys.der = ssl.PEM_cert_to_DER_cert((presents / CERTIFICATE).read_text())
        self._first, self._answers, self._greets = CallVerifier(SECRET, keys), CallVerifier(SECRET, Keys(answers)), Keys(greets)
        self.received: list[str] = []

    def call(self, method: str, data: bytes, _: float) -> bytes:
        if method == "Challenge":
            return self._first.greeting("here", data, self._greets.own.fingerprint)
        self.received.append(method)
        return self._answers.sealed(data, b"answer")


@pytest.mark.parametrize(("nodes", "code"), [
    ("revoked revoked revoked worker", "E-CERTIFICATE-REVOKED"),
    ("foreign foreign foreign worker", "E-CERTIFICATE-CA"),
    ("dials dials dials worker", "E-CERTIFICATE-USE"),
    ("expired server server worker", "E-CERTIFICATE-DATE"),
    ("server revoked revoked worker", "E-CERTIFICATE-KEY"),
    ("server server server second", "E-CERTIFICATE-KEY"),
    ("server server revoked worker", "E-CERTIFICATE-KEY"),
])
def test_only_unrevoked_nodes_of_the_job_are_accepted_as_coordinator(
        nodes: str, code: str, folders: Folders) -> None:
    """gRPC would accept most of them, because it has no revocation list."""
    impostor = Impostor(*(getattr(folders, name) for name in nodes.split()))
    asker = CallAuthenticator(SECRET, impostor.call, lambda _: False, Keys(folders.worker))
    with pytest.raises(Refused) as caught:
        asker.ask("Join", b"body", WAIT_S)
    assert caught.value.code == code
    assert impostor.received == ["Join"] * (nodes == "server server revoked worker"), "a call before the proof reveals too much"


def test_coordinator_of_the_job_is_accepted(folders: Folders) -> None:
    coordinator = Impostor(folders.server, folders.server, folders.server, folders.worker)
    assert CallAuthenticator(SECRET, coordinator.call, lambda _: False, Keys(folders.worker)).ask("Join", b"", 1.0) == b"answer"


@pytest.mark.parametrize("kind", ["elliptic curve", "RSA", "Ed25519"])
def test_keys_of_every_algorithm_can_sign(kind: str, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tools may have created the keys."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    make: dict[str, Callable[[], Any]] = {
        "elliptic curve": lambda: ec.generate_private_key(ec.SECP256R1()), "RSA": lambda: rsa.generate_private_key(65537, 2048),
        "Ed25519": ed25519.Ed25519PrivateKey.generate}
    private = make[kind]()
    keys = Keys(folders.worker)
    monkeypatch.setattr(keys, "_private_key", private)
    signer = tls.SigningCertificate(keys.own, private.public_key())
    assert signer.has_signed(keys.sign(b"message"), b"message")
    assert not signer.has_signed(keys.sign(b"message"), b"another")


def test_reconnect_needs_one_connection(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow link a second connection just for the certificate would take the time of the heartbeat."""
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=1)
    link = CoordinatorChannel(coordinator.address, SECRET, Keys(folders.worker))
    monkeypatch.setattr(diagnosis, "diagnose", None)
    accepted: list[str] = []
    serve = port_of(coordinator)._forward
    monkeypatch.setattr(port_of(coordinator), "_forward", lambda known: (accepted.append(known.where), serve(known)))
    assert until_answered(link).unknown_token
    for connection in list(known_connections(coordinator).values()):
        shut_down(connection.sock)
    until(lambda: not known_connections(coordinator), "the end of the connection")
    assert until_answered(link).unknown_token
    assert len(accepted) == 2
    link.close()
    coordinator.close()


def test_revoked_coordinator_is_refused_while_connected(ca: Path) -> None:
    coordinator = Coordinator(quick(token=SECRET, keys=str(ca / "server-1")), workers=1)
    member = client.join(coordinator.address, messages.worker_request("job", 0, 1, plan=b"a plan"),
                         quick(token=SECRET, keys=str(ca / "gpu-1")), Failures())
    request = messages.Heartbeat("unknown")
    assert channel_of(member).call("Heartbeat", request, messages.HeartbeatReply, 5.0).unknown_token
    authority.revoke(ca.parent, "server-1")
    line = outcome(lambda: channel_of(member).call("Heartbeat", request, messages.HeartbeatReply, 5.0))
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


def test_node_revoked_after_the_handshake_receives_the_reason(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is about to be closed; until then it must not search for an error in its secret."""
    gone = authority.add(ca.parent, "gpu-9")
    coordinator = Coordinator(quick(token=SECRET, keys=str(ca / "server-1")), workers=1)
    monkeypatch.setattr(port_of(coordinator), "drop", lambda _: None)
    link = CoordinatorChannel(coordinator.address, SECRET, Keys(gone))
    try:
        assert not link.call("Join", messages.worker_request("job", 7, 1), messages.JoinReply, WAIT_S).error.count("revoked")
        authority.revoke(ca.parent, "gpu-9")
        until(lambda: coordinator._revoked != frozenset(), "the coordinator has read the list")
        error = link.call("Join", messages.worker_request("job", 0, 1), messages.JoinReply, WAIT_S).error
        assert error == "the certificate of gpu-9 was revoked [E-CERTIFICATE-REVOKED]"
    finally:
        link.close()
        coordinator.close()


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["while it was away", "after the restart"])
def test_restarted_coordinator_disconnects_revoked_nodes(when: str, folders: Folders, tmp_path: Path) -> None:
    """No worker registers again: the journal has the registrations."""
    gone = authority.add(folders.ca, f"gpu-{'away' if when.startswith('while') else 'behind'}")
    (tmp_path / "two").mkdir()
    first = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=2, journal=CoordinatorJournal(str(tmp_path)))
    lines = [Failures(), Failures()]

    def joined_now(rank: int) -> client.Membership:
        # Longer than this test.
        config = quick(token=SECRET, keys=str((folders.worker, gone)[rank]), reconnect_s=1000.0)
        return client.join(first.address, messages.worker_request("job", rank, 2, plan=b"a plan"), config, lines[rank])

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(joined_now, range(2)))
    first.close()
    # A process holds its journal's folder to its end.
    for path in tmp_path.glob(f"{NAME}*"):
        shutil.copy(path, tmp_path / "two")
    if when == "while it was away":
        authority.revoke(folders.ca, gone.name)
    port = int(first.address.rsplit(":", 1)[1])
    second = Coordinator(quick(token=SECRET, keys=str(folders.server), port=port, reconnect_s=1000.0),
                         journal=CoordinatorJournal(str(tmp_path / "two")))
    authority.revoke(folders.ca, gone.name)
    try:
        assert lines[0].came.wait(WAIT_S), "it sent nothing"
        assert f"worker 1: its certificate ({gone.name}) was revoked" in str(lines[0].errors[0])
    finally:
        for member in both:
            member.close()
        second.close()


def test_refused_peers_leave_no_state(folders: Folders) -> None:
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=1)
    link = CoordinatorChannel(coordinator.address, SECRET, Keys(folders.worker))
    results = [messages.worker_request("job", 7, 1) for _ in range(20)]
    for one in results:
        assert "rank 7 is outside 0..0" in link.call("Join", one, messages.JoinReply, WAIT_S).error
    kept = [name for name, value in vars(coordinator).items() if any(one.token in repr(value) for one in results)]
    assert kept == []
    link.close()
    coordinator.close()


def test_registration_has_the_latest_certificate_of_its_process() -> None:
    """A server is killed and resumes its registration with a new key folder."""
    one = msgspec.structs.replace(messages.worker_request("job", 0, 1, plan=b"a plan"), certificate="gpu-1", serial="a")
    first = membership.join(membership.State(1, 0), one, 0.0)[0]
    then = membership.join(first, msgspec.structs.replace(one, certificate="gpu-1", serial="b"), 1.0)[0]
    assert then.registrations[one.token].join.serial == "b"
    assert membership.has_news(first, then), "and the journal is written"
