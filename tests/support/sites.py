"""Homes as processes that are started as somebody types it, and what they print. Knows no script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOKEN = "secret-of-this-test"
WAIT_S = 60.0
QUICK = {"OMP_NUM_THREADS": "1", "COMMLAYER_HEARTBEAT_S": "0.5", "COMMLAYER_DEAD_AFTER_S": "3",
         "COMMLAYER_JOIN_DEADLINE_S": "40"}
FULL = "the job is running with all its", "of the job's"
"""By which a home is refused while those who died are not missed yet."""


class Homes:
    """`commlayer serve` and as many `commlayer launch`, each as somebody types it."""

    def __init__(self) -> None:
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")}
        self._environment |= QUICK | {"COMMLAYER_CONFIG": "", "COMMLAYER_TOKEN": TOKEN}
        self._processes: list[subprocess.Popen[str]] = []
        self.address = ""

    def set(self, **settings: str) -> None:
        """In the environment of whatever starts from now on."""
        self._environment |= settings

    def run(self, *arguments: str) -> subprocess.Popen[str]:
        """As in a shell's background, where Ctrl-C is ignored, and by all children that do not mind it themselves."""
        line = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-m", "commlayer.cli.main", *arguments]
        process = subprocess.Popen(line, text=True, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        self._processes.append(process)
        return process

    def serve(self, workers: int, *more: str) -> subprocess.Popen[str]:
        process = self.run("serve", "--workers", str(workers), *more)
        assert process.stdout is not None
        self.address = json.loads(process.stdout.readline())["control"]
        return process

    def close(self) -> None:
        for process in reversed(self._processes):  # the server last
            process.kill()
            process.communicate(timeout=WAIT_S)


def next_row(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next row of JSON that it prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return dict(json.loads(line))
    raise AssertionError(process.communicate(timeout=WAIT_S)[1])


def switch_off(process: subprocess.Popen[str]) -> None:
    """Ends it and all that it has started, at once: no part of it sends a last word for another."""
    every = [process.pid]
    for pid in every:
        os.kill(pid, signal.SIGSTOP)
        every += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    for pid in every:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=WAIT_S)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    """Its exit code, the rows of JSON that it printed, and what it said."""
    out, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("{")], errors


def let_in(start: Callable[[], subprocess.Popen[str]]) -> tuple[int, list[dict[str, Any]], str]:
    """Of a home that comes in place of one that has died, to its end."""
    until = time.monotonic() + WAIT_S
    while True:
        code, rows, errors = ended(start())
        if not any(line in errors for line in FULL):
            return code, rows, errors
        assert time.monotonic() < until, errors
