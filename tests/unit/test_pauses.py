"""When a home trains: hours of the day, and what counts as use of a machine."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.cli import pauses
from commlayer.cli.pauses import (
    BUSY_S,
    QUIET_S,
    Machine,
    MachineUse,
    PauseRules,
    limited_power,
    parse_allowed_hours,
    reason_closed,
    systemd_unit,
)
from commlayer.errors import InvalidInput, find_error_code
from commlayer.observe.caps import DAY_MIN, Hours

MINUTES = st.integers(0, DAY_MIN - 1)


def at(minute: int) -> datetime.datetime:
    return datetime.datetime(2026, 11, 29, minute // 60, minute % 60, 30)


@given(MINUTES, MINUTES, MINUTES)
def test_hours_contain_the_minutes_from_begin_to_end(begin: int, end: int, minute: int) -> None:
    wanted = begin <= minute < end if begin < end else minute >= begin or minute < end
    assert Hours(begin, end).contain(minute) == wanted
    assert (reason_closed([Hours(begin, end)], at(minute)) == "") == wanted


@pytest.mark.parametrize(("text", "minute", "wanted"), [
    ("", 600, ""),
    ("22:00-07:00", 21 * 60 + 59, "pauses until 22:00"),
    ("22:00-07:00", 22 * 60, ""),
    ("22:00-07:00", 6 * 60 + 59, ""),
    ("22:00-07:00", 7 * 60, "pauses until 22:00"),
    ("22:00-07:00, 12:30-13:00", 12 * 60, "pauses until 12:30"),
    ("22:00-07:00, 12:30-13:00", 13 * 60, "pauses until 22:00"),
    ("00:00-00:00", 0, ""),
])
def test_a_home_says_when_it_trains_again(text: str, minute: int, wanted: str) -> None:
    assert reason_closed(parse_allowed_hours(text), at(minute)) == wanted


@pytest.mark.parametrize("text", ["x", "22:00", "22:00-", "-7:00", "24:00-07:00", "22:60-07:00", "22:00-07:00,",
                                  "22:00-07:00-08:00", "22:00:30-07:00", "22:00+01:00-07:00"])
def test_times_that_are_no_times_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_allowed_hours(text)
    assert find_error_code(caught.value) == "E-CLI-OPTION"
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("looks", "wanted"), [
    ([(0, "game"), (BUSY_S - 1, "game")], False),
    ([(0, "game"), (BUSY_S, "game")], True),
    ([(0, "game"), (BUSY_S / 2, ""), (BUSY_S, "game")], False),
    ([(0, "game"), (BUSY_S, "game"), (BUSY_S + 1, ""), (BUSY_S + QUIET_S, "")], True),
    ([(0, "game"), (BUSY_S, "game"), (BUSY_S + 1, ""), (BUSY_S + 1 + QUIET_S, "")], False),
    ([(0, "game"), (BUSY_S, "game"), (BUSY_S + 1, ""), (QUIET_S, "film"), (BUSY_S + 1 + QUIET_S, "")], True),
])
def test_use_counts_after_a_while_and_ends_after_a_longer_one(looks: list[tuple[float, str]], wanted: bool) -> None:
    use = MachineUse()
    for now, what in looks:
        use = use.after_look(what, 1000.0 + now)
    assert use.counts == wanted


def test_a_home_pauses_by_hand_whatever_the_hour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert PauseRules("", if_busy=False).reason() == ""
    pauses.pause()
    pauses.pause()
    assert PauseRules("", if_busy=False).reason().startswith("pauses until its owner")
    pauses.resume()
    pauses.resume()
    assert PauseRules("", if_busy=False).reason() == ""


@pytest.mark.parametrize(("others_s", "own_s", "wanted"), [
    (9.0, 0.0, True), (9.0, 100.0, True), (1.0, 100.0, False), (0.0, 0.0, False)])
def test_work_of_others_counts_and_own_work_does_not(
    monkeypatch: pytest.MonkeyPatch, others_s: float, own_s: float, wanted: bool,
) -> None:
    """In 10 seconds on one core."""
    machine, clock, all_s = Machine(), [100.0], [5000.0]
    mine = {7: 20.0}
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(pauses, "busy_s", lambda: all_s[0])
    monkeypatch.setattr(pauses, "own_tree", lambda own: {*own})
    monkeypatch.setattr(pauses, "process_s", lambda pid: mine[pid])
    monkeypatch.setattr(pauses, "command_output", lambda *_: "")
    assert machine.other_use([7]) == "", "nothing is known after the first look"
    clock[0], all_s[0], mine[7] = 110.0, 5000.0 + others_s + own_s, 20.0 + own_s
    assert bool(machine.other_use([7])) == wanted


PMON = """# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       4242     C     {}     20      -      -      -      -    python
    0       5151   C+G     {}      4      -      -      -      -    game
    1          -     -      -      -      -      -      -      -    -
