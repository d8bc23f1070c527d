"""A child process that sends a worker's heartbeats while the worker holds Python's GIL. Imports neither torch nor numpy.

A heartbeat thread stops while another thread holds the GIL. A C call that holds it for half a minute must not count as
death. A C++ thread would need a compiler and could not speak gRPC, the coordinator's protocol. So a child process sends
heartbeats in addition to that thread, under the same registration. It reports the parent's state from the kernel: running,
stopped, or ended (its last message). Silence alone could also mean a cut network. Without /proc there is
no child, and only the thread sends heartbeats.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commlayer.cluster import piping

log = logging.getLogger("commlayer")

ROOT = Path(__file__).parents[2]
RUN = "import sys; sys.path.append(sys.argv.pop(1)); from commlayer.cluster.heartbeat_child import main; main()"
STILL = frozenset("TtZXx")
"""States of a process that does not run: stopped, traced, dead."""
THERE, STOPPED, ENDED = range(3)
GRACE_S = 1.0


class Keeper:
    """A running child."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._owner, self._said = process, os.getpid(), False
        self.pid = process.pid

    def close(self) -> None:
        """Ends the child. Idempotent; does nothing in a forked copy of the trainer, which does not own the child."""
        if os.getpid() != self._owner or self._process.stdin is None or self._process.stdin.closed:
            return
        self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def look(self) -> None:
        """Logs once that the child has ended, if it has."""
        if not self._said and self._process.poll() is not None:
            self._said = True
            log.warning("the process %d that kept this worker's heartbeats going has ended (exit code %s): from now on a call "
                        "that holds the GIL for longer than dead_after_s counts as death", self.pid, self._process.returncode)


def start(
    address: str, secret: str, bodies: list[bytes], options: list[tuple[str, Any]], every_s: float, call_s: float,
    shown: tuple[str, ...] | None = None, channel: bytes = b"",
) -> Keeper | None:
    """`bodies`: encoded Heartbeats for a parent that runs, is stopped, or has ended. `shown`, `channel`: as in grpc_channel and
    Asker.

    None if the child does not start, or there is no /proc.
    """
    if not Path("/proc/self/stat").exists():
        return None
    setup = {"address": address, "secret": secret, "bodies": [body.hex() for body in bodies], "options": options,
             "every_s": every_s, "call_s": call_s, "shown": shown, "channel": channel.hex()}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", RUN, str(ROOT), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )
    except OSError as error:
        log.warning("no process to keep heartbeats going beside the GIL: %s", error)
        return None
    piping.tell(process, json.dumps(setup).encode())
    return Keeper(process)


def awake(pid: int) -> bool:
    """Whether the process exists and is not stopped."""
    return state(pid) not in STILL


def state(pid: int) -> str:
    """The kernel's letter for the state of the process; X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def beat(parent: int, send: Callable[[int], None], every_s: float) -> None:
    """Calls `send` with THERE or STOPPED until the parent ends or closes standard input; then with ENDED if it has ended."""
    while os.getppid() == parent:
        send(THERE if awake(parent) else STOPPED)
        if select.select([0], [], [], every_s)[0]:
            break
    # A parent that dies closes its files before its id is gone. A living one ends this child by a signal.
    until = time.monotonic() + GRACE_S
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.01)
    if os.getppid() != parent:
        send(ENDED)


def main() -> None:
    """Entry point of the child. Its argument is the parent's process id; the rest is one line on standard input."""
    parent = int(sys.argv[1])
    line = piping.hear()
    if not line:
        return
    init = json.loads(line)
    import grpc

    from commlayer.cluster.grpc_channel import Shown, opened
    from commlayer.cluster.proved_calls import Asker, Unproved

    channel = opened(init["address"], [tuple(option) for option in init["options"]], init["shown"] and Shown(*init["shown"]))
    asker = Asker(init["secret"], lambda method, data, timeout_s: channel.unary_unary(f"/commlayer.Control/{method}")(
        data, timeout=timeout_s), lambda e: isinstance(e, grpc.RpcError) and e.code() is grpc.StatusCode.UNAUTHENTICATED,
        bytes.fromhex(init["channel"]))
    bodies = [bytes.fromhex(body) for body in init["bodies"]]

    def send(which: int) -> None:
        try:
            asker.ask("Heartbeat", bodies[which], init["call_s"])
        except (grpc.RpcError, Unproved):
            pass  # the worker's own thread has the same error, and logs it

    beat(parent, send, init["every_s"])
