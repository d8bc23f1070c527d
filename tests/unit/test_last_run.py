"""What a machine remembers of a job: it is found by the same job only, and a bad file or folder is as none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.autotuning import START

from commlayer import last_run
from commlayer.last_run import MOST, LastRun, LastRuns
from commlayer.planner.model import Link

RUN = LastRun(START, Link(2e7, 5e7, 0.01))
SITES = [[0], [1, 2]]
JOB = {"model": "a1", "server": "host:1"}


def test_the_same_job_finds_its_last_run(tmp_path: Path) -> None:
    LastRuns(tmp_path / "runs", JOB).save(SITES, RUN)
    again = LastRuns(tmp_path / "runs", JOB)
    assert again.load(SITES) == RUN
    assert again.load([[5], [7, 9]]) == RUN, "the sizes of the sites count, not their ranks"


@pytest.mark.parametrize(("job", "sites"), [
    ({**JOB, "server": "host:2"}, SITES), ({"model": "a1"}, SITES), (JOB, [[0], [1]]), (JOB, [[0, 1], [2]]),
    (JOB, [[0], [1], [2]])])
def test_another_job_finds_nothing(tmp_path: Path, job: dict[str, str], sites: list[list[int]]) -> None:
    LastRuns(tmp_path, JOB).save(SITES, RUN)
    assert LastRuns(tmp_path, job).load(sites) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"plan": {}}', b"\xff", b'{"link":{"up_bps":1,"down_bps":1}}'])
def test_a_file_of_another_version_is_as_none(tmp_path: Path, content: bytes) -> None:
    runs = LastRuns(tmp_path, JOB)
    runs.save(SITES, RUN)
    (file,) = last_run.list_remembered(tmp_path)
    file.write_bytes(content)
    assert runs.load(SITES) is None


def test_a_folder_that_cannot_be_written_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    runs = LastRuns(tmp_path / "file" / "runs", JOB)
    runs.save(SITES, RUN)
    assert runs.load(SITES) is None
    assert last_run.list_remembered(tmp_path / "file" / "runs") == []


def test_nothing_is_remembered_without_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert last_run.folder("") is None
    runs = LastRuns()
    runs.save(SITES, RUN)
    assert runs.load(SITES) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert last_run.folder(last_run.AUTO) == tmp_path / "commlayer" / "runs"
    assert last_run.folder("here") == Path("here")


def test_the_latest_runs_are_kept_and_can_be_forgotten(tmp_path: Path) -> None:
    for number in range(MOST + 3):
        LastRuns(tmp_path, {"model": str(number)}).save(SITES, RUN)
        newest = max(last_run.list_remembered(tmp_path), key=lambda file: file.stat().st_ctime_ns)
        os.utime(newest, (number, number))
    assert len(last_run.list_remembered(tmp_path)) == MOST
    found = [LastRuns(tmp_path, {"model": str(number)}).load(SITES) is not None for number in (0, 1, 2, 3)]
    assert found == [False, False, False, True]
    last_run.forget(tmp_path)
    assert last_run.list_remembered(tmp_path) == []
