"""What people at each home see: the plan, for whom it waits, who left and why, by name. Run as a script: training."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)
from support.sites import WAIT_S, Homes, ended

from commlayer.engine import step as step_module

SLOW_STEP = 3


def main(how: str, go: str = "") -> None:
    import torch
    from support.attached import data, mlp
    from torch import nn

    import commlayer

    rank = int(os.environ["RANK"])
    if how == "mistaken" and rank == 1:
        raise LookupError("a mistake of the script's own")
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    commlayer.attach(model, optimizer, plan="int4()", every=-1 if how == "refused" else None)
    for step in range(10**6):
        x, y = data(rank, step)
        loss = nn.functional.mse_loss(model(x), y)
        while go and rank == 1 and step == SLOW_STEP and not Path(go).exists():
            time.sleep(0.1)
        loss.backward()
        optimizer.step()


@pytest.fixture(name="homes")
def two_homes(homes: Homes, folders: Folders) -> Homes:
    homes.set(COMMLAYER_JOIN_DEADLINE_S="100")
    homes.serve(2, "--keys", str(folders.server))
    return homes


def launched(homes: Homes, folders: Folders, *how: str) -> list[Any]:
    return [homes.run("launch", "--join", homes.address, "--keys", str(keys), "--node-rank", str(n), __file__, *how)
            for n, keys in enumerate((folders.worker, folders.second))]


def test_a_home_that_lets_another_wait_and_is_interrupted_is_named_there_in_a_line(
    homes: Homes, folders: Folders, tmp_path: Path,
) -> None:
    go = tmp_path / "go"
    first, second = launched(homes, folders, "slow", str(go))
    heard = list[str]()
    read = iter(first.stderr.readline, "")
    reader = threading.Thread(target=lambda: heard.extend(line.rstrip() for line in read), daemon=True)
    reader.start()

    def until(words: str) -> None:
        deadline = time.monotonic() + 1.5 * WAIT_S
        while not any(words in line for line in heard):
            assert time.monotonic() < deadline, heard
            time.sleep(0.1)

    until("waiting for worker 1")
    go.touch()
    until("continues after")
    second.send_signal(signal.SIGINT)
    code, _, said = ended(second)
    reader.join(WAIT_S)
    assert code == 130
    assert "this home was interrupted" in said
    assert first.wait(WAIT_S) == 1
    for each in (said, "\n".join(heard)):
        assert "Traceback" not in each
        assert len(re.findall(r"^commlayer: begins with plan [0-9a-f]{16}: ", each, re.M)) == 1
    assert "waiting for worker" not in said
    name = r"worker 1 \(gpu-2\)"
    for line in (rf"commlayer: waiting for {name}: \d+ s, up to 600 s \(60 s without a sign of life\)",
                 rf"commlayer: continues after \d+ s of waiting for {name}",
                 rf"commlayer: {name}: left the job: KeyboardInterrupt.*\[E-PEER-LOST\]"):
        assert [bool(re.fullmatch(line, each)) for each in heard].count(True) >= 1, line


@pytest.mark.parametrize(("how", "pattern"), [
    ("refused", r"^commlayer: every: .*-1, .*\[E-SYNC-EVERY\]$"),
    ("mistaken", "^LookupError: a mistake of the script's own$"),
])
def test_a_refusal_is_a_line_and_a_mistake_of_the_script_keeps_its_traceback(
    homes: Homes, folders: Folders, how: str, pattern: str,
) -> None:
    first, second = launched(homes, folders, how)
    code, _, said = ended(second)
    first.send_signal(signal.SIGINT)
    ended(first)
    assert code in (1, 2), "2: the launcher has heard of the other home's end first"
    assert re.search(pattern, said, re.MULTILINE)
    assert ("Traceback" in said) == (how == "mistaken")


def test_a_wait_is_logged_at_growing_intervals_and_once_when_it_is_over() -> None:
    state, lines = step_module.WaitState(), []
    for now in range(100, 160):
        since = 110.0 if 110 <= now < 152 else 0.0
        state, line = step_module.wait_notice(state, since, float(now), lambda: ("worker 2 (ben)", "up to 60 s"))
        lines += [(now - 110, line)] if line else []
    assert [at for at, _ in lines] == [5, 10, 20, 40, 42]
    assert lines[0][1] == "waiting for worker 2 (ben): 5 s, up to 60 s"
    assert lines[-1][1] == "continues after 42 s of waiting for worker 2 (ben)"


def test_short_waits_are_not_logged() -> None:
    state = step_module.WaitState()
    for now in range(1000):
        state, line = step_module.wait_notice(state, now - now % 4 + 0.5, float(now), lambda: ("nobody", ""))
        assert line == ""


if __name__ == "__main__":
    main(*sys.argv[1:])
