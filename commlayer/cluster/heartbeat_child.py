"""A small child process that keeps a worker's heartbeats going while a thread of it holds the GIL. Loads no torch, no numpy.

Heartbeats of a thread in the training process stop with the interpreter: a C call of half a minute that keeps the GIL is no
death. A thread of the C++ core would do without the GIL, but not without a compiler, nor could it use the coordinator's one
port, which speaks gRPC. So a child beats beside that thread, under the same seat. It says what the kernel tells of its parent:
that it is there, is stopped, or has ended, which is the child's last word. From silence alone nobody could tell these from a
network that is cut. Where the kernel does not say (no /proc), there is no child, and the thread beats alone.
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
"""States of a process that does nothing: stopped, traced, dead."""
THERE, STOPPED, ENDED = range(3)
GRACE_S = 1.0


class Keeper:
    """A running child."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._owner, self._said = process, os.getpid(), False
        self.pid = process.pid

    def close(self) -> None:
        """Ends it. Twice is once; a forked copy of the trainer does not own it."""
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
        """Says once that it is gone, if it is."""
        if not self._said and self._process.poll() is not None:
            self._said = True
            log.warning("the process %d that kept this worker's heartbeats going has ended (exit code %s): from now on a call "
                        "that holds the GIL for longer than dead_after_s counts as death", self.pid, self._process.returncode)


def start(
    address: str, secret: str, bodies: list[bytes], options: list[tuple[str, Any]], every_s: float, call_s: float,
    shown: tuple[str, ...] | None = None, channel: bytes = b"",
) -> Keeper | None:
    """`bodies`: the Heartbeats of a parent that is there, is stopped, or has ended; `shown` and `channel`: as in grpc_channel
    and Asker.

    None where it could not tell whether its parent is stopped, or does not start.
    """
    if not Path("/proc/self/stat").exists():
        return None
    told = {"address": address, "secret": secret, "bodies": [body.hex() for body in bodies], "options": options,
            "every_s": every_s, "call_s": call_s, "shown": shown, "channel": channel.hex()}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", RUN, str(ROOT), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )
    except OSError as error:
        log.warning("no process to keep heartbeats going beside the GIL: %s", error)
        return None
    piping.tell(process, json.dumps(told).encode())
    return Keeper(process)


def awake(pid: int) -> bool:
    """Whether that process is there and not stopped."""
    return state(pid) not in STILL


def state(pid: int) -> str:
    """Of that process, a letter as the kernel has it; X for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def beat(parent: int, send: Callable[[int], None], every_s: float) -> None:
    """Sends which of THERE, STOPPED and ENDED it is; returns when the parent has ended or closes standard input."""
    while os.getppid() == parent:
        send(THERE if awake(parent) else STOPPED)
        if select.select([0], [], [], every_s)[0]:
            break
    # A parent that dies closes its files first. One that lives ends its child by a signal.
    until = time.monotonic() + GRACE_S
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.01)
    if os.getppid() != parent:
        send(ENDED)


def main() -> None:
    """The child: its parent's id is its argument, all else comes as one line on standard input."""
    parent = int(sys.argv[1])
    line = piping.hear()
    if not line:
        return
    told = json.loads(line)
    import grpc

    from commlayer.cluster.grpc_channel import Shown, opened
    from commlayer.cluster.proved_calls import Asker, Unproved

    channel = opened(told["address"], [tuple(option) for option in told["options"]], told["shown"] and Shown(*told["shown"]))
    asker = Asker(told["secret"], lambda method, data, timeout_s: channel.unary_unary(f"/commlayer.Control/{method}")(
        data, timeout=timeout_s), lambda e: isinstance(e, grpc.RpcError) and e.code() is grpc.StatusCode.UNAUTHENTICATED,
        bytes.fromhex(told["channel"]))
    bodies = [bytes.fromhex(body) for body in told["bodies"]]

    def send(which: int) -> None:
        try:
            asker.ask("Heartbeat", bodies[which], told["call_s"])
        except (grpc.RpcError, Unproved):
            pass  # the thread beside the training hears of it, too, and says so

    beat(parent, send, told["every_s"])
