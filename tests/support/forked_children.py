"""The children of a test's rank, its embedded server and heartbeat sidecar, forked instead of started by an interpreter.

A new interpreter imports what they need in a third of a second, for each job of each test. A rank therefore begins with a fork
of itself, which has no threads and forks them. Otherwise they are the same processes: with their own input, output, environment
and session, and they end with the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
MOST_NBYTES = 1 << 17
"""Size of the largest request. Its environment is most of it."""


def fork_children_of_this_process() -> None:
    """From now on `child_processes.spawn` forks. Call it before this process starts threads."""
    from commlayer.cluster.processes import child_processes, heartbeat_sidecar

    requests, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank = os.getpid()
    if not os.fork():
        _serve(requests.fileno(), rank)
    requests.close()
    forks, lock = ours, threading.Lock()

    def spawn(code: str, argument: str, line: bytes, *, env: dict[str, str] | None = None, stdout: int | None = None,
              stderr: int | None = None) -> ForkedChild:
        with lock:
            child = ForkedChild(forks, [code, str(child_processes.ROOT), argument, os.getcwd(), env or dict(os.environ)],
                                stdout, stderr)
        child_processes.send_line(child, line)  # type: ignore[arg-type]
        return child

    child_processes.spawn = heartbeat_sidecar.spawn = spawn  # type: ignore[assignment, attr-defined]


class ForkedChild:
    """What the package uses of subprocess.Popen. A child that has ended has return code 0: the process that forked it cannot
    ask for another one."""

    def __init__(self, forks: socket.socket, request: list[Any], stdout: int | None, stderr: int | None) -> None:
        theirs, mine = os.pipe()
        self.stdin, self.stdout = os.fdopen(mine, "wb"), None
        given = [theirs, *(self._output(number, where) for number, where in ((1, stdout), (2, stderr)))]
        socket.send_fds(forks, [json.dumps(request).encode()], given)
        for descriptor in given:
            os.close(descriptor)
        self.pid = int.from_bytes(forks.recv(8), "little")
        self.returncode: int | None = None
        try:
            self._ended = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.returncode = 0

    def _output(self, number: int, where: int | None) -> int:
        if where is None:
            return os.dup(number)
        if where == subprocess.DEVNULL:
            return os.open(os.devnull, os.O_WRONLY)
        mine, theirs = os.pipe()
        self.stdout = os.fdopen(mine, "rb")
        return theirs

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked child", timeout or 0.0)
            os.close(self._ended)
            self.returncode = 0
        return self.returncode

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, number)


def _serve(requests: int, rank: int) -> NoReturn:
    """Forks a child for each request, until the rank has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.closerange(3, requests)
    os.closerange(requests + 1, os.sysconf("SC_OPEN_MAX"))
    with socket.socket(fileno=requests) as incoming:
        while True:
            data, given, *_ = socket.recv_fds(incoming, MOST_NBYTES, 3)
            if not data:
                os._exit(0)
            if not (pid := os.fork()):
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                incoming.detach()
                _run(json.loads(data), given, requests, rank)
            for descriptor in given:
                os.close(descriptor)
            incoming.send(pid.to_bytes(8, "little"))


def _run(request: list[Any], given: list[int], requests: int, rank: int) -> NoReturn:
    """What `python -P -c code root argument` does."""
    from support import processes

    os.setsid()
    for number, descriptor in enumerate(given):
        os.dup2(descriptor, number)
    os.closerange(3, max(*given, requests) + 1)
    code, root, argument, folder, environment = request
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", root, argument]
    parent = os.pidfd_open(rank)
    os.getppid = lambda: 1 if select.select([parent], [], [], 0)[0] else rank
    status = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    processes.exit_process(status)
