"""Real chaos runs: the command, campaigns in pieces, jobs whose members go, and runs over TLS."""

from __future__ import annotations

import json
import math
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.__main__ import main
from commlayer.errors import CommError
from tests.chaos import cluster, strikes
from tests.chaos.campaign import Campaign, Row, summary
from tests.chaos.cluster import Cluster, Evidence, all_free
from tests.chaos.dealing import KEYED, dealt, trial
from tests.chaos.faults import FAULTS
from tests.chaos.kept import Kept
from tests.chaos.reports import Ended, Finding
from tests.chaos.strikes import STRIKES
from tests.chaos.trials import STEPS, Setting, Trial
from tests.chaos.verdict import Verdict


def test_campaign_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommError, match="FileNotFoundError: .*'/none'.*E-COMM"), Campaign(inside="/none"):
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not all_free(["127.0.0.1"], [port])
        monkeypatch.setattr(cluster, "PORTS", range(port, port + 1))
        with pytest.raises(CommError, match=r"\b3 ports\b.*127\.0\.0\.1\b.*\b50\b.*E-ADDRESS"):
            Cluster(Trial(0, "none", SETTING), ("127.0.0.1", 1)).__enter__()
    with pytest.raises(CommError, match=r"192\.0\.2\.1:\d+: .*\(errno \d+\).*E-ADDRESS"):
        all_free(["192.0.2.1"], [port])


def test_killed_worker_is_named_and_killed_server_resumes() -> None:
    with Campaign() as campaign:
        rows = [campaign.one(Trial(0, fault, SETTING, FAULTS[fault].strikes, 0, 5))
                for fault in ("kill-worker", "kill-server", "cut")]
        rows.append(campaign.one(Trial(0, "clock-jump", SETTING._replace(apart=True), "server", 0, 5)))
    assert [(row.verdict.outcome, row.verdict.wrong) for row in rows] == [
        ("stops, naming worker 0", ()), ("goes on", ()), ("goes on", ()), ("goes on", ())]
    assert (rows[3].evidence.shots, rows[3].told()["struck"]) == (1, "server 0")
    assert all(row.evidence.contributions for row in rows)
    assert rows[1].evidence.off < 1e-5


APART = Setting("identity()", servers=2, apart=True)


def kill_until_the_end(result: Cluster, trial: Trial, chance: random.Random) -> int:
    """The coordinator, which is started again after the last step of its job."""
    struck, until = result.coordinator.signal(signal.SIGKILL), time.monotonic() + 20.0
    while not all((result.folder / f"applied-{rank}").exists() for rank in range(2)) and time.monotonic() < until:
        time.sleep(0.01)
    result.restart_coordinator()
    return struck


@pytest.mark.parametrize(("fault", "waits", "line"), [
    # Servers wait for it for longer than this run may take, so it is theirs to tell.
    ("kill-coordinator", cluster.PATIENT, "worker 0: ended while no coordinator was running, according to its servers"),
    ("lose-coordinator", cluster.UNTOLD, "all workers have ended: this server ends too"),
])
def test_job_that_ends_without_its_coordinator_leaves_nothing_behind(
    fault: str, waits: dict[str, float], line: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STRIKES, "kill-coordinator", kill_until_the_end)
    monkeypatch.setattr(cluster, "UNTOLD", waits)
    with Campaign() as campaign:
        row = campaign.one(Trial(0, fault, APART, "coordinator", 0, 5))
    assert (row.verdict.outcome, row.verdict.wrong) == ("goes on", ())
    assert line in row.evidence.lines


def test_resumed_campaign_makes_each_run_once_and_shows_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results: list[int] = []

    def run(self: Campaign, seeds: Any, faults: Any) -> Iterator[Row]:
        for seed in seeds:
            results.append(seed)
            wanted = trial(seed, faults)
            verdict = Verdict("goes on", (Finding("left", "a file"),) * (seed % 2), 0.5 if seed % 2 else math.nan, 40, 0)
            ended = [Ended(40, 1.0), None]
            yield Row(wanted, verdict, Evidence([[], []], ended, 1, 0.0, 1.5, (), None, 3, (), (), math.nan, "a line"))

    monkeypatch.setattr(Campaign, "run", run)
    monkeypatch.setattr(Campaign, "__enter__", lambda self: self)
    monkeypatch.setattr(Campaign, "__exit__", lambda self, *_: None)
    file, report = tmp_path / "runs", tmp_path / "runs.json"

    def piece(runs: int, *more: str) -> int:
        chosen = ["--faults", "cut,slow-link", "--seed", "4", "--runs", str(runs), "--resume", str(file), *more]
        return main(["chaos", *chosen, "--json", str(report)])

    for _ in range(3):
        piece(5, "--seconds", "1e-9")
    assert results == [4, 5, 6]
    assert piece(5) == 1
    assert results == [4, 5, 6, 7, 8]
    pieces = json.loads(report.read_text())
    file.unlink()
    piece(5)
    assert results[5:] == results[:5]
    assert json.loads(report.read_text()) == pieces
    assert [row["seed"] for row in pieces["rows"]] == [4, 5, 6, 7, 8]
    assert (pieces["summary"]["asked"], pieces["summary"]["violations"]) == (5, 2)
    with pytest.raises(ValueError, match=r"cut of seed 8\b.*E-CLI-OPTION"):
        Kept(file, range(4, 8), ("cut", "slow-link"))
    with pytest.raises(ValueError, match=r"cut of seed 4\b.*E-CLI-OPTION"):
        Kept(file, range(4, 9), ("slow-link", "cut"))
    with pytest.raises(ValueError, match="without hosts.*E-CLI-OPTION"):
        Kept(file, range(4, 9), ("cut", "slow-link"), "40ms")
    file.write_bytes(b"{}")
    with pytest.raises(ValueError, match="runs: .*Expected .*E-CLI-OPTION"):
        Kept(file, range(4, 9), ("cut", "slow-link"))


