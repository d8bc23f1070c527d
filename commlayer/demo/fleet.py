"""Runs the demo's processes over simulated links, reads what the workers report, and ends them."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from commlayer.config import Config, child_environment
from commlayer.demo.links import LOOPBACK, LinkDirection, Relay
from commlayer.demo.settings import ALONE, COMMLAYER, DDP, RTT_S, DemoSettings, WorkerReport, WorkerSettings, read_report
from commlayer.errors import CommError, DeadlineExceeded
from commlayer.records import encode

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("training.py")
START_S = 120.0
"""Seconds that all workers may take to start. All workers load torch at the same time."""
FORKED_S = 2.0
"""Seconds that workers get to end after the process that has forked them."""
GRACE_S = 20.0
"""Seconds to wait for the processes to end: longer than workers and server take, also on a busy machine."""
FORKS = "alone and DDP"
"""The process whose children are the workers of these runs."""
LINE = re.compile(r"commlayer join (\S+)@(\S+):(\d+)#(\S+)")
"""The line that `commlayer serve` prints for each home: name, host, port, token."""
GLOO_PORTS = range(1 << 12, 1 << 15, 1 << 8)
"""Ports for the relays of Gloo: the smallest numbers in the byte order of x86 and ARM, see training.Addresses."""
PAGE = re.compile(r"page: (http\S+)")


class HomeLink:
    """A home's uplink and downlink."""

    def __init__(self, settings: DemoSettings) -> None:
        self.up, self.down = LinkDirection(settings.up_bps), LinkDirection(settings.down_bps)


class Fleet:
    """Context manager that starts the processes of all runs on entry and ends them on exit."""

    def __init__(self, settings: DemoSettings) -> None:
        self._settings = settings
        self.lines: dict[str, list[HomeLink]] = {run: [HomeLink(settings) for _ in range(settings.homes)]
                                                 for run in (DDP, COMMLAYER)}
        self.page = ""
        """Address of the job's page; "" without."""
        self._folder = tempfile.TemporaryDirectory(prefix="commlayer-demo-")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._reports: queue.SimpleQueue[WorkerReport] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []
        self._ports = [0] * settings.homes
        """Gloo's port of each rank of DDP, from the rank's report."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Fleet:
        with contextlib.ExitStack() as stack:
            stack.callback(self._folder.cleanup)
            relay = stack.enter_context(Relay(RTT_S / 2))
            stack.callback(self._end)
            self._start("serve", ["-m", "commlayer", "serve", "--workers", str(self._settings.homes), "--dir", "keys",
                                  "--invite", ",".join(f"home-{n}" for n in range(1, self._settings.homes + 1)),
                                  *(["--page", "0"] if self._settings.page else [])])
            self._start(FORKS, [str(SCRIPT), *map(_text, self._alone_and_ddp(relay))])
            self._join(relay)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _alone_and_ddp(self, relay: Relay) -> Iterator[WorkerSettings]:
        homes, lines, seed = self._settings.homes, self.lines[DDP], self._settings.seed
        yield WorkerSettings(ALONE, 0, 1, seed)
        for home in range(homes):
            ports = [relay.listen(functools.partial(self._ports.__getitem__, to), (lines[home].up, lines[to].down),
                                  (lines[to].up, lines[home].down), GLOO_PORTS) for to in range(home)]
            yield WorkerSettings(DDP, home, homes, seed, self._path("store"), tuple(ports))

    def _join(self, relay: Relay) -> None:
        """Starts `commlayer join` in each home, with the line that the server has printed, at the relay's address."""
        homes, until = self._settings.homes, time.monotonic() + START_S
        found: list[tuple[str, str, str, str]] = []
        while len(found) < homes:
            self._check(until)
            time.sleep(0.05)
            text = Path(self._path("serve.log")).read_text("utf-8", "replace")
            found = LINE.findall(text)
        self.page = "".join(PAGE.findall(text))
        for home, (name, _, port, token) in enumerate(found):
            line = self.lines[COMMLAYER][home]
            address = f"{name}@{LOOPBACK}:{relay.listen(functools.partial(int, port), (line.up,), (line.down,))}#{token}"
            settings = WorkerSettings(COMMLAYER, home, homes, self._settings.seed)
            self._start(name, ["-m", "commlayer", "join", address, str(SCRIPT), _text(settings)])

    def _start(self, name: str, command: Sequence[str]) -> None:
        with Path(self._path(f"{name}.log")).open("wb") as log:
            process = subprocess.Popen([sys.executable, *command], cwd=self._folder.name, env=self._environment(), stderr=log,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       start_new_session=True)  # Ctrl-C reaches only this process, which ends the others
        self._processes[name] = process
        self._readers.append(threading.Thread(target=self._read, args=(process,), name="demo reader", daemon=True))
        self._readers[-1].start()

    def _environment(self) -> dict[str, str]:
        """No settings of the user, keys of homes in the demo's folder, one thread for each worker, and this package."""
        # Each home reaches the coordinator's port through the relay of its simulated link. gRPC needs no other port.
        variables = child_environment(Config(carrier="grpc", cache=""))
        variables |= {"XDG_CONFIG_HOME": self._folder.name, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                      "PYTHONSAFEPATH": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH", "")]))
        return variables

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if (report := read_report(line)) is not None:
                self._reports.put(report)

    def begin(self) -> list[WorkerReport]:
        """Starts the training of all workers together, once they are ready. Returns their reports that they are."""
        ready: list[WorkerReport] = []
        until = time.monotonic() + START_S
        while len(ready) < 1 + 2 * self._settings.homes:
            for report in self.reports(0.1):
                if report.port:
                    self._ports[report.home] = report.port
                elif report.ready:
                    ready.append(report)
            self._check(until)
        for line in (line for lines in self.lines.values() for line in lines):
            line.up.nbytes = line.down.nbytes = 0
        for name, process in self._processes.items():
            assert process.stdin is not None
            process.stdin.write(b"\n" * (1 + self._settings.homes if name == FORKS else 1))  # each worker takes one
            process.stdin.flush()
        return ready

    def reports(self, seconds: float) -> Iterator[WorkerReport]:
        """Yields what workers report within that time. Raises CommError with the end of its log if a process has ended."""
        until = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while (left_s := until - time.monotonic()) > 0:
                yield self._reports.get(timeout=left_s)
        self._check()

    def _check(self, until: float | None = None) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                lines = [line for line in Path(self._path(f"{name}.log")).read_text("utf-8", "replace").split("\n") if line]
                wrong = [line for line in lines if "Error" in line or "[E-" in line]
                last = [*(lines[-1:] or ["no output"]), *wrong[-1:]][-1]
                raise CommError(f"ended early, with exit code {process.returncode}: {last}", peer=f"process {name!r}")
        if until is not None and time.monotonic() > until:
            raise DeadlineExceeded(f"not ready within {START_S:g} s", peer="the demo's workers")

    def _path(self, name: str) -> str:
        return str(Path(self._folder.name, name))

    def _end(self) -> None:
        """Ends all processes: closes their standard input, which ends workers, and terminates them. Returns when they, and the
        workers that they have forked, have ended."""
        # A second Ctrl-C must not interrupt the cleanup of the first.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        until = time.monotonic() + GRACE_S
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            _end_group(process.pid)
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_group(group: int) -> None:
    """Waits until no process of the group is left, at most FORKED_S; then kills those that are."""
    until = time.monotonic() + FORKED_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(0.01)
        os.killpg(group, signal.SIGKILL)


def _text(settings: WorkerSettings) -> str:
    return encode(settings).decode()
