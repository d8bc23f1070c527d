"""A home that pauses leaves the job at once and holds nothing; the others train on, and it joins again by itself."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from support.site_job import Script, run
from support.sites import Process, Sites, all_ended

pytestmark = pytest.mark.timeout(300)


def until(process: Process, words: str) -> str:
    """The first line of the process's standard error that contains these words."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            return line
    raise AssertionError("".join(seen))


def children(process: Process) -> str:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()


@pytest.mark.parametrize("modes", [{}, {"every": 2, "overlap": "round"}], ids=str)
def test_the_others_train_on_while_a_home_pauses(sites: Sites, tmp_path: Path, modes: dict[str, object]) -> None:
    server = sites.serve(2, "--min-workers", "1")
    script = Script(attach=modes, momentum=True, workers=2)
    stays = run(sites, script, 0, rank=0)
    sites.set(XDG_CONFIG_HOME=str(tmp_path))
    pauses = run(sites, script, 1, rank=1)
    until(stays, "begins with plan")
    all_ended([sites.run("pause")])
    until(pauses, "this home pauses until its owner runs `commlayer resume`")
    assert "worker 1 left" in until(stays, "worker 1")
    while children(pauses):
        pass
    all_ended([sites.run("resume")])
    ends = all_ended([stays, pauses])
    assert "pauses until its owner runs `commlayer resume`" in all_ended([server])[0].errors
    old, new = (end.rows[-1] for end in ends)
    assert (old["weights"], old["step"]) == (new["weights"], new["step"])
    assert sorted(old["members"]) == [0, 2]


def test_a_home_waits_for_its_hours_and_trains_with_the_others_then(sites: Sites, tmp_path: Path) -> None:
    sites.serve(1)
    now = datetime.datetime.now()
    begin, end = ((now + datetime.timedelta(minutes=minutes)).strftime("%H:%M") for minutes in (1, 30))
    process = run(sites, Script(), 0, options=["--when", f"{begin}-{end}"])
    assert f"pauses until {begin}" in until(process, "pauses")
    until(process, "trains again")
    assert all_ended([process])[0].rows[-1]["step"] > 0


def test_a_home_pauses_before_its_cap_of_a_month(sites: Sites, tmp_path: Path) -> None:
    server, script = sites.serve(2, "--min-workers", "1"), Script(workers=2)
    stays = run(sites, script, 0, rank=0)
    sites.set(XDG_CONFIG_HOME=str(tmp_path))
    pauses = run(sites, script, 1, rank=1, options=["--monthly", "1MB"])
    until(stays, "begins with plan")
    now = datetime.datetime.now()
    again = f"pauses until 1 {datetime.datetime(now.year, now.month % 12 + 1, 1):%B}"
    until(pauses, f"this home {again}")
    while children(pauses):
        pass
    assert again in until(server, "pauses")
    pauses.kill()
    until(run(sites, script, 1, rank=1, options=["--monthly", "1MB"]), f"this home {again}")
    counted = json.loads((tmp_path / "commlayer" / "traffic.json").read_text())["months"][f"{now:%Y-%m}"]
    assert 100_000 < counted <= 1_000_000
