"""The refusal log, and members that flood, violate the protocol or only probe: each is named, and the others continue."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.attached import outcome
from support.coordinators import WAIT_S, quick, until
from support.internals import asker_of, known_connections, send_unchecked
from support.keys import (
    Folders,
)

from commlayer.cluster.calls import messages
from commlayer.cluster.calls.call_proofs import ServerChallenge
from commlayer.cluster.calls.coordinator_channel import CoordinatorChannel
from commlayer.cluster.membership import coordinator as coordinator_module
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.servers.data_server import DataServer
from commlayer.config import host_port
from commlayer.doctor import server
from commlayer.errors import Refused, SentNothing
from commlayer.records import Record
from commlayer.transport.connection import shut_down
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.handshake import MAX_REFUSED, Hello, PendingHandshakes, RefusalLog, SilentConnection
from commlayer.transport.keys import tls
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE


@pytest.mark.parametrize("knows", [True, False])
def test_reconnecting_member_is_not_logged_as_a_stranger(
    knows: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    """Several channels of a process share a connection, and each proves its next call by the challenge of the previous one."""
    monkeypatch.setattr(coordinator_module, "PROVE_S", 0.3)
    coordinator = Coordinator(quick(token="the-jobs-secret"), workers=1)
    channels = [CoordinatorChannel(coordinator.address, "the-jobs-secret" if knows else "another-secret") for _ in range(3)]
    with caplog.at_level(logging.INFO, "commlayer"):
        for channel in channels:
            asker_of(channel)._known = ServerChallenge(bytes(16), None)  # of a connection that is gone
            with contextlib.suppress(Refused):
                channel.call("Heartbeat", messages.Heartbeat("unknown"), messages.HeartbeatReply, 10.0)
        time.sleep(0.6)
    assert [r.levelno for r in caplog.records if "does not prove" in r.getMessage()] == [logging.WARNING] * (not knows)
    for channel in channels:
        channel.close()
    coordinator.close()


def test_refusal_floods_are_counted_and_probes_hide_no_refusal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    now = 6000.0
    monkeypatch.setattr("commlayer.transport.handshake.time.monotonic", lambda: now)
    log = RefusalLog()
    with caplog.at_level(logging.INFO, "commlayer"):
        for why in [SilentConnection(NOTHING)] * (MAX_REFUSED + 7) + ["plain text"] * (MAX_REFUSED + 50):
            log.refused("1.2.3.4:5", why)
        assert len(caplog.records) == 2 * MAX_REFUSED
        now += 61
        caplog.clear()
        log.denied("rank 5")
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.WARNING, "50 more were refused within a minute"), (logging.WARNING, "refused: rank 5")]


SECRET = "correct-horse-battery"


@pytest.fixture
def keyed(folders: Folders) -> Iterator[Coordinator]:
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=2)
    yield coordinator
    coordinator.close()


def channel(to: Coordinator, folder: Path | None = None) -> CoordinatorChannel:
    return CoordinatorChannel(to.address, SECRET, Keys(folder) if folder else None, own=True)


@pytest.mark.parametrize(("method", "request_", "line"), [
    ("Heartbeat", messages.HeartbeatReply(), ".*Heartbeat.*`unknown_token`"),
    ("PlanPart", messages.PlanPart("digest", 10, 5, b"beyond its end"), r".*\b5 to 19\b.*\b10\b"),
])
def test_protocol_violator_is_named_by_its_certificate_and_disconnected(
    keyed: Coordinator, folders: Folders, method: str, request_: Record, line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = channel(keyed, folders.worker), channel(keyed, folders.second)
    for one in (bad, good):
        assert one.call("Heartbeat", messages.Heartbeat("unknown"), messages.HeartbeatReply, WAIT_S).unknown_token
    (connection,) = (one for one in known_connections(keyed).values() if one.where.startswith("gpu-1 at "))
    with caplog.at_level(logging.WARNING, "commlayer"), pytest.raises(Refused, match=f"gpu-1 at .*: {line}.*E-FRAME"):
        bad.call(method, request_, messages.HeartbeatReply, WAIT_S)
    (lines,) = [r.getMessage() for r in caplog.records]
    results = re.match(f"connection from (gpu-1 at 127.0.0.1:\\d+) refused: {line}", lines)
    assert results, lines
    assert results.group(1) == connection.where, "its own end's address, not the front's"
    with pytest.raises(Exception, match="does not prove"):  # nothing that comes by that connection is read any more
        send_unchecked(bad, "Heartbeat", b"", WAIT_S)
    until(lambda: connection.sock.fileno() < 0, "its connection is closed")
    assert good.call("Heartbeat", messages.Heartbeat("unknown"), messages.HeartbeatReply, WAIT_S).unknown_token
    for each in (bad, good):
        each.close()


@pytest.mark.parametrize("request_", [messages.worker_request("job", 5, 1), messages.site_request(2)], ids=["worker", "site"])
def test_refused_requests_do_not_fill_the_log(
    request_: messages.Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("commlayer.transport.handshake.MAX_REFUSED", 5)
    coordinator = Coordinator(quick(token=SECRET), workers=1)
    mine = channel(coordinator)
    with caplog.at_level(logging.WARNING, "commlayer"):
        for _ in range(20):
            assert mine.call("Join", request_, messages.JoinReply, WAIT_S).error
    lines = sum("refused" in r.getMessage() for r in caplog.records)
    assert lines == 5, "of 20"
    mine.close()
    coordinator.close()


def test_peers_cannot_forge_log_lines_or_reasons(caplog: pytest.LogCaptureFixture) -> None:
    forged = "a\nLOG worker 0: FORGED" + "x" * 100_000
    coordinator = Coordinator(quick(token=SECRET), workers=2)
    mine = channel(coordinator)
    requests = [messages.worker_request("job", rank, 2, plan=b"a plan") for rank in range(2)]
    with caplog.at_level(logging.INFO, "commlayer"):
        answers = [
            mine.call("Join", msgspec.structs.replace(messages.worker_request("job", 9, 2), name=forged), messages.JoinReply,
                      WAIT_S).error,
            mine.call("Join", msgspec.structs.replace(requests[0], version=forged, rank=9), messages.JoinReply, WAIT_S).error,
            mine.call("Join", messages.site_request(9, name=forged), messages.JoinReply, WAIT_S).error,
        ]
        mine.send_plan(b"a plan", WAIT_S)
        for request in requests:
            plain = msgspec.structs.replace(request, plan=b"", name=forged if request.rank else "b")
            mine.call("Join", plain, messages.JoinReply, WAIT_S)
        mine.call("Leave", messages.Leave(requests[1].token, f"PeerLost: {forged}"), messages.HeartbeatReply, WAIT_S)
        pulse = mine.call("Heartbeat", messages.Heartbeat(requests[0].token), messages.HeartbeatReply, WAIT_S)
    (left,) = pulse.departed
    assert left.reason.startswith("PeerLost: a\\nLOG worker 0: FORGED")
    lines = [*answers, left.reason, *(r.getMessage() for r in caplog.records)]
    for line in lines:
        assert "\n" not in line
        assert len(line) < 2000
    assert len(messages.pack(pulse)) < 2000
    assert sum("FORGED" in line for line in lines) >= 4, "it is said who they say they are"
    mine.close()
    coordinator.close()


def test_reconnected_member_is_not_logged_as_refused(
        folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=1)
    link = CoordinatorChannel(coordinator.address, SECRET, Keys(folders.worker))
    request = messages.Heartbeat("unknown")
    assert link.call("Heartbeat", request, messages.HeartbeatReply, WAIT_S).unknown_token
    for connection in list(known_connections(coordinator).values()):
        shut_down(connection.sock)
    until(lambda: not outcome(lambda: link.call("Heartbeat", request, messages.HeartbeatReply, WAIT_S)), "it is answered again")
    assert "refused" not in caplog.text
    # A connection that continues without a proof is logged once.
    forged = bytes(40)
    for _ in range(2):
        with pytest.raises(Exception, match="does not prove"):
            send_unchecked(link, "Heartbeat", forged, WAIT_S)
    link.close()
    coordinator.close()
    assert [r.getMessage().split()[2] for r in caplog.records if "refused" in r.getMessage()] == ["gpu-1"]


NOTHING = "the connection was closed before any message was sent"


class Job:
    """A coordinator and a server, the settings of a client, and their log."""

    def __init__(self, caplog: pytest.LogCaptureFixture, folders: Folders | None) -> None:
        keys = {"keys": str(folders.server)} if folders else {}
        self._caplog = caplog
        config = quick(token=SECRET, **keys)
        self.coordinator = Coordinator(config, workers=1, servers=1)
        self.serving = DataServer("127.0.0.1", 0, config)
        self.mine = quick(token=SECRET, join=self.coordinator.address, **({"keys": str(folders.worker)} if folders else {}))

    def lines(self) -> list[dict[str, str]]:
        found = (re.fullmatch(r"connection from (?P<where>.*) (?P<event>probed|refused|lost): (?P<why>.*)", r.getMessage())
                 for r in self._caplog.records)
        return [line.groupdict() for line in found if line]

    def close(self) -> None:
        self.serving.close()
        self.coordinator.close()


@pytest.fixture(name="job", params=["keys", "a token"])
def made_job(request: pytest.FixtureRequest, folders: Folders, caplog: pytest.LogCaptureFixture) -> Iterator[Job]:
    with caplog.at_level(logging.INFO, "commlayer"), \
            contextlib.closing(Job(caplog, folders if request.param == "keys" else None)) as description:
        yield description


def test_doctor_connections_are_not_refusals(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(job.mine.keys) if job.mine.keys else None
    with caplog.at_level(logging.INFO, "commlayer"):
        assert [*server.ServerCheck(job.mine).run("")]
        assert server.dial_tls(job.mine.join, keys, tls.CONTROL) == ""
        assert server.dial_tls(job.serving.address, keys, tls.DATA) == ""
        assert server.dial_streams(job.serving.streams, keys) == ""
        until(lambda: len(job.lines()) >= 2, "both ports of the server are logged")
    where = "gpu-1 at 127.0.0.1:" if job.mine.keys else ("127.0.0.1:", "ipv4:127.0.0.1:")
    noted = job.lines()
    assert {(line["event"], line["why"]) for line in noted} == {("probed", NOTHING)}
    assert all(line["where"].startswith(where) for line in noted)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def ports(job: Job) -> list[str]:
    """That take plain sockets: without keys gRPC's own does, and logs nothing."""
    return [job.serving.address, *([job.mine.join, job.serving.streams] if job.mine.keys else [])]


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("how", [lambda _: None, reset], ids=["in order", "by a reset"])
def test_silent_close_is_logged_as_a_probe(job: Job, how: Callable[[socket.socket], None]) -> None:
    for count, address in enumerate(ports(job)):
        with socket.create_connection(host_port(address), WAIT_S) as sock:
            how(sock)
        until(lambda count=count: len(job.lines()) > count, "it is noted")  # type: ignore[misc]
    assert {(line["event"], line["why"]) for line in job.lines()} == {("probed", NOTHING)}


