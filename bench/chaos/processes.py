"""Processes that begin with torch and commlayer loaded, forked from one that has done nothing else: a run lasts no 3 s.

Each is a process of its own, with its own environment, signals and end. Loads no torch here: the process that is forked does.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import resource
import runpy
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.chaos.clock import jump
from bench.chaos.reports import Task
from commlayer.config import Launch, read_config, take_environment
from commlayer.errors import CommError

PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.utils.data", "commlayer.session", "commlayer.balance",
           "bench.chaos.training", "commlayer.cluster.server_process", "commlayer.cluster.summation_server",
           "commlayer.cli.main"]
START_S = 60.0
"""Until torch is loaded, once."""
DIE_S = 5.0
CLONE_NEWNET = 0x40000000


class Started:
    """A process. `lines` is where its standard error goes, and that of those that it was before."""

    def __init__(self, target: Callable[..., None], *args: Any, environ: Mapping[str, str], lines: Path,
                 most_nbytes: int = 0, inside: str = "") -> None:
        """`target(pipe, *args)`. `most_nbytes`: no file that it writes gets larger, 0: as the system has it. `inside`: the
        network namespace that it is in, a path; empty for this one."""
        self.lines, self._over = lines, False
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        given = (target, theirs, args, dict(environ), str(lines), most_nbytes, inside)
        self.process = context.Process(target=_begin, args=given, daemon=True)
        self.process.start()
        theirs.close()

    def signal(self, number: int) -> int:
        """1 if it was alive."""
        if not self.process.is_alive() or self.process.pid is None:
            return 0
        os.kill(self.process.pid, number)
        return 1

    def order(self, what: Any) -> int:
        """Tells it something; 1 if somebody is there to hear it."""
        try:
            self.pipe.send(what)
        except OSError:
            return 0
        return int(self.process.is_alive())

    def told(self) -> list[Any]:
        """What it has said since."""
        found = []
        try:
            while not self._over and self.pipe.poll():
                found.append(self.pipe.recv())
        except (EOFError, OSError):
            self._over = True
        return found

    @property
    def silent(self) -> bool:
        """Whether it will never say anything more."""
        return self._over or (not self.process.is_alive() and not self.pipe.poll())

    def end(self) -> None:
        """At once, whatever it does."""
        self.process.kill()
        self.process.join(DIE_S)
        self.pipe.close()


def _begin(target: Callable[..., None], pipe: Any, args: tuple[Any, ...], environ: dict[str, str], lines: str,
           most_nbytes: int, inside: str) -> None:
    os.setpgid(0, 0)
    with open(lines, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 2)
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if inside:
        with open(inside) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {inside}")
    take_environment(environ)
    if most_nbytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_nbytes, most_nbytes))
    target(pipe, *args)


def train(pipe: Any, task: Task) -> None:
    """A worker."""
    from bench.chaos import training

    training.train(pipe, task)


def replay(pipe: Any, workers: int, steps: Sequence[Sequence[Sequence[int]]]) -> None:
    """See training.replay."""
    from bench.chaos import training

    training.replay(pipe, workers, steps)


def attend(pipe: Any, place: int) -> None:
    """What `commlayer launch` does beside its worker, which who hears of its seat starts; until it is told how that ended."""
    from commlayer.cluster import messages
    from commlayer.cluster.site_client import SiteLease

    config = read_config()
    attendance = SiteLease(config.join, config, messages.site_request(1, place), lambda line: print(line, file=sys.stderr))
    seat = attendance.meet(START_S)
    first, joins = (seat.world - 1, seat.first) if seat.joins else (seat.first, -1)
    pipe.send((Launch(first, seat.world, 0, 1, seat.node, seat.node, attendance.request.home, joins), seat.nodes,
               seat.min_workers))
    attendance.close(pipe.recv())


def serve(pipe: Any, arguments: list[str], off_s: float) -> None:
    """`commlayer serve`, whose clock is off by so much."""
    if off_s:
        jump(off_s)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.argv = ["commlayer", "serve", *arguments]
    runpy.run_module("commlayer", run_name="__main__")


def owner_of(address: tuple[str, int], pids: Sequence[int | None]) -> int:
    """Which of these processes, by its place, has the end of a TCP connection that is there; -1: none of them."""
    at = f"{int.from_bytes(socket.inet_aton(address[0]), 'little'):08X}:{address[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    known = {f"socket:[{row[9]}]" for row in rows if row[1] == at}
    for place, pid in enumerate(pids):
        with contextlib.suppress(OSError):  # it may have ended, and files are closed meanwhile
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path) in known:
                        return place
    return -1


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder of its own, as long as it is needed."""
    folder = Path(tempfile.mkdtemp(prefix="commlayer-chaos-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def meeting(address: str, inside: str = "") -> Iterator[tuple[str, int]]:
    """Where ranks meet, in a process of its own. CommError if there is none, with the last that it said."""
    with scratch() as folder, contextlib.ExitStack() as stack:
        made = Started(store, address, environ={}, lines=folder / "store.lines", inside=inside)
        stack.callback(made.end)
        try:
            if not made.pipe.poll(START_S):
                raise CommError(f"no process with torch within {START_S:g} s{_last(made.lines)}", peer="chaos")
            port = made.pipe.recv()
        except (EOFError, OSError):
            raise CommError(f"the process where ranks meet has ended as it began{_last(made.lines)}", peer="chaos") from None
        yield address, port


def _last(lines: Path) -> str:
    with contextlib.suppress(OSError):
        if said := lines.read_text(errors="replace").split("\n"):
            return "".join(f": {line}" for line in [line for line in said if line.strip()][-1:])
    return ""


def store(pipe: Any, address: str) -> None:
    """Where the ranks of all runs meet, as under torchrun, whose agent outlasts them. Tells its port."""
    from torch._C._distributed_c10d import TCPStore

    made = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    pipe.send(made.port)
    with contextlib.suppress(EOFError):
        pipe.recv()
