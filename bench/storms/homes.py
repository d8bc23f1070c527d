"""The processes of a storm's job: `commlayer serve`, and homes that join it. A proxy that can cut it carries a home's bytes.

A home is two processes, as with `commlayer join`: a launcher that registers, and a worker. Both are forked from a process that
has torch loaded, because homes of a time-lapse start that many times faster.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.storms.reports import LEAST, Ended, Stepped, Work
from commlayer.config import home_environment
from commlayer.errors import CommError
from tests.chaos import processes
from tests.chaos.cluster import CONTROL, FROM_LAUNCHER, HERE, PORT_TRIES, PORTS, THERE, all_free
from tests.chaos.processes import Started
from tests.chaos.proxy import Link, Proxy
from tests.chaos.wire import Seen

MEET_S = 60.0
"""Deadline for the meeting of the homes, on this machine."""
TOKEN = "of-a-storm"


class Job:
    """The server and the proxies; a context."""

    def __init__(self, homes: int, work: Work, settings: Mapping[str, float]) -> None:
        self.count, self.work = homes, work
        self._settings = {**settings, "token": TOKEN, "cache": "", "join_deadline_s": MEET_S, "last_call_s": MEET_S}
        self.links = [Link(random.Random(0)) for _ in range(homes)]
        self._homes: list[Home | None] = [None] * homes
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder = stack.enter_context(processes.scratch())
            self.port = self._free_port()
            seen = Seen(self.count)
            for slot in range(self.count):
                proxy = Proxy((CONTROL.format(slot + 1), self.port), (HERE, self.port), self.links, seen, slot)
                stack.callback(proxy.close)
            stack.callback(Proxy((THERE, self.port + 1), (HERE, self.port + 1), self.links, seen, whose=self._whose).close)
            for link in self.links:
                stack.callback(link.close)
            self._server = Started(
                processes.serve, ["--port", str(self.port), "--bind", HERE, "--advertise", THERE, "--workers", str(self.count),
                                  "--min-workers", str(LEAST), "--events", str(self.folder)], 0.0,
                environ=self.environ(), lines=self.folder / "server.lines")
            stack.callback(self._server.end)
            stack.callback(self._end_homes)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def _free_port(self) -> int:
        """The coordinator's port; data uses the next one."""
        hosts = HERE, THERE, *(CONTROL.format(slot + 1) for slot in range(self.count))
        for _ in range(PORT_TRIES):
            if all_free(hosts, [port := random.choice(PORTS), port + 1]):
                return port
        raise CommError(f"no two ports in a row are free on {', '.join(hosts)}", peer="storm", code="E-ADDRESS")

    def _whose(self, address: tuple[str, int]) -> int:
        """The slot of the worker that owns that end of a data connection, or -1."""
        workers = [home.worker if home else None for home in self._homes]
        return processes.owner_of(address, [worker.process.pid if worker else None for worker in workers])

    def environ(self) -> dict[str, str]:
        return {f"COMMLAYER_{name.upper()}": str(value) for name, value in self._settings.items()}

    def home(self, slot: int) -> Home:
        """Starts a home there."""
        if earlier := self._homes[slot]:
            earlier.end()
        home = self._homes[slot] = Home(self, slot)
        return home

    def cut(self, slot: int) -> None:
        for way in self.links[slot].ways:
            way.hold()

    def mend(self, slot: int) -> None:
        for way in self.links[slot].ways:
            way.release()

    def finish_at(self, step: int) -> bool:
        """All homes end after this step. Returns whether they can."""
        for home in self._homes:
            if home and home.worker:
                home.worker.order(step)
        return True

    def removals(self) -> list[tuple[float, str]]:
        """When the coordinator decided that a worker is no longer a member, and its name."""
        file = self.folder / "events.jsonl"
        events = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
        return [(event["time"], event["member"]) for event in events
                if event["event"] == "member" and event["rank"] == -1 and event["state"] in ("dead", "left")]

    def log(self) -> str:
        return "\n".join(f"{path.stem}: {text}" for path in sorted(self.folder.glob("*.lines"))
                         for text in path.read_text(errors="replace").splitlines()[-8:])

    def _end_homes(self) -> None:
        for home in self._homes:
            if home:
                home.end()


class Home:
    """A home, from its start to its end."""

    def __init__(self, job: Job, slot: int) -> None:
        self._job, self._join = job, f"{CONTROL.format(slot + 1)}:{job.port}"
        self._lines = job.folder / f"home-{slot}.lines"
        self._launcher = Started(processes.attend, -1, environ=job.environ() | {"COMMLAYER_JOIN": self._join},
                                 lines=Path(self._lines))
        self.worker: Started | None = None
        self.name = ""
        """The worker's name in the job's events, once it has one."""
        self.refused = False

    def reports(self) -> list[Stepped | Ended]:
        """What it has reported since the last call. Starts the worker as soon as the launcher has a place."""
        if self.worker is None and not self.refused and self._launcher.pipe.poll():
            try:
                launch, nodes, least = self._launcher.pipe.recv()
            except EOFError:
                self.refused = True
                return []
            number = launch.joins if launch.joins >= 0 else launch.rank
            self.name = f"worker {number}"
            environ = home_environment(launch, nodes, {"join": self._join, "min_workers": str(least)})
            others = [name for name in environ if name.startswith("COMMLAYER_") and name not in FROM_LAUNCHER]
            environ = {name: value for name, value in environ.items() if name not in others} | {"OMP_NUM_THREADS": "1"}
            self.worker = Started(_train, number, self._job.work, environ=self._job.environ() | environ, lines=self._lines)
        return self.worker.told() if self.worker else []

    @property
    def gone(self) -> bool:
        """Whether its worker is gone, or no place was free for it."""
        return self.refused or (self.worker is not None and self.worker.silent)

    def signal(self, number: int) -> None:
        """Ctrl-C and a crash strike the worker; a stopped machine stops both processes."""
        assert self.worker is not None
        self.worker.signal(number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self._launcher.signal(number)

    def released(self, reason: str) -> None:
        """The launcher learns that its worker has ended, and reports it."""
        self._launcher.order(reason)

    def end(self) -> None:
        for process in filter(None, (self.worker, self._launcher)):
            process.end()


def _train(pipe: Any, number: int, work: Work) -> None:
    from bench.storms import training

    training.train(pipe, number, work)
