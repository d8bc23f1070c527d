"""The processes and links of one chaos run: `commlayer serve` processes, workers, and proxies between them.

Servers listen on 127.0.0.1 and advertise 127.0.0.2, where the proxies are. Each worker has its own address for the coordinator,
so that its link is known. The cluster follows the workers, strikes once and collects the evidence; tests.chaos.verdict judges
it.
"""

from __future__ import annotations

import errno
import itertools
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from commlayer.cluster.keys import authority
from commlayer.config import home_environment
from commlayer.errors import CommError
from tests.chaos import processes
from tests.chaos.faults import FAULTS, FULL_NBYTES
from tests.chaos.processes import Started
from tests.chaos.proxy import Link, Proxy
from tests.chaos.reports import Began, Elements, Ended, Finding, Stepped, Summed, Task
from tests.chaos.trials import STEPS, Trial
from tests.chaos.wire import Seen

HERE, THERE, CONTROL = "127.0.0.1", "127.0.0.2", "127.0.1.{}"
PORTS = range(20_000, 32_000)
"""Below the range from which the system takes ports for outgoing connections."""
PORT_TRIES = 50
TOKEN = "of-a-chaos-run"
POLL_S = 0.02
BEHIND = 80
"""Number of steps that follow the step in which a home joins. A new home has its part of the samples after 64 steps."""
AHEAD = 10
"""Workers wait this many steps after the step at which a fault is to strike, so that the fault does not come too late."""
MEET_S, SLOW_MEET_S = 20.0, 60.0
"""Seconds until all processes of a job have met, on one machine and over slow links."""
FROM_LAUNCHER = "COMMLAYER_HOME", "COMMLAYER_JOIN", "COMMLAYER_MIN_WORKERS"
"""The COMMLAYER_ variables that a worker takes from its launcher. The launcher's other COMMLAYER_ variables come from this
process and do not apply to the run."""
LINGER_S = 4.0
"""Time for servers to end after the job."""
Waits = dict[str, float]
PATIENT: Waits = {"heartbeat_s": 0.2, "dead_after_s": 8.0, "reconnect_s": 15.0, "deadline_s": 20.0}
"""Timeouts for faults that heal: longer than any recovery takes, even on a busy machine."""
BRIEF: Waits = {"heartbeat_s": 0.1, "dead_after_s": 0.8, "reconnect_s": 0.8, "deadline_s": 1.5}
"""Timeouts if a process is lost for good: the others must notice within the run's time limit."""
UNTOLD: Waits = PATIENT | {"heartbeat_s": 0.1, "dead_after_s": 1.5, "reconnect_s": 3.0}
"""Timeouts if the coordinator is struck. Servers of a job that ends without it notice its silence within the run."""


class Evidence(NamedTuple):
    """What a run leaves for the verdict. `stepped` and `ended` are by worker; `struck_s` is 0 if there was no strike."""

    stepped: list[list[Stepped]]
    ended: list[Ended | None]
    shots: int
    struck_s: float
    wall_s: float
    faults: tuple[Finding, ...]
    """Errors seen on the wire."""
    contributions: int | None
    """Number of contributions in sums, and of payloads that were sent again; None if no proxy reads the frames."""
    repeats: int | None
    servers_left: tuple[str, ...]
    """Servers still running after the job. Empty if a remaining worker stopped with an error: then this is not checked."""
    left_files: tuple[str, ...]
    """Journal files that were left, except locks."""
    off: float
    """Largest difference between what was applied and what was put in; nan unless all workers finished."""
    lines: str
    began: Sequence[Sequence[Began]] = ()
    """Reports before each step, by worker, for jobs whose workers may be lost."""
    replayed: Sequence[str] = ()
    """For the same jobs: the digests that the steps should have."""