@pytest.mark.parametrize("messages", [b"\x16", b"C"])
def test_close_after_one_byte_is_logged_as_refused(job: Job, messages: bytes) -> None:
    for count, address in enumerate(ports(job)):
        with socket.create_connection(host_port(address), WAIT_S) as sock:
            sock.sendall(messages)
        until(lambda count=count: len(job.lines()) > count, "it is noted")  # type: ignore[misc]
    assert {line["event"] for line in job.lines()} == {"refused"}


@pytest.mark.parametrize("job", ["keys"], indirect=True)
def test_lost_handshakes_of_members_are_one_line_that_does_not_blame_keys(job: Job, folders: Folders) -> None:
    """A network that fails loses the handshakes of all members repeatedly."""
    address = host_port(job.mine.join)
    for _ in range(5):
        with socket.create_connection(address, WAIT_S) as sock, \
                tls.TlsSocket(sock, Keys(folders.worker), tls.CONTROL, server=False) as dialer:
            with contextlib.suppress(ssl.SSLWantReadError):
                dialer._tls.do_handshake()
            dialer._flush(time.monotonic() + WAIT_S)
            assert dialer.recv(1), "the server's part of the handshake"
    with socket.create_connection(address, WAIT_S) as sock:
        sock.sendall(b"C")
    until(lambda: len(job.lines()) > 1, "the stranger is noted after the members")
    assert [line["event"] for line in job.lines()] == ["lost", "refused"]
    assert "KEYS" not in job.lines()[0]["why"]


