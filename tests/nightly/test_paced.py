"""Training against the clock: passes take their time, waiting is not made up for, and systems start, train and stop."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.lab.lab import Link
from bench.paced.pace import BACKWARD_S, FORWARD_S, Pace
from bench.paced.race import trained
from bench.paced.watch import Watch
from bench.tta.links import Event, Network
from bench.tta.systems import SYSTEMS


def test_passes_take_their_time_and_waiting_is_not_made_up_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    pace = Pace(model, list(model), slow=0.5)
    waited_s = 0.0

    def late_weights(*_: object) -> None:
        time.sleep(waited_s)

    def step() -> tuple[float, float]:
        pace.forward()
        begin = time.perf_counter()
        loss = model(torch.ones(1, 4)).sum()
        middle = time.perf_counter()
        pace.backward()
        loss.backward()
        return middle - begin, time.perf_counter() - middle

    forward_s, backward_s = step()
    assert forward_s >= 0.5 * FORWARD_S
    assert backward_s >= 0.5 * BACKWARD_S
    # Like a system that is added last: its hook runs before all others.
    model[2].register_forward_pre_hook(late_weights, prepend=True)
    waited_s = 0.2
    assert step()[0] >= 0.5 * FORWARD_S + waited_s
    assert pace.passes == 4


@pytest.mark.parametrize("name", ["DDP PowerSGD", "DeMo-like", "int4 forward", "auto, shares"])
def test_a_system_trains_two_ranks_on_loopback(name: str) -> None:
    run = trained(None, {"task": "digits", "system": SYSTEMS[name].start}, 0.2, 2)
    steps, seconds, losses = zip(*run.curve, strict=True)
    assert steps[:2] == (0, 1)
    assert list(seconds) == sorted(seconds)
    assert losses[1] != losses[0]
    assert run.steps >= 2
    assert run.cpu_s > 0
    assert run.peak_mb > 10


def test_what_a_run_leaves_behind_is_ended() -> None:
    code = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL).pid, flush=True); input()"
    argv = [sys.executable, "-S", "-c", code]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    assert child.stdin
    grandchild, watch = int(child.stdout.readline()), Watch()
    watch([child])
    child.communicate("\n", timeout=60)
    watch.end()
    until = time.monotonic() + 10
    while _lives(grandchild) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _lives(grandchild)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Links:
    """As much of a lab as a network plays on."""

    def __init__(self) -> None:
        self.links = [Link(1e8, 1e8, 0.01, 0.1, 0.0, False)] * 4
        self.rates: list[tuple[int, float, bool]] = []

    def set(self, host: int, **values: float) -> None:
        self.rates.append((host, values["up_bps"], bool(values["cut"])))


def test_a_trace_changes_links_at_its_times_and_puts_them_back() -> None:
    network = Network(100, 100, 20, (Event(0.0, 10, (1,)), Event(0.01, 5, (1,), cut=True), Event(3600.0, 1)))
    lab, over = Links(), threading.Event()
    player = threading.Thread(target=network.play, args=(lab, over))
    player.start()
    until = time.monotonic() + 10
    while len(lab.rates) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    over.set()
    player.join(10)
    assert lab.rates == [(1, 1e7, False), (1, 5e6, True), *((host, 1e8, False) for host in range(4))]
