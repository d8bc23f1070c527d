"""Real processes, over TCP and gRPC: one is killed, one is stopped, and every survivor names it in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PEER = Path(__file__).parents[1] / "support" / "scripts" / "transport_peer.py"
ROOT = PEER.parents[3]


class Ranks:
    """The processes; ended by pid when the test ends, however it ends."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[str]] = []
        self.pids: list[int] = []

    def start(self, n: int, deadline_s: float, loader: bool) -> None:
        path = os.pathsep.join((str(ROOT), str(PEER.parents[2])))
        for rank in range(n):
            extra = ["dataloader"] if loader and rank == n - 1 else []
            command = [sys.executable, str(PEER), str(rank), str(n), str(deadline_s), *extra]
            self.running.append(subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}))
        addresses = [self.line(rank)["address"] for rank in range(n)]
        for process in self.running:
            assert process.stdin is not None
            process.stdin.write(json.dumps(addresses) + "\n")
            process.stdin.flush()

    def line(self, rank: int) -> dict[str, Any]:
        stdout = self.running[rank].stdout
        assert stdout is not None
        text = stdout.readline()
        assert text, f"rank {rank} ended without a word"
        return dict(json.loads(text))

    def end(self) -> None:
        for pid in [process.pid for process in self.running if process.poll() is None] + self.pids:
            os.kill(pid, signal.SIGKILL)
        for process in self.running:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
            process.wait()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    processes = Ranks()
    yield processes
    processes.end()


def survivors_say(ranks: Ranks, n: int, error: str, code: str) -> list[dict[str, Any]]:
    lines = [ranks.line(rank) for rank in range(n - 1)]
    for line in lines:
        assert (line.get("error"), line.get("code"), line.get("peer")) == (error, code, f"worker {n - 1}"), line
    for process in ranks.running[: n - 1]:
        assert process.stdin is not None
        process.stdin.close()
    for process in ranks.running[: n - 1]:
        assert process.wait(30) == 0
    return lines


def test_a_killed_trainer_is_lost_at_once_though_its_dataloader_worker_lives(ranks: Ranks) -> None:
    """Over gRPC by rank 0, over TCP by rank 1."""
    n = 3
    ranks.start(n, deadline_s=60, loader=True)
    worker = ranks.line(n - 1)["worker"]
    ranks.pids.append(worker)
    for rank in range(n):
        assert ranks.line(rank) == {"step": 3}
    os.kill(ranks.running[-1].pid, signal.SIGKILL)
    for line in survivors_say(ranks, n, "PeerLost", "E-PEER-LOST"):
        assert line["early_s"] > 0
    os.kill(worker, 0)  # it holds copies of whatever it did not close


def test_a_stopped_trainer_is_overdue_by_name(ranks: Ranks) -> None:
    n = 4
    ranks.start(n, deadline_s=4, loader=False)
    for rank in range(n):
        assert ranks.line(rank) == {"step": 3}
    os.kill(ranks.running[-1].pid, signal.SIGSTOP)
    for line in survivors_say(ranks, n, "DeadlineExceeded", "E-DEADLINE"):
        assert -30 < line["early_s"] <= 0
