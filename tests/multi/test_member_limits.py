"""Calls of members with good keys: a member that breaks the protocol is removed; floods and forged lines cost little."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.coordinators import WAIT_S, quick
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)

from commlayer.cluster import messages
from commlayer.cluster.client import CoordinatorChannel
from commlayer.cluster.coordinator import Coordinator
from commlayer.errors import Refused
from commlayer.records import Record
from commlayer.transport.key_folder import Keys

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
