"""The first evening as a new user has it: the tutorial's lines, on a server and three homes, all of them behind routers.

One home is paused by its owner, one has a cap of a month that it reaches, and one is a laptop whose lid is closed.
`COMMLAYER_EVENING=DIR` keeps what each of them has printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT
from support.coordinators import until
from support.lab import needs_lab
from support.nat import SERVER, Nat
from support.sites import suspend

pytest.importorskip("cryptography", reason="cryptography is not installed")
pytestmark = [needs_lab, pytest.mark.nightly, pytest.mark.timeout(600)]
HOMES = ("anna", "ben", "cleo")
SILENT_S = 8
"""`reconnect_s` in time-lapse. By default it is 60 s."""
WAIT_S = 90.0
ROOM_NBYTES = 6_000_000
"""What anna's cap leaves: her home joins with 4 MB. These lines have no limit, so some MB pass before the first looks."""
ADDRESS = f"{SERVER}:7000"


class Person:
    """Someone at one machine, who types commands. All that they print is in one file."""

    def __init__(self, nat: Nat, place: int, name: str, folder: Path) -> None:
        self._nat, self._place, self.name, self._home = nat, place, name, folder / name
        self._seen = 0
        shutil.copytree(ROOT / "examples", self._home / "examples")
        self._screen = folder / f"{name}.txt"
        self._screen.touch()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMMLAYER_", "XDG_"))}
        self._environment = kept | {
            "HOME": str(self._home), "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "COMMLAYER_RECONNECT_S": str(SILENT_S), "COMMLAYER_DEAD_AFTER_S": "5"}

    def types(self, line: str) -> subprocess.Popen[str]:
        """Starts a command in the background."""
        with self._screen.open("a") as screen:
            screen.write(f"$ {line}\n")
            screen.flush()
            return self._nat.popen(self._place, ["sh", "-c", f"exec {line}"], stdout=screen, stderr=screen, cwd=self._home,
                                   env=self._environment, start_new_session=True)

    def runs(self, line: str) -> str:
        """Runs a command to its end, and returns what it printed."""
        before = len(self.screen)
        assert self.types(line).wait(WAIT_S) == 0, self.screen
        return self.screen[before:]

    def traffic_nbytes(self) -> int:
        """What this home has counted in this month."""
        counted = json.loads((self._home / ".config" / "commlayer" / "traffic.json").read_text())
        return sum(counted["months"].values())

    @property
    def screen(self) -> str:
        return self._screen.read_text()

    def sees(self, words: str) -> str:
        """Waits for a line with these words, after those that were waited for before, and returns it."""
        def lines() -> list[str]:
            return [line for line in self.screen[self._seen :].splitlines(keepends=True) if re.search(words, line)]

        until(lambda: bool(lines()) and lines()[0].endswith("\n"), f"{self.name} sees {words!r}:\n{self.screen}", WAIT_S)
        line = lines()[0]
        self._seen = self.screen.index(line, self._seen) + len(line)
        return line


@pytest.fixture(name="folder")
def folder_of_screens(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if kept := os.environ.get("COMMLAYER_EVENING"):
        for screen in tmp_path.glob("*.txt"):
            shutil.copy(screen, kept)


def steps(top: str) -> int:
    """The last step that `commlayer top` shows."""
    return max((int(number.replace(",", "")) for number in re.findall(r"step ([\d,]+)", top)), default=0)


def others_train(watcher: Person, before: int) -> int:
    """Waits until `commlayer top` shows a later step than `before`, and returns it."""
    end = time.monotonic() + WAIT_S
    while (now := steps(watcher.runs(f"commlayer top {watcher.name}@{ADDRESS} --once"))) <= before:
        assert time.monotonic() < end, watcher.screen
    return now


def test_the_first_evening_behind_routers(folder: Path) -> None:
    with Nat(len(HOMES), forwards=True) as nat:
        flat = Person(nat, 0, "flat", folder)
        anna, ben, cleo = people = [Person(nat, 1 + number, name, folder) for number, name in enumerate(HOMES)]
        server = flat.types(f"commlayer serve --bind 0.0.0.0:7000 --advertise {SERVER} --workers 3 --min-workers 2 "
                            f"--journal job1 --invite {','.join(HOMES)} --events run1")
        lines = [flat.sees(f"commlayer join {name}@").strip().replace("train.py", "examples/homes.py 100000") for name in HOMES]
        watch = flat.sees("watch the job: ").partition("watch the job: ")[2].strip()
        trains = {name: person.types(line) for name, person, line in zip(HOMES, people, lines, strict=True)}
        for person in people:
            person.sees("starting with|joining the running job")
        flat.sees("all joined")
        shown = others_train(anna, 0)
        flat.runs(f"{watch} --once")

        ben.runs("commlayer pause")
        ben.sees("this home pauses until")
        flat.sees("continuing with 2 workers")
        others_train(anna, shown)
        ben.runs("commlayer resume")
        ben.sees("joining the running job")
        flat.sees("continuing with 3 workers")

        asleep = suspend(trains["cleo"])
        flat.sees("continuing with 2 workers")
        shown = others_train(anna, shown)
        for pid in asleep:
            os.kill(pid, signal.SIGCONT)
        cleo.sees("joining the running job")
        flat.sees("continuing with 3 workers")
        others_train(anna, shown)

        trains["anna"].send_signal(signal.SIGINT)
        assert trains["anna"].wait(WAIT_S) == 130
        cap = (anna.traffic_nbytes() + ROOM_NBYTES) / 1e6
        trains["anna"] = anna.types(f"commlayer join anna@{ADDRESS} --monthly {cap:.1f}MB examples/homes.py 100000")
        anna.sees("joining the running job")
        anna.sees("this home pauses until 1 ")
        assert anna.traffic_nbytes() < 1e6 * cap
        others_train(ben, shown)

        flat.runs("commlayer log run1")
        for process in trains.values():
            process.send_signal(signal.SIGINT)
        assert [process.wait(WAIT_S) for process in trains.values()] == [130] * len(HOMES)
        server.send_signal(signal.SIGINT)
        server.wait(WAIT_S)
        assert "Traceback" not in flat.screen
