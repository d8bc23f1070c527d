"""Shared by the control plane's tests: short settings, requests, and a worker in a separate process (run as a script)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from support import ROOT
from support.internals import sidecar_of

T = TypeVar("T")
WAIT_S = 30.0
"""Bounds every wait of these tests; none should take long."""


class Opened(list[Any]):
    """What a test opens, newest last."""

    def add(self, thing: T) -> T:
        self.append(thing)
        return thing


@pytest.fixture(name="opened")
def all_opened() -> Iterator[Opened]:
    """What a test opens is closed in the reverse order."""
    things = Opened()
    yield things
    for thing in reversed(things):
        thing.close()


def until(true: Callable[[], bool], what: str, deadline_s: float = WAIT_S) -> None:
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.01)


def quick(**fields: Any) -> Any:
    """Settings with short heartbeats, independent of the environment."""
    from commlayer.config import read_config

    short = {"heartbeat_s": 0.05, "dead_after_s": 1.0, "join_deadline_s": WAIT_S, "reconnect_s": 1.0,
             "last_call_s": WAIT_S}
    return read_config(short | fields, environ={}, cwd="/nonexistent")


PATIENT_S, HELD_S = 2.5, 5.0
"""The silence that counts as death where a worker holds the GIL, and how long it holds it. Heartbeats of a busy machine are up
to a second late."""


class Failures:
    """The errors that on_failure received, and an event that is set by the first."""

    def __init__(self) -> None:
        self.errors: list[Any] = []
        self.came = threading.Event()

    def __call__(self, error: Any) -> None:
        self.errors.append(error)
        self.came.set()


class Process:
    """This file as a script: a worker that reports its events as lines of JSON."""

    def __init__(self, address: str, rank: int, world: int, *, how: str = "stay", **fields: Any) -> None:
        command = [sys.executable, __file__, address, str(rank), str(world), how, json.dumps(fields)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def report(self) -> Any:
        """The next report; None at the end of the process. The suite's own time limit bounds this."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def leave(self) -> None:
        """Lets a waiting process leave in order, and waits for its end."""
        self.process.communicate("\n", timeout=WAIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)


def _main(address: str, rank: str, world: str, how: str, fields: str) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from commlayer.cluster.calls import messages
    from commlayer.cluster.membership import client

    def send_report(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    config = quick(**json.loads(fields))
    request = messages.worker_request("job", int(rank), int(world), plan=b"a plan")
    member = client.join(address, request, config, lambda error: send_report(failure=str(error)), keep=True)
    sidecar = sidecar_of(member) and sidecar_of(member).pid
    send_report(sidecar=sidecar, rank=member.rank, plan=member.plan.decode(), pids=[m.pid for m in member.epoch.members])
    if how == "hold_gil":
        import ctypes

        # A PyDLL call keeps the GIL, as a long stretch of C code in a training thread may.
        ctypes.PyDLL(None).usleep(int(1e6 * HELD_S))
        send_report(held=True)
    if how.startswith("embed"):
        from commlayer.cluster.processes.child_processes import EmbeddedServer

        embedded = EmbeddedServer.start(config, workers=1, servers=0, number=None).pid
        # A DataLoader worker: it holds the pipes of its trainer open and may outlive it.
        forked = os.fork() if how == "embed_and_fork" else -1
        if forked == 0:
            signal.pause()
        send_report(embedded=embedded, forked=forked)
    sys.stdin.readline()
    member.leave()


if __name__ == "__main__":
    _main(*sys.argv[1:])
