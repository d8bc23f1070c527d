"""Starts the processes of chaos runs, forked from a process that has torch and commlayer loaded.

So a run takes under 3 s. Each process has its own environment, process group and end. This module does not import torch; only
the process that is forked does.
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
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from commlayer.config import PREFIX, Launch, read_config
from commlayer.errors import CommError
from tests.chaos.clock import jump
from tests.chaos.reports import Elements, Summed, Task

PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.utils.data", "commlayer.session", "commlayer.balance",
           "tests.chaos.training", "commlayer.cluster.servers.server_process", "commlayer.cluster.servers.summation_server",
           "commlayer.cli.main"]
START_S = 60.0
"""Timeout until torch is loaded, which happens once."""
DIE_S = 5.0
CLONE_NEWNET = 0x40000000


class Started:
    """A process. `lines`: the file to which its standard error is appended, after that of earlier processes with this name."""

    def __init__(self, target: Callable[..., None], *args: Any, environ: Mapping[str, str], lines: Path,
                 most_nbytes: int = 0, inside: str = "") -> None:
        """`target(pipe, *args)`. `most_nbytes`: size limit of files that it writes, 0 for none. `inside`: path of its network
        namespace, empty for this one."""
        self.lines, self._over = lines, False
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        process_args = (target, theirs, args, dict(environ), str(lines), most_nbytes, inside)
        self.process = context.Process(target=_begin, args=process_args, daemon=True)
        self.process.start()
        theirs.close()

    def signal(self, number: int) -> int:
        """Returns 1 if the process was alive."""
        if not self.process.is_alive() or self.process.pid is None:
            return 0
        os.kill(self.process.pid, number)
        return 1

    def order(self, what: Any) -> int:
        """Sends a message; returns 1 if the process is alive to receive it."""
        try:
            self.pipe.send(what)
        except OSError:
            return 0
        return int(self.process.is_alive())

    def told(self) -> list[Any]:
        """The reports received since the last call."""
        reports = []
        try:
            while not self._over and self.pipe.poll():
                reports.append(self.pipe.recv())
        except (EOFError, OSError):
            self._over = True
        return reports

    @property
    def silent(self) -> bool:
        """Whether no further report will come."""
        return self._over or (not self.process.is_alive() and not self.pipe.poll())

    def end(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.join(DIE_S)
        self.pipe.close()


def take_environment(wanted: Mapping[str, str]) -> None:
    """Replaces all COMMLAYER_* variables of this process with `wanted`. Called in a forked process."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update({PREFIX + "CONFIG": "", **wanted})


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
    """A worker. It leaves at SIGINT also if its campaign runs in the background of a shell, which ignores the signal."""
    from tests.chaos import training

    signal.signal(signal.SIGINT, signal.default_int_handler)
    training.train(pipe, task)


def replay(pipe: Any, workers: int, width: int, steps: Sequence[Summed], buckets: Sequence[Sequence[Elements]]) -> None:
    """See training.replay."""
    from tests.chaos import training

    training.replay(pipe, workers, width, steps, buckets)


def attend(pipe: Any, place: int) -> None:
    """The part of `commlayer join` other than its worker: sends its seat, so that the receiver can start the worker, and
    waits until it gets the worker's end."""
    from commlayer.cluster.calls import messages
    from commlayer.cluster.calls.site_client import SiteLease

    config = read_config()
    attendance = SiteLease(config.join, config, messages.site_request(1, place), lambda line: print(line, file=sys.stderr))
    seat = attendance.register_and_wait(START_S)
    first, joins = (seat.world - 1, seat.rank) if seat.joins else (seat.rank, -1)
    pipe.send((Launch(first, seat.world, 0, 1, seat.node, seat.node, attendance.request.token, joins), seat.nodes,
               seat.min_workers))
    attendance.close(pipe.recv())


def serve(pipe: Any, arguments: list[str], off_s: float) -> None:
    """`commlayer serve` with its clock shifted by `off_s`."""
    if off_s:
        jump(off_s)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.argv = ["commlayer", "serve", *arguments]
    runpy.run_module("commlayer", run_name="__main__")


def owner_of(address: tuple[str, int], pids: Sequence[int | None]) -> int:
    """The index of the process that owns the TCP socket with this local address, or -1."""
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
    """A temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="commlayer-chaos-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def meeting(address: str, inside: str = "") -> Iterator[tuple[str, int]]:
    """The store where ranks meet, in a process of its own. Raises CommError with its last log line if it does not start."""
    with scratch() as folder, contextlib.ExitStack() as stack:
        process = Started(store, address, environ={}, lines=folder / "store.lines", inside=inside)
        stack.callback(process.end)
        try:
            if not process.pipe.poll(START_S):
                raise CommError(f"no process with torch within {START_S:g} s{_last(process.lines)}", peer="chaos")
            port = process.pipe.recv()
        except (EOFError, OSError):
            raise CommError(f"the process where ranks meet has ended as it began{_last(process.lines)}", peer="chaos") from None
        yield address, port


def _last(lines: Path) -> str:
    with contextlib.suppress(OSError):
        if rows := lines.read_text(errors="replace").split("\n"):
            return "".join(f": {line}" for line in [line for line in rows if line.strip()][-1:])
    return ""


def store(pipe: Any, address: str) -> None:
    """The store where the ranks of all runs meet. Like torchrun's agent it outlasts the ranks. Sends its port."""
    from torch._C._distributed_c10d import TCPStore

    server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    pipe.send(server.port)
    with contextlib.suppress(EOFError):
        pipe.recv()
