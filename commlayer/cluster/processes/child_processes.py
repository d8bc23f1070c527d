"""How a parent controls a child: through the child's standard input. Secrets are also passed through it, since other users
can read a process's environment and arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from commlayer.config import Config, child_environment
from commlayer.errors import CommError, DeadlineExceeded

ROOT = Path(__file__).parents[2]
# The child must run the same package as this process, installed or not, and nothing from the current directory.
RUN = "import sys; sys.path.append(sys.argv.pop(1)); from commlayer.cluster.servers.server_process import main; main()"
GRACE_S = 5.0


class EmbeddedServer:
    """A running child process with a coordinator, a summation server, or both. `control`: the coordinator's address; `data`:
    the summation server's. Empty for a role that the child does not have."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.control = self.data = ""
        self.pid = process.pid
        self._process, self._owner = process, os.getpid()

    @classmethod
    def start(
        cls, config: Config, *, workers: int = 0, servers: int = 1, join: str = "", number: int | None = 0,
    ) -> EmbeddedServer:
        """Starts a coordinator and summation server `number` in a child process (None: no server). With `join`, a coordinator's
        address, starts only the server. Returns when the child is ready. The child's log appears on the standard error of this
        process.

        Raises CommError if the child does not start, DeadlineExceeded if that takes longer than join_deadline_s.
        """
        part = {"join": join, "workers": workers, "servers": servers, "parent": os.getpid(), "sums": number is not None,
                "number": -1 if number is None else number}
        if join:
            # The configured port may be in use on this machine, by the coordinator or by another server.
            config = msgspec.structs.replace(config, port=0)
        embedded = cls(spawn(RUN, json.dumps(part), config.token.encode(), stdout=subprocess.PIPE,
                             env=child_environment(config)))
        process = embedded._process
        try:
            started = json.loads(_first_line(process, config.join_deadline_s) or b"{}")
            if "control" not in started:
                why = started.get("error") or f"exit code {process.wait(GRACE_S)}, see its output above"
                raise CommError(f"did not start: {why}", peer="embedded server")
        except BaseException:
            embedded.close()
            raise
        embedded.control, embedded.data = started["control"], started["data"]
        return embedded

    def over(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` seconds for the child to end by itself, after all workers have left. Returns whether the
        child has ended."""
        return os.getpid() == self._owner and _ended(self._process, max(0.0, timeout_s))

    def close(self) -> None:
        """Ends the child: asks for an orderly end, then sends SIGTERM, then SIGKILL, with GRACE_S seconds between."""
        if os.getpid() != self._owner:
            return  # a forked copy of the trainer does not own it
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            process.stdin.write(END_LINE)
            process.stdin.close()
        if process_state(self.pid) in ("T", "t"):
            process.kill()  # a stopped process handles no other signal
        if not _ended(process, GRACE_S):
            terminate(process, GRACE_S)
        assert process.stdout is not None
        process.stdout.close()


def _first_line(process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
    """Returns the first line of the child's standard output. Returns None if the child ended without writing a line."""
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


def spawn(code: str, argument: str, line: bytes, **more: Any) -> subprocess.Popen[bytes]:
    """Starts a Python process that runs this code and can import this package. Sends `line` to its standard input. Ctrl-C
    reaches only this process, which ends the child when it no longer needs the child."""
    process = subprocess.Popen([sys.executable, "-P", "-c", code, str(ROOT), argument], stdin=subprocess.PIPE,
                               start_new_session=True, **more)
    send_line(process, line)
    return process


def terminate(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Sends SIGTERM, and SIGKILL after `grace_s` seconds."""
    process.terminate()
    if not _ended(process, grace_s):
        process.kill()
        process.wait()


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


END_LINE = b"end\n"
"""The line that the parent writes to the child's standard input to request that the child end."""
LOOK_S = 1.0
EXIT_S = 5.0


def send_line(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Writes a line to the child's standard input. If the child has ended, does nothing: other code detects that end."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def read_line(descriptor: int = 0) -> bytes:
    """Called in the child: reads the first line of standard input and no further byte. Returns b"" if the parent ended before
    it sent the line."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(descriptor, 1)
        if not more:
            return b""
        line += more
    return line[:-1]


def follow_parent(parent: int, stop: threading.Event, orphaned: Callable[[], None]) -> None:
    """Called in the child: sets `stop` when the parent requests an end or has ended. If the parent has ended without a request,
    calls `orphaned` first. Kills this process if it is still running EXIT_S seconds after that."""

    def follow() -> None:
        message = b""
        while os.getppid() == parent:
            readable, _, _ = select.select([0], [], [], LOOK_S)
            if readable:
                message = os.read(0, len(END_LINE))
                break
        if not message and not stop.is_set():
            orphaned()
        stop.set()
        time.sleep(EXIT_S)
        os._exit(1)

    threading.Thread(target=follow, name="commlayer-parent", daemon=True).start()


def process_state(pid: int) -> str:
    """Returns the kernel's letter for the state of the process; "X" if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
