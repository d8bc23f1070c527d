"""Ctrl-C under torchrun: one line for each rank. Run as a script: the training."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import processes, rank_pool
from support.attached import mlp
from support.coordinators import until

import commlayer
from commlayer.engine.start import interrupted

WORLD, LIMIT_S = 2, 100.0


def train(folder: Path) -> None:
    model = mlp()
    with commlayer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), config=rank_pool.quick()) as session:
        while True:
            model(torch.ones(2, 12)).sum().backward()
            model.zero_grad()
            (folder / f"{session.rank}").write_text(str(os.getpid()))


def started(folder: Path) -> tuple[Any, list[int]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), __file__,
               str(folder)]
    process = subprocess.Popen(command, env=processes.clean_environment(), start_new_session=True, text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    files = [folder / str(rank) for rank in range(WORLD)]
    until(lambda: all(file.exists() and file.read_text() for file in files), "all ranks train", LIMIT_S)
    return process, [int(file.read_text()) for file in files]


@pytest.mark.parametrize("all_ranks", [True, False])
def test_ctrl_c_under_torchrun_is_one_line_for_each_rank(tmp_path: Path, all_ranks: bool) -> None:
    process, ids = started(tmp_path)
    if all_ranks:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    else:
        os.kill(ids[1], signal.SIGINT)
    try:
        _, text = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in text.splitlines() if line.startswith("commlayer: rank ")]
    counts = [sum(line.startswith(f"commlayer: rank {rank}: ") for line in lines) for rank in range(WORLD)]
    assert counts == [1, 1] or (not all_ranks and counts == [0, 1]), text  # torchrun may end rank 0 before it knows
    rank = r"\d" if all_ranks else "1"  # where both are interrupted, one may learn of the other's end first
    assert re.search(rf"commlayer: rank {rank}: interrupted in test_interrupted.py, line \d+", text), text
    assert "[rank" not in text, "tracebacks of ranks"


def test_exception_hook_of_the_script_and_other_tracebacks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    own: Callable[..., None] = lambda _kind, error, _trace: seen.append(error)  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", own)
    interrupted.print_one_line(0)
    assert sys.excepthook is own
    monkeypatch.setattr(sys, "__excepthook__", own)
    interrupted.print_one_line(0)
    assert sys.excepthook is not own
    other = commlayer.CommError("worker 1: left the job: KeyboardInterrupt")
    for error in (ValueError("of the script"), KeyboardInterrupt(), other):
        sys.excepthook(type(error), error, None)
    assert [type(error) for error in seen] == [ValueError]


if __name__ == "__main__":
    train(Path(sys.argv[1]))
