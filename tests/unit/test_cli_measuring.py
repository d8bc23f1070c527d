"""estimate FILE.py: a user's model is timed here, and its times are compared with the tables' reference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commlayer import plan_file
from commlayer.cli.arguments import function_of, job_made_by, job_named, made_by
from commlayer.cli.main import run
from commlayer.planner.tables import device_named

MODEL = '''
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    x = torch.randn(16, 64)
    return model, lambda: model(x).square().mean()
'''


def test_a_script_can_be_planned_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODEL)
    words = ("mine.py", "--nodes", "2xcpu@20/5Mb", "--batch", "16", "--out", "plan.json")
    monkeypatch.setattr("sys.argv", ["commlayer", "plan", "create", *words])
    with pytest.raises(SystemExit, match="0"):
        run()
    out = capsys.readouterr().out
    assert out.startswith("mine.py: 4 tensors, 0.0 M elements, 2 ranks on 2 nodes\n")
    plan, inputs = plan_file.plan_in(Path("plan.json")), plan_file.inputs_of(Path("plan.json"))
    assert plan.job == inputs.job.digest()
    assert inputs.job.batch == 16
    assert inputs.job.timing is not None
    assert inputs.job.timing.device == ""
    with pytest.raises(ValueError, match="^mine.py:absent: .*E-USER-CODE"):
        job_named("mine.py:absent", None)


@pytest.mark.parametrize(("driver", "name"), [
    ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"), ("Tesla T4", "t4"),
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA L40S", ""), ("Radeon", ""),
])
def test_gpus_are_known_by_what_their_drivers_call_them(driver: str, name: str) -> None:
    assert device_named(driver) == name


SCRIPT = '''
from __future__ import annotations

import dataclasses

import {beside}


@dataclasses.dataclass
class Settings:
    width: int = {beside}.WIDTH


def make():
    return Settings().width
'''


@pytest.mark.parametrize("name", ["{folder}/script.py:make", "{folder}/script.py", "script_of_mine:make"])
def test_a_script_finds_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As if Python had been given it; dataclasses included."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path if name.startswith("script") else "/")
    beside = f"beside_{len(name)}"
    (tmp_path / f"{beside}.py").write_text("WIDTH = 7")
    for script in ("script.py", "script_of_mine.py"):
        (tmp_path / script).write_text(SCRIPT.format(beside=beside))
    assert function_of(name.format(folder=tmp_path), "make", "that returns a number")() == 7


ALLOWED = '''
"""A script."""
import logging
import os
import sys
import torch

sys.path.append("lib")
logging.basicConfig(level=logging.INFO)
log = logging.getLogger(__name__)
torch.manual_seed(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH: int = int(os.environ.get("WIDTH", "7"))
SIZES = [2 * n for n in (1, 2)]
rate = lambda step: work(step)
try:
    import numpy
except ImportError:
    numpy = None


class Net:
    made = work = None


def make():
    return WIDTH

if __name__ == "__main__":
    raise SystemExit(make())
else:
    BESIDE = 1
'''


def test_a_file_whose_top_level_only_defines_and_sets_is_imported(tmp_path: Path) -> None:
    (tmp_path / "allowed.py").write_text(ALLOWED)
    assert function_of(f"{tmp_path}/allowed.py", "make", "")() == 7


@pytest.mark.parametrize(("top", "line", "more"), [
    ("model = nn.Linear(4, 4)\n", "model = nn.Linear(4, 4)", 0),
    ("X = 1\nfor step in range(9):\n    train()\nprint('done')\n", "for step in range(9):", 1),
    ("with open('mark', 'w') as f:\n    f.write('ran')\n", "with open('mark', 'w') as f:", 0),
    ("if True:\n    open('mark', 'w')\n", "open('mark', 'w')", 0),
    ("try:\n    open('mark', 'w')\nfinally:\n    X = 1\n", "open('mark', 'w')", 0),
    ("if __name__ == '__main__':\n    main()\nelse:\n    open('mark', 'w')\n", "open('mark', 'w')", 0),
    ("X: int = len(open('mark', 'w').name)\n", "X: int = len(open('mark', 'w').name)", 0),
])
def test_a_file_whose_top_level_would_run_is_refused_unless_it_is_named_as_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top: str, line: str, more: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("working.py").write_text(f"from torch import nn\n\ndef make():\n    return 7\n\n{top}")
    with pytest.raises(ValueError) as caught:
        function_of("working.py:make", "make", "")
    number = Path("working.py").read_text().splitlines().index(next(
        each for each in Path("working.py").read_text().splitlines() if each.strip() == line)) + 1
    assert str(caught.value).startswith(f"working.py:{number}: ")
    assert f"`{line}`" in str(caught.value)
    assert str(caught.value).endswith("[E-USER-CODE]")
    assert (f"and {more} more" in str(caught.value)) is (more > 0)
    assert "\n" not in str(caught.value)
    assert not Path("mark").exists(), "nothing has run"


def test_a_module_is_imported_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("runs_when_imported.py").write_text("mark = open('mark', 'w')\nmark.close()\n\ndef make():\n    return 7\n")
    assert function_of("runs_when_imported:make", "make", "")() == 7
    assert Path("mark").exists()


def test_a_job_says_what_its_step_keeps_for_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kept.py").write_text(KEPT)
    timing = job_made_by(made_by("kept.py"), "kept.py", 8).timing
    assert timing is not None
    # The input of each layer, and the result of the last for its square; no weights.
    assert timing.activation_nbytes == 4 * 8 * (100 + 200 + 300)


KEPT = '''
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(100, 200, bias=False), nn.Linear(200, 300, bias=False))
    return model, lambda: model(torch.ones(8, 100)).square().sum()
'''

BROKEN = '''
import torch
from torch import nn


def raising():
    raise KeyError("weights")


def frozen():
    model = nn.Linear(4, 4).requires_grad_(False)
    return model, lambda: model(torch.ones(2, 4)).sum()


def fine():
    model = nn.Linear(4, 4)
    return model, lambda: model(torch.ones(2, 4)).sum()
'''


@pytest.mark.parametrize(("name", "batch", "text"), [
    ("raising", None, "broken.py:raising: KeyError: 'weights'"),
    ("frozen", None, "broken.py:frozen: a step: InvalidInput: the loss is a Tensor of 1 without a gradient"),
    ("fine", 0, "batch of broken.py:fine: got 0"),
])
def test_what_fails_in_a_users_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, batch: int | None, text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(BROKEN)
    with pytest.raises(ValueError) as caught:
        job_made_by(made_by(f"broken.py:{name}"), f"broken.py:{name}", batch)
    assert str(caught.value).startswith(text)
    assert str(caught.value).endswith("[E-CLI-OPTION]" if batch == 0 else "[E-USER-CODE]")
    assert "\n" not in str(caught.value)
