"""Commands of the pages about Slurm, SkyPilot and Kubernetes, as processes on this machine."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from support import ROOT
from support.processes import clean_environment
from support.sites import Process, switch_off

WAIT_S = 240.0
SCRIPT = ROOT / "tests" / "support" / "scripts" / "until_stopped.py"


def free_port(after: int = 21000) -> int:
    """A free port below those that the system gives away, whose successor is free, too."""
    for port in range(after, 32000, 2):
        try:
            with socket.create_server(("", port)), socket.create_server(("", port + 1)):
                return port
        except OSError:
            continue
    raise OSError("no free port")


def environment_of(home: Path) -> dict[str, str]:
    """That of a user with this home folder, who finds commlayer's and torch's commands."""
    result = clean_environment() | {"HOME": str(home), "OMP_NUM_THREADS": "1", "COMMLAYER_CONFIG": "",
                                    "COMMLAYER_JOIN_DEADLINE_S": "120", "COMMLAYER_LAST_CALL_S": "0.5"}
    return result | {"PATH": f"{Path(sys.executable).parent}:{result['PATH']}"}


def until(ready: Callable[[], object], what: str, folder: Path) -> None:
    """Waits; after WAIT_S it fails with the output files below `folder`."""
    deadline = time.monotonic() + WAIT_S
    while not ready():
        texts = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in folder.rglob("*.out"))
        assert time.monotonic() < deadline, f"not in time: {what}\n{texts}"
        time.sleep(0.3)


class Machines:
    """Machines with a home folder each, below one folder. Each runs one command at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, Process] = {}

    def run(self, name: str, *line: str, **settings: str) -> Process:
        (home := self.folder / name).mkdir(exist_ok=True)
        shutil.copy(SCRIPT, home / "train.py")
        with (home / f"{name}.out").open("a") as out:
            self._running[name] = subprocess.Popen(line, cwd=home, env=environment_of(home) | settings, text=True,
                                                   stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        return self._running[name]

    def output(self, name: str) -> str:
        return (self.folder / name / f"{name}.out").read_text()

    def says(self, name: str, pattern: str, times: int = 1) -> None:
        """Waits until that many lines match."""
        found = re.compile(f"^{pattern}$", re.MULTILINE)
        until(lambda: len(found.findall(self.output(name))) >= times, f"{name}: {pattern}", self.folder)

    def switch_off(self, name: str) -> None:
        switch_off(self._running.pop(name))

    def stop(self, name: str) -> None:
        """Lets the training end, and checks that all commands have succeeded."""
        (self.folder / name / "stop").touch()
        codes = {name: process.wait(WAIT_S) for name, process in self._running.items()}
        assert set(codes.values()) == {0}, {name: self.output(name)[-2000:] for name in codes}

    def close(self) -> None:
        for process in self._running.values():
            if process.poll() is None:
                switch_off(process)


def home_is_replaced(machines: Machines, start: Callable[[str], object], names: tuple[str, str]) -> None:
    """Both homes train; the second one is switched off, the first one continues alone, and a replacement joins it."""
    kept, lost = names
    for name in names:
        start(name)
    for name in names:
        machines.says(name, r"saved \d+ of 2")
    machines.switch_off(lost)
    machines.says(kept, r"saved \d+ of 1")
    start(lost)
    machines.says(lost, r"first [1-9]\d* of 2")
    alone = len(re.findall(r"^saved \d+ of 1$", machines.output(kept), re.MULTILINE))
    machines.says(kept, r"saved \d+ of [12]", alone + 1)
    assert machines.output(kept).count("first ") == 1


def replaced(line: str, values: Mapping[str, str]) -> str:
    """The line with other addresses and sizes, each of which it contains."""
    for old, new in values.items():
        assert old in line, (old, line)
        line = line.replace(old, new)
    return line
