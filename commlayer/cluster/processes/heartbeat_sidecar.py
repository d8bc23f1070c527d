"""The heartbeat sidecar: a child process that sends a worker's heartbeats while a thread of the worker holds Python's GIL."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from commlayer.cluster.processes.child_processes import process_state, spawn, terminate

log = logging.getLogger("commlayer")
RUN_SIDECAR = "import sys; sys.path.append(sys.argv.pop(1)); " \
              "from commlayer.cluster.membership.client import sidecar_main; sidecar_main()"
STOPPED_STATES = frozenset("TtZXx")
"""States of a process that does not run, as letters in /proc/PID/stat: stopped, traced, zombie, dead."""
PARENT_EXIT_S = 1.0


class HeartbeatSidecar:
    """A running heartbeat sidecar: a child process that sends a worker's heartbeats while the worker waits for Python's GIL."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._owner, self._exit_logged = process, os.getpid(), False
        self.pid = process.pid

    def close(self) -> None:
        """Ends the sidecar. Idempotent. Does nothing in a forked copy of the training process, which does not own the
        sidecar."""
        if os.getpid() != self._owner or self._process.stdin is None or self._process.stdin.closed:
            return
        self._process.stdin.close()
        terminate(self._process, PARENT_EXIT_S)

    def check_running(self) -> None:
        """Logs a warning, once, if the sidecar has ended."""
        if not self._exit_logged and self._process.poll() is not None:
            self._exit_logged = True
            log.warning("the heartbeat process %d has ended (exit code %s): from now on, a call "
                        "that holds Python's GIL for longer than dead_after_s makes the "
                        "coordinator count this worker as dead", self.pid, self._process.returncode)


def start_sidecar(setup: Mapping[str, str | float]) -> HeartbeatSidecar | None:
    """Starts a sidecar that sends heartbeats for this process. Returns None if the sidecar does not start, or if the system has
    no /proc. `setup` has address, secret and keys (a folder, or "") for the channel; the registration's token; every_s
    (interval); call_s (timeout of a call). """
    if not Path("/proc/self/stat").exists():
        return None
    try:
        process = spawn(RUN_SIDECAR, str(os.getpid()), json.dumps(setup).encode(), stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL)
    except OSError as error:
        log.warning("cannot start the process that sends heartbeats while a call holds Python's GIL: %s", error)
        return None
    return HeartbeatSidecar(process)


def is_awake(pid: int) -> bool:
    """Returns whether the process exists and is not stopped."""
    return process_state(pid) not in STOPPED_STATES


def run_heartbeats(parent: int, send: Callable[[Literal["", "stopped", "ended"]], None], every_s: float) -> None:
    """Calls send("") or send("stopped") every `every_s` seconds until the parent ends or closes standard input. When the parent
    has ended, calls send("ended")."""
    while os.getppid() == parent:
        send("" if is_awake(parent) else "stopped")
        if select.select([0], [], [], every_s)[0]:
            break
    # A parent that dies closes its files before its id is gone. A living one ends this child by a signal.
    until = time.monotonic() + PARENT_EXIT_S
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.01)
    if os.getppid() != parent:
        send("ended")