class Cluster:
    """Use it as a context."""

    here, there = HERE, THERE
    """Addresses where servers listen, and which they advertise."""
    insecure = False
    """Whether plain text is sent to addresses other than loopback."""
    interface = "lo"
    patient, brief, untold, meet_s, pace_s = PATIENT, BRIEF, UNTOLD, MEET_S, 0.0

    def __init__(self, trial: Trial, store: tuple[str, int], steps: int = STEPS, told_every: int = 1) -> None:
        self.trial, self._steps, self._store, self._told_every = trial, steps, store, told_every
        self.setting, self._fault = trial.setting, FAULTS[trial.fault]
        self._chance = random.Random(f"{trial.fault} {trial.seed} strikes")
        self.waits = self.brief if self._fault.ends else self.untold if self._fault.strikes == "coordinator" else self.patient
        self.seen = Seen(self.setting.workers)
        self.links: list[Link] = []
        self.controls: list[Link] = []
        self.workers: list[Started] = []
        self.servers: list[Started] = []
        self._homes: list[Started] = []
        """The launchers of the workers, if the workers are homes."""
        self._places = list(range(self.setting.workers))
        self._coordinator: Started | None = None
        self._strangers: list[socket.socket] = []
        self._marks: dict[int, int] = {}
        """By server: length of its log when it was last restarted."""
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder = stack.enter_context(processes.scratch())
            if self.setting.keys:
                authority.init(self.folder / "keys")
            stack.callback(self._end_processes)
            self._ports = self._free_ports()
            self._make_links(stack)
            if self.setting.apart:
                self._coordinator = self._serving("coordinator", full=self._fault.full)
            for number in range(self.setting.servers):
                self.servers.append(self._serving(f"server-{number}", number, full=self._fault.full))
            if self.setting.least:
                self._homes += [self._home(rank) for rank in range(self.setting.workers)]
            for rank in range(self.setting.workers):
                self.workers.append(self._worker(rank))
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def _free_ports(self) -> list[int]:
        """The coordinator's port, the port of its own server, and one for each separate server."""
        chance = random.Random()
        hosts = HERE, THERE, *(CONTROL.format(rank + 1) for rank in range(self.setting.workers))
        for _ in range(PORT_TRIES):
            first = chance.choice(PORTS)
            ports = [first, *range(first + 1, first + 2 + self.setting.servers)]
            if all_free(hosts, ports):
                return ports
        raise CommError(f"no {len(ports)} ports in a row are free on {', '.join(hosts)}, of {PORT_TRIES} that were tried in "
                        f"{PORTS.start} to {PORTS.stop - 1}", peer="chaos", code="E-ADDRESS")

    def _data_port(self, number: int) -> int:
        return self._ports[1 + number + self.setting.apart] if self.setting.apart else self._ports[1 + number]

    def _make_links(self, stack: ExitStack) -> None:
        chances = [random.Random(f"{self.trial.seed} {rank}") for rank in range(self.setting.workers)]
        self.controls = [Link(chance) for chance in chances]
        grpc = self.setting.carrier == "grpc"  # data uses the same connections as control
        self.links = self.controls if grpc else [Link(chance) for chance in chances]
        for rank in range(self.setting.workers):
            proxy = Proxy((CONTROL.format(rank + 1), self._ports[0]), (HERE, self._ports[0]), self.controls, self.seen, rank)
            stack.callback(proxy.close)
        for number in range(self.setting.servers):
            port = self._data_port(number)
            whose = None if self.watched or self.setting.carrier == "grpc" else self._whose
            stack.callback(Proxy((THERE, port), (HERE, port), self.links, self.seen, whose=whose).close)
        for link in dict.fromkeys((*self.links, *self.controls)):
            stack.callback(link.close)

    def _whose(self, address: tuple[str, int]) -> int:
        """The worker that owns that end of a connection, or -1."""
        number = processes.owner_of(address, [worker.process.pid for worker in self.workers])
        return self._places[number] if number >= 0 else -1

    def _serving(self, name: str, number: int = -1, *, full: bool = False, off_s: float = 0.0) -> Started:
        common = ["--journal", str(self.folder / f"{name}.journal"), "--bind", self.here, "--advertise", self.there]
        if number >= 0 and self.setting.apart:
            arguments = ["--join", f"{self.here}:{self._ports[0]}", "--port", str(self._data_port(number)),
                         "--number", str(number)]
        else:
            arguments = ["--port", str(self._ports[0]), "--workers", str(self.setting.workers),
                         "--servers", str(self.setting.servers), *(["--no-server"] if self.setting.apart else [])]
            arguments += ["--min-workers", str(self.setting.least)] if self.setting.least else []
        environ = self._environ(name) | {"COMMLAYER_CARRIER": self.setting.carrier, "COMMLAYER_LAST_CALL_S": str(MEET_S)}
        return Started(processes.serve, [*arguments, *common], off_s, environ=environ, lines=self.folder / f"{name}.lines",
                       most_nbytes=FULL_NBYTES if full else 0, inside=self._inside(0))

    def _environ(self, name: str) -> dict[str, str]:
        settings = {**self.waits, "token": TOKEN, "keys": self._keys_of(name), "insecure": int(self.insecure), "cache": ""}
        return {f"COMMLAYER_{key.upper()}": str(value) for key, value in settings.items()}

    def _home(self, rank: int) -> Started:
        join = {"COMMLAYER_JOIN": f"{self._join(rank)}:{self._ports[0]}", "COMMLAYER_JOIN_DEADLINE_S": str(self.meet_s)}
        return Started(processes.attend, rank, environ=self._environ(f"worker-{rank}") | join,
                       lines=self.folder / f"home-{rank}.lines", inside=self._inside(1 + rank))

    def _seat(self, home: Started) -> Any:
        """Waits until all homes have met and returns the launcher's seat. Raises EOFError if the home is refused."""
        if not home.pipe.poll(self.meet_s):
            raise CommError(f"the homes have not met within {self.meet_s:g} s:\n{self._lines()}", peer="chaos")
        return home.pipe.recv()

    def _in_home(self, rank: int, seat: Any) -> dict[str, str]:
        """The environment that the launcher of that home gives to its worker."""
        launch, nodes, least = seat
        environ = home_environment(launch, nodes, {"join": f"{self._join(rank)}:{self._ports[0]}", "min_workers": str(least)})
        others = [name for name in environ if name.startswith("COMMLAYER_") and name not in FROM_LAUNCHER]
        return self._environ(f"worker-{rank}") | {name: value for name, value in environ.items() if name not in others}

    def _worker(self, rank: int, again: Any = None) -> Started:
        """`again`: the seat of a worker that joins the running job."""
        settings: dict[str, Any] = self.waits | {
            "join": f"{self._join(rank)}:{self._ports[0]}", "insecure": self.insecure, "token": TOKEN,
            "keys": self._keys_of(f"worker-{rank}"),
            "join_deadline_s": self.meet_s, "ranks_per_node": 1,
            "fuse_nbytes": self._bucket_nbytes, "cut_nbytes": 2 * self._bucket_nbytes,
            "carrier": self.setting.carrier, "drift_steps": 10, "servers": "one" if self.setting.servers == 1 else "each"}
        number = rank if again is None else len(self.workers)
        task = Task(number, self.setting.workers, self._steps, self.setting.codec, self._store, self.folder.name, settings,
                    str(self.folder), self._told_every, self.trial.at + AHEAD if self.trial.at and again is None else 0,
                    self.setting.least, self.setting.width, self.pace_s, BEHIND if self._fault.joins else 0)
        environ = self._in_home(rank, again or self._seat(self._homes[rank])) if self.setting.least else {}
        environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.interface}
        return Started(processes.train, task, environ=environ,
                       lines=self.folder / f"worker-{number}.lines", inside=self._inside(1 + rank))

    def _keys_of(self, name: str) -> str:
        """The folder with that node's keys, or "" without TLS. A restarted node keeps its folder."""
        if not self.setting.keys:
            return ""
        place = self.folder / "keys" / authority.NODES / name
        return str(place if place.exists() else authority.add(self.folder / "keys", name))

    def _join(self, rank: int) -> str:
        """The address at which that worker finds the coordinator."""
        return CONTROL.format(rank + 1)

    def _inside(self, host: int) -> str:
        """The network namespace of a host; "" for this process's own. Servers are on host 0, workers on host 1 and up."""
        return ""

    @property
    def _bucket_nbytes(self) -> int:
        """Several buckets, whatever the size of the model."""
        return max(2048, self.setting.width**2)

    @property
    def watched(self) -> bool:
        """Whether a proxy reads the frames. It cannot with gRPC or TLS; if homes may leave, weights count no contributions."""
        return self.setting.carrier == "tcp" and not self.setting.keys and not self.setting.least

    def pause(self, chance: random.Random, least_s: float, most_s: float) -> None:
        """Waits until what was struck comes back."""
        time.sleep(chance.uniform(least_s, most_s))

    @property
    def coordinator(self) -> Started:
        return self._coordinator or self.servers[0]

    def restart_server(self, number: int, *, full: bool = False, off_s: float = 0.0) -> None:
        self.servers[number].end()
        self._marks[number] = len(self._lines_of(number))
        self.servers[number] = self._serving(f"server-{number}", number, full=full, off_s=off_s)

    def restart_coordinator(self) -> None:
        assert self._coordinator is not None
        self._coordinator.end()
        self._coordinator = self._serving("coordinator")

    def end_home(self, number: int, *, finished: bool = False) -> None:
        """Reports to a worker's launcher how the worker ended. `number` counts all workers of the run, also earlier ones."""
        self._homes[number].order("finished" if finished else "a worker of this home has ended")

    def start_home_again(self, rank: int) -> None:
        """Replaces an ended worker on the same links. Retries until the coordinator knows that the old one is gone."""
        self.end_home(max(number for number, place in enumerate(self._places) if place == rank))
        until = time.monotonic() + self.meet_s
        while True:
            home = self._home(rank)
            try:
                seat = self._seat(home)
                break
            except EOFError:
                home.end()
                if time.monotonic() > until:
                    raise CommError(f"a home that came again was not let in within {self.meet_s:g} s", peer="chaos") from None
        self._homes.append(home)
        self._places.append(rank)
        self.workers.append(self._worker(rank, seat))

    def stranger(self, says: bytes) -> int:
        """Connects to one of the ports and sends `says`. Returns 1 on success, else 0."""
        try:
            one = socket.create_connection((self.here, self._chance.choice([self._ports[0], self._data_port(0)])), 1.0)
            one.sendall(says)
        except OSError:
            return 0
        self._strangers.append(one)
        return 1

    def said(self, words: str) -> int:
        """How often the victim, a server, has logged these words since its last restart."""
        return self._lines_of(self.trial.number)[self._marks.get(self.trial.number, 0) :].count(words)

    def _lines_of(self, number: int) -> str:
        path = self.folder / f"server-{number}.lines"
        return path.read_text(errors="replace") if path.exists() else ""

    def run(self, limit_s: float, strike: Callable[[Cluster, Trial, random.Random], int] = lambda *_: 1) -> Evidence:
        """Runs until all workers that can end have ended, or for `limit_s`. `strike` is called once and returns its hits."""
        begin = time.monotonic()
        stepped, began, ended = list[list[Stepped]](), list[list[Began]](), list[Ended | None]()
        struck, struck_s, waiting = 0, 0.0, set[int]()
        while time.monotonic() < begin + limit_s:
            for rank in range(len(ended), len(self.workers)):  # a worker may have joined
                stepped.append([])
                began.append([])
                ended.append(None)
                waiting |= {rank} if self._homes else set()
            for rank, worker in enumerate(self.workers):
                for report in worker.told():
                    if isinstance(report, Stepped):
                        stepped[rank].append(report)
                    elif isinstance(report, Began):
                        began[rank].append(report)
                    else:
                        ended[rank] = report
                if rank in waiting and (ended[rank] is not None or worker.silent):
                    waiting.remove(rank)
                    self.end_home(rank, finished=ended[rank] is not None)
            if not struck_s and any(steps and steps[-1].step >= self.trial.at for steps in stepped):
                time.sleep(self.trial.after_s)
                for worker in self.workers:
                    worker.order(None)
                struck_s = time.monotonic()
                struck = strike(self, self.trial, self._chance)
            if all(report is not None or self._lost(rank) for rank, report in enumerate(ended)):
                break
            wait([worker.pipe for worker, report in zip(self.workers, ended, strict=False) if report is None], POLL_S)
        lost = self.trial.victims if self._fault.loses else ()
        stopped = any(report is not None and report.what for rank, report in enumerate(ended) if rank not in lost)
        left = () if stopped else self._servers_left()
        wall_s = time.monotonic() - begin
        if self._fault.says:  # the restart alone does not count
            struck = self.said(self._fault.says)
        shots = struck + sum(link.shots for link in dict.fromkeys((*self.links, *self.controls)))
        files = tuple(str(path.relative_to(self.folder)) for path in sorted(self.folder.glob("*.journal/*"))
                      if path.name != "lock")
        seen = self.seen
        return Evidence(stepped, ended, shots, struck_s, wall_s, tuple(seen.faults),
                        seen.contributions if self.watched else None, seen.repeats if self.watched else None,
                        left, files, self.off(), self._lines(), began, self._replayed(began, stepped))

    def _replayed(self, began: Sequence[Sequence[Began]], stepped: Sequence[Sequence[Stepped]]) -> list[str]:
        """The digests of the same steps, computed in another process by plain means over the workers that began each step. One
        that has not completed it may be in any of its sums or in none."""
        longest = max(range(len(stepped)), key=lambda rank: len(stepped[rank]))
        if not self.setting.least or not stepped[longest]:
            return []
        used = [{start.step: start.samples for start in row} for row in began]
        complete = [{step.step for step in row} for row in stepped]
        steps = [Summed(step.digest, [(used[rank][step.step], step.step in complete[rank])
                                      for rank in range(len(used)) if used[rank].get(step.step)])
                 for step in stepped[longest]]
        buckets = msgspec.json.decode((self.folder / f"buckets-{longest}").read_bytes(), type=list[list[Elements]])
        process = Started(processes.replay, self.setting.workers, self.setting.width, steps, buckets,
                          environ={"OMP_NUM_THREADS": "1"}, lines=self.folder / "replay.lines")
        try:
            return list(process.pipe.recv()) if process.pipe.poll(MEET_S) else []
        except EOFError:
            return []
        finally:
            process.end()

    def _lost(self, rank: int) -> bool:
        """Whether that worker will send nothing more."""
        frozen = self.trial.fault == "freeze-worker" and rank == self.trial.number
        return frozen or self.workers[rank].silent

    def _servers_left(self) -> tuple[str, ...]:
        names = {f"server {n}": s for n, s in enumerate(self.servers)}
        names |= {"coordinator": self._coordinator} if self._coordinator is not None else {}
        until = time.monotonic() + LINGER_S
        for one in names.values():
            one.process.join(max(0.0, until - time.monotonic()))
        return tuple(name for name, one in names.items() if one.process.is_alive())

    def off(self) -> float:
        ranks = range(self.setting.workers)
        if not all((self.folder / f"applied-{rank}").exists() for rank in ranks):
            return float("nan")
        put = sum(np.fromfile(self.folder / f"put-{rank}") for rank in ranks)
        return max(float(np.abs(np.fromfile(self.folder / f"applied-{rank}") - put).max()) for rank in ranks)

    def _lines(self) -> str:
        return "\n".join(f"{path.stem}: {line}" for path in sorted(self.folder.glob("*.lines"))
                         for line in path.read_text(errors="replace").splitlines())

    def _end_processes(self) -> None:
        for one in (*self.workers, *self._homes, *self.servers, *([self._coordinator] if self._coordinator else [])):
            one.end()
        for stranger in self._strangers:
            stranger.close()


def all_free(hosts: Sequence[str], ports: Sequence[int]) -> bool:
    """Whether all these ports are free. Raises CommError if that cannot be determined."""
    with ExitStack() as stack:
        for host, port in itertools.product(hosts, ports):
            try:
                stack.enter_context(socket.create_server((host, port)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
                line = f"cannot listen at {host}:{port}: {error.strerror} (errno {error.errno})"
                raise CommError(line, peer="chaos", code="E-ADDRESS") from None
    return True
