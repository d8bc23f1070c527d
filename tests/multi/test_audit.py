"""The audit log: one line of JSON for each event of all writers; floods are counted, and full disks end no job."""

from __future__ import annotations

import contextlib
import json
import logging
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.attached import assert_refused, outcome
from support.coordinators import Failures, quick

from commlayer.cluster import client, messages
from commlayer.cluster import coordinator as coordinator_module
from commlayer.cluster.audit import MOST_REFUSED, Audit
from commlayer.cluster.client import CoordinatorChannel
from commlayer.cluster.coordinator import Coordinator
from commlayer.errors import Refused
from commlayer.transport.handshake import SilentConnection


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
