"""`commlayer demo` as a user meets it: a small run to its end, Ctrl-C. And the examples run."""

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

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0
SMALL = ("--quick", "--workers", "2", "--link", "1Gb", "--rtt", "2")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "commlayer.cli.main", "demo", *arguments]


def test_its_digits_need_no_package_that_installing_commlayer_does_not_bring() -> None:
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
def test_a_small_demo_reaches_its_target_and_leaves_nothing(tmp_path: Path) -> None:
    out, folder = tmp_path / "demo.json", tmp_path / "tmp"
    folder.mkdir()
    environ = os.environ | {"TMPDIR": str(folder), "COMMLAYER_JOIN": "not for the demo"}
    done = subprocess.run(command(*SMALL, "--json", str(out)),
                          capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert marked(folder) == []
    assert list(folder.glob("commlayer*")) == []
    assert max(map(len, done.stdout.splitlines())) <= 100
    data = json.loads(out.read_text())
    assert [entry.name for entry in tmp_path.iterdir() if entry != folder] == [out.name]
    assert set(data) == {"rows", "summary"}
    dense, bound, compressed = data["rows"]
    for row in (dense, compressed):
        assert row["reached"]
        assert row["accuracy"] >= 0.3
        assert row["sent_nbytes"] == pytest.approx(row["step_nbytes"] * row["steps"])
        assert 0 < row["exposed"] < 1
        assert f"{row['train_s']:.1f} s" in done.stdout
    assert dense["step_nbytes"] > 2 * data["summary"]["parameters"], "two bytes each and a header"
    assert 3.5 < dense["step_nbytes"] / compressed["step_nbytes"] < 4, "16 bits against four and a scale"
    assert bound["train_s"] == pytest.approx(bound["step_s"] * dense["steps"])
    assert data["summary"]["speedup"] == pytest.approx(dense["train_s"] / compressed["train_s"])


def test_ctrl_c_ends_workers_and_servers(tmp_path: Path) -> None:
    demo = subprocess.Popen(command(*SMALL, "--rtt", "200"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        assert demo.stdout is not None
        assert any(" dense " in line for line in demo.stdout), "training began"
        others = [os.pidfd_open(pid) for pid in marked(tmp_path) if pid != demo.pid]
        assert len(others) >= 5, "torchrun, two workers, two servers"
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
