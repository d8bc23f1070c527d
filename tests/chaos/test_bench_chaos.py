"""`python -m bench chaos`: schedules that go on where a piece of them stopped, findings that can be repeated, the soak."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import msgspec
import pytest
from support.lab import needs_lab

from bench import Unmeasurable
from bench.__main__ import main
from tests.chaos import fuzzed, hosts, soak, soak_homes
from tests.chaos.trials import Setting, Trial
from tests.sim import schedules
from tests.sim.schedules import Done, Options
from tests.sim.simulated_sums import Sums


@pytest.mark.parametrize(("of", "count"), [("sums", "contributions"), ("members", "epochs"), ("epochs", "joins")])
def test_resumed_schedules_equal_an_uninterrupted_run(of: str, count: str, tmp_path: Path) -> None:
    result = schedules.run(Options(30, 5, 0.0, None, of))["summary"]
    file = tmp_path / "schedules.json"
    for schedules_so_far in (10, 20, 30):
        pieces = schedules.run(Options(schedules_so_far, 5, 0.0, file, of))["summary"]
    timed = {"seconds", "schedules_per_s"}
    assert {name: result[name] for name in result.keys() - timed} == {name: pieces[name] for name in pieces.keys() - timed}
    assert {"events", count} < result.keys()
    assert (result["left"], result["wrong_schedules"], result["seeds"]) == (0, 0, "5 to 34")
    assert schedules.run(Options(60, 5, 1e-9, file, of))["summary"]["left"] == 30
    with pytest.raises(Unmeasurable, match="begins with seed 5, asked for: --seed 6"):
        schedules.run(Options(60, 6, 0.0, file, of))
    with pytest.raises(Unmeasurable, match="its schedules are of .*; name another file"):
        schedules.run(Options(60, 5, 0.0, file, "sums" if of != "sums" else "members"))
    file.write_text("{}x")
    with pytest.raises(Unmeasurable, match="not what an earlier piece has written"):
        schedules.run(Options(60, 5, 0.0, file, of))


def test_finding_includes_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "emit", lambda self, r, acc, out: 8)
    done = Done()
    schedules.one(Options(1, 41, 0.0, None), 41, done)
    assert done.wrong == 1
    (finding,) = done.findings
    assert finding["again"] == "python -m bench chaos --of sums --schedules 1 --seed 41"
    assert "lost" in finding["wrong"]


def test_damaged_bytes_end_only_their_own_connection() -> None:
    result = fuzzed.run(2000, 3)
    summary = result["summary"]
    assert result["code"] == 0, result
    assert (summary["sockets.inputs"], summary["sockets.findings"], summary["sockets.tracebacks"]) == (fuzzed.LEAST, 0, 0)
    assert summary["sockets.sums_of_others"] >= 2
    report = {row["socket"]: row["inputs"] for row in result["rows"] if "socket" in row}
    assert len(report) == 4
    assert all(report.values())


def test_server_that_mishandles_damage_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless:
        """Which neither answers nor closes."""

        def __init__(self, listener: socket.socket) -> None:
            self.data = self.control = f"127.0.0.1:{listener.getsockname()[1]}"

    monkeypatch.setattr(fuzzed, "PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets = fuzzed.Sockets(Careless(listener), random.Random(1))  # type: ignore[arg-type]
        assert "was still open after 0.2 s" in sockets.greeting()
        assert "a member could not join: server 0: " in sockets.frames()


def test_short_soak_finishes_and_conserves_gradients() -> None:
    result = soak.run(400, 1)["summary"]
    assert (result["finished"], result["other_digests"], result["wrong_on_the_wire"], result["accounts_balance"]) == (
        True, 0, 0, True), result
    assert result["connections_cut"] >= 3
    assert result["servers_killed"] >= 4


def test_short_soak_of_homes_kills_and_rejoins_one_repeatedly() -> None:
    for steps in (1200, 2400, 4800):  # how many go by while a process starts is the machine's affair
        result = soak_homes.run(steps, 1)["summary"]
        state = [result[name] for name in ("finished", "other_digests", "idle_homes", "stuck_homes")]
        assert state == [True, 0, 0, 0], result
        if result["homes_left"]:
            break
    assert result["homes_killed"] >= 1
    assert result["homes_left"] >= 1
    assert result["homes_joined"] == result["homes_killed"] + result["homes_left"]


@pytest.mark.parametrize(("options", "line"), [
    (["--runs", "-1"], "--runs: got -1, allowed: 0 and more"),
    (["--faults", "cut,earthquake"], "--faults: got 'earthquake', allowed: kill-worker, "),
    (["--seconds", "nan"], "--seconds: got nan, allowed: 0 and more"),
    (["--schedules", "1", "--resume", "{}/none/file"], "its folder does not exist"),
    (["--schedules", "1", "--resume", "{}"], "it is a folder"),
    (["--homes"], "--homes: says what --soak is of; name how many steps"),
    (["--of", "epochs"], "--of: says what --schedules simulate; name how many"),
    (["--outages", "-1"], "--outages: got -1, allowed: 0 and more"),
    (["--json", "{}"], "it is a folder"),
])
def test_invalid_options_are_one_line_before_any_work(options: list[str], line: str, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *(option.format(tmp_path) for option in options)]) == 2
    errors = capsys.readouterr().err
    assert line in errors
    assert errors.count("\n") == 1


def test_findings_set_the_exit_code_and_interrupted_pieces_are_kept(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(["chaos", "--schedules", "3"]) == 0
    one = schedules.one

    def broken_off(options: Options, seed: int, done: Done) -> None:
        if seed == 2:
            raise KeyboardInterrupt
        one(options, seed, done)

    monkeypatch.setattr(schedules, "one", broken_off)
    assert main(["chaos", "--schedules", "5", "--resume", str(tmp_path / "kept.json")]) == 130
    assert msgspec.json.decode((tmp_path / "kept.json").read_bytes(), type=Done).schedules == 2
    monkeypatch.setattr(schedules, "one", one)
    monkeypatch.setattr(Sums, "emit", lambda self, r, acc, out: 8)
    assert main(["chaos", "--schedules", "1", "--seed", "41"]) == 1


HOMES = Setting("identity()", workers=3, least=2, keys=True)


@needs_lab
@pytest.mark.timeout(400)
@pytest.mark.parametrize("line", hosts.LINES)
def test_outages_over_every_line_change_no_bit_and_isolated_home_is_evicted(line: str) -> None:
    with hosts.campaign(line) as campaign:
        row = campaign.one(Trial(0, "partition", Setting("identity()"), "worker", 1, 5, line=line))
        again = campaign.one(Trial(0, "kill-home-server", HOMES, "server", 0, 5, line=line))
        cut_off = campaign.one(Trial(0, "isolate-home", HOMES, "worker", 1, 5, line=line))
    assert (row.verdict.outcome, row.verdict.wrong) == ("goes on", ()), row.evidence.lines
    assert row.evidence.shots > 0
    assert (again.verdict.outcome, again.verdict.wrong) == ("goes on", ()), again.evidence.lines
    assert (cut_off.verdict.outcome, cut_off.verdict.wrong) == ("goes on without worker 1", ()), cut_off.evidence.lines
