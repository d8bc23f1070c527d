"""The same storm for torchft's replicas, which run in an environment of their own (`make rivals`). See bench.storms.replicas.

Replicas connect to each other directly, so a cut stops the replica for as long instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.report import ROOT
from bench.storms.reports import Ended, Stepped, Work, read_line
from bench.tta.systems import HOME
from commlayer.errors import CommError
from tests.chaos import processes

ENVIRONMENT = "torchft"


class TorchftJob:
    """The lighthouse and the process that forks replicas; a context."""

    def __init__(self, homes: int, work: Work, scale: float) -> None:
        self.count, self._work, self._scale = homes, work, scale
        self._replicas: list[Replica] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder = stack.enter_context(processes.scratch())
            command = [str(HOME / ENVIRONMENT / "bin" / "python"), "-m", "bench.storms.replicas", str(self.folder),
                       self._work.mode, str(self._work.pace_s), str(self._scale)]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            with (self.folder / "forks.lines").open("wb") as lines:
                self._forks = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=lines,
                                               env=environ, text=True)
            stack.callback(self._forks.wait)
            stack.callback(self._forks.kill)  # and with it the lighthouse and all replicas
            self._pid()  # the lighthouse's
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def _pid(self) -> int:
        assert self._forks.stdout is not None
        if not (line := self._forks.stdout.readline()):
            raise CommError(f"it has ended: {self.log()}", peer="torchft's process")
        return int(line)

    def home(self, slot: int) -> Replica:
        number = len(self._replicas)
        assert self._forks.stdin is not None
        self._forks.stdin.write(f"{number} {int(number >= self.count)}\n")
        self._forks.stdin.flush()
        self._replicas.append(Replica(self.folder, number, self._pid(), slot))
        return self._replicas[-1]

    def cut(self, slot: int) -> None:
        self._newest(slot).signal(signal.SIGSTOP)

    def mend(self, slot: int) -> None:
        self._newest(slot).signal(signal.SIGCONT)

    def _newest(self, slot: int) -> Replica:
        return next(replica for replica in reversed(self._replicas) if replica.slot == slot)

    def finish_at(self, step: int) -> bool:
        """Replicas do not end together: the last ones would wait for a quorum."""
        return False

    def removals(self) -> list[tuple[float, str]]:
        """The lighthouse reports none."""
        return []

    def log(self) -> str:
        return "\n".join(f"{path.stem}: {text}" for path in sorted(self.folder.glob("*.lines"))
                         for text in path.read_text(errors="replace").splitlines()[-8:])


class Replica:
    def __init__(self, folder: Path, number: int, pid: int, slot: int) -> None:
        self.name, self.slot = f"replica {number}", slot
        self._reports, self._pid, self._read_nbytes = folder / f"{number}.jsonl", pid, 0

    def reports(self) -> list[Stepped | Ended]:
        if not self._reports.exists():
            return []
        with self._reports.open("rb") as file:
            file.seek(self._read_nbytes)
            whole, _, _ = file.read().rpartition(b"\n")
        self._read_nbytes += len(whole) + 1 if whole else 0
        return [read_line(text) for text in whole.decode().splitlines()]

    @property
    def gone(self) -> bool:
        """The process that forked it does not wait for it, so its process id stays its own."""
        return Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def released(self, reason: str) -> None:
        """Nobody but the lighthouse watches replicas."""
