"""The lab leaves nothing behind however it ends, never runs twice at once, and says in one line why it cannot run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.lab import needs_lab

from bench.lab import Lab, LabUnavailable
from bench.lab.__main__ import main
from bench.lab.namespaces import present

ROOT = Path(__file__).resolve().parents[2]


@needs_lab
def test_an_exception_leaves_no_process_and_no_namespace() -> None:
    lab = Lab(hosts=2)

    def fail_inside() -> None:
        with lab:
            started.append(lab.popen(1, ["sleep", "600"]))
            assert set(lab.names) <= set(present())
            raise KeyError("the test's own")

    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(KeyError, match="the test's own"):
        fail_inside()
    [child] = started
    assert child.poll() is not None
    assert not set(lab.names) & set(present())


@needs_lab
def test_sigterm_cleans_up_and_sigkill_is_cleaned_up_after() -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.lab", "--hosts", "2", "--", "sh", "-c", "echo $LAB_NAMESPACES; sleep 600"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout
        names = process.stdout.readline().split()
        assert len(names) == 2
        assert set(names) <= set(present())
        process.send_signal(number)
        process.wait(20)
        process.stdout.close()
        if number == signal.SIGKILL:
            assert set(names) <= set(present()), "nothing cleans up at once after SIGKILL"
            with Lab(hosts=2):
                pass
        assert not set(names) & set(present())


@needs_lab
def test_one_lab_at_a_time() -> None:
    with Lab(hosts=2):
        with pytest.raises(LabUnavailable, match=f"process {os.getpid()}"):
            Lab(hosts=2, lock_s=0.1).__enter__()


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--check"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "needs root" in errors