SETTING = Setting("identity()")
HOMES = Setting("identity()", workers=3, least=2)
MENDED = "stop-home", "cut-home", "partition-home", "kill-home-server", "storm-home-server", "kill-home-coordinator"
GONE_WITHOUT = "freeze-home", "isolate-home"


def test_freeze_counts_only_if_the_home_was_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    signals: list[int] = []
    lines = tmp_path / "coordinator.lines"
    lines.write_text("worker 1: no heartbeat for 0.9 s\n")
    coordinator, worker = SimpleNamespace(lines=lines), SimpleNamespace(signal=lambda number: signals.append(number) or 1)
    namespace: Any = SimpleNamespace(workers=[worker] * 3, coordinator=coordinator)
    monkeypatch.setattr(strikes, "TOLD_S", 0.1)
    woken = Trial(0, "freeze-home", HOMES, "worker", 2, 5)
    assert strikes.freeze_home(namespace, woken, random.Random(0)) == 0
    assert strikes.freeze_home(namespace, woken._replace(number=1), random.Random(0)) == 1
    assert signals == [signal.SIGSTOP, signal.SIGCONT] * 2, "it wakes, missed or not"


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    with Campaign() as result:
        yield result


@pytest.mark.parametrize("fault", [*MENDED, *GONE_WITHOUT])
def test_homes_survive_temporary_faults_and_continue_without_a_lost_home(fault: str, campaign: Campaign) -> None:
    row = campaign.one(Trial(0, fault, HOMES._replace(apart=True), FAULTS[fault].strikes, 0, 5))
    expected = "goes on" if fault in MENDED else "goes on without worker 0"
    assert (row.verdict.outcome, row.verdict.wrong) == (expected, ()), row.evidence.lines
    assert row.evidence.shots > 0
    assert (len(row.evidence.replayed), row.verdict.steps) == (STEPS, STEPS)


def test_some_seeds_use_keys_and_the_other_runs_are_unchanged() -> None:
    results = [trial(seed, dealt()) for seed in range(30 * len(dealt()))]
    keyed = [one for one in results if one.setting.keys]
    assert 0.8 * KEYED < len(keyed) / len(results) < 1.2 * KEYED
    assert {one.fault for one in results} - {one.fault for one in keyed} == {"clock-jump"}
    assert {one.fault for one in results if one.setting.least} == {
        "kill-home", "kill-homes", "rejoin-home", *MENDED, *GONE_WITHOUT}


def test_homes_continue_without_one_and_tls_connections_are_cut() -> None:
    with Campaign() as campaign:
        rows = [campaign.one(Trial(0, "kill-home", HOMES, "worker", 0, 5)),
                campaign.one(Trial(0, "cut", SETTING._replace(keys=True), "worker", 1, 5))]
    assert [(row.verdict.outcome, row.verdict.wrong) for row in rows] == [("goes on without worker 0", ()), ("goes on", ())]
    assert [row.evidence.contributions for row in rows] == [None, None]
    assert (len(rows[0].evidence.replayed), rows[0].verdict.steps) == (STEPS, STEPS)
    assert rows[1].evidence.shots > 0
    report = summary(rows, 2)
    assert (report["went_on"], report["went_on_without"], report["over_tls"]) == (1, 1, 1)


def test_killed_home_rejoins_and_all_continue() -> None:
    with Campaign() as campaign:
        row = campaign.one(Trial(0, "rejoin-home", HOMES, "worker", 1, 5))
    assert (row.verdict.outcome, row.verdict.wrong) == ("goes on with worker 3", ()), row.evidence.lines
    assert summary([row], 1)["went_on_with"] == 1
    assert row.evidence.stepped[3][0].members == (0, 2, 3)
