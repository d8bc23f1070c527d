"""Starts and stops servers as a child process of a training process.

The child ends with its parent. Its standard input is a pipe that closes when the parent ends. It also checks its parent's
process id, since forked DataLoader workers keep that pipe open. (PR_SET_PDEATHSIG would fire when the *thread* that called
attach() ends.) The pipe first carries the job's secret. An orderly end is announced on it, so the child recognizes a crash.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import msgspec

from commlayer.cluster import piping
from commlayer.cluster.heartbeat_child import state
from commlayer.config import Config, child_environment
from commlayer.errors import CommError, DeadlineExceeded

ROOT = Path(__file__).parents[2]
# The child must run the same package as this process, installed or not, and nothing from the current directory.
RUN = "import sys; sys.path.append(sys.argv.pop(1)); from commlayer.cluster.server_process import main; main()"
TAIL_LINES = 15
GRACE_S = 5.0


class Embedded:
    """A running child. `control` and `data` are its addresses; empty for a role that it does not have."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: _Stderr, control: str, data: str) -> None:
        self.control, self.data = control, data
        self.pid = process.pid
        self._process, self._stderr, self._owner = process, stderr, os.getpid()

    @classmethod
    def start(
        cls, config: Config, *, workers: int = 0, servers: int = 1, join: str = "", number: int | None = 0,
    ) -> Embedded:
        """Starts a coordinator and server `number` (None: no server); with `join` only the server. Returns when it is ready.

        CommError with the child's last lines if it does not start, DeadlineExceeded if it takes longer than join_deadline_s.
        """
        part = {"join": join, "workers": workers, "servers": servers, "parent": os.getpid(), "sums": number is not None}
        part["number"] = -1 if number is None else number
        command = [sys.executable, "-P", "-c", RUN, str(ROOT), json.dumps(part)]
        if join:
            # A configured port is the coordinator's, which may be on this machine, as may other servers.
            config = msgspec.structs.replace(config, port=0)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # Ctrl-C must reach only the trainer, which ends the child when it no longer needs it.
            start_new_session=True, env=child_environment(config),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        piping.tell(process, config.token.encode())
        stderr = _Stderr(process.stderr)
        embedded = cls(process, stderr, "", "")
        try:
            line = _first_line(process, config.join_deadline_s)
        except BaseException:
            embedded.close()
            raise
        if line is None:
            embedded.close()
            raise CommError(f"did not start: {stderr.tail() or f'exit code {process.returncode}'}", peer="embedded server")
        addresses = json.loads(line)
        embedded.control, embedded.data = addresses["control"], addresses["data"]
        stderr.forward()
        return embedded

    def over(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the child to end by itself, as it does after all workers have left. Whether it did."""
        return os.getpid() == self._owner and _ended(self._process, max(0.0, timeout_s))

    def close(self) -> None:
        """Ends the child in bounded time."""
        if os.getpid() != self._owner:
            return  # a forked copy of the trainer does not own it
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            process.stdin.write(piping.END)
            process.stdin.close()
        if state(self.pid) in ("T", "t"):
            process.kill()  # a stopped process handles no other signal
        if not _ended(process, GRACE_S):
            process.terminate()
            if not _ended(process, GRACE_S):
                process.kill()
                process.wait()
        self._stderr.finish()
        assert process.stdout is not None
        process.stdout.close()


class _Stderr:
    """Drains the child's standard error: keeps the last lines, and prints new ones after forward()."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._lines: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._forward = False
        self._thread = threading.Thread(target=self._drain, name="commlayer-stderr", daemon=True)
        self._thread.start()

    def forward(self) -> None:
        self._forward = True

    def tail(self) -> str:
        self._thread.join(timeout=1.0)
        return "\n".join(self._lines).strip()

    def finish(self) -> None:
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            self._pipe.close()

    def _drain(self) -> None:
        for data in self._pipe:
            line = data.decode("utf-8", "replace").rstrip("\n")
            self._lines.append(line)
            if self._forward:
                print(line, file=sys.stderr, flush=True)


def _first_line(process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
    """The first line of its standard output; None if it ended without one."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    deadline, data = time.monotonic() + deadline_s, b""
    while b"\n" not in data:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise DeadlineExceeded(f"did not start within {deadline_s:g} s", peer="embedded server")
        more = os.read(descriptor, 4096)
        if not more:
            return None
        data += more
    return data


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True
