"""docs/first-evening.md: its script trains alone and under torchrun and goes on from its weights; its homes are planned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ranks_kit import ROOT, clean_environment
from typer.testing import CliRunner

from commlayer.cli.main import app

PAGE = (ROOT / "docs" / "first-evening.md").read_text("utf-8")


def losses(line: list[str], folder: Path) -> list[float]:
    done = subprocess.run([sys.executable, *line, str(ROOT / "examples" / "homes.py"), "2"], cwd=folder, text=True, timeout=120,
                          env=clean_environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+), ", done.stdout, re.MULTILINE)]


def test_the_script_trains_under_torchrun_and_goes_on_alone(tmp_path: Path) -> None:
    (anew := tmp_path / "anew").mkdir()
    fresh = losses([], anew)
    first = losses(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], tmp_path)
    then = losses([], tmp_path)
    assert len(fresh) == len(first) == len(then) == 2, "rank 0 alone prints"
    assert then[0] < 0.8 * fresh[0], "with the weights that the two have left"


def test_the_page_shows_what_the_planner_says_of_its_cluster(tmp_path: Path) -> None:
    (line,) = re.findall(r"^\$ commlayer (plan make .*)$", PAGE, re.MULTILINE)
    said = CliRunner().invoke(app, [*line.split(), "--out", str(tmp_path / "plan.json")], env={"COLUMNS": "120"})
    assert said.exit_code == 0, said.output
    assert "servers on server\n" in said.output
    rows = dict(re.findall(r"^ (this plan|best synchronous|one machine alone) +([\d.]+ .*) x *$", said.output, re.MULTILINE))
    shown = dict(re.findall(r"^ (this plan|best synchronous|one machine alone) +([\d.]+ .*) x *$", PAGE, re.MULTILINE))
    assert {name: row.split() for name, row in rows.items()} == {name: row.split() for name, row in shown.items()} != {}
    assumed = re.findall(r"^  (?:batch|computing|optimizer|memory|network): .*$", PAGE, re.MULTILINE)
    assert len(assumed) == 5
    assert [line for line in assumed if line not in said.output] == []
