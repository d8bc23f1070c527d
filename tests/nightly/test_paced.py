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

from bench import ways
from bench.__main__ import main
from bench.baselines import RankFailed
from bench.lab.lab import Link
from bench.paced.pace import BACKWARD_S, FORWARD_S, Pace
from bench.paced.place import Place, spoken
from bench.paced.race import Run, at, at_step, reached, reached_step, trained
from bench.paced.shares import Samples
from bench.paced.watch import Watch
from bench.tasks import TASKS, together
from bench.tta.links import Event, Network
from bench.tta.systems import SYSTEMS, System


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
    # As a system that comes late: its hook is ahead of all that are there.
    model[2].register_forward_pre_hook(late_weights, prepend=True)
    waited_s = 0.2
    assert step()[0] >= 0.5 * FORWARD_S + waited_s
    assert pace.passes == 4


def test_the_samples_that_are_dealt_out_are_those_of_ranks_that_share_evenly() -> None:
    task = TASKS["digits"]()
    place = Place(0, 3, "127.0.0.1", Path(), len(task.batch(0, 0)[1]), seed=2)
    samples = Samples(task, place)
    for step in (0, 7):
        x, y = together([task.batch(rank, step, 2) for rank in range(3)])
        found = [samples[step * samples.batch + at] for at in range(samples.batch)]
        assert torch.equal(torch.stack([each for each, _ in found]), x)
        assert torch.equal(torch.stack([each for _, each in found]), y)


CURVE = [(0, 0.0, 4.0), (10, 10.0, 3.0), (20, 30.0, 2.0), (30, 40.0, 2.5)]


def test_curves_are_read_between_looks() -> None:
    assert at(CURVE, 20.0) == pytest.approx(2.5)
    assert at(CURVE, 99.0) == 2.5, "the last look"
    assert at_step(CURVE, 5) == pytest.approx(3.5)
    assert (reached(CURVE, 2.5), reached_step(CURVE, 2.5)) == (pytest.approx(20.0), pytest.approx(15.0))
    assert reached(CURVE, 1.9) is None


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


def test_what_a_system_lacks_is_said_in_one_line() -> None:
    assert System("x", "rival", {}, "no_such_rival").missing() == "no_such_rival is not installed: run `make rivals`"
    assert SYSTEMS["auto"].missing() == ""


def test_an_unknown_kind_is_refused_with_what_there_is() -> None:
    with pytest.raises(RankFailed, match=r"kind: got 'ddq', allowed are alone, together, ddp, .*torchft_diloco"):
        trained(None, {"task": "digits", "system": {"kind": "ddq"}}, 0.1, 1)


def test_what_one_rank_says_all_hear(tmp_path: Path) -> None:
    place = Place(0, 2, "127.0.0.1", tmp_path, 4)
    spoken(place, "through.0", "zero")
    spoken(place, "through.1", "one")
    assert [spoken(place, f"through.{rank}") for rank in range(2)] == ["zero", "one"]
    with pytest.raises(TimeoutError, match=r"no rank wrote peers within 0.1 s"):
        spoken(place, "peers", wait_s=0.1)


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


def test_a_way_that_a_link_does_not_have_is_refused_before_anything_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    def train(*_: object) -> Run:
        raise AssertionError("nothing is to train")

    monkeypatch.setattr(ways, "trained", train)
    assert main(["ways", "--link", "10m", "--way", "fp16", "--way", "int4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'fp16'" in line
    assert all(name in line for name in ways.BY_LINK["10m"])
    with pytest.raises(AssertionError, match="nothing is to train"):
        main(["ways", "--way", "fp16"])


def test_what_a_step_takes_beyond_its_pace_is_told_in_seconds_and_per_cent() -> None:
    curve = [(0, 0.0, 4.0), (10, 4.0, 3.0), (20, 8.0, 2.0)]
    run = Run(curve, 0.42, 20, 0.0, 1.0, 1.0, reported={"exposed_s": 1.0})
    told = ways.row("10m", "int4, overlap=forward", run, paced_s=0.3, goal=2.5, seconds=6.0)
    assert told["exposed_s"] == pytest.approx(0.12)
    assert told["exposed_pct"] == pytest.approx(40)
    assert told["waited_s"] == pytest.approx(0.05)
    assert told["s_to_goal"] == pytest.approx(6.0)
    other = ways.row("none", "each host alone", run._replace(reported={}), paced_s=0.3, goal=0.0, seconds=6.0)
    assert (other["waited_s"], other["s_to_goal"]) == ("-", "-")
    found = ways.summary([told, other, told | {"void": True}])
    assert found == {
        "x_paced, int4, overlap=forward, 10m": pytest.approx(1.4), "exposed_pct, int4, overlap=forward, 10m": pytest.approx(40),
        "x_paced, int4, overlap=forward, 10m (void)": pytest.approx(1.4),
        "exposed_pct, int4, overlap=forward, 10m (void)": pytest.approx(40),
    }
    for link, systems in ways.BY_LINK.items():
        assert ways.IN_QUICK & set(ways.wanted(link, True, None))
        assert any("fragments" in name for name in ways.wanted(link, True, None))
        assert ways.wanted(link, False, None) == list(systems)
        assert ways.wanted(link, True, ["auto"]) == ["auto"]
