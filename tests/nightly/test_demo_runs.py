"""`commlayer demo` for a user: a short run to its end, and Ctrl-C. The examples run, too."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import ROOT

WAIT_S = 150.0
SHORT = ("--homes", "2", "--links", "50/50Mb", "--seconds", "20")  # in 10 s of a busy machine, one run may make no step
FP16_NBYTES = 2 * 1_822_944
"""What a ring of two homes sends in a step: each home half of the gradients twice."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "commlayer.cli.main", "demo", *arguments]


def test_demo_needs_only_the_installed_dependencies() -> None:
    look = ("import sys; sys.modules['sklearn'] = None\n"
            "from commlayer.demo.problem import digits\n"
            "train, test = digits(0)\n"
            "print(tuple(train[0].shape), tuple(test[0].shape), sorted(set(train[1].tolist())))")
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT)
    assert done.stdout == f"(1437, 64) (360, 64) {list(range(10))}\n", done.stderr


def marked(folder: Path) -> list[int]:
    """The processes that were started with this folder for temporary files: workers, servers and all."""
    results = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and f"TMPDIR={folder}\0".encode() in (entry / "environ").read_bytes():
                results.append(int(entry.name))
    return results


@pytest.mark.commit(1)
def test_short_demo_trains_three_times_and_leaves_no_files_or_processes(tmp_path: Path) -> None:
    out, folder = tmp_path / "demo.json", tmp_path / "tmp"
    folder.mkdir()
    environ = os.environ | {"TMPDIR": str(folder), "COMMLAYER_JOIN": "not for the demo"}
    done = subprocess.run(command(*SHORT, "--json", str(out), "--png", str(tmp_path / "demo.png")),
                          capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert marked(folder) == []
    assert list(folder.glob("commlayer*")) == []
    last = done.stdout.splitlines()[-3:]
    assert [line.partition(":")[0] for line in last] == ["Result", "Your own model", "Picture"]
    assert "--homes 2xrtx3060@50/50Mb" in last[1]
    assert ("install" in last[2]) != (tmp_path / "demo.png").exists()
    data = json.loads(out.read_text())
    alone, ddp, ours = data["rows"]
    assert [row["run"] for row in data["rows"]] == ["alone", "DDP fp16", "commlayer"]
    assert all(row["steps"] > 0 for row in data["rows"])
    assert alone["sent_nbytes"] == 0
    assert ddp["sent_nbytes"] > 0.9 * (ddp["steps"] - 1) * FP16_NBYTES, "the bytes of DDP pass the links"
    assert 0 < ours["sent_nbytes"] / ours["steps"] < 0.6 * FP16_NBYTES
    assert data["target"] == pytest.approx(alone["loss"])


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    demo = subprocess.Popen(command(*SHORT, "--seconds", "600"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        assert demo.stdout is not None
        assert any("loss:" in line for line in demo.stdout), "training began"
        others = [os.pidfd_open(pid) for pid in marked(tmp_path) if pid != demo.pid]
        assert len(others) >= 9, "a server, three workers besides their parent, two sites and their workers"
        demo.send_signal(signal.SIGINT)
        _, text = demo.communicate(timeout=WAIT_S)
        assert (demo.returncode, text) == (130, "commlayer demo: stopped\n")
        deadline = time.monotonic() + WAIT_S
        for descriptor in others:
            assert select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], "it is still running"
            os.close(descriptor)
        assert list(tmp_path.glob("commlayer*")) == []
    finally:
        demo.kill()


@pytest.mark.parametrize("example", ["train.py", "train_ddp.py"])
def test_examples_learn(example: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(ROOT / "examples" / example)], capture_output=True, text=True, timeout=WAIT_S,
                          cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines()]
    assert len(losses) == (10 if example == "train.py" else 4)
    assert losses[-1] < losses[0] / 1.5
