"""Runs the demo's worker processes: starts them under torchrun, reads the events that they report, and ends them."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from commlayer.config import Config, child_environment
from commlayer.demo.settings import DemoSettings
from commlayer.errors import CommError, DeadlineExceeded
from commlayer.records import Record, encode

ROOT = Path(__file__).parents[2]
SILENCE_S = 120.0
"""Seconds without an event after which the workers count as failed: longer than their startup deadline. The step deadline is
added."""
GRACE_S = 4.0
"""Seconds to wait for workers to end: slightly longer than their servers take."""
TAIL_LINES = 3


class Fleet:
    """Context manager that starts the worker processes on entry and ends them on exit."""

    def __init__(self, settings: DemoSettings) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="commlayer-demo-")
        self._settings = msgspec.structs.replace(settings, folder=self._folder.name)
        self._log = Path(self._folder.name, "torchrun.log")
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def __enter__(self) -> Fleet:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
                   "--nproc-per-node", str(self._settings.workers), "--log-dir", self._folder.name, "--redirects", "2",
                   "-m", "commlayer.demo.training", encode(self._settings).decode()]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the workers in an orderly way
            )
        self._reader = threading.Thread(target=self._read, name="demo-reader", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # A second Ctrl-C must not interrupt the cleanup of the first.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        self._end()
        self._folder.cleanup()
        for number, handler in before.items():
            signal.signal(number, handler)

    def events(self, tick_s: float) -> Iterator[Event | None]:
        """Yields the workers' events, and None whenever no event arrives for `tick_s` seconds. Raises CommError with the end of
        the workers' logs if they fail."""
        quiet_s, limit_s = 0.0, SILENCE_S + self._settings.deadline_s
        while True:
            try:
                line = self._lines.get(timeout=tick_s)
            except queue.Empty:
                quiet_s += tick_s
                if quiet_s > limit_s:
                    raise DeadlineExceeded(f"sent nothing for {limit_s:g} s", peer="the demo's workers") from None
                if self._process.poll() is not None:
                    break
                yield None
                continue
            if not line:
                break
            if (event := read(line)) is not None:
                quiet_s = 0.0
                yield event
        if self._process.wait():
            raise CommError(self._last_words())

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _last_words(self) -> str:
        """An error text: the worker that failed first according to torchrun, and the last lines of each worker's standard
        error."""
        text = self._log.read_text("utf-8", "replace")
        failed = re.search(r"exitcode: (-?\d+)\) local_rank: (\d+)", text)
        lines_ = [f"worker {failed[2]} ended with code {failed[1]}"] if failed else text.splitlines()[-1:]
        for log in sorted(Path(self._folder.name).rglob("stderr.log"), key=lambda path: int(path.parent.name)):
            lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
            lines_ += [f"worker {log.parent.name}: {line}" for line in lines[-TAIL_LINES:]]
        return "\n".join(["the workers ended early", *lines_])

    def _end(self) -> None:
        """Ends the workers by closing their standard input and terminating torchrun; each worker ends its own servers."""
        process, deadline = self._process, time.monotonic() + GRACE_S
        assert process.stdin is not None
        process.stdin.close()
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._reader.join(max(0.0, deadline - time.monotonic()))  # standard output closes with the last worker


def environment() -> dict[str, str]:
    """The workers' environment variables: no commlayer settings of the user, one thread per worker, and this package on the
    path."""
    variables = child_environment(Config())
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    variables |= {"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH", "")]))
    return variables


# ---- events: one line of JSON each, on a worker's standard output

class RunBegan(Record, frozen=True, tag="began"):
    """Event: the workers and servers of a run are ready, and training starts."""

    run: int
    numel: int
    """Number of parameters of the model."""
    native: bool


class Progress(Record, frozen=True, tag="progress"):
    """Event: progress of a run since its start, as rank 0 measured it."""

    run: int
    step: int
    loss: float
    accuracy: float
    """Accuracy on the test set at the last evaluation."""
    train_s: float
    """Seconds of training, without evaluations."""
    exposed_s: float
    """Seconds of `train_s` that were spent waiting for communication."""
    sent_nbytes: int
    """Payload bytes that rank 0 sent."""

    @property
    def step_s(self) -> float:
        return self.train_s / max(1, self.step)

    @property
    def step_nbytes(self) -> float:
        return self.sent_nbytes / max(1, self.step)

    @property
    def exposed(self) -> float:
        return self.exposed_s / self.train_s if self.train_s else 0.0


class RunEnded(Record, frozen=True, tag="ended"):
    """Event: a run has ended. The result is in its last Progress event."""

    run: int
    reached: bool


Event = RunBegan | Progress | RunEnded
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def report(event: Event) -> None:
    """Writes an event to a worker's standard output. Uses one write per event, so lines of several processes do not mix."""
    os.write(1, encode(event) + b"\n")


def read(line: bytes) -> Event | None:
    """Parses a line of a worker's output; None if the line is not an event."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None
