"""Sites as processes: `commlayer serve` and `commlayer join` as a user starts them, and what they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from support import ROOT

TOKEN = "secret-of-this-test"
WAIT_S = 100.0
Process = subprocess.Popen[str]
KILLED, REFUSED = 128 + signal.SIGKILL, 2
QUICK = {"OMP_NUM_THREADS": "1", "COMMLAYER_HEARTBEAT_S": "0.5", "COMMLAYER_DEAD_AFTER_S": "3",
         "COMMLAYER_JOIN_DEADLINE_S": "40", "COMMLAYER_LAST_CALL_S": str(WAIT_S)}
FULL = "the job is running with all its", "of the job's"
"""Refusals of a site while the coordinator has not detected yet that another one died."""


class Sites:
    """One `commlayer serve` and any number of `commlayer join`."""

    def __init__(self) -> None:
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")}
        self._environment |= QUICK | {"COMMLAYER_CONFIG": "", "COMMLAYER_CACHE": "", "COMMLAYER_TOKEN": TOKEN}
        self._processes: list[Process] = []
        self.address = ""

    def set(self, **settings: str) -> None:
        """Sets environment variables of the processes started after this call."""
        self._environment |= settings

    def run(self, *arguments: str) -> Process:
        """Starts a command as a shell does in the background: SIGINT is ignored unless a process handles it."""
        line = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-m", "commlayer.cli.main", *arguments]
        process = subprocess.Popen(line, text=True, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        self._processes.append(process)
        return process

    def serve(self, workers: int, *options: str) -> Process:
        process = self.run("serve", "--workers", str(workers), *options)
        assert process.stdout is not None
        self.address = json.loads(process.stdout.readline())["control"]
        return process

    def launch(self, script: str, *arguments: str, rank: int | None = None, options: Iterable[str] = ()) -> Process:
        place = () if rank is None else ("--node-rank", str(rank))
        return self.run("join", *place, *options, self.address, script, *arguments)

    def close(self) -> None:
        for process in reversed(self._processes):  # the server last
            process.kill()
            process.communicate(timeout=WAIT_S)


class Ended(NamedTuple):
    """Exit code of a process, the rows of JSON that it printed, and its standard error."""

    code: int
    rows: list[dict[str, Any]]
    errors: str


def ended(process: Process, starts: int = 1) -> Ended:
    """Waits for the end of a process that starts its script so many times."""
    out, errors = process.communicate(timeout=starts * WAIT_S)
    return Ended(process.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("{")], errors)


def all_ended(processes: Iterable[Process], *codes: int) -> list[Ended]:
    """Waits for all processes and checks their exit codes: 0 unless given."""
    ends = [ended(process) for process in processes]
    assert [end.code for end in ends] == list(codes or [0] * len(ends)), "\n".join(end.errors for end in ends)
    return ends


def joined(start: Callable[[], Process], starts: int = 1) -> Ended:
    """Starts a site that replaces a dead one, again until the coordinator admits it; waits for its end."""
    deadline = time.monotonic() + WAIT_S
    while True:
        end = ended(start(), starts)
        if end.code != REFUSED or not any(line in end.errors for line in FULL):  # a home that waits says so, too
            return end
        assert time.monotonic() < deadline, end.errors


def next_row(process: Process) -> dict[str, Any]:
    """The next row of JSON that the process prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return dict(json.loads(line))
    raise AssertionError(process.communicate(timeout=WAIT_S)[1])


def suspend(process: Process) -> list[int]:
    """Stops a process and all its descendants, as when a laptop sleeps. Returns their process ids."""
    pids = [process.pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return pids


def switch_off(process: Process) -> None:
    """Kills a process and all its descendants at once, so that none reports the death of another."""
    for pid in suspend(process):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