"""


@pytest.mark.parametrize(("said", "wanted"), [
    (PMON.format(90, 40), "game uses the GPU"), (PMON.format(90, 3), ""), (PMON.format(90, "-"), ""), ("", ""),
    ("nvidia-smi has failed", "")])
def test_another_program_on_the_gpu_is_named(monkeypatch: pytest.MonkeyPatch, said: str, wanted: str) -> None:
    monkeypatch.setattr(pauses, "command_output", lambda *command: said if command[0] == "nvidia-smi" else "")
    monkeypatch.setattr(pauses, "own_tree", lambda own: {*own})
    assert Machine().other_use([4242]) == wanted


@pytest.mark.parametrize(("said", "wanted"), [
    ("ActiveSession=3\nIdleHint=no\n", True), ("ActiveSession=3\nIdleHint=yes\n", False),
    ("ActiveSession=\nIdleHint=no\n", False), ("", False)])
def test_somebody_at_the_machine_counts(monkeypatch: pytest.MonkeyPatch, said: str, wanted: bool) -> None:
    monkeypatch.setattr(pauses, "command_output", lambda *command: said if command[0] == "loginctl" else "")
    assert bool(Machine().other_use([])) == wanted


def test_own_children_are_own() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        tree = pauses.own_tree([])
        child.kill()
    assert {os.getpid(), child.pid} <= tree
    assert os.getppid() not in tree
    assert pauses.process_s(os.getpid()) > 0
    assert pauses.process_s(1 << 30) == 0.0
    assert 0 < pauses.busy_s() < time.clock_gettime(time.CLOCK_BOOTTIME) * (os.cpu_count() or 1) * 1.1


def test_a_machine_without_gpus_refuses_a_limit_of_power(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "command_output", lambda *_: "")
    with limited_power(0):
        pass
    with pytest.raises(InvalidInput), limited_power(150):
        raise AssertionError("it does not begin")


def test_power_returns_to_its_earlier_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def said(*command: str) -> str:
        calls.append(command[1:])
        return "250.00\n170.50\n" if "power.default_limit" in command[1] else "done"

    monkeypatch.setattr(pauses, "command_output", said)
    with pytest.raises(KeyError), limited_power(150):
        raise KeyError
    assert calls[1:] == [("--id=0", "--power-limit=150"), ("--id=1", "--power-limit=150"),
                         ("--id=0", "--power-limit=250.00"), ("--id=1", "--power-limit=170.50")]


def test_a_unit_runs_the_same_command(tmp_path: Path) -> None:
    unit = systemd_unit(tmp_path / "my script.py", ["--lr", "1e-3"], "22:00-07:00", pause_if_busy=True, watts=150,
                        monthly="200GB", upload_share="60%")
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert line == (f"ExecStart={sys.executable} -m commlayer up --when 22:00-07:00 --pause-if-busy --max-gpu-power 150 "
                    f"--monthly 200GB --upload-share 60%% '{tmp_path}/my script.py' --lr 1e-3")
    for when, monthly in (("noon", ""), ("", "200")):
        with pytest.raises(InvalidInput):
            systemd_unit(tmp_path / "s.py", [], when, pause_if_busy=False, watts=0, monthly=monthly)
