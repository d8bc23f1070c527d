"""Members that send, connect or ask too much are named and told, and the others go on; what is no offence is not noted."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.coordinators import WAIT_S, Failures, quick
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)
from support.meshes import exchange_pair, soon
from support.summation import VALUES, Doubles, push, service

from commlayer.cluster import client, coordinator, messages, tls_terminator
from commlayer.cluster.client import CoordinatorChannel
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.grpc_server import MOST_KNOWN, CallQuota
from commlayer.cluster.summation import OVERHEAD_NBYTES, REPEAT_EVERY_S, REPEATS
from commlayer.cluster.tls_terminator import goaway, reason_of
from commlayer.errors import CommError, CorruptFrame, Refused
from commlayer.transport import endpoint
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, Flag

SECRET = "correct-horse-battery"


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


# ---- connections of a certificate


def test_who_codes_again_since_another_one_changed_its_weight_uses_up_no_quota() -> None:
    ops = Doubles()
    ops.in_means = True
    core, _ = service(ops=ops)
    told = 99.0
    for again in range(2 * REPEATS):
        weights = [1.0, 2.0, 3.0 + again % 2]  # the last one's is another one each time
        flags = Flag.AGAIN if again else Flag.NONE
        for sender, value in enumerate(VALUES):
            replies = core.push(push(sender, value, total=told, weight=weights[sender], flags=flags), 0.0)
        assert {reply.header.flags & Flag.AGAIN for reply in replies} == {Flag.AGAIN}
        told = sum(weights)


def test_data_connections_of_one_certificate_are_capped_and_told(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS_EACH", 2)
    server = StreamTransport(Hello("job", SERVER_BASE), settings=Settings(secret=SECRET, keys=Keys(folders.server)))
    address = server.listen()
    mine, other = ([StreamTransport(Hello("job", rank), settings=Settings(secret=SECRET, keys=Keys(folder))) for rank in ranks]
                   for folder, ranks in ((folders.worker, (1, 2, 3)), (folders.second, (4,))))
    for worker in (*mine[:2], *other):
        worker.dial(SERVER_BASE, address, soon())
    with pytest.raises(Refused, match=r"\(gpu-1\) .*\b2 data.*E-CONNECTIONS"):
        mine[2].dial(SERVER_BASE, address, soon())
    assert exchange_pair(other[0], server)
    mine[0].close()
    until = time.monotonic() + WAIT_S
    while 1 in server.peers and time.monotonic() < until:
        time.sleep(0.01)
    mine[2].dial(SERVER_BASE, address, soon())
    for each in (*mine, *other, server):
        each.close()


def test_control_connections_of_one_certificate_are_capped_and_told(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_terminator, "MOST_EACH", 0)
    monkeypatch.setattr(coordinator, "EACH_WORKER", 0)
    made = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=1)
    begin = time.monotonic()
    with pytest.raises(Refused, match=r"coordinator 127.*\(gpu-1\) .*\b0 control.*E-CONNECTIONS"):
        client.join(made.address, messages.worker_request("job", 0, 1), quick(token=SECRET, keys=str(folders.worker)),
                    Failures())
    assert time.monotonic() - begin < WAIT_S / 2, "not at the deadline"
    made.close()


@pytest.mark.parametrize("said_by", ["serve", "the first worker"])
def test_a_job_whose_workers_have_one_certificate_has_room_for_all_their_connections(
    said_by: str, folders: Folders, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tls_terminator, "MOST_EACH", 4)
    made = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=4 if said_by == "serve" else 0)
    links = [CoordinatorChannel(made.address, SECRET, Keys(folders.worker), own=True) for _ in range(3 * 4)]
    if said_by != "serve":
        links[0].call("Join", messages.worker_request("job", 0, 4), messages.JoinReply, WAIT_S)
    for link in links:
        assert link.call("Heartbeat", messages.Heartbeat("nobody"), messages.HeartbeatReply, WAIT_S).unknown_token
    for each in (*links, made):
        each.close()


def test_farewells_are_read_and_nothing_else_is() -> None:
    said = goaway("its certificate has enough")
    assert reason_of(said) == "its certificate has enough"
    assert [reason_of(said[:n]) for n in range(len(said))] == [""] * len(said)
    assert reason_of(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18) + b"\x00\x00\x04\x08" + bytes(9)) == ""
    assert reason_of(b"\xff" * 64) == ""


# ---- calls a second


def test_calls_are_counted_by_who_makes_them() -> None:
    quota = CallQuota(rate=10.0, burst=5.0)
    assert [quota.excess_calls("a", 0.0) for _ in range(7)] == [0] * 5 + [1, 2]
    assert quota.excess_calls("b", 0.0) == 0
    assert [quota.excess_calls("a", 0.2) for _ in range(3)] == [0, 0, 1]
    assert [quota.excess_calls("a", 100.0) for _ in range(6)] == [0] * 5 + [1]
    for number in range(2 * MOST_KNOWN):
        quota.excess_calls(f"stranger {number}", 101.0)
    assert len(quota._left) == MOST_KNOWN


def test_a_large_job_may_have_one_certificate_and_makes_more_calls() -> None:
    quota = CallQuota(rate=1000.0, burst=8000.0)
    quota.expect(8)
    assert [quota.excess_calls("a", 0.0) for _ in range(8001)][-1] == 1, "no fewer, and no more, than a small one's"
    quota.expect(512)
    assert [quota.excess_calls("b", 0.0) for _ in range(512 * 128 + 1)][-2:] == [0, 1]
    assert [quota.excess_calls("b", 1.0) for _ in range(512 * 16 + 1)][-2:] == [0, 1]


@pytest.mark.parametrize("keyed", [True, False])
def test_who_asks_too_much_is_named_once_and_others_go_on(keyed: bool, folders: Folders, tmp_path: Path) -> None:
    def keys(folder: Path) -> dict[str, str]:
        return {"keys": str(folder)} if keyed else {}

    made = Coordinator(quick(token=SECRET, audit=str(tmp_path / "audit"), **keys(folders.server)), workers=2)
    made._quota = CallQuota(rate=20.0, burst=40.0)
    mine, other = (CoordinatorChannel(made.address, SECRET, Keys(folder) if keyed else None)
                   for folder in (folders.worker, folders.second))
    asked = next(number for number in range(1000) if not answered(mine))
    assert asked >= 30
    if keyed:  # without, both are on one connection, and so one asker
        assert all(answered(other) for _ in range(10))
    noted = [line for line in audited(tmp_path) if "calls a second" in line.get("why", "")]
    assert len(noted) == 1
    assert noted[0]["where"].startswith("gpu-1" if keyed else "ipv4:127.0.0.1:")
    for each in (mine, other, made):
        each.close()


def answered(link: CoordinatorChannel) -> bool:
    try:
        return link.call("Heartbeat", messages.Heartbeat("nobody"), messages.HeartbeatReply, WAIT_S).unknown_token
    except CommError:
        return False


def audited(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit").read_text().splitlines()]


# ---- what is no offence


def test_a_member_whose_connection_was_made_anew_is_not_noted_as_refused(folders: Folders, tmp_path: Path) -> None:
    made = Coordinator(quick(token=SECRET, audit=str(tmp_path / "audit"), keys=str(folders.server)), workers=1)
    link = CoordinatorChannel(made.address, SECRET, Keys(folders.worker))
    request = messages.Heartbeat("nobody")
    assert link.call("Heartbeat", request, messages.HeartbeatReply, WAIT_S).unknown_token
    front = made._port._terminator
    assert front is not None
    for name in list(front._known):
        front.end(name)
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
    made.close()
    assert [line["where"].split()[0] for line in audited(tmp_path) if line["event"] == "refused"] == ["gpu-1"]


def test_a_clock_that_is_hours_off_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    later = SimpleNamespace(time=lambda: time.time() - 3 * 3600, monotonic=time.monotonic)
    with caplog.at_level(logging.WARNING, "commlayer"):
        made = Coordinator(quick(), workers=1)
        client.join(made.address, messages.worker_request("job", 0, 1, plan=b"a plan"), quick(), Failures()).leave()
        made.close()
        assert [r for r in caplog.records if "clock" in r.getMessage()] == []
        monkeypatch.setattr(coordinator, "time", later)
        made = Coordinator(quick(), workers=1)
        client.join(made.address, messages.worker_request("job", 0, 1, plan=b"a plan"), quick(), Failures()).leave()
        made.close()
    (line,) = [r.getMessage() for r in caplog.records if "clock" in r.getMessage()]
    assert "this machine's clock is 3.0 hours fast compared with coordinator 127.0.0.1:" in line
