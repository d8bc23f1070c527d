"""docs/tutorials/first-evening.md: its script trains alone and under torchrun and resumes; its homes are planned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch
from support.processes import ROOT, clean_environment
from typer.testing import CliRunner

from commlayer.cli.main import app

PAGE = (ROOT / "docs" / "tutorials" / "first-evening.md").read_text("utf-8")


def losses(line: list[str], folder: Path) -> list[float]:
    done = subprocess.run([sys.executable, *line, str(ROOT / "examples" / "homes.py"), "2"], cwd=folder, text=True, timeout=120,
                          env=clean_environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+), ", done.stdout, re.MULTILINE)]


def test_the_script_trains_under_torchrun_and_goes_on_alone(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    fresh = losses([], empty)
    first = losses(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], tmp_path)
    then = losses([], tmp_path)
    assert len(fresh) == len(first) == len(then) == 2, "rank 0 alone prints"
    assert then[0] < 0.8 * fresh[0], "with the weights that the two have left"


def test_a_home_without_a_checkpoint_that_comes_first_overwrites_none(tmp_path: Path) -> None:
    """Rank 0's folder is empty; rank 1 has the checkpoint of an earlier run."""
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    losses([], folders[1])
    run = f"os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK']); os.environ['LOCAL_RANK'] = '0'"
    script = tmp_path / "home.py"
    example = str(ROOT / "examples" / "homes.py")
    script.write_text(f"import os, runpy\n{run}\nrunpy.run_path({example!r}, run_name='__main__')\n")
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), "1"]
    done = subprocess.run([sys.executable, *line], text=True, timeout=120, env=clean_environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    steps = [torch.load(folder / "checkpoint.pt", weights_only=True)["step"] for folder in folders]
    assert steps == [120, 120]  # two epochs of 40 steps alone, and one together


def test_the_page_shows_what_the_planner_says_of_its_cluster(tmp_path: Path) -> None:
    (line,) = re.findall(r"^\$ commlayer (estimate .*)$", PAGE, re.MULTILINE)
    text = CliRunner().invoke(app, line.split(), env={"COLUMNS": "120"})
    assert text.exit_code == 0, text.output
    assert "servers on server\n" in text.output
    rows = dict(re.findall(r"^ (this plan|best synchronous|one machine alone) +([\d.]+ .*) x *$", text.output, re.MULTILINE))
    shown = dict(re.findall(r"^ (this plan|best synchronous|one machine alone) +([\d.]+ .*) x *$", PAGE, re.MULTILINE))
    assert {name: row.split() for name, row in rows.items()} == {name: row.split() for name, row in shown.items()} != {}
    assumed = re.findall(r"^  (?:batch|computing|optimizer|memory|network): .*$", PAGE, re.MULTILINE)
    assert len(assumed) == 5
    assert [line for line in assumed if line not in text.output] == []
