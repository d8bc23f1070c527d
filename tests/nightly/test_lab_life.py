"""The lab leaves nothing behind however it ends, never runs twice at once, and says in one line why it cannot run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.coordinators import until
from support.lab import DATAGRAMS, needs_lab, python

from bench.lab import Lab, LabUnavailable, sound
from bench.lab.__main__ import main
from bench.lab.namespaces import present
from bench.lab.router import build

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
            assert set(names) <= set(present()), "nobody can clean up after SIGKILL at once"
            with Lab(hosts=2):
                pass
        assert not set(names) & set(present())


@needs_lab
def test_one_lab_at_a_time() -> None:
    with Lab(hosts=2):
        with pytest.raises(LabUnavailable, match=f"process {os.getpid()}"):
            Lab(hosts=2, lock_s=0.1).__enter__()


@needs_lab
def test_losses_are_seeded() -> None:
    def losses(seed: int) -> int:
        with Lab(hosts=2, loss=[0.1, 0.0], seed=seed) as lossy:
            assert python(lossy, 0, DATAGRAMS, lossy.addresses[1], 1000).wait(20) == 0
            until(lambda: lossy.counters()["in_flight"] == 0, "all have arrived")
            host = lossy.counters()["hosts"][0]
            assert host["sent_packets"] == 1000
            return int(host["dropped_loss"])

    first = losses(3)
    assert 60 <= first <= 150
    assert losses(3) == first


@needs_lab
def test_an_idle_router_sleeps() -> None:
    with Lab(hosts=2) as lab:
        before = lab.counters()
        until(lambda: lab.counters()["time_s"] > before["time_s"] + 0.5, "half a second passes")
        after = lab.counters()
    assert after["cpu_s"] - before["cpu_s"] < 0.1 * (after["time_s"] - before["time_s"])


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--check"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "needs root" in said


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabUnavailable, match=r"no c\+\+; install"):
        build(cache=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"hosts": 0}, "hosts: got 0, allowed are 1 to 250"),
        ({"hosts": 2, "up_bps": 0}, "up_bps: got 0.0, allowed is above 0"),
        ({"hosts": 2, "down_bps": -1}, "down_bps: got -1.0"),
        ({"hosts": 2, "delay_s": [0.1]}, "delay_s: got 1 values, the lab has 2 hosts"),
        ({"hosts": 2, "loss": 1.0}, "loss: got 1.0, allowed is 0 to below 1"),
        ({"hosts": 2, "up_bps": float("nan")}, "up_bps: got nan"),
        ({"hosts": 2, "delay_s": float("inf")}, "delay_s: got inf"),
    ],
)
def test_a_bad_value_is_named(arguments: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Lab(**arguments)


def test_a_late_or_lossy_stretch_is_unsound() -> None:
    def counters(deliveries: int, late_5ms: int, **lost: int) -> dict[str, object]:
        clean = {"device_dropped": 0, "refused": 0}
        return {"deliveries": deliveries, "late_5ms": late_5ms, "hosts": [clean, {**clean, **lost}]}

    start = counters(1000, 900)  # what lay before the stretch does not count
    assert sound(start, counters(2000, 950))
    assert not sound(start, counters(2000, 951))
    assert not sound(start, counters(2000, 900, refused=1))
    assert not sound(start, counters(2000, 900, device_dropped=1))
    assert sound(start, start)
