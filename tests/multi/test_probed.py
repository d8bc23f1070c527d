"""A connection that closes without sending anything is logged as a probe; a peer that sends anything wrong is refused."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.coordinators import WAIT_S, quick, until
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)

from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.summation_server import DataServer
from commlayer.config import host_port
from commlayer.doctor import server
from commlayer.errors import Unsaid
from commlayer.transport import tls
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.handshake import Hello, PendingHandshakes, SilentConnection
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE

SECRET = "correct-horse-battery"
NOTHING = "the connection was closed before anything was sent"


class Job:
    """A coordinator and a server with an audit log each, and the settings of who looks at them."""

    def __init__(self, audit: Path, folders: Folders | None) -> None:
        keys = {"keys": str(folders.server)} if folders else {}
        self.audit = audit
        config = quick(token=SECRET, audit=str(audit), **keys)
        self.coordinator = Coordinator(config, workers=1, servers=1)
        self.serving = DataServer("127.0.0.1", 0, config)
        self.mine = quick(token=SECRET, join=self.coordinator.address, **({"keys": str(folders.worker)} if folders else {}))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]

    def close(self) -> None:
        self.serving.close()
        self.coordinator.close()


@pytest.fixture(name="job", params=["keys", "a token"])
def made_job(request: pytest.FixtureRequest, folders: Folders, tmp_path: Path) -> Iterator[Job]:
    with contextlib.closing(Job(tmp_path / "audit", folders if request.param == "keys" else None)) as description:
        yield description


def test_what_the_doctor_tries_is_no_refusal(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(job.mine.keys) if job.mine.keys else None
    with caplog.at_level(logging.INFO, "commlayer"):
        assert [*server.ServerCheck(job.mine).run("")]
        assert server.dial_tls(job.mine.join, keys, tls.CONTROL) == ""
        assert server.dial_tls(job.serving.address, keys, tls.DATA) == ""
        assert server.dial_streams(job.serving.streams, keys) == ""
        until(lambda: len(job.lines()) >= 2, "both ways to the server are noted")
    where = "gpu-1 at 127.0.0.1:" if job.mine.keys else ("127.0.0.1:", "ipv4:127.0.0.1:")
    noted = [line for line in job.lines() if line["event"] != "started"]
    assert {(line["event"], line["why"]) for line in noted} == {("probed", NOTHING)}
    assert all(line["where"].startswith(where) for line in noted)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def ports(job: Job) -> list[str]:
    """That take plain sockets: without keys gRPC's own does, and logs nothing."""
    return [job.serving.address, *([job.mine.join, job.serving.streams] if job.mine.keys else [])]


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("how", [lambda _: None, reset], ids=["in order", "by a reset"])
def test_who_closes_without_a_word_is_noted_as_a_probe(job: Job, how: Callable[[socket.socket], None]) -> None:
    for count, address in enumerate(ports(job)):
        with socket.create_connection(host_port(address), WAIT_S) as sock:
            how(sock)
        until(lambda count=count: len(job.lines()) > count, "it is noted")  # type: ignore[misc]
    assert {(line["event"], line["why"]) for line in job.lines()} == {("probed", NOTHING)}


@pytest.mark.parametrize("messages", [b"\x16", b"C"])
def test_who_closes_behind_a_single_byte_is_refused(job: Job, messages: bytes) -> None:
    for count, address in enumerate(ports(job)):
        with socket.create_connection(host_port(address), WAIT_S) as sock:
            sock.sendall(messages)
        until(lambda count=count: len(job.lines()) > count, "it is noted")  # type: ignore[misc]
    assert {line["event"] for line in job.lines()} == {"refused"}


def test_who_says_nothing_until_the_deadline_is_refused() -> None:
    noted: list[str] = []
    settings = Settings(hello_s=0.05, refused=lambda _, why: noted.append(why))
    with contextlib.closing(StreamTransport(Hello("job", SERVER_BASE), settings=settings)) as server, \
            socket.create_connection(server.listen(), WAIT_S):
        until(lambda: bool(noted), "it is noted")
    assert [(type(why), why.partition(": ")[2]) for why in noted] == [
        (str, "sent no HELLO before the deadline of the handshake [E-DEADLINE]")]


def test_who_is_sent_away_since_it_said_nothing_is_refused() -> None:
    """Its end finds the connection closed as if the other end had done so."""
    hall, (sock, other) = PendingHandshakes(most=1, evict_after_s=0.0), socket.socketpair()
    with sock, other:
        hall.add(sock)
        assert isinstance(hall.drop_reason(sock, Unsaid()), SilentConnection)
        assert hall.acquire()
        assert type(hall.drop_reason(sock, Unsaid())) is str


def test_who_says_nothing_until_this_end_closes_is_no_probe() -> None:
    hall, (sock, other) = PendingHandshakes(), socket.socketpair()
    with sock, other:
        hall.add(sock)
        hall.close()
        assert type(hall.drop_reason(sock, Unsaid())) is str
