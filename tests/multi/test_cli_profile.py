"""`commlayer profile`: measures codecs and a model's step, and what it writes can be planned with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from commlayer.autotune.measure.step_times import timed_job

MODEL = '''
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    x = torch.randn(16, 64)
    return model, lambda: model(x).square().mean()

def wrong():
    return 3

def shapes():
    model = nn.Linear(4, 4)
    return model, lambda: model(torch.ones(2, 5)).sum()

def silent():
    return nn.Linear(4, 4), lambda: None

def several():
    model = nn.Linear(4, 4)
    return model, lambda: model(torch.ones(2, 4))
'''


def commlayer(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "commlayer.cli.main", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_what_is_measured_can_be_planned_with(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    done = commlayer("profile", "mine.py", "--codec", "identity()", "--codec", "topk(ratio=0.01)", "--batch", "16",
                     cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 tensors" in done.stdout
    assert " topk(ratio=0.01, values='int8', exact=False) " in done.stdout
    profile, job = (json.loads((tmp_path / name).read_text()) for name in ("profile.json", "job.json"))
    assert [c["codec"] for c in profile["codecs"]] == ["identity()", "topk(ratio=0.01, values='int8', exact=False)"]
    assert profile["codecs"][1]["task_loss"] is None, "what it costs in quality is not measured here"
    assert job["batch"] == 16
    assert len(job["timing"]["ready_s"]) == 4
    arguments = ("create", "job.json", "--profile", "profile.json", "--nodes", "3xcpu@20/5Mb", "--sync", "step")
    planned = commlayer("plan", *arguments, cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "topk" in (tmp_path / "plan.json").read_text()
    chosen = commlayer("plan", *arguments, "--codec", "topk(ratio=0.01)", "--codec", "identity()", cwd=tmp_path)
    assert chosen.returncode == 0, chosen.stderr
    assert profile["server"]["slope_s"] > 0
    assert profile["bucket_s"] > 0
    assert "server: " in done.stdout
    assert "bucket: " in done.stdout


@pytest.mark.commit(3)
@pytest.mark.parametrize(("words", "code", "lines"), [
    (("none.py",), "E-USER-CODE", "commlayer: none.py: "),
    (("mine.py:absent",), "E-USER-CODE", "commlayer: mine.py:absent: "),
    (("mine.py:wrong",), "E-USER-CODE", "commlayer: mine.py:wrong: "),
    (("mine.py:shapes",), "E-USER-CODE", "commlayer: mine.py:shapes: a step: RuntimeError: mat1"),
    (("mine.py:silent",), "E-USER-CODE",
     "commlayer: mine.py:silent: a step: InvalidInput: the loss is of type NoneType"),
    (("mine.py:several",), "E-USER-CODE",
     "commlayer: mine.py:several: a step: InvalidInput: the loss is a Tensor of 8"),
    (("--batch", "8"), "E-CLI-OPTION", "commlayer: --batch "),
    (("--out", "none/p.json"), "E-CLI-OPTION", "commlayer: none/p.json: the folder "),
    (("mine",), "E-USER-CODE", "commlayer: mine: allowed are FILE.py, FILE.py:FUNCTION and MODULE:FUNCTION"),
    (("--out", "absent/p.json"), "E-CLI-OPTION", "commlayer: absent/p.json: the folder "),
    (("--codec", "topq()"), "E-CODEC-NAME", "commlayer: codec 'topq()': 'topq' is unknown"),
])
def test_what_is_wrong_is_one_line_and_code_2(tmp_path: Path, words: tuple[str, ...], code: str, lines: str) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    done = commlayer("profile", "--codec", "identity()", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(lines)
    assert done.stderr.endswith(f"[{code}]\n")
    assert done.stderr.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".py"] in ([], ["__pycache__"]), "nothing half written"


def test_times_follow_the_layers() -> None:
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
    x = torch.randn(64, 200)
    timing = timed_job(model, lambda: model(x).square().mean(), batch=64).timing
    assert timing is not None
    weights = range(0, 12, 2)
    assert [*weights] == sorted(weights, key=lambda t: timing.needed_s[t]), "the first layer is read first"
    assert [*weights] == sorted(weights, key=lambda t: -timing.ready_s[t]), "and its gradient is made last"
    assert max(timing.ready_s) <= timing.backward_s
