"""The audit log: a line of JSON for each thing that happens, whoever writes; floods are counted, full disks end no job."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from control_kit import Failures, quick

from commlayer.control import client, messages
from commlayer.control.audit import MOST_REFUSED, Audit
from commlayer.control.coordinator import Coordinator
from commlayer.errors import RecordError, Refused
from commlayer.transport.unproved_connections import Probe


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_job_leaves_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    coordinator = Coordinator(quick(token="the-jobs-secret", audit=str(path)), workers=1)
    mine = quick(token="the-jobs-secret")
    with pytest.raises(Refused):
        client.join(coordinator.address, messages.worker("job", 0, 1), quick(token="another-secret"), Failures())
    with pytest.raises(Refused):
        client.join(coordinator.address, messages.worker("job", 5, 1, plan=b"a plan"), mine, Failures())
    client.join(coordinator.address, messages.worker("job", 0, 1, plan=b"a plan"), mine, Failures()).leave()
    coordinator.close()
    told = lines(path)
    kinds = [line["event"] for line in told if "does not prove" not in line.get("why", "")]
    assert kinds == ["refused", "joined", "begun", "left"]
    assert told[0]["event"] == "refused"
    assert "secret" in told[0]["why"]
    assert any("rank 5 is outside" in line.get("why", "") for line in told)
    assert told[-1]["peer"] == "worker 0"
    assert all(line["time"].endswith("+00:00") for line in told)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "the-jobs-secret" not in path.read_text()


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
    monkeypatch.setattr("commlayer.control.audit.time.monotonic", lambda: now)
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
        audit.refused("1.2.3.4:5", Probe("closed before anything was said"))
    audit.refused("1.2.3.4:5", "plain text")
    assert [line["event"] for line in lines(tmp_path / "audit.jsonl")] == [*["probed"] * MOST_REFUSED, "refused"]
    audit.close()


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RecordError, match="audit: .*audit.jsonl cannot be written: No such file or directory; name a file in"):
        Audit(str(tmp_path / "missing" / "audit.jsonl"))
    full = Audit("/dev/full")
    full.note("joined", peer="worker 0")
    assert 'No space left on device; not written: {"time"' in caplog.text
    Audit("").note("joined", peer="worker 0")
