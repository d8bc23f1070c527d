"""The audit log, and members that flood, break the protocol or only look: each is named, the others continue."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.attached import assert_refused, outcome
from support.coordinators import WAIT_S, Failures, quick, until
from support.keys import (
    Folders,
    made_folders,  # noqa: F401  (a fixture)
)
from support.summation import VALUES, Doubles, push, service

from commlayer.cluster import client, messages
from commlayer.cluster import coordinator as coordinator_module
from commlayer.cluster.audit import MOST_REFUSED, Audit
from commlayer.cluster.client import CoordinatorChannel
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.summation import OVERHEAD_NBYTES, REPEAT_EVERY_S, REPEATS
from commlayer.cluster.summation_server import DataServer
from commlayer.config import host_port
from commlayer.doctor import server
from commlayer.errors import CommError, CorruptFrame, Refused, Unsaid
from commlayer.records import Record
from commlayer.transport import tls
from commlayer.transport.endpoint import Settings, StreamTransport, shut_down
from commlayer.transport.handshake import Hello, PendingHandshakes, SilentConnection
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, Flag


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_job_leaves_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "PROVE_S", 0.0)  # all channels of this process share a connection
    path = tmp_path / "audit.jsonl"
    coordinator = Coordinator(quick(token="the-jobs-secret", audit=str(path)), workers=1)
    mine = quick(token="the-jobs-secret")
    with pytest.raises(Refused):
        client.join(coordinator.address, messages.worker_request("job", 0, 1), quick(token="another-secret"), Failures())
    with pytest.raises(Refused):
        client.join(coordinator.address, messages.worker_request("job", 5, 1, plan=b"a plan"), mine, Failures())
    client.join(coordinator.address, messages.worker_request("job", 0, 1, plan=b"a plan"), mine, Failures()).leave()
    coordinator.close()
    report = lines(path)
    kinds = [line["event"] for line in report if "does not prove" not in line.get("why", "")]
    assert kinds == ["refused", "joined", "begun", "left"]
    assert {line["event"] for line in report if "does not prove that" in line.get("why", "")} == {"refused"}
    assert any("rank 5 is outside" in line.get("why", "") for line in report)
    assert [line["peer"] for line in report if line["event"] == "left"] == ["worker 0"]
    assert all(line["time"].endswith("+00:00") for line in report)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "the-jobs-secret" not in path.read_text()


@pytest.mark.parametrize("knows", [True, False])
def test_a_member_that_reconnects_is_not_logged_as_one_without_the_secret(
    knows: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    """Several channels of a process share a connection, and each proves its next call by the challenge of the one before."""
    monkeypatch.setattr(coordinator_module, "PROVE_S", 0.3)
    coordinator = Coordinator(quick(token="the-jobs-secret"), workers=1)
    channels = [CoordinatorChannel(coordinator.address, "the-jobs-secret" if knows else "another-secret") for _ in range(3)]
    with caplog.at_level(logging.INFO, "commlayer"):
        for channel in channels:
            channel._asker._challenge = bytes(16)  # of a connection that is gone
            with contextlib.suppress(Refused):
                channel.call("Heartbeat", messages.Heartbeat("unknown"), messages.HeartbeatReply, 10.0)
        time.sleep(0.6)
    assert [r.levelno for r in caplog.records if "does not prove" in r.getMessage()] == [logging.WARNING] * (not knows)
    for each in (*channels, coordinator):
        each.close()


def test_what_is_there_stays_and_many_may_write(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"event": "earlier"}\n')
    writers = [Audit(str(path)) for _ in range(4)]
    threads = [threading.Thread(target=lambda w=w: [w.note("joined", peer="x" * 300) for _ in range(50)]) for w in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close()
        writer.note("joined", peer="too late")
    assert [line["event"] for line in lines(path)] == ["earlier"] + ["joined"] * 200


def test_a_flood_of_refusals_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "audit.jsonl", 6000.0
    monkeypatch.setattr("commlayer.cluster.audit.time.monotonic", lambda: now)
    audit = Audit(str(path))
    for _ in range(MOST_REFUSED + 50):
        audit.refused("1.2.3.4:5", "plain text")
    assert len(lines(path)) == MOST_REFUSED
    now += 61
    audit.refused("1.2.3.4:5", "plain text")
    assert [line["why"] for line in lines(path)[MOST_REFUSED:]] == ["50 more within a minute", "plain text"]
    audit.close()


def test_a_flood_of_probes_hides_no_refusal(tmp_path: Path) -> None:
    audit = Audit(str(tmp_path / "audit.jsonl"))
    for _ in range(MOST_REFUSED + 50):
        audit.refused("1.2.3.4:5", SilentConnection("closed before anything was sent"))
    audit.refused("1.2.3.4:5", "plain text")
    assert [line["event"] for line in lines(tmp_path / "audit.jsonl")] == [*["probed"] * MOST_REFUSED, "refused"]
    audit.close()


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = outcome(lambda: Audit(str(tmp_path / "missing" / "audit.jsonl")))
    assert_refused(line, "E-SETTING", "audit: ", "audit.jsonl", ": No such file or directory")
    full = Audit("/dev/full")
    full.note("joined", peer="worker 0")
    assert 'No space left on device; this event was not written: {"time"' in caplog.text
    Audit("").note("joined", peer="worker 0")


# ---- members that break the protocol, flood and forge

SECRET = "correct-horse-battery"
Connect = Callable[[Path], CoordinatorChannel]


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit"


@pytest.fixture
def keyed(folders: Folders, audit: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(quick(token=SECRET, audit=str(audit), keys=str(folders.server)), workers=2)
    yield coordinator
    coordinator.close()


def noted(path: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == event]


def channel(to: Coordinator, folder: Path | None = None) -> CoordinatorChannel:
    return CoordinatorChannel(to.address, SECRET, Keys(folder) if folder else None, own=True)


# ---- what breaks the protocol


@pytest.mark.parametrize(("method", "request_", "line"), [
    ("Heartbeat", messages.HeartbeatReply(), ".*Heartbeat.*`unknown_token`"),
    ("PlanPart", messages.PlanPart("digest", 10, 5, b"beyond its end"), r".*\b5 to 19\b.*\b10\b"),
])
def test_who_breaks_the_protocol_is_named_by_its_certificate_and_let_go(
    keyed: Coordinator, folders: Folders, audit: Path, method: str, request_: Record, line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = channel(keyed, folders.worker), channel(keyed, folders.second)
    assert good.call("Heartbeat", messages.Heartbeat("unknown"), messages.HeartbeatReply, WAIT_S).unknown_token
    front = keyed._port
    with caplog.at_level(logging.WARNING, "commlayer"), pytest.raises(Refused, match=f"gpu-1 at .*: {line}.*E-FRAME"):
        bad.call(method, request_, messages.HeartbeatReply, WAIT_S)
    (lines,) = [r.getMessage() for r in caplog.records]
    results = re.match(f"connection from (gpu-1 at (127.0.0.1:\\d+)) refused: {line}", lines)
    assert results, lines
    where, address = results.groups()
    assert where in {one.where for one in front._known.values()}
    assert f"ipv4:{address}" not in front._known, "its own end's address, not the front's"
    (entry,) = noted(audit, "refused")
    assert entry["where"] == where
    assert re.match(line, entry["why"])
    with pytest.raises(Exception, match="does not prove"):  # nothing that comes by that connection is read any more
        bad._send("Heartbeat", b"", WAIT_S)
    until = time.monotonic() + WAIT_S
    while where in {one.where for one in front._known.copy().values()}:
        assert time.monotonic() < until, "its connection is still there"
        time.sleep(0.02)
    assert good.call("Heartbeat", messages.Heartbeat("unknown"), messages.HeartbeatReply, WAIT_S).unknown_token
    for each in (bad, good):
        each.close()


# ---- what cannot be met, again and again


@pytest.mark.parametrize("request_", [messages.worker_request("job", 5, 1), messages.site_request(2)], ids=["worker", "site"])
def test_a_flood_of_requests_that_are_refused_fills_neither_log(
    request_: messages.Join, audit: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("commlayer.cluster.audit.MOST_REFUSED", 5)
    coordinator = Coordinator(quick(token=SECRET, audit=str(audit)), workers=1)
    mine = channel(coordinator)
    with caplog.at_level(logging.WARNING, "commlayer"):
        for _ in range(20):
            assert mine.call("Join", request_, messages.JoinReply, WAIT_S).error
    assert len(noted(audit, "refused")) in range(5, 12), "20 of them; 10, and a line more, if a minute ends meanwhile"
    assert sum("refused" in r.getMessage() for r in caplog.records) in range(5, 12)
    mine.close()
    coordinator.close()


# ---- what they write of themselves


def test_nobody_writes_lines_of_the_log_or_of_what_others_hear(audit: Path, caplog: pytest.LogCaptureFixture) -> None:
    forged = "a\nLOG worker 0: FORGED" + "x" * 100_000
    coordinator = Coordinator(quick(token=SECRET, audit=str(audit)), workers=2)
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
    assert len(audit.read_text()) < 10_000
    mine.close()
    coordinator.close()


# ---- bytes of a step

def test_a_member_may_say_its_part_again_but_not_for_ever() -> None:
    core, ops = service()
    for step in range(3):
        for _ in range(REPEATS):
            core.push(push(1, VALUES[1], step), 0.0)
        for member in (0, 1, 2):
            core.push(push(member, VALUES[member], step), 0.0)
    for _ in range(REPEATS + 1):
        core.push(push(1, VALUES[1], 3), 0.0)
    with pytest.raises(CorruptFrame, match=rf"worker 1: .* {(REPEATS + 1) * (8 + OVERHEAD_NBYTES)} .*step 3\b.*E-FRAME"):
        core.push(push(1, VALUES[1], 3), 0.0)
    ops.added.clear()
    for member in (0, 2):
        core.push(push(member, VALUES[member], 3), 0.0)
    assert ops.added == VALUES, "what it had said counts, and the others go on"


def test_a_step_that_waits_long_lets_members_repeat_themselves_for_as_long() -> None:
    core, ops = service()
    beats = 4 * REPEATS  # a connection that breaks every second, while member 2 is waited for
    for second in range(beats):
        core.push(push(1, VALUES[1]), 100.0 + second * REPEAT_EVERY_S)
    for _ in range(REPEATS):
        core.push(push(1, VALUES[1]), 100.0 + (beats - 1) * REPEAT_EVERY_S)
    with pytest.raises(CorruptFrame, match=f" {(REPEATS + beats) * (8 + OVERHEAD_NBYTES) * ops.rounds} .*E-FRAME"):
        core.push(push(1, VALUES[1]), 100.0 + (beats - 1) * REPEAT_EVERY_S)


def test_results_that_are_asked_for_again_and_again_are_an_offence_too() -> None:
    core, _ = service(1)
    core.push(push(0, 1.0), 0.0)
    for _ in range(REPEATS + 1):
        assert core.push(push(0, 1.0), 0.0)
    with pytest.raises(CorruptFrame, match=f" {(REPEATS + 1) * (8 + OVERHEAD_NBYTES)} .*E-FRAME"):
        core.push(push(0, 1.0), 0.0)


def test_who_codes_again_since_another_one_changed_its_weight_uses_up_no_quota() -> None:
    ops = Doubles()
    ops.in_means = True
    core, _ = service(ops=ops)
    report = 99.0
    for again in range(2 * REPEATS):
        weights = [1.0, 2.0, 3.0 + again % 2]  # the last one's is another one each time
        flags = Flag.AGAIN if again else Flag.NONE
        for sender, value in enumerate(VALUES):
            replies = core.push(push(sender, value, total=report, weight=weights[sender], flags=flags), 0.0)
        assert {reply.header.flags & Flag.AGAIN for reply in replies} == {Flag.AGAIN}
        report = sum(weights)


def audited(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit").read_text().splitlines()]


# ---- what is no offence


def test_a_member_whose_connection_was_made_anew_is_not_noted_as_refused(folders: Folders, tmp_path: Path) -> None:
    coordinator = Coordinator(quick(token=SECRET, audit=str(tmp_path / "audit"), keys=str(folders.server)), workers=1)
    link = CoordinatorChannel(coordinator.address, SECRET, Keys(folders.worker))
    request = messages.Heartbeat("unknown")
    assert link.call("Heartbeat", request, messages.HeartbeatReply, WAIT_S).unknown_token
    for connection in list(coordinator._port._known.values()):
        shut_down(connection.sock)
    until = time.monotonic() + WAIT_S
    while True:
        try:
            assert link.call("Heartbeat", request, messages.HeartbeatReply, WAIT_S).unknown_token
            break
        except CommError:
            assert time.monotonic() < until
    assert [line for line in audited(tmp_path) if line["event"] == "refused"] == []
    # A connection that goes on without proof is noted once.
    forged = bytes(40)
    for _ in range(2):
        with pytest.raises(Exception, match="does not prove"):
            link._send("Heartbeat", forged, WAIT_S)
    link.close()
    coordinator.close()
    assert [line["where"].split()[0] for line in audited(tmp_path) if line["event"] == "refused"] == ["gpu-1"]


# ---- connections that close without a word

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