def test_silence_until_the_deadline_is_logged_as_refused() -> None:
    noted: list[str] = []
    settings = Settings(hello_s=0.05, refused=lambda _, why: noted.append(why))
    with contextlib.closing(StreamTransport(Hello("job", SERVER_BASE), settings=settings)) as server, \
            socket.create_connection(server.listen(), WAIT_S):
        until(lambda: bool(noted), "it is noted")
    assert [(type(why), why.partition(": ")[2]) for why in noted] == [
        (str, "sent no HELLO before the deadline of the handshake [E-DEADLINE]")]


def test_eviction_for_silence_is_logged_as_refused() -> None:
    """The connection then looks as if the other end had closed it."""
    pending, (sock, other) = PendingHandshakes(most=1), socket.socketpair()
    with sock, other:
        assert pending.add(sock, "one")
        assert isinstance(pending.drop_reason(sock, SentNothing()), SilentConnection)
        assert pending.add(other, "another")
        assert type(pending.drop_reason(sock, SentNothing())) is str


def test_silence_until_shutdown_is_not_logged_as_a_probe() -> None:
    pending, (sock, other) = PendingHandshakes(), socket.socketpair()
    with sock, other:
        assert pending.add(sock, "one")
        pending.close()
        assert type(pending.drop_reason(sock, SentNothing())) is str
        assert not pending.add(other, "one")
