"""README's first lines: its script is examples/train.py, and its first command runs in a clone."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support.processes import ROOT, clean_environment

PAGE = (ROOT / "README.md").read_text("utf-8")


def test_the_first_script_is_the_example() -> None:
    first = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert first is not None
    assert first[1] == (ROOT / "examples" / "train.py").read_text("utf-8")


def test_the_first_script_trains_alone_and_says_so() -> None:
    done = subprocess.run([sys.executable, "examples/train.py"], cwd=ROOT, text=True, timeout=120, capture_output=True,
                          env=clean_environment())
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("line", re.findall(r"^commlayer (estimate .*)$", PAGE, re.MULTILINE))
def test_a_command_to_plan_runs_in_a_clone(line: str) -> None:
    done = subprocess.run([sys.executable, "-m", "commlayer", *line.split()], cwd=ROOT, text=True, timeout=120,
                          capture_output=True, env=clean_environment())
    assert done.returncode == 0, done.stderr
    assert "3 ranks on 3 nodes" in done.stdout
    assert "homes behind NAT" in done.stdout
    assert "servers on server" in done.stdout


def test_there_is_a_command_to_plan() -> None:
    assert re.findall(r"^commlayer estimate examples/train.py:make ", PAGE, re.MULTILINE)
